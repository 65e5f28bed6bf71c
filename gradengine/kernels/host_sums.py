"""Squared sums of fp32 values in NumPy, within 1e-6 relative whatever their magnitudes: what norms are made of."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt

Values: TypeAlias = npt.NDArray[np.float32]
Dot: TypeAlias = tuple[Callable[[Values, Values, Values], object], Values, Values]  # a product, its factors, its place

_ROW = 512  # elements whose squares are summed in fp32; with 16 lanes or more that is <= 32 roundings, 1e-6 of the norm
_SAFE_MEAN_SQUARE = 2.0**-100  # below this mean square, fp32 squares (>= 2**-126) may have lost what fp64 keeps


def squared_sum(values: Values) -> float:
    """The sum of squares of fp32 values, within 1e-6 relative for any magnitudes; NaN or Inf where one is in them."""
    if not values.size:
        return 0.0
    sums = ChunkSums([values.size])
    with np.errstate(over="ignore", invalid="ignore"):
        for dot, factors, place in sums.dots(0, values):
            dot(factors, factors, place)
        totals = sums.totals()
    return sum_in_fp64(values) if sums.doubtful(totals) else float(totals[0])


@final
class ChunkSums:
    """The squared sums of chunks of these sizes, none empty: a call or two of BLAS for each, to a place of its own.

    Rows of 512 squares are summed in fp32, rows in fp64, for all chunks by one call. Threads that each made a sum as a
    whole would wait for the GIL at most of its ten calls (124 tensors of 75,000: 3.9 ms on two threads, 1.4 on one).
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        counts = [-(-size // _ROW) for size in sizes]  # of products: one for each row, and for what is left over
        self._starts = np.array([0, *itertools.accumulate(counts)], np.intp)
        self._products = np.zeros(sum(counts), np.float32)
        self._least = _SAFE_MEAN_SQUARE * np.array(sizes, np.float64)

    def dots(self, number: int, values: Values) -> list[Dot]:
        """What is to be done for that chunk, before `totals` is asked."""
        first, size = self._starts[number], values.size
        if size < _ROW:
            return [(np.dot, values, self._products[first, ...])]
        whole = size - size % _ROW
        stop = first + whole // _ROW
        found: list[Dot] = [(np.vecdot, values[:whole].reshape(-1, _ROW), self._products[first:stop])]
        if whole < size:
            found.append((np.dot, values[whole:], self._products[stop, ...]))
        return found

    def totals(self, numbers: Sequence[int] | None = None) -> npt.NDArray[np.float64]:
        """The squared sum of each of these chunks, all by default; of `doubtful` ones it says nothing."""
        starts = self._starts
        if numbers is None:
            return np.add.reduceat(self._products.astype(np.float64), starts[:-1])
        parts = [self._products[starts[number] : starts[number + 1]] for number in numbers]
        return np.array([np.add.reduceat(part.astype(np.float64), [0])[0] for part in parts])

    def doubtful(self, totals: npt.NDArray[np.float64], numbers: Sequence[int] | None = None) -> list[int]:
        """Positions in `totals` that overflowed, are not finite, or so small that squares may have been lost.

        Such a sum is taken again in fp64, where neither can happen (3e38 squared is 1e77).
        """
        least = self._least if numbers is None else self._least[list(numbers)]
        is_safe = (least <= totals) & (totals < math.inf)  # written so that NaN is in doubt
        return [] if is_safe.all() else np.flatnonzero(~is_safe).tolist()


def sum_in_fp64(values: Values) -> float:
    """The sum of squares; of zeros alone, which most of an embedding's gradient may be, in a fifth of the time."""
    if values.max() == 0 == values.min():
        return 0.0
    wide = values.astype(np.float64)
    return float(np.add.reduce(np.multiply(wide, wide, out=wide)))
