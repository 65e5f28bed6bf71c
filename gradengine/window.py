"""The micro-batches of one optimizer step, counted and weighed for each slot; no array is touched here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gradengine.buffer import Lender
from gradengine.errors import BufferRefused, WindowError
from gradengine.kernels import Batch, Contribution, Places
from gradengine.layout import Slot

__all__ = ["Window", "checked_weight", "ordered_sum"]

Flags = npt.NDArray[np.bool_]


@dataclass(eq=False)
class _Held:
    """A contribution that is kept by reference; `waits` says for which of its slots."""

    contribution: Contribution
    weight: np.float32
    waits: Flags

    def columns_of(self, places: Places) -> list[int]:
        """Those of its slots that wait and are among these."""
        mine = self.contribution.places
        waits = self.waits if mine is places else self.waits & np.isin(mine.index, places.index)
        found: list[int] = np.flatnonzero(waits).tolist()
        return found


class Window:
    """What has been added since the last step.

    Attributes:
        weights: The fp32 weight of each micro-batch begun, in order.
        counts: Micro-batches each slot has got.
        filled: Whether a slot's memory holds something of this window; where not, the next fold overwrites.
        waiting: How many contributions each slot holds by reference, not yet folded.
        measured: Slots whose squared sums are those of their memory.
        lenders: Whose streams its gradients are worked on.
    """

    def __init__(self, size: int) -> None:
        self.weights: list[np.float32] = []
        self.counts: npt.NDArray[np.intp] = np.zeros(size, np.intp)
        self.filled: Flags = np.zeros(size, np.bool_)
        self.waiting: npt.NDArray[np.intp] = np.zeros(size, np.intp)
        self.measured: Flags = np.zeros(size, np.bool_)
        self.lenders: set[Lender] = set()
        self._held: list[_Held] = []

    def refuse_other_weight(self, places: Places, weight: np.float32, where: str) -> None:
        """Raise `WindowError` where these slots' micro-batch was begun with another weight."""
        for micro_batch in np.unique(self.counts[places.index]).tolist():
            if micro_batch < len(self.weights) and self.weights[micro_batch] != weight:
                raise WindowError(
                    f"{where} of micro-batch {micro_batch} has another weight than its other parts",
                    got=float(weight),
                    expected=float(self.weights[micro_batch]),
                )

    def held_already(self, contribution: Contribution) -> int | None:
        """The first of its slots whose address some slot holds already, or None."""
        here = contribution.addresses
        there = [held.contribution.addresses[held.waits] for held in self._held]
        if not there:
            return None
        again = np.isin(here, np.concatenate(there)) & (here != 0)
        return contribution.places.positions[int(again.argmax())] if again.any() else None

    def refuse_moved(self, places: Places, slots: Sequence[Slot]) -> None:
        """Raise `BufferRefused` where a gradient that these slots hold lies elsewhere than when it came, or is gone."""
        for held in self._held_for(places):
            whereabouts = held.contribution.whereabouts
            columns = held.columns_of(places) if whereabouts else []
            moved = whereabouts.moved(columns) if whereabouts and columns else None
            if moved is not None:
                raise BufferRefused(
                    f"component '{slots[held.contribution.places.positions[moved]].name}' was given other memory, or "
                    "freed, while it was held",
                    expected="each micro-batch's gradients to stay as they are until they are folded",
                    do="use hold=1, or leave them alone; this window is lost: discard() it",
                )

    def take(self, contribution: Contribution, weight: np.float32) -> None:
        """Count a contribution to each of its slots and hold it; one without a gradient counts and holds nothing."""
        self.lenders |= contribution.lenders
        index = contribution.places.index
        if (self.counts[index] == len(self.weights)).any():
            self.weights.append(weight)
        self.counts[index] += 1
        present = contribution.present
        if present.any():
            self.measured[index[present]] = False
            self.waiting[index] += present
            self._held.append(_Held(contribution, weight, present.copy()))

    def batches(self, places: Places) -> list[Batch]:
        """All that these slots hold, in as few passes as can be: one, where they came together."""
        mine = self._held_for(places)
        if all(held.contribution.places is places and not self._is_broken(held) for held in mine):
            contributions = [held.contribution for held in mine]
            return [self._batch(places, contributions, [held.weight for held in mine])] if mine else []
        alike: dict[tuple[int, ...], list[int]] = {}
        for position in places.positions:
            numbers = tuple(n for n, held in enumerate(mine) if self._waits(held, position))
            alike.setdefault(numbers, []).append(position)
        alike.pop((), None)
        return [self._part(positions, [mine[n] for n in numbers]) for numbers, positions in alike.items()]

    def folded(self, places: Places) -> None:
        """What these slots held is in their memory now."""
        self.filled[places.index] |= self.waiting[places.index] > 0
        self.waiting[places.index] = 0
        for held in self._held_for(places):
            if held.contribution.places is places:
                held.waits[:] = False
            else:
                held.waits &= ~np.isin(held.contribution.places.index, places.index)
        self._held = [held for held in self._held if held.waits.any()]

    def become_one(self) -> None:
        """The memory holds the mean: one micro-batch of weight 1."""
        self.weights = [np.float32(1)]
        self.counts[:] = 1
        self.measured[:] = False

    def _held_for(self, places: Places) -> list[_Held]:
        return [held for held in self._held if not held.contribution.places.is_disjoint(places)]

    def _is_broken(self, held: _Held) -> bool:
        return bool((held.waits != held.contribution.present).any())

    def _waits(self, held: _Held, position: int) -> bool:
        column = held.contribution.places.column.get(position)
        return column is not None and bool(held.waits[column])

    def _part(self, positions: Sequence[int], held: Sequence[_Held]) -> Batch:
        places = Places(positions)
        parts = [h.contribution.part(positions) for h in held]
        return self._batch(places, parts, [h.weight for h in held])

    def _batch(self, places: Places, parts: Sequence[Contribution], weights: Sequence[np.float32]) -> Batch:
        return Batch(places, ~self.filled[places.index], parts, weights)


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
