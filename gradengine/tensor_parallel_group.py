"""A worker's side of its tensor-parallel group: replicated gradients become one, and the norm is the whole model's.

Each rank holds a part of the model. Squared sums of sharded components add up over the group and those of replicated
ones count once, so that all ranks find the norm, the clip scale and the verdict of the model that they are parts of.
Replicated gradients travel, where they must, through memory of their own: the arena keeps the sum over the
data-parallel workers until these have all got it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Literal, TypeAlias, final, get_args

import msgpack
import numpy as np

from gradengine.accumulate import PerBlockGradientAccumulator
from gradengine.agreement import Tally, gathered, refuse_diverged
from gradengine.buffer import Buffer
from gradengine.errors import CallerError, ExchangeError, NonFiniteGradient, ProtocolError
from gradengine.exchange.interface import Exchange, Progress
from gradengine.kernels import Float64
from gradengine.kernels.mirror import Mirror
from gradengine.layout import GradientLayout
from gradengine.slots import Slot, Span

__all__ = ["Replicated", "TensorParallelGroup"]

Replicated: TypeAlias = Literal["same", "sum", "average"]


@final
class TensorParallelGroup:
    """What the ranks that share one model tell each other at the end of a step.

    Args:
        accumulator: This rank's part of the gradient set.
        replicated: What the ranks hold of replicated gradients: the "same", whole on each rank; parts that "sum" up, as
            under sequence parallelism; or copies that differ by their rounding, to "average".

    Attributes:
        exchange: The group's, if it is joined.
        progress: Where its step stands.
        agreed: The tally of the whole model, once the group has one.

    Raises:
        CallerError: `replicated` is none of these.
    """

    def __init__(self, accumulator: PerBlockGradientAccumulator, replicated: Replicated) -> None:
        if replicated not in get_args(Replicated):
            raise CallerError("unknown replicated", got=repr(replicated), expected=f"one of {get_args(Replicated)}")
        self._accumulator, self._replicated = accumulator, replicated
        self._kernels = accumulator.kernels
        self._slots = accumulator.layout.slots
        self._is_replicated = np.array([slot.partition == "replicated" for slot in self._slots])
        self.exchange: Exchange | None = None
        self.progress = Progress()
        self.agreed: Tally | None = None
        self._started: set[int | str] = set()
        self._is_summed = False
        self._found: list[NonFiniteGradient] | None = None

    @property
    def form(self) -> str:
        """What the workers of a grid must have alike: the group's size, and how it treats replicated gradients."""
        return "none" if self.exchange is None else f"of {self.exchange.world_size}, replicated={self._replicated}"

    @property
    def is_alone(self) -> bool:
        """Whether this rank holds the whole model."""
        return self.exchange is None or self.exchange.world_size == 1

    def connect(self, exchange: Exchange) -> None:
        """Join the group, and let leave again what had left through another exchange.

        Raises:
            CallerError: The exchange is not of the layout's rank and size.
            HandshakeRefused, PeerLost: The ranks do not come together, or hold parts of different models.
        """
        _refuse_other_group(exchange, self._accumulator.layout)
        with _named():
            exchange.bind(self._layout, self._replicas.data, self.progress, _do_nothing)
        # What the old exchange agreed on may have reached this rank alone: all of them agree anew.
        self.exchange, self._is_summed, self.agreed, self._found = exchange, False, None, None
        for span in self._layout.spans:
            if span.key in self._started:
                exchange.start(span)

    def agree(self, mine: Tally) -> Tally:
        """The whole model's tally from this rank's: the same on all ranks of the group.

        Raises:
            ExchangeError: A rank has another window or other settings, or another replicated gradient where it must be
                the same.
            PeerLost, ProtocolError, DeadlineExceeded: The exchange failed; the window is kept.
        """
        if self.exchange is None or self.agreed is not None:
            return self.agreed or mine
        with _named():
            totals = mine.totals.copy()
            if self._travels:
                self._sum_replicas(self.exchange)
                totals[self._is_replicated] = self._replicas.totals()
            self.agreed = self._of_the_model(gathered(self.exchange, replace(mine, totals=totals)))
        return self.agreed

    def put_back(self) -> None:
        """Have the arena's replicated components be what the group made of them; may be done twice."""
        if self._travels and not self.is_alone:
            with self._accumulator.changing():
                self._replicas.put_back(self._targets)

    def own_of(self, positions: Sequence[int]) -> list[int]:
        """Those of these components whose gradient in the arena is this rank's own, and not a sum over the group."""
        return [p for p in positions if not self._is_traveller(self._slots[p])]

    def first_found(self, mine: NonFiniteGradient | None, step: int) -> NonFiniteGradient | None:
        """Of what each rank found that is not finite, the first in layout order; all ranks ask, and are told the same.

        Args:
            mine: What this rank found in what is its own.
            step: The engine's, for the error.

        Raises:
            PeerLost, ProtocolError, DeadlineExceeded: The exchange failed; the window is kept.
        """
        if self.exchange is None or self.is_alone:
            return mine
        if self._found is None:
            order = {slot.name: i for i, slot in enumerate(self._slots)}
            with _named():
                parts = self.exchange.gather(_packed(mine or self._found_in_sums(step)))
                found = [_unpacked(part, rank, step, order) for rank, part in enumerate(parts)]
            self._found = sorted((f for f in found if f is not None), key=lambda f: order[f.component])
        return self._found[0] if self._found else None

    def discard(self) -> None:
        """Forget the window. What is under way already the exchange cannot take back: it is closed."""
        if self._started and self.exchange is not None:
            self.exchange.close()
        self.progress.restart()
        self.clear()

    def clear(self) -> None:
        """The next window begins."""
        self._started, self._is_summed, self._found = set(), False, None
        self.agreed = None

    # ---- inside ----

    @property
    def _travels(self) -> bool:
        return self._replicated != "same"

    @cached_property
    def _targets(self) -> list[Buffer]:
        return [target for target, is_one in zip(self._accumulator.targets, self._is_replicated, strict=True) if is_one]

    @cached_property
    def _layout(self) -> GradientLayout:
        """What the handshake compares: every component, but only what travels has elements."""
        shapes: dict[str, tuple[int, ...]] = {f"replicated={self._replicated}": (0,)}
        for slot in self._slots:
            name = f"{slot.name} ({slot.partition})"
            shapes[name] = slot.shape if self._is_traveller(slot) else (0, *slot.shape)
        return GradientLayout.of(shapes)

    @cached_property
    def _travellers(self) -> list[tuple[Slot, Slot]]:
        """Of each component that travels its slot in the arena and in what travels."""
        pairs = zip(self._slots, self._layout.slots[1:], strict=True)
        return [(slot, travelling) for slot, travelling in pairs if self._is_traveller(slot)]

    @cached_property
    def _replicas(self) -> _Replicas:
        slots = [travelling for _, travelling in self._travellers]
        return _Replicas(self._accumulator, self._layout, slots, average=self._replicated == "average")

    def _is_traveller(self, slot: Slot) -> bool:
        return self._travels and slot.partition == "replicated"

    def _sum_replicas(self, exchange: Exchange) -> None:
        if not self._started:
            self._replicas.take(self._targets)
        for span in self._layout.spans:
            if span.key not in self._started:
                self._started.add(span.key)
                exchange.start(span)
        if not self._is_summed:
            self.progress.bad = list(exchange.wait())
            self._is_summed = True
        self._replicas.land()

    def _of_the_model(self, tallies: Sequence[Tally]) -> Tally:
        first = tallies[0]
        for rank, tally in enumerate(tallies):
            _refuse_other_window(rank, tally, first)
        totals = np.zeros(len(self._slots))
        for tally in tallies:
            totals += tally.totals
        replicas = np.array([tally.totals[self._is_replicated] for tally in tallies])
        is_finite = np.isfinite(replicas).all(axis=0)
        for rank, replica in enumerate(replicas):
            self._refuse_other_replicas(rank, np.where(is_finite, replica, 0), np.where(is_finite, replicas[0], 0))
        # Where one rank's is not finite the sum over the ranks is not either: all of them refuse the step.
        totals[self._is_replicated] = np.where(is_finite, replicas[0], totals[self._is_replicated])
        return replace(first, totals=totals)

    def _refuse_other_replicas(self, rank: int, replica: Float64, first: Float64) -> None:
        if self._travels:
            refuse_diverged(rank, replica, first)
            return
        differs = np.flatnonzero(~np.isclose(replica, first, rtol=1e-5, atol=0.0))
        if differs.size:
            slot = [s for s in self._slots if s.partition == "replicated"][differs[0]]
            raise ExchangeError(
                f"replicated gradient '{slot.name}' is not the same on ranks 0 and {rank}",
                got=f"norm {replica[differs[0]] ** 0.5:.9g} on rank {rank}",
                expected=f"{first[differs[0]] ** 0.5:.9g}",
                do="use replicated='sum' where each rank holds a partial sum (sequence parallelism), "
                "'average' where the copies differ by their rounding",
            )

    def _found_in_sums(self, step: int) -> NonFiniteGradient | None:
        """What this rank gave to a sum of replicas that was not finite."""
        for bad in self.progress.bad:
            for slot, place in self._travellers:
                if place.offset <= bad.index < place.stop and bad.rank == self._accumulator.layout.tp_rank:
                    return NonFiniteGradient(slot.name, bad.index - place.offset, bad.value, step=step)
        return None


