"""Counts and weights of one optimizer step's micro-batches for each slot. This module touches no array."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, SupportsFloat

import numpy as np
import numpy.typing as npt

from gradengine.accumulate.gradients import and_more
from gradengine.arguments import as_float, out_of_range, said
from gradengine.arrays.device import device_of
from gradengine.arrays.streams import ProducerStream
from gradengine.errors import BufferRefused, CallerError, WindowError
from gradengine.kernels import Contribution, FoldPass
from gradengine.kernels.operands import ADDRESS
from gradengine.layout import Slot
from gradengine.layout.slots import Span

Flags = npt.NDArray[np.bool_]
# For a smaller weight than this, 1 / weight may not be a finite fp32 number.
_LEAST, _MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class SavedWindow:
    """A window on the host, with all values that an accumulator of the same layout needs to resume it."""

    says_nothing: bool  # whether add(None) was called
    weights: npt.NDArray[np.float32]
    counts: npt.NDArray[np.int64]
    used: Flags
    filled: Flags
    sums: npt.NDArray[np.float32]  # the arena, with zeros in slots that are not filled; empty if none is filled
    counted_weight: float  # total weight of micro-batches that were not dropped
    dropped: int  # number of dropped micro-batches

    @property
    def is_open(self) -> bool:
        """Whether anything was added, or add(None) was called."""
        return self.says_nothing or bool(self.weights.size) or bool(self.filled.any())


class FirstFold(NamedTuple):
    """The weight and the squared sums of a window's first fold, a small batch compared with the whole window."""

    weight: float
    filled: Flags  # slots that had a sum after the fold
    kept: Any  # result of `Kernels.keep_sums`


