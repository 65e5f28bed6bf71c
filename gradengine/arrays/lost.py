"""The errors by which CUDA says that a device has failed, through whichever library it says so."""

from __future__ import annotations

from gradengine.errors import DeviceFailed

# CUDA's errors after which a device does nothing more for this process: of memory, links, kernels and addresses.
_LOST = frozenset({214, 220, 226, 700, 702, 710, *range(714, 720)})


def status_of_loss(fault: BaseException) -> int | None:
    """The status of CuPy's error by which a device has failed; None for any other."""
    status = getattr(fault, "status", None)
    return status if status in _LOST else None


def device_failed(why: object) -> DeviceFailed:
    """The error of a device that has failed for this reason."""
    return DeviceFailed(
        "work on the GPU ended in an error, which may be another library's",
        got=why,
        do="start this process again, from a checkpoint; CUDA_LAUNCH_BLOCKING=1 shows whose kernel it was",
    )
