"""The operations on gradients, once for each device behind one interface."""

from __future__ import annotations

import functools

from gradengine.errors import CallerError
from gradengine.kernels.contribution import (
    ADDRESS,
    Batch,
    Contribution,
    Fold,
    Places,
    Whereabouts,
    as_of_now,
    lenders_of,
)
from gradengine.kernels.cuda import CudaKernels, cuda_kernels
from gradengine.kernels.decision import ClipPlan, Decision, Float64, decide, refuse_bad_divisor
from gradengine.kernels.host import HostKernels
from gradengine.kernels.interface import CHUNK, Chunk, Kernels, Recorded, SquaredSums
from gradengine.kernels.tables import chunk_for
from gradengine.kernels.toolkit import arithmetic, device_ordinal
from gradengine.kernels.verdict import Verdict

__all__ = [
    "ADDRESS",
    "CHUNK",
    "Batch",
    "Chunk",
    "ClipPlan",
    "Contribution",
    "CudaKernels",
    "Decision",
    "Float64",
    "Fold",
    "HostKernels",
    "Kernels",
    "Places",
    "Recorded",
    "SquaredSums",
    "Verdict",
    "Whereabouts",
    "arithmetic",
    "as_of_now",
    "chunk_for",
    "decide",
    "kernels_for",
    "lenders_of",
    "refuse_bad_divisor",
]


@functools.cache
def _host_kernels() -> HostKernels:
    return HostKernels()


def kernels_for(device: str | Kernels) -> Kernels:
    """The kernels of a device by name.

    Args:
        device: "cpu", "cuda" (the first GPU) or "cuda:1"; kernels are given back as they are.

    Raises:
        CallerError: There is no such device.
        DeviceUnavailable: What the device needs is missing; the error says how to get it.

    Example:
        >>> type(kernels_for("cpu")).__name__
        'HostKernels'
    """
    if isinstance(device, Kernels):
        return device
    if device == "cpu":
        return _host_kernels()
    ordinal = device_ordinal(device)
    if ordinal is None:
        raise CallerError(
            "there are no kernels for the device", got=repr(device), expected="'cpu', 'cuda' or 'cuda:<number>'"
        )
    return cuda_kernels(ordinal)
