"""The operations on gradients, once for each device behind one interface."""

from __future__ import annotations

from gradengine.errors import CallerError
from gradengine.kernels.host import HostKernels
from gradengine.kernels.interface import CHUNK, Chunk, ClipPlan, Decision, Float64, Fold, Kernels, SquaredSums

__all__ = ["CHUNK", "Chunk", "ClipPlan", "Decision", "Float64", "Fold", "Kernels", "SquaredSums", "kernels_for"]


def kernels_for(device: str) -> Kernels:
    """The kernels of a device by name.

    Raises:
        CallerError: The device is not one of this version's; only "cpu" is.

    Example:
        >>> type(kernels_for("cpu")).__name__
        'HostKernels'
    """
    if device == "cpu":
        return HostKernels()
    raise CallerError("this version has no kernels for the device", got=repr(device), expected="'cpu'")
