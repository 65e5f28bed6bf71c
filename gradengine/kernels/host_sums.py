"""Squared sums of fp32 values in NumPy, for norms. The relative error is within 1e-6 for all magnitudes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt

Values: TypeAlias = npt.NDArray[np.float32]
Float64: TypeAlias = npt.NDArray[np.float64]
Product: TypeAlias = tuple[Values, Values]  # values or rows of values, and the place of their product with themselves

#: Elements whose squares are summed in fp32. The error is at most 7e-7 of the norm, with SSE2's lanes too. NumPy's
#: vecdot releases the GIL from 500 rows on, so for chunks of 131,072 elements or more.
_ROW = 256
_SAFE_MEAN_SQUARE = 2.0**-100  # mean square below which fp32 squares (>= 2**-126) may lose bits that fp64 keeps


@final
class ChunkSums:
    """The squared sums of chunks of these sizes, none empty. Each takes one or two BLAS calls, to a separate place.

    A row of 256 squares is summed in fp32. The rows of all chunks are summed in fp64 by a few calls. If each thread
    made a whole sum, threads would wait for the GIL in most of its ten calls. Then 124 tensors of 75,000 elements would
    take 3.9 ms on two threads and 1.4 ms on one. Only one measurement at a time may use the places.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        counts = [-(-size // _ROW) for size in sizes]  # number of products, one for each row and one for the rest
        self._starts = np.array([0, *itertools.accumulate(counts)], np.intp)
        self._first: list[int] = self._starts.tolist()
        self._products = np.zeros(self._first[-1] + 1, np.float32)  # one more, so that each stop is an index
        self._least = _SAFE_MEAN_SQUARE * np.array(sizes, np.float64)

    def products(self, number: int, values: Values) -> list[Product]:
        """Return the arguments of numpy.vecdot for a chunk. Call vecdot before `totals`.

        `dot` would release the GIL for a single small product, and another thread could then keep it for 5 ms.
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
        """Return the squared sum of each of these chunks, by default all, and the positions of doubtful ones.

        A doubtful sum overflowed, is not finite, or is so small that squares may be lost. It must be summed in fp64,
        where neither can happen (3e38 squared is 1e77).
        """
        totals = self._of_all() if numbers is None else self._of_some(numbers)
        least = self._least if numbers is None else self._least[numbers]
        is_safe = (least <= totals) & (totals < math.inf)  # NaN is doubtful too.
        return totals, [] if is_safe.all() else np.flatnonzero(~is_safe).tolist()

    def _of_all(self) -> Float64:
        products = self._products[:-1].astype(np.float64)
        is_one_of_each = len(products) == len(self._least)
        return products if is_one_of_each else np.add.reduceat(products, self._starts[:-1])

    def _of_some(self, numbers: npt.NDArray[np.intp]) -> Float64:
        """Return the sums from each chunk's start to its stop, every second result of reduceat over both."""
        starts, stops = self._starts[numbers], self._starts[numbers + 1]
        first, last = starts.min(initial=len(self._products)), stops.max(initial=0)
        products = self._products[first : last + 1].astype(np.float64)
        return np.add.reduceat(products, np.array((starts - first, stops - first)).T.ravel())[::2]


def sum_in_fp64(values: Values) -> float:
    """Return the sum of squares in fp64. Zeros alone (as in an embedding's gradient) take a fifth of the time."""
    if values.max() == 0 == values.min():
        return 0.0
    wide = values.astype(np.float64)
    return float(np.add.reduce(np.multiply(wide, wide, out=wide)))