class Window:
    """The contributions to the slots since the last step, counted and weighed.

    Contributions are held by their set of slots. No slot is in two sets that are held.
    """

    def __init__(self, size: int) -> None:
        self.weights: list[np.float32] = []  # weight of each micro-batch that has begun, in order
        self.counts: npt.NDArray[np.intp] = np.zeros(size, np.intp)  # micro-batches of each slot
        self.used: Flags = np.zeros(size, np.bool_)  # slots that got a gradient, and not only None
        self.filled: Flags = np.zeros(size, np.bool_)  # slots written in this window; the next fold overwrites others
        self.measured: Flags = np.zeros(size, np.bool_)  # slots whose squared sum is up to date
        self.producers: set[ProducerStream] = set()  # the streams on which its gradients are produced
        self.first: FirstFold | None = None  # None until it is whole and measured
        self._is_even = True  # whether every contribution was to all slots
        self.is_coming = False  # whether a micro-batch is being added component by component
        self._held: dict[Span, list[tuple[Contribution, np.float32]]] = {}
        self._holder: dict[int, Span] = {}  # slot -> the set in which it is held
        self._addresses: set[int] = set()  # addresses of held gradients

    @staticmethod
    def of(saved: SavedWindow) -> Window:
        """Return the saved window, with no held gradients and no measured squared sums."""
        window = Window(saved.counts.size)
        window.weights, window.counts = list(saved.weights), saved.counts.astype(np.intp)
        window.used, window.filled = saved.used.copy(), saved.filled.copy()
        window._is_even = bool((window.counts == len(window.weights)).all())
        return window

    def refuse_other_weight(self, span: Span, weight: np.float32) -> None:
        """Raise `WindowError` if these slots' micro-batch was begun with a different weight."""
        if self._is_even:
            return  # This contribution begins a micro-batch.
        counts = [len(self.weights) - 1] if self.is_coming else np.unique(self.counts[span.where]).tolist()
        for micro_batch in counts:
            if micro_batch < len(self.weights) and self.weights[micro_batch] != weight:
                raise WindowError(
                    f"{span.called} of micro-batch {micro_batch} has a different weight than its other parts",
                    got=float(weight),
                    expected=float(self.weights[micro_batch]),
                )

    def refuse_aliases(self, contribution: Contribution, slots: Sequence[Slot]) -> None:
        """Raise `BufferRefused` if one of the contribution's addresses is already held."""
        addresses = _untagged(contribution)
        if self._addresses.isdisjoint(addresses):
            return
        for position, address in zip(contribution.slots.positions, addresses, strict=True):
            if address in self._addresses:
                raise BufferRefused(
                    f"component '{slots[position].name}' is held already at the same address",
                    got=f"address {address:#x} twice",
                    expected="separate memory",
                    do="use hold=1, or new gradients in each micro-batch (torch: set .grad = None)",
                )

    def refuse_lagging(self, slots: Sequence[Slot]) -> None:
        """Raise `WindowError` if a component has fewer micro-batches than another."""
        lagging = [] if self._is_even else np.flatnonzero(self.counts < len(self.weights)).tolist()
        if lagging:
            raise WindowError(
                f"component '{slots[lagging[0]].name}'{and_more(lagging)} lacks part of the window",
                got=f"{self.counts[lagging[0]]} micro-batches",
                expected=f"{len(self.weights)}, as for the others",
                do="add the missing gradients, or None for a component without a gradient",
            )

    def begin(self, weight: np.float32) -> None:
        """Begin a micro-batch that is added component by component, each any number of times."""
        self.weights.append(weight)
        self._is_even, self.is_coming = False, True

    def note_added(self, position: int, name: str) -> None:
        """Count a slot to which a layer has added its gradient, so that its squared sum is to be measured.

        Raises `WindowError` if the slot held no sum of this window.
        """
        if not self.filled[position]:
            what = f"a layer added component '{name}' to memory that held the sum of an earlier window"
            raise WindowError(what, do="call begin() before layers add to the arena; discard() this window")
        self.counts[position], self.used[position], self.measured[position] = len(self.weights), True, False

    def end(self) -> None:
        """End a micro-batch that was added component by component. Components that were not added had no gradient.

        Raises `WindowError` if no component was added.
        """
        if self.counts.max() < len(self.weights):
            raise nothing_came(len(self.counts))
        self.counts[:] = len(self.weights)
        self._is_even, self.is_coming = True, False

    def count(self, contribution: Contribution, weight: np.float32, *, is_coming: bool = False) -> None:
        """Count a contribution in each of its slots, also in those without a gradient.

        `is_coming` is whether its micro-batch is added component by component.
        """
        if is_coming and not self.is_coming:
            self.begin(weight)
        self.producers |= contribution.producers
        where = contribution.slots.where
        if self.is_coming:
            self.counts[where] = len(self.weights)
        else:
            if self._is_even or self.counts[where].max() == len(self.weights):
                self.weights.append(weight)
            self.counts[where] += 1
            self._is_even = self._is_even and len(contribution.slots.positions) == self.counts.size
        self.measured[contribution.given] = False
        self.used[contribution.given] = True

    @property
    def is_even(self) -> bool:
        """Whether all slots have the same number of micro-batches."""
        return self._is_even or bool((self.counts == self.counts[0]).all())

    def is_in_first_fold(self, hold: int) -> bool:
        """Return whether only the first `hold` micro-batches were added, and their squared sums were not kept yet."""
        return self.first is None and 0 < len(self.weights) <= hold

    @property
    def is_measured(self) -> bool:
        """Whether all micro-batches are whole and folded, and every sum was measured."""
        is_whole = self.is_even and not self.is_coming and not self._held
        return is_whole and not (self.filled & ~self.measured).any()

    def held_with(self, span: Span) -> list[Span]:
        """Return the held sets that share a slot with this set."""
        if not self._held:
            return []
        if span in self._held:
            return [span]
        return list(dict.fromkeys(self._holder[p] for p in span.positions if p in self._holder))

    def depth(self, span: Span) -> int:
        """Return the number of contributions that are held for exactly these slots."""
        return len(self._held.get(span, ()))

    def hold(self, contribution: Contribution, weight: np.float32) -> None:
        """Keep a contribution by reference. No other set with one of its slots may be held."""
        # A contribution without gradients also counts in a pass that has begun.
        if contribution.present.any() or contribution.slots in self._held:
            self._held.setdefault(contribution.slots, []).append((contribution, weight))
            self._holder.update(dict.fromkeys(contribution.slots.positions, contribution.slots))
            # Address 0 stands for a missing or an empty gradient.
            self._addresses.update(filter(None, _untagged(contribution)))

    def held_passes(self, span: Span) -> list[FoldPass]:
        """Return one fold pass for each held set that shares a slot with this set."""
        return [
            FoldPass(held, ~self.filled[held.where], *zip(*self._held[held], strict=True))
            for held in self.held_with(span)
        ]

    def folded(self, fold: FoldPass, *, measured: bool = False) -> None:
        """Note that a pass was written to memory, and whether it was measured."""
        given = fold.given
        self.filled[given] = True
        if measured:
            self.measured[given] = True
        if fold.slots in self._held:
            for contribution, _ in self._held.pop(fold.slots):
                self._addresses.difference_update(_untagged(contribution))
            for position in fold.slots.positions:
                del self._holder[position]

    def become_one(self) -> None:
        """Note that the memory holds the mean, which counts as one micro-batch of weight 1."""
        self.weights = [np.float32(1)]
        self.counts[:] = 1
        self.measured[:] = False
        self.first = None


