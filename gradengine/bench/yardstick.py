"""What the device's memory can do in the same run: a copy, and STREAM's triad a = b + s c with s = 1.

Bytes counted: the copy reads one array and writes one, the triad reads two and writes one. On a CPU by NumPy on all
cores, on a GPU by the driver's own copy and CuPy's kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import final

import numpy as np

from gradengine.bench.case import Case, Variant, relative_error
from gradengine.bench.device import Array, Device

__all__ = ["COPY", "TRIAD", "Yardsticks"]

COPY, TRIAD = "copy", "triad"
_PIECES = 32


@final
class Yardsticks:
    """Three arrays that all benchmarks of a device share: of random numbers, as zeros would be faster than data."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._piece = np.random.default_rng(1).standard_normal(device.copied // _PIECES, np.float32)

    @property
    def variants(self) -> list[Variant]:
        """The copy and the triad."""
        nbytes = 4 * _PIECES * self._piece.size
        return [
            Variant(COPY, 2 * nbytes, partial(self._case, self._copy, 1.0), required=True, tolerance=1e-6),
            Variant(TRIAD, 3 * nbytes, partial(self._case, self._triad, 2.0), tolerance=1e-6),
        ]

    def _case(self, run: Callable[[], None], factor: float) -> Case:
        """A case whose result is the random numbers multiplied by a factor."""

        def error() -> float:
            found = self._device.read(self._arrays[2]).reshape(_PIECES, -1)
            return relative_error(list(found), lambda _: self._piece.astype(np.float64) * factor)

        return Case(run, error)

    @cached_property
    def _arrays(self) -> list[Array]:
        arrays = self._device.empty([(_PIECES, self._piece.size)] * 3, np.float32)
        piece = self._device.xp.asarray(self._piece)
        for array in arrays[:2]:
            array[...] = piece
        self._device.poison(arrays[2:])
        return [self._device.by_hand(array.reshape(-1)) for array in arrays]

    def _copy(self) -> None:
        source, _, target = self._arrays
        self._device.spread(lambda part: np.copyto(target[part], source[part]), target.size)

    def _triad(self) -> None:
        one, other, target = self._arrays
        self._device.spread(lambda part: np.add(one[part], other[part], out=target[part]), target.size)
