"""The micro-batches of one optimizer step, counted and weighed for each slot; no array is touched here."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gradengine.arguments import as_float, out_of_range
from gradengine.arrays.streams import ProducerStream
from gradengine.errors import BufferRefused, WindowError
from gradengine.kernels import Contribution, FoldPass, SlotSet
from gradengine.layout import Slot

__all__ = ["Window", "checked_weight", "ordered_sum"]

Flags = npt.NDArray[np.bool_]
_ONE: np.float32 = np.float32(1)


@dataclass(eq=False)
class _Held:
    """A contribution that is kept by reference.

    Attributes:
        contribution: What is kept.
        weight: Its micro-batch's.
        waiting: How many of its slots still wait for it.
    """

    contribution: Contribution
    weight: np.float32
    waiting: int

    @property
    def is_whole(self) -> bool:
        """Whether no slot has folded it yet."""
        return self.waiting == int(self.contribution.present.sum())


class Window:
    """What has been added since the last step.

    Of what is held each slot knows the numbers, in the order they came, so that no call looks at more than its own
    slots: a model that comes block by block would else be searched once for each block.

    Args:
        size: How many slots there are.
        holds: Whether anything is held beyond the call that brings it; where not, no address need be known.

    Attributes:
        weights: The fp32 weight of each micro-batch begun, in order.
        counts: Micro-batches each slot has got.
        used: Whether a slot got a gradient, and not None alone.
        filled: Whether a slot's memory holds something of this window; where not, the next fold overwrites.
        waiting: How many contributions each slot holds by reference, not yet folded.
        measured: Slots whose squared sums are those of their memory.
        producers: Whose streams its gradients are worked on.
    """

    def __init__(self, size: int, *, holds: bool = True) -> None:
        self._holds = holds
        self.weights: list[np.float32] = []
        self.counts: npt.NDArray[np.intp] = np.zeros(size, np.intp)
        self.used: Flags = np.zeros(size, np.bool_)
        self.filled: Flags = np.zeros(size, np.bool_)
        self.waiting: npt.NDArray[np.intp] = np.zeros(size, np.intp)
        self.measured: Flags = np.zeros(size, np.bool_)
        self.producers: set[ProducerStream] = set()
        self._held: dict[int, _Held] = {}
        self._came = itertools.count()
        self._numbers: npt.NDArray[np.intp] = np.zeros((size, 1), np.intp)  # of slot s: the first waiting[s] of row s
        self._addresses: dict[int, int] = {}  # that are held, and by how many slots

    def refuse_other_weight(self, places: SlotSet, weight: np.float32, where: str) -> None:
        """Raise `WindowError` where these slots' micro-batch was begun with another weight."""
        counts = self.counts[places.where]
        if counts.min() == len(self.weights):
            return  # it begins with these
        for micro_batch in np.unique(counts).tolist():
            if micro_batch < len(self.weights) and self.weights[micro_batch] != weight:
                raise WindowError(
                    f"{where} of micro-batch {micro_batch} has another weight than its other parts",
                    got=float(weight),
                    expected=float(self.weights[micro_batch]),
                )

    def held_already(self, contribution: Contribution) -> int | None:
        """The first of its slots whose address some slot holds already, or None."""
        pairs = zip(contribution.slots.positions, contribution.addresses.tolist(), strict=True)
        return next((position for position, address in pairs if address in self._addresses), None)

    def refuse_moved(self, places: SlotSet, slots: Sequence[Slot]) -> None:
        """Raise `BufferRefused` where a gradient that these slots hold lies elsewhere than when it came, or is gone."""
        for number, held in self._held_for(places):
            address_check = held.contribution.address_check
            columns = self._columns(number, held, places) if address_check else []
            moved = address_check.moved(columns) if address_check and columns else None
            if moved is not None:
                raise BufferRefused(
                    f"component '{slots[held.contribution.slots.positions[moved]].name}' was given other memory, or "
                    "freed, while it was held",
                    expected="each micro-batch's gradients to stay as they are until they are folded",
                    do="use hold=1, or leave them alone; this window is lost: discard() it",
                )

    def count(self, contribution: Contribution, weight: np.float32) -> None:
        """Count a contribution to each of its slots, also where it has no gradient."""
        self.producers |= contribution.producers
        where = contribution.slots.where
        if self.counts[where].max() == len(self.weights):
            self.weights.append(weight)
        self.counts[where] += 1
        given = where if contribution.is_whole else contribution.slots.index[contribution.present]
        self.measured[given] = False
        self.used[given] = True

    def fold_at_once(self, contribution: Contribution, weight: np.float32) -> FoldPass:
        """The pass of one contribution to slots that hold nothing."""
        return FoldPass(contribution.slots, ~self.filled[contribution.slots.where], [contribution], [weight])

    def folded_at_once(self, contribution: Contribution) -> None:
        """It is in its slots' memory now."""
        slots = contribution.slots
        self.filled[slots.where if contribution.is_whole else slots.index[contribution.present]] = True

    def hold(self, contribution: Contribution, weight: np.float32) -> None:
        """Keep a contribution by reference for each of its slots that it has a gradient for."""
        given = contribution.slots.index[contribution.present]
        if given.size:
            self._hold(_Held(contribution, weight, given.size), given)

    def batches(self, places: SlotSet) -> list[FoldPass]:
        """All that these slots hold, in as few passes as can be: one, where they came together."""
        mine = self._held_for(places)
        if all(held.contribution.slots is places and held.is_whole for _, held in mine):
            contributions = [held.contribution for _, held in mine]
            return [self._batch(places, contributions, [held.weight for _, held in mine])] if mine else []
        alike: dict[tuple[int, ...], list[int]] = {}
        rows, depths = self._numbers[places.index].tolist(), self.waiting[places.index].tolist()
        for position, numbers, depth in zip(places.positions, rows, depths, strict=True):
            alike.setdefault(tuple(numbers[:depth]), []).append(position)
        alike.pop((), None)
        return [
            self._part(places if len(positions) == len(rows) else SlotSet(positions), [self._held[n] for n in numbers])
            for numbers, positions in alike.items()
        ]

    def folded(self, places: SlotSet) -> None:
        """What these slots held is in their memory now."""
        for number, held in self._held_for(places):
            columns = self._columns(number, held, places)
            if self._holds:
                self._forget(held.contribution.addresses[columns].tolist())
            held.waiting -= len(columns)
            if not held.waiting:
                del self._held[number]
        self.filled[places.index] |= self.waiting[places.index] > 0
        self.waiting[places.index] = 0

    def become_one(self) -> None:
        """The memory holds the mean: one micro-batch of weight 1."""
        self.weights = [np.float32(1)]
        self.counts[:] = 1
        self.measured[:] = False

    def _hold(self, held: _Held, index: npt.NDArray[np.intp]) -> None:
        depth, number = self.waiting[index], next(self._came)
        if depth.max() == self._numbers.shape[1]:
            self._numbers = np.concatenate([self._numbers, np.zeros_like(self._numbers)], axis=1)
        self._numbers[index, depth] = number
        self.waiting[index] = depth + 1
        self._held[number] = held
        if self._holds:
            self._learn(held.contribution.addresses.tolist())

    def _held_for(self, places: SlotSet) -> list[tuple[int, _Held]]:
        """What any of these slots waits for, by number."""
        depths = self.waiting[places.index]
        deepest = int(depths.max(initial=0))
        if not deepest:
            return []
        rows = self._numbers[places.index, :deepest]
        numbers = set(rows[np.arange(deepest) < depths[:, np.newaxis]].tolist())
        return [(number, self._held[number]) for number in sorted(numbers)]

    def _columns(self, number: int, held: _Held, places: SlotSet) -> list[int]:
        """Those of its slots that wait for it and are among these."""
        columns: list[int]
        if held.contribution.slots is places and held.is_whole:
            columns = np.flatnonzero(held.contribution.present).tolist()
            return columns
        rows, depths = self._numbers[places.index], self.waiting[places.index]
        waits = (rows == number) & (np.arange(rows.shape[1]) < depths[:, np.newaxis])
        columns = [held.contribution.slots.column[p] for p in places.index[waits.any(axis=1)].tolist()]
        return columns

    def _learn(self, addresses: Iterable[int]) -> None:
        for address in filter(None, addresses):  # 0: nothing came, or it is empty
            self._addresses[address] = self._addresses.get(address, 0) + 1

    def _forget(self, addresses: Iterable[int]) -> None:
        for address in filter(None, addresses):
            self._addresses[address] -= 1
            if not self._addresses[address]:
                del self._addresses[address]

    def _part(self, places: SlotSet, held: Sequence[_Held]) -> FoldPass:
        parts = [h.contribution.part(places) for h in held]
        return self._batch(places, parts, [h.weight for h in held])

    def _batch(self, places: SlotSet, parts: Sequence[Contribution], weights: Sequence[np.float32]) -> FoldPass:
        return FoldPass(places, ~self.filled[places.index], parts, weights)


def checked_weight(weight: float) -> np.float32:
    """The weight as fp32.

    Raises:
        WindowError: It is not a finite number above 0, or is below fp32's normal numbers.

    Example:
        >>> checked_weight(0)
        Traceback (most recent call last):
        gradengine.errors.WindowError: a micro-batch's weight is out of range: got 0, expected a finite ...
    """
    if type(weight) is float and weight == 1:  # as nearly all are
        return _ONE
    with np.errstate(over="ignore"):
        scalar: np.float32 = np.float32(as_float(weight))
    if not np.finfo(np.float32).tiny <= scalar < np.inf:  # below, 1/weight may be no fp32 number
        do = "of a micro-batch that counts nothing say add(None, weight=0)"
        raise out_of_range("a micro-batch's weight", weight, "a finite number above 1.18e-38", WindowError, do)
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
