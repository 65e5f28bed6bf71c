"""What this GPU's memory can do in the same run: a copy within the device, and a triad (a = b + s c).

Bytes counted: the copy reads one array and writes one, the triad reads two and writes one; 2.1 GB each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, final

import numpy as np

from gradengine.bench.case import Case, relative_error
from gradengine.bench.gpu.device import Gpu
from gradengine.bench.gpu.report import COPY, Entry
from gradengine.bench.yardstick import TRIAD

__all__ = ["Yardsticks"]

_PIECES = 32
_FACTOR = 3.0


@final
class Yardsticks:
    """Three arrays of random numbers, which all benchmarks of a process share.

    The same piece again and again: zeros would be faster than real data.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._piece = np.random.default_rng(1).standard_normal(gpu.copied // _PIECES, np.float32)
        self._size = _PIECES * self._piece.size
        self._arrays: list[Any] = []

    def entries(self, benchmark: str) -> list[Entry]:
        """The copy and the triad."""
        return [
            Entry(COPY, partial(self._case, benchmark, COPY, 2, self._copy, 1.0), ours=True),
            Entry(TRIAD, partial(self._case, benchmark, TRIAD, 3, self._triad, 1 + _FACTOR)),
        ]

    def _case(self, benchmark: str, variant: str, arrays: int, run: Callable[[], None], times: float) -> Case:
        """A case whose result is the random numbers multiplied by `times`."""
        self._fill()
        return Case(benchmark, variant, 4 * self._size * arrays, run, partial(self._error, times), tolerance=1e-6)

    def _copy(self) -> None:
        """By the driver's own copy."""
        source, _, target = self._arrays
        self._gpu.copy(target.data.ptr, source.data.ptr, source.nbytes)

    def _triad(self) -> None:
        """By CuPy's elementwise kernel."""
        source, other, target = self._arrays
        self._add_scaled(source, other, np.float32(_FACTOR), target)

    def _fill(self) -> None:
        if self._arrays:
            return
        xp = self._gpu.xp
        self._add_scaled = xp.ElementwiseKernel(
            "float32 b, float32 c, float32 s", "float32 a", "a = b + s * c", "triad"
        )
        self._arrays = [xp.empty(self._size, np.float32) for _ in range(3)]
        for array in self._arrays[:2]:
            for start in range(0, self._size, self._piece.size):
                array[start : start + self._piece.size].set(self._piece)

    def _error(self, times: float) -> float:
        target = self._arrays[2].get().reshape(_PIECES, -1)
        return relative_error(list(target), lambda _: self._piece.astype(np.float64) * times)
