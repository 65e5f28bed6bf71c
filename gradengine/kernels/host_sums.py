"""Squared sums of fp32 values in NumPy, within 1e-6 relative whatever their magnitudes: what norms are made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt

Values: TypeAlias = npt.NDArray[np.float32]
Dot: TypeAlias = tuple[Callable[[Values, Values, Values], object], Values, Values]  # a product, its factors, its place

_ROW = 512  # elements whose squares are summed in fp32; with 16 lanes or more that is <= 32 roundings, 1e-6 of the norm
_SAFE_MEAN_SQUARE = 2.0**-100  # below this mean square, fp32 squares (>= 2**-126) may have lost what fp64 keeps


def squared_sum(values: Values) -> float:
    """The sum of squares of fp32 values, within 1e-6 relative for any magnitudes; NaN or Inf where one is in them.

    Rows of 512 squares are summed in fp32 by BLAS, rows in fp64; where a square overflows or all are tiny, the sum is
    taken again in fp64, where neither can happen (3e38 squared is 1e77). Zeros alone, which most of an embedding's
    gradient may be, are found in a fifth of that time.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return squared_sums([values])[0]


def squared_sums(chunks: Iterable[Values]) -> list[float]:
    """Each one's `squared_sum`; where squares overflow, NumPy warns as the caller has it."""
    found = []
    for values in chunks:
        if values.size < _ROW:
            total = float(values.dot(values))
        else:
            rows, tail = _rows_and_tail(values)
            total = float(np.add.reduce(np.vecdot(rows, rows), dtype=np.float64)) + float(tail.dot(tail))
        is_safe = _SAFE_MEAN_SQUARE * values.size <= total < math.inf  # written so that NaN is in doubt
        found.append(total if is_safe else _sum_in_fp64(values))
    return found


def _rows_and_tail(values: Values) -> tuple[Values, Values]:
    whole = values.size - values.size % _ROW
    return values[:whole].reshape(-1, _ROW), values[whole:]


def _sum_in_fp64(values: Values) -> float:
    if values.size and values.max() == 0 == values.min():
        return 0.0
    wide = values.astype(np.float64)
    return float(np.add.reduce(np.multiply(wide, wide, out=wide)))


@final
class PreparedSums:
    """The squared sums of some chunks that stay where they are: each a call or two of BLAS, to places taken once.

    A sum as `squared_sum` makes it takes ten calls and their results; threads that work beside each other would wait
    for the GIL at most of them (124 tensors of 75,000: 3.9 ms on two threads, 1.4 on one).
    """

    def __init__(self, chunks: Sequence[Values]) -> None:
        self._chunks, self._tails = chunks, np.zeros(len(chunks), np.float32)
        self._least = np.array([_SAFE_MEAN_SQUARE * chunk.size for chunk in chunks])
        self.dots: list[list[Dot]] = [[] for _ in chunks]  # of each chunk, to be taken before `totals` is asked
        by_rows: dict[int, list[tuple[int, Values]]] = {}
        for number, chunk in enumerate(chunks):
            rows, tail = _rows_and_tail(chunk)
            if len(rows):
                by_rows.setdefault(len(rows), []).append((number, rows))
            if tail.size:
                self.dots[number].append((np.dot, tail, self._tails[number, ...]))
        # Of chunks with as many rows these lie in one matrix, and are added by one call.
        self._matrices = []
        for count, alike in by_rows.items():
            matrix = np.zeros((len(alike), count), np.float32)
            self._matrices.append((np.array([number for number, _ in alike]), matrix))
            for place, (number, rows) in zip(matrix, alike, strict=True):
                self.dots[number].append((np.vecdot, rows, place))

    def totals(self) -> npt.NDArray[np.float64]:
        """Each chunk's squared sum, from its products; of `doubtful` ones it says nothing."""
        totals = self._tails.astype(np.float64)
        for numbers, matrix in self._matrices:
            totals[numbers] += np.add.reduce(matrix.astype(np.float64), axis=1)
        return totals

    def doubtful(self, totals: npt.NDArray[np.float64]) -> list[int]:
        """The chunks whose totals overflowed, are not finite, or so small that squares may have been lost."""
        is_safe = (self._least <= totals) & (totals < math.inf)  # written so that NaN is in doubt
        return [] if is_safe.all() else np.flatnonzero(~is_safe).tolist()

    def elements(self, numbers: Iterable[int], least: int) -> int:
        """How many these chunks have, of those that have so many."""
        sizes = [self._chunks[number].size for number in numbers]
        return sum(size for size in sizes if size >= least)

    def in_fp64(self, number: int) -> float:
        """A chunk's squared sum, taken anew."""
        return _sum_in_fp64(self._chunks[number])