def _untagged(contribution: Contribution) -> list[int]:
    """Return the addresses of a contribution's gradients without their dtypes' tags, and 0 for no gradient."""
    addresses: list[int] = (contribution.addresses & np.uint64(ADDRESS)).tolist()
    return addresses


def nothing_came(components: int) -> WindowError:
    """Return the error for a micro-batch in which no component has a gradient."""
    return WindowError(
        "no component has a gradient in this micro-batch",
        got=f"None for all {components}",
        do="add() after backward() and before zero_grad(), or add(None, weight=0) on a rank without a micro-batch",
    )


def no_part_may_be_dropped() -> CallerError:
    """Return the error for a part of a micro-batch, which could not be removed from the sum again."""
    what, do = "a micro-batch that may be dropped must be added as a whole", "use on_non_finite='skip' to add parts"
    return CallerError(what, got="a part of one", expected="engine.add(gradients)", do=do)


def weighs_nothing(weight: object) -> WindowError:
    """Return the error for a micro-batch without gradients whose weight is not 0."""
    return WindowError(
        "a micro-batch without gradients has a weight",
        got=f"weight {said(weight)}",
        expected="weight 0",
        do="add its gradients, or call add(None, weight=0) if there are none",
    )


def checked_weight(weight: SupportsFloat) -> np.float32:
    """Return the weight as fp32.

    Raises:
        WindowError: The weight is not a finite normal fp32 number above 0.
        CallerError: The weight is an array that is not on the host.
    """
    scalar: np.float32
    if (type(weight) is float or type(weight) is int) and _LEAST <= weight <= _MOST:  # the usual case
        scalar = np.float32(weight)
        return scalar
    with np.errstate(over="ignore"):
        scalar = np.float32(weight_as_float(weight))
    if not _LEAST <= scalar <= _MOST:
        do = "for a micro-batch without weight call add(None, weight=0)"
        raise out_of_range("a micro-batch's weight", weight, "a finite number above 1.18e-38", WindowError, do)
    return scalar


def weight_as_float(weight: SupportsFloat) -> float:
    """Return a weight as a float, or NaN if it is not a number. Raise `CallerError` for an array on a device."""
    if not isinstance(weight, (int, float, np.generic)) and (device := device_of(weight)) != "cpu":
        raise CallerError(
            "a micro-batch's weight is an array on a device",
            got=device,
            expected="a number",
            do="call `.item()` on it once a step, or count the labels on the host",
        )
    return as_float(weight)


def ordered_sum(values: Iterable[float]) -> float:
    """Return the sum from first to last, each addition rounded to fp64 (Python 3.12's sum() compensates)."""
    total = 0.0
    for value in values:
        total += value
    return total
