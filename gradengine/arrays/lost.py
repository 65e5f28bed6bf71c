"""The CUDA errors that mean that a device has failed. Any library may report them."""

from __future__ import annotations

from gradengine.errors import DeviceFailed

# CUDA errors (of memory, links, kernels and addresses) after which this process can no longer use the device.
_LOST = frozenset({214, 220, 226, 700, 702, 710, *range(714, 720)})


def status_of_loss(fault: BaseException) -> int | None:
    """Return the status of a CuPy error if it means that a device has failed, otherwise None."""
    status = getattr(fault, "status", None)
    return status if status in _LOST else None


def device_failed(why: object) -> DeviceFailed:
    """Return the error for a device that has failed for this reason."""
    return DeviceFailed(
        "work on the GPU ended in an error, perhaps in another library",
        got=why,
        do="start this process again from a checkpoint (CUDA_LAUNCH_BLOCKING=1 shows which kernel failed)",
    )
