"""The micro-batches of one optimizer step, counted and weighed for each slot; no array is touched here."""

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
# Below the smallest weight, 1 / weight may be no fp32 number.
_LEAST, _MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class SavedWindow:
    """A window on the host, with all that another accumulator of the same layout needs to resume it."""

    says_nothing: bool  # add(None) said that this worker has no micro-batch
    weights: npt.NDArray[np.float32]
    counts: npt.NDArray[np.int64]
    used: Flags
    filled: Flags
    sums: npt.NDArray[np.float32]  # the arena, with zeros for what is not filled; empty where nothing is
    counted_weight: float  # of the micro-batches that were not dropped
    dropped: int  # micro-batches that were

    @property
    def is_open(self) -> bool:
        """Whether anything was added, or add(None) was called."""
        return self.says_nothing or bool(self.weights.size) or bool(self.filled.any())


class FirstFold(NamedTuple):
    """The weight of a window's first fold, and its squared sums: a small batch, beside the whole window."""

    weight: float
    filled: Flags  # slots with a sum then
    kept: Any  # what `Kernels.keep_sums` returned


class Window:
    """The contributions to the slots since the last step, counted and weighed.

    Contributions are held by their set of slots; no slot is in two sets that are held.
    """

    def __init__(self, size: int) -> None:
        self.weights: list[np.float32] = []  # of each micro-batch begun, in order
        self.counts: npt.NDArray[np.intp] = np.zeros(size, np.intp)  # micro-batches each slot has got
        self.used: Flags = np.zeros(size, np.bool_)  # slots that got a gradient, and not None alone
        self.filled: Flags = np.zeros(size, np.bool_)  # slots written in this window; others the next fold overwrites
        self.measured: Flags = np.zeros(size, np.bool_)  # slots whose squared sum is up to date
        self.producers: set[ProducerStream] = set()  # the streams on which its gradients are produced
        self.first: FirstFold | None = None  # once it is whole, if it was measured
        self._is_even = True  # every contribution so far was to all slots
        self.is_coming = False  # a micro-batch is being added component by component
        self._held: dict[Span, list[tuple[Contribution, np.float32]]] = {}
        self._holder: dict[int, Span] = {}  # of a slot: the set that it is held in
        self._addresses: set[int] = set()  # that are held

    @staticmethod
    def of(saved: SavedWindow) -> Window:
        """The window that was saved, with nothing held; its squared sums are to be measured again."""
        window = Window(saved.counts.size)
        window.weights, window.counts = list(saved.weights), saved.counts.astype(np.intp)
        window.used, window.filled = saved.used.copy(), saved.filled.copy()
        window._is_even = bool((window.counts == len(window.weights)).all())
        return window

    def refuse_other_weight(self, span: Span, weight: np.float32) -> None:
        """Raise `WindowError` if these slots' micro-batch was begun with another weight."""
        if self._is_even:
            return  # it begins with these
        counts = [len(self.weights) - 1] if self.is_coming else np.unique(self.counts[span.where]).tolist()
        for micro_batch in counts:
            if micro_batch < len(self.weights) and self.weights[micro_batch] != weight:
                raise WindowError(
                    f"{span.called} of micro-batch {micro_batch} has another weight than its other parts",
                    got=float(weight),
                    expected=float(self.weights[micro_batch]),
                )

    def refuse_aliases(self, contribution: Contribution, slots: Sequence[Slot]) -> None:
        """Raise `BufferRefused` if one of the contribution's addresses is held already."""
        addresses = _untagged(contribution)
        if self._addresses.isdisjoint(addresses):
            return
        for position, address in zip(contribution.slots.positions, addresses, strict=True):
            if address in self._addresses:
                raise BufferRefused(
                    f"component '{slots[position].name}' is held already at the same address",
                    got=f"address {address:#x} twice",
                    expected="memory of its own",
                    do="use hold=1, or new gradients in each micro-batch (torch: set .grad = None)",
                )

    def refuse_lagging(self, slots: Sequence[Slot]) -> None:
        """Raise `WindowError` if a component has fewer micro-batches than another."""
        lagging = [] if self._is_even else np.flatnonzero(self.counts < len(self.weights)).tolist()
        if lagging:
            raise WindowError(
                f"component '{slots[lagging[0]].name}'{and_more(lagging)} lacks part of the window",
                got=f"{self.counts[lagging[0]]} micro-batches",
                expected=f"{len(self.weights)} as the others have",
                do="add what is missing; None stands for a component without a gradient",
            )

    def begin(self, weight: np.float32) -> None:
        """Begin a micro-batch that is added component by component, some perhaps twice, and some not at all."""
        self.weights.append(weight)
        self._is_even, self.is_coming = False, True

    def note_added(self, position: int, name: str) -> None:
        """Count a slot whose memory was added to by another's work, which nobody has measured.

        Raises `WindowError` if it held no sum to add to.
        """
        if not self.filled[position]:
            what = f"a layer added component '{name}' to memory that held another window's sum"
            raise WindowError(what, do="call begin() before layers add to the arena; discard() this window")
        self.counts[position], self.used[position], self.measured[position] = len(self.weights), True, False

    def end(self) -> None:
        """End a micro-batch that was added component by component: components not added had no gradient.

        Raises `WindowError` if none was added.
        """
        if self.counts.max() < len(self.weights):
            raise nothing_came(len(self.counts))
        self.counts[:] = len(self.weights)
        self._is_even, self.is_coming = True, False

    def count(self, contribution: Contribution, weight: np.float32, *, is_coming: bool = False) -> None:
        """Count a contribution in each of its slots, also in those without a gradient.

        `is_coming` says that its micro-batch is added component by component.
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
        """Whether nothing but the first `hold` micro-batches was added, and their squared sums were not kept yet."""
        return self.first is None and 0 < len(self.weights) <= hold

    @property
    def is_measured(self) -> bool:
        """Whether all micro-batches are whole and folded, and every sum was measured."""
        is_whole = self.is_even and not self.is_coming and not self._held
        return is_whole and not (self.filled & ~self.measured).any()

    def held_with(self, span: Span) -> list[Span]:
        """The held sets that share a slot with this set."""
        if not self._held:
            return []
        if span in self._held:
            return [span]
        return list(dict.fromkeys(self._holder[p] for p in span.positions if p in self._holder))

    def depth(self, span: Span) -> int:
        """How many contributions are held for these slots together."""
        return len(self._held.get(span, ()))

    def hold(self, contribution: Contribution, weight: np.float32) -> None:
        """Keep a contribution by reference; no other set with one of its slots may be held."""
        if contribution.present.any() or contribution.slots in self._held:  # an empty one counts for the pass, too
            self._held.setdefault(contribution.slots, []).append((contribution, weight))
            self._holder.update(dict.fromkeys(contribution.slots.positions, contribution.slots))
            self._addresses.update(filter(None, _untagged(contribution)))  # 0: nothing came, or it is empty

    def held_passes(self, span: Span) -> list[FoldPass]:
        """Fold passes of all that is held for these slots, and for others in the same sets: one for each set."""
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
    """The addresses of a contribution's gradients, without their dtypes' tags; 0 for none."""
    addresses: list[int] = (contribution.addresses & np.uint64(ADDRESS)).tolist()
    return addresses


def nothing_came(components: int) -> WindowError:
    """The error for a micro-batch in which no component has a gradient."""
    return WindowError(
        "no component has a gradient in this micro-batch",
        got=f"None for all {components}",
        do="add() after backward() and before zero_grad(); a worker without a micro-batch calls add(None, weight=0)",
    )


def no_part_may_be_dropped() -> CallerError:
    """Return the error for a part of a micro-batch, which could not be taken out of the sum again."""
    what, do = "a micro-batch that may be dropped is added as a whole", "or use on_non_finite='skip'"
    return CallerError(what, got="a part of one", expected="engine.add(gradients)", do=do)


def weighs_nothing(weight: object) -> WindowError:
    """The error for a micro-batch without gradients whose weight is not 0."""
    return WindowError(
        "a micro-batch without gradients",
        got=f"weight {said(weight)}",
        expected="0: it counts nothing",
        do="add its gradients, or call add(None, weight=0) if there are none",
    )


def checked_weight(weight: SupportsFloat) -> np.float32:
    """Return the weight as fp32.

    Raises:
        WindowError: The weight is not a finite normal fp32 number above 0.
        CallerError: It is an array that is not on the host.
    """
    scalar: np.float32
    if (type(weight) is float or type(weight) is int) and _LEAST <= weight <= _MOST:  # as nearly all are
        scalar = np.float32(weight)
        return scalar
    with np.errstate(over="ignore"):
        scalar = np.float32(weight_as_float(weight))
    if not _LEAST <= scalar <= _MOST:
        do = "for a micro-batch that counts nothing call add(None, weight=0)"
        raise out_of_range("a micro-batch's weight", weight, "a finite number above 1.18e-38", WindowError, do)
    return scalar


def weight_as_float(weight: SupportsFloat) -> float:
    """Return a weight as a float, NaN if it is not a number; raises `CallerError` for an array on a device."""
    if not isinstance(weight, (int, float, np.generic)) and (device := device_of(weight)) != "cpu":
        raise CallerError(
            "a micro-batch's weight is an array on a device",
            got=device,
            expected="a number",
            do="call `.item()` on it, once a step, or count the labels on the host",
        )
    return as_float(weight)


def ordered_sum(values: Iterable[float]) -> float:
    """Sum from first to last, each addition rounded to fp64 (Python's own sum() compensates from 3.12 on)."""
    total = 0.0
    for value in values:
        total += value
    return total
