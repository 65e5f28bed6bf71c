"""The step as a person writes it in NumPy: tensor by tensor, pass by pass."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gradengine.bench.workload import widened

__all__ = ["add", "clip", "clip_in_place", "norm_of", "zero", "zeros_like"]

Totals = Sequence[npt.NDArray[np.float32]]


def zeros_like(gradients: Iterable[npt.NDArray[Any]]) -> list[npt.NDArray[np.float32]]:
    """An fp32 accumulator for each gradient."""
    return [np.zeros(gradient.shape, np.float32) for gradient in gradients]


def zero(totals: Totals) -> None:
    """Begin a window."""
    for total in totals:
        total[...] = 0


def add(totals: Totals, gradients: Sequence[npt.NDArray[Any]]) -> None:
    """Add a micro-batch; bfloat16 comes as its bits."""
    for total, gradient in zip(totals, gradients, strict=True):
        np.add(total, widened(gradient), out=total)


def norm_of(totals: Totals) -> float:
    """The global norm, from each tensor's.

    >>> norm_of([np.array([3], np.float32), np.array([4], np.float32)])
    5.0
    """
    return math.sqrt(sum(float(np.linalg.norm(total)) ** 2 for total in totals))


def clip(totals: Totals, max_norm: float, divisor: float = 1.0) -> float:
    """Divide, then clip by the global norm, in one multiplication; the norm of the divided gradients is returned.

    Raises:
        FloatingPointError: The norm is not finite.

    Example:
        >>> gradient = np.array([6, 8], np.float32)
        >>> clip([gradient], max_norm=1.0, divisor=2.0), gradient
        (5.0, array([0.6, 0.8], dtype=float32))
    """
    norm = norm_of(totals) / divisor
    if not math.isfinite(norm):
        raise FloatingPointError("the gradient is not finite")
    factor = np.float32(min(1.0, max_norm / norm) / divisor)
    for total in totals:
        np.multiply(total, factor, out=total)
    return norm


def clip_in_place(gradients: Sequence[npt.NDArray[Any]], max_norm: float) -> None:
    """Clip by the global norm; bfloat16 is widened, clipped and rounded back to its bits.

    Example:
        >>> bits = np.array([0x40C0, 0x4100], np.uint16)  # 6 and 8
        >>> clip_in_place([bits], max_norm=5.0)
        >>> [hex(word) for word in bits]
        ['0x4040', '0x4080']
    """
    wide = [widened(gradient) for gradient in gradients]
    clip(wide, max_norm)
    for gradient, values in zip(gradients, wide, strict=True):
        if values is not gradient:
            gradient[...] = _rounded(values)


def _rounded(values: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    """The bits of the nearest bfloat16, ties to even; not for NaN."""
    bits = values.view(np.uint32)
    return (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
