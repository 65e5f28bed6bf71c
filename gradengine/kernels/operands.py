"""A micro-batch's gradients for some components, as they lie: what K1 takes, one micro-batch or several held."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from gradengine.arrays.buffer import Buffer
from gradengine.arrays.streams import NamedStream, ProducerStream

__all__ = ["ADDRESS", "AddressCheck", "Batch", "Contribution", "Fold", "SlotSet", "as_of_now", "producers_of"]

ADDRESS = (1 << 56) - 1  # of a tagged address; the byte above says how to read what is there


@dataclass(frozen=True)
class Fold:
    """What K1 does to one target in one pass: `target = [target +] w0*s0 + w1*s1 + ...`, rounded after each operation.

    Attributes:
        position: Which target.
        overwrite: True for the window's first contribution: the target is written without being read.
        sources: The micro-batches' gradients, in the order they came.
        weights: One fp32 weight for each; exactly 1 multiplies nothing.
    """

    position: int
    overwrite: bool
    sources: tuple[Buffer, ...]
    weights: tuple[np.float32, ...]


class SlotSet:
    """Some of the targets, in order; compared by identity, so that what is known of them need not be looked up.

    Args:
        positions: Which targets.
    """

    def __init__(self, positions: Sequence[int]) -> None:
        self.positions = tuple(positions)
        self.index: npt.NDArray[np.intp] = np.array(self.positions, np.intp)

    @cached_property
    def column(self) -> dict[int, int]:
        """Where each target stands among these."""
        return {position: i for i, position in enumerate(self.positions)}

    def is_disjoint(self, other: SlotSet) -> bool:
        """Whether no target is among both."""
        return self is not other and self.column.keys().isdisjoint(other.positions)


@dataclass(frozen=True, eq=False)
class AddressCheck:
    """Where arrays lay when they came, to be compared with where they lie when they are read.

    Attributes:
        read: Asks arrays where they lie now: an answer for each.
        sources: The arrays.
        then: What they said.
    """

    read: Callable[[Sequence[Any]], list[Any]]
    sources: Sequence[Any]
    then: Sequence[Any]

    def moved(self, columns: Sequence[int]) -> int | None:
        """The first of these columns whose array lies elsewhere now, or is gone; None where all stand."""
        now = self.read([self.sources[column] for column in columns])
        return next((c for c, here in zip(columns, now, strict=True) if here != self.then[c]), None)


def producers_of(views: Iterable[Buffer | None]) -> frozenset[ProducerStream]:
    """Whose streams these are worked on, each once."""
    return frozenset(view.producer for view in views if view is not None and view.producer is not None)


def as_of_now(producers: frozenset[ProducerStream]) -> frozenset[ProducerStream]:
    """With the streams that they work on now: a framework may be on another one when our work is queued."""
    handles = [producer.stream() for producer in producers]
    return producers.union(NamedStream(handle) for handle in handles if handle is not None)


@dataclass(frozen=True, eq=False)
class Contribution:
    """One micro-batch's gradients for some targets.

    Attributes:
        places: Which targets.
        held: What must stay alive until they are folded; None where the micro-batch gave no gradient.
        addresses: Where each lies, with its dtype, as the device's kernels read it; 0 where there is nothing.
        producers: Whose streams they are worked on.
        views: The gradients as the host's kernels read them; nothing on a GPU, which needs the addresses alone.
        address_check: Where they lay, where they are held and may move meanwhile.
    """

    places: SlotSet
    held: Sequence[Any]
    addresses: npt.NDArray[np.uint64]
    producers: frozenset[ProducerStream] = frozenset()
    views: Sequence[Buffer | None] = ()
    address_check: AddressCheck | None = None

    @cached_property
    def present(self) -> npt.NDArray[np.bool_]:
        """Which targets get a gradient."""
        return np.array([given is not None for given in self.held], np.bool_)

    def part(self, positions: Sequence[int]) -> Contribution:
        """The same for fewer targets."""
        columns = [self.places.column[position] for position in positions]
        views = [self.views[c] for c in columns] if self.views else ()
        held = [self.held[c] for c in columns]
        return Contribution(SlotSet(positions), held, self.addresses[columns], self.producers, views)


@dataclass(frozen=True, eq=False)
class Batch:
    """What K1 does in one pass: the micro-batches held for some targets, in the order they came.

    Attributes:
        places: Which targets.
        overwrite: Of each, whether this is the window's first contribution.
        contributions: The micro-batches, all for these targets.
        weights: One fp32 weight for each.
    """

    places: SlotSet
    overwrite: npt.NDArray[np.bool_]
    contributions: Sequence[Contribution]
    weights: Sequence[np.float32]

    @cached_property
    def present(self) -> npt.NDArray[np.bool_]:
        """Which targets get a gradient from any of the micro-batches."""
        found: npt.NDArray[np.bool_] = np.logical_or.reduce([c.present for c in self.contributions])
        return found

    def folds(self) -> list[Fold]:
        """The same target by target, without those that get nothing."""
        return [self._fold(i) for i in range(len(self.places.positions)) if self.present[i]]

    def _fold(self, i: int) -> Fold:
        given = [(c.views[i], w) for c, w in zip(self.contributions, self.weights, strict=True)]
        terms = [(view, weight) for view, weight in given if view is not None]
        sources, weights = zip(*terms, strict=True)
        return Fold(self.places.positions[i], bool(self.overwrite[i]), sources, weights)
