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

#: Elements whose squares are summed in fp32: 7e-7 of the norm at most, with SSE2's lanes too. NumPy's vecdot lets other
#: threads have the GIL from 500 rows on: of 131,072 elements.
_ROW = 256
_SAFE_MEAN_SQUARE = 2.0**-100  # below this mean square, fp32 squares (>= 2**-126) may have lost what fp64 keeps


def squared_sum(values: Values) -> float:
    """The sum of squares of fp32 values, within 1e-6 relative for any magnitudes; NaN or Inf where one is in them."""
    if not values.size:
        return 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        if values.size < _ROW:
            total = float(values.dot(values))
            return total if _SAFE_MEAN_SQUARE * values.size <= total < math.inf else sum_in_fp64(values)
        sums = ChunkSums([values.size])
        for dot, factors, place in sums.dots(0, values):
            dot(factors, factors, place)
        totals = sums.totals([0])
    return sum_in_fp64(values) if sums.doubtful(totals, [0]) else float(totals[0])


@final
class ChunkSums:
    """The squared sums of chunks of these sizes, none empty: a call or two of BLAS for each, to a place of its own.

    Rows of 256 squares are summed in fp32, rows in fp64, for all chunks by one call. Threads that each made a sum as a
    whole would wait for the GIL at most of its ten calls (124 tensors of 75,000: 3.9 ms on two threads, 1.4 on one).
    Places are of one measurement at a time.
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

    def totals(self, numbers: Sequence[int]) -> npt.NDArray[np.float64]:
        """The squared sum of each of these chunks; of `doubtful` ones it says nothing."""
        chosen = np.array(numbers, np.intp)
        starts, stops = self._starts[chosen], self._starts[chosen + 1]
        first = starts.min()
        products = np.append(self._products[first : stops.max()], np.float32(0)).astype(np.float64)
        # Sums from each start to its stop, and between these from a stop to the next start, which nobody wants.
        bounds = np.stack((starts, stops), axis=1).ravel() - first
        wanted: npt.NDArray[np.float64] = np.add.reduceat(products, bounds)[::2]
        return wanted

    def doubtful(self, totals: npt.NDArray[np.float64], numbers: Sequence[int]) -> list[int]:
        """Positions in `totals` that overflowed, are not finite, or so small that squares may have been lost.

        Such a sum is taken again in fp64, where neither can happen (3e38 squared is 1e77).
        """
        is_safe = (self._least[list(numbers)] <= totals) & (totals < math.inf)  # written so that NaN is in doubt
        return [] if is_safe.all() else np.flatnonzero(~is_safe).tolist()


def sum_in_fp64(values: Values) -> float:
    """The sum of squares; of zeros alone, which most of an embedding's gradient may be, in a fifth of the time."""
    if values.max() == 0 == values.min():
        return 0.0
    wide = values.astype(np.float64)
    return float(np.add.reduce(np.multiply(wide, wide, out=wide)))
