"""The micro-batches of one optimizer step, counted and weighed for each slot; no array is touched here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from gradengine.buffer import Buffer
from gradengine.errors import WindowError
from gradengine.kernels import Fold

__all__ = ["Window", "checked_weight", "ordered_sum"]


class Window:
    """What has been added since the last step.

    Attributes:
        weights: The fp32 weight of each micro-batch begun, in order.
        counts: Micro-batches each slot has got.
        filled: Whether a slot's memory holds something of this window; where not, the next fold overwrites.
        pending: What each slot holds by reference, not yet folded.
        measured: Slots whose squared sums are those of their memory.
        held: How often each address lies in `pending`.
    """

    def __init__(self, size: int) -> None:
        self.weights: list[np.float32] = []
        self.counts = [0] * size
        self.filled = [False] * size
        self.pending: list[list[tuple[Buffer, np.float32]]] = [[] for _ in range(size)]
        self.measured: set[int] = set()
        self.held: Counter[int] = Counter()

    def refuse_other_weight(self, positions: Sequence[int], weight: np.float32, where: str) -> None:
        """Raise `WindowError` where these slots' micro-batch was begun with another weight."""
        for p in positions:
            micro_batch = self.counts[p]
            if micro_batch < len(self.weights) and self.weights[micro_batch] != weight:
                raise WindowError(
                    f"{where} of micro-batch {micro_batch} has another weight than its other parts",
                    got=float(weight),
                    expected=float(self.weights[micro_batch]),
                )

    def take(self, positions: Sequence[int], views: Sequence[Buffer | None], weight: np.float32) -> None:
        """Count a contribution to each of these slots and hold it; None counts and holds nothing."""
        if any(self.counts[p] == len(self.weights) for p in positions):
            self.weights.append(weight)
        for p, view in zip(positions, views, strict=True):
            self.counts[p] += 1
            self.measured.discard(p)
            if view is not None:
                self.pending[p].append((view, weight))
                self.held[view.pointer] += view.size > 0

    def fold(self, position: int) -> Fold:
        """All that this slot holds, as one pass."""
        buffers, weights = zip(*self.pending[position], strict=True)
        return Fold(position, not self.filled[position], buffers, weights)

    def folded(self, positions: Sequence[int]) -> None:
        """What these slots held is in their memory now."""
        for p in positions:
            self.held.subtract(buffer.pointer for buffer, _ in self.pending[p] if buffer.size)
            self.pending[p].clear()
            self.filled[p] = True

    def become_one(self) -> None:
        """The memory holds the mean: one micro-batch of weight 1."""
        self.weights = [np.float32(1)]
        self.counts = [1] * len(self.counts)
        self.measured.clear()


def checked_weight(weight: float) -> np.float32:
    """The weight as fp32.

    Raises:
        WindowError: It is not a finite number above 0, or is below fp32's normal numbers.

    Example:
        >>> checked_weight(0)
        Traceback (most recent call last):
        gradengine.errors.WindowError: a micro-batch's weight is out of range: got 0, expected a finite ...
    """
    try:
        with np.errstate(over="ignore"):
            scalar: np.float32 = np.float32(float(weight))
    except (TypeError, ValueError, OverflowError):
        scalar = np.float32(np.nan)
    if not np.finfo(np.float32).tiny <= scalar < np.inf:  # below, 1/weight may be no fp32 number
        raise WindowError(
            "a micro-batch's weight is out of range",
            got=repr(weight),
            expected="a finite number above 1.18e-38",
            do="leave out a micro-batch that counts nothing",
        )
    return scalar


def ordered_sum(values: Iterable[float]) -> float:
    """Sum from first to last, each addition rounded to fp64 (Python's own sum() compensates from 3.12 on).

    >>> ordered_sum(iter([1e16, 1.0, 1.0])) == 1e16
    True
    """
    total = 0.0
    for value in values:
        total += value
    return total