@final
class _Replicas:
    """Memory for the replicated gradients that travel: side by side, and on a GPU a mirror on the host."""

    def __init__(
        self, accumulator: PerBlockGradientAccumulator, layout: GradientLayout, slots: Sequence[Slot], *, average: bool
    ) -> None:
        self._kernels, self._factor, self._divisor = accumulator.kernels, np.float32(1), 1.0
        if average:
            self._factor, self._divisor = np.float32(1 / accumulator.layout.tp_size), float(accumulator.layout.tp_size)
        self._arena = self._kernels.allocate(layout.arena_size)
        self._kernels.fill_zero([self._arena])
        self._parts = [self._arena.part(slot.offset, slot.stop) for slot in slots]
        self._sums = self._kernels.squared_sums([slot.size for slot in slots])

    @property
    def data(self) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """Where the exchange sums."""
        return self._mirror.data if self._arena.size else np.empty(0, np.float32)

    @cached_property
    def _mirror(self) -> Mirror:
        return self._kernels.mirror(self._arena)

    def take(self, targets: Sequence[Buffer]) -> None:
        """Copy this rank's gradients to where the exchange finds them."""
        self._kernels.scale(targets, np.float32(1), self._parts)
        if self._arena.size:
            self._mirror.fetch(0, self._arena.size)

    def land(self) -> None:
        """The sums are there."""
        if self._arena.size:
            self._mirror.put_back()

    def totals(self) -> Float64:
        """Squared sums of what will be put back."""
        self._kernels.measure_all(self._parts, self._sums)
        return self._kernels.totals(self._sums) / self._divisor**2

    def put_back(self, targets: Sequence[Buffer]) -> None:
        """Copy sums, or averages, to the arena."""
        self._kernels.scale(self._parts, self._factor, targets)


