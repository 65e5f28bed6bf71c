"""Squared sums of fp32 values in NumPy, for norms; within 1e-6 relative whatever the magnitudes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt

Values: TypeAlias = npt.NDArray[np.float32]
Float64: TypeAlias = npt.NDArray[np.float64]
Product: TypeAlias = tuple[Values, Values]  # of values, or rows of them, with themselves; and where that goes

#: Elements whose squares are summed in fp32: 7e-7 of the norm at most, with SSE2's lanes too. NumPy's vecdot lets other
#: threads have the GIL from 500 rows on: of 131,072 elements.
_ROW = 256
_SAFE_MEAN_SQUARE = 2.0**-100  # below this mean square, fp32 squares (>= 2**-126) may have lost what fp64 keeps


@final
class ChunkSums:
    """The squared sums of chunks of these sizes, none empty: a call or two of BLAS for each, to a place of its own.

    Rows of 256 squares are summed in fp32, rows in fp64, for all chunks by a few calls. Threads that each made a whole
    sum would wait for the GIL at most of its ten calls (124 tensors of 75,000: 3.9 ms on two threads, 1.4 on one). One
    measurement at a time uses the places.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        counts = [-(-size // _ROW) for size in sizes]  # of products: one for each row, and for what is left over
        self._starts = np.array([0, *itertools.accumulate(counts)], np.intp)
        self._first: list[int] = self._starts.tolist()
        self._products = np.zeros(self._first[-1] + 1, np.float32)  # one more, so that each stop is an index, too
        self._least = _SAFE_MEAN_SQUARE * np.array(sizes, np.float64)

    def products(self, number: int, values: Values) -> list[Product]:
        """The arguments of NumPy's vecdot for a chunk, to be called before `totals`.

        Not `dot`, which releases the GIL for a single small product, and another thread may then keep it for 5 ms.
        """
        first, size = self._first[number], values.size
        if size < _ROW:
            return [(values, self._products[first, ...])]
        whole = size - size % _ROW
        stop = first + whole // _ROW
        found = [(values[:whole].reshape(-1, _ROW), self._products[first:stop])]
        if whole < size:
            found.append((values[whole:], self._products[stop, ...]))
        return found

    def totals(self, numbers: npt.NDArray[np.intp] | None = None) -> tuple[Float64, list[int]]:
        """The squared sum of each of these chunks, by default all, and the positions of those that are in doubt.

        These overflowed, are not finite, or are so small that squares may have been lost: they must be summed in fp64,
        where neither can happen (3e38 squared is 1e77).
        """
        totals = self._of_all() if numbers is None else self._of_some(numbers)
        least = self._least if numbers is None else self._least[numbers]
        is_safe = (least <= totals) & (totals < math.inf)  # written so that NaN is in doubt
        return totals, [] if is_safe.all() else np.flatnonzero(~is_safe).tolist()

    def _of_all(self) -> Float64:
        products = self._products[:-1].astype(np.float64)
        is_one_of_each = len(products) == len(self._least)
        return products if is_one_of_each else np.add.reduceat(products, self._starts[:-1])

    def _of_some(self, numbers: npt.NDArray[np.intp]) -> Float64:
        """The sums from each chunk's start to its stop: every second result of reduceat over all starts and stops."""
        starts, stops = self._starts[numbers], self._starts[numbers + 1]
        first, last = starts.min(initial=len(self._products)), stops.max(initial=0)
        products = self._products[first : last + 1].astype(np.float64)
        return np.add.reduceat(products, np.array((starts - first, stops - first)).T.ravel())[::2]


def sum_in_fp64(values: Values) -> float:
    """The sum of squares in fp64; of zeros alone, as in much of an embedding's gradient, in a fifth of the time."""
    if values.max() == 0 == values.min():
        return 0.0
    wide = values.astype(np.float64)
    return float(np.add.reduce(np.multiply(wide, wide, out=wide)))