def _do_nothing(span: Span, upto: int) -> None:
    """Sums are measured when all have landed: there are few."""


def _refuse_other_group(exchange: Exchange, layout: GradientLayout) -> None:
    if (exchange.rank, exchange.world_size) != (layout.tp_rank, layout.tp_size):
        raise CallerError(
            "tp_exchange is not the layout's",
            got=f"rank {exchange.rank} of {exchange.world_size}",
            expected=f"tp_rank {layout.tp_rank} of tp_size {layout.tp_size}",
            do="connect each rank as its tp_rank of its TensorParallelConfig",
        )


def _refuse_other_window(rank: int, tally: Tally, first: Tally) -> None:
    if (tally.weight, tally.micro_batches) != (first.weight, first.micro_batches):
        raise ExchangeError(
            f"rank {rank} has another window than rank 0",
            got=f"{tally.micro_batches} micro-batches of weight {tally.weight:g} in all",
            expected=f"{first.micro_batches} of {first.weight:g}",
            do="give all ranks of a tensor-parallel group the same micro-batches",
        )


@contextmanager
def _named() -> Iterator[None]:
    """Have errors say which of a worker's two groups they are of."""
    try:
        yield
    except ExchangeError as fault:
        what = f"in the tensor-parallel group: {fault.what}"
        raise type(fault)(what, got=fault.got, expected=fault.expected, do=fault.do) from fault


def _packed(found: NonFiniteGradient | None) -> bytes:
    facts = None if found is None else [found.component, found.index, float(found.value), found.rank]
    packed: bytes = msgpack.packb(facts)
    return packed


def _unpacked(part: bytes, tp_rank: int, step: int, known: Container[str]) -> NonFiniteGradient | None:
    try:
        facts = msgpack.unpackb(part)
        if facts is None:
            return None
        component, index, value, rank = facts
        found = NonFiniteGradient(component, int(index), float(value), step=step, rank=rank, tp_rank=tp_rank)
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as fault:
        raise ProtocolError(f"what rank {tp_rank} found cannot be read ({fault})") from None
    if not isinstance(component, str) or component not in known or not isinstance(rank, (int, type(None))):
        raise ProtocolError(f"rank {tp_rank} found something that cannot be", got=f"{component!r} of rank {rank!r}")
    return found
