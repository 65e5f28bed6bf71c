"""A worker's side of its tensor-parallel group: replicated gradients are made equal, and the norm is the whole model's.

Each rank holds a part of the model. Squared sums of sharded components add up over the group and those of replicated
ones count once, so that all ranks find the norm, the clip scale and the verdict of the whole model. Replicated
gradients that must be summed are exchanged in memory of their own: the arena keeps the sum over the data-parallel
workers until all of these have received it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal, TypeAlias, final, get_args

import numpy as np

from gradengine.accumulate import PerBlockGradientAccumulator
from gradengine.arguments import refuse_unknown
from gradengine.arrays.buffer import Buffer
from gradengine.errors import CallerError, ExchangeError, NonFiniteGradient, ProtocolError
from gradengine.exchange.linked import Exchange
from gradengine.kernels import Float64
from gradengine.layout import GradientLayout
from gradengine.layout.slots import Slot
from gradengine.reduction.all_gather import in_group
from gradengine.reduction.all_reduce import AllReduce
from gradengine.reduction.stats import StepStats, refuse_diverged, same_sums, stats_of_all, unused_by_all
from gradengine.threads import cached_property

Replicated: TypeAlias = Literal["same", "sum", "average"]

_WEIGHTS_SHOWN = 8


@final
class TensorParallelGroup:
    """One rank's side of the group that shares a model; `group` is the all-reduce over it."""

    def __init__(self, accumulator: PerBlockGradientAccumulator, replicated: Replicated) -> None:
        refuse_unknown("replicated", replicated, get_args(Replicated))
        self._accumulator, self._replicated = accumulator, replicated
        self._slots = accumulator.layout.slots
        self._is_replicated = np.array([slot.partition == "replicated" for slot in self._slots])
        self._travels = replicated != "same" and accumulator.layout.tp_size > 1
        self.group = AllReduce()

    @property
    def described(self) -> str:
        """The group's size and mode as text, which must be the same on all workers."""
        exchange = self.group.exchange
        return "none" if exchange is None else f"{exchange.world_size} ranks with replicated={self._replicated!r}"

    def join(self, exchange: Exchange) -> None:
        """Join the group, and start again what was started through another exchange."""
        layout = self._accumulator.layout
        if (exchange.rank, exchange.world_size) != (layout.tp_rank, layout.tp_size):
            raise CallerError(
                "tp_exchange does not fit the layout",
                got=f"rank {exchange.rank} of {exchange.world_size}",
                expected=f"tp_rank {layout.tp_rank} of tp_size {layout.tp_size}",
                do="connect each rank as its tp_rank of its TensorParallelConfig",
            )
        with _named(), self._replicas.in_order():
            self.group.join(exchange, self._layout, self._replicas.in_parts)

    def agree(self, mine: StepStats) -> StepStats:
        """The whole model's stats from this rank's: the same on all ranks of the group."""
        if self.group.is_alone:
            return mine
        with _named():
            return self._of_all_parts(mine)

    def put_back(self) -> None:
        """Write the group's sums or averages of replicated components to the arena; may be called twice."""
        if self._travels and not self.group.is_alone:
            with self._accumulator.changing():
                self._replicas.put_back(self._targets)

    def own_of(self, positions: Sequence[int]) -> list[int]:
        """Those of these positions whose gradient in the arena is this rank's own, not a sum over the group."""
        return [p for p in positions if not (self._travels and self._is_replicated[p])]

    def tell_non_finite(self, mine: NonFiniteGradient | None, place: str, step: int) -> NonFiniteGradient | None:
        """The first error, in layout order, of those that all ranks found; the same on each. `mine` is this rank's."""
        if self.group.is_alone:
            return mine
        order = {slot.name: i for i, slot in enumerate(self._slots)}
        with _named():
            mine = mine or self._found_in_sums(step)
            facts = None if mine is None else [mine.component, mine.index, float(mine.value), mine.rank]
            told = self.group.tell(f"finding in {place}", facts)
            found = [_found_by(rank, facts, step, order) for rank, facts in enumerate(told)]
        return min((f for f in found if f is not None), key=lambda f: order[f.component], default=None)

    # ---- inside ----

    @cached_property
    def _targets(self) -> list[Buffer]:
        return [self._accumulator.arena.targets[position] for position in np.flatnonzero(self._is_replicated)]

    @cached_property
    def _layout(self) -> GradientLayout:
        """The layout that the handshake compares: has all components, but elements only of those that are exchanged."""
        shapes: dict[str, tuple[int, ...]] = {f"replicated={self._replicated}": (0,)}
        for slot, is_one in zip(self._slots, self._is_replicated, strict=True):
            shapes[f"{slot.name} ({slot.partition})"] = slot.shape if self._travels and is_one else (0, *slot.shape)
        return GradientLayout.of(shapes)

    @cached_property
    def _travellers(self) -> list[tuple[Slot, Slot]]:
        """For each component that is exchanged: its slot in the arena and its slot in the exchanged memory."""
        pairs = list(zip(self._slots, self._layout.slots[1:], strict=True))
        return [pairs[position] for position in np.flatnonzero(self._is_replicated & self._travels)]

    @cached_property
    def _replicas(self) -> _Replicas:
        slots = [travelling for _, travelling in self._travellers]
        return _Replicas(self._accumulator, self._layout, slots, average=self._replicated == "average")

    def _of_all_parts(self, mine: StepStats) -> StepStats:
        totals, settings = mine.totals.copy(), {**mine.settings, "window": _described(self._accumulator.weights)}
        if self._travels:
            self._sum_replicas()
            totals[self._is_replicated] = self._replicas.totals()
        parts = stats_of_all(self.group, replace(mine, totals=totals, settings=settings))
        totals = self._totals_of_the_model([part.totals for part in parts])
        return replace(mine, totals=totals, unused=unused_by_all(parts))

    def _sum_replicas(self) -> None:
        if not self.group.started:
            self._replicas.take(self._targets)
        with self._replicas.in_order():
            new = [span for span in self._layout.spans if span.key not in self.group.started]
            self.group.start(*new, in_background=False)
        self.group.wait()

    def _totals_of_the_model(self, parts: Sequence[Float64]) -> Float64:
        totals: Float64 = np.add.accumulate(parts)[-1]
        replicas = np.array(parts)[:, self._is_replicated]
        is_finite = np.isfinite(replicas).all(axis=0)
        for rank, replica in enumerate(replicas):
            self._refuse_other_replicas(rank, np.where(is_finite, replica, 0), np.where(is_finite, replicas[0], 0))
        # Where one rank's is not finite the sum over the ranks is not either: all of them refuse the step.
        totals[self._is_replicated] = np.where(is_finite, replicas[0], totals[self._is_replicated])
        return totals

    def _refuse_other_replicas(self, rank: int, replica: Float64, first: Float64) -> None:
        if self._travels:
            refuse_diverged(rank, replica, first)
            return
        differs = np.flatnonzero(~same_sums(replica, first))
        if differs.size:
            slot = self._slots[np.flatnonzero(self._is_replicated)[differs[0]]]
            raise ExchangeError(
                f"replicated gradient '{slot.name}' is not the same on ranks 0 and {rank}",
                got=f"norm {replica[differs[0]] ** 0.5:.9g} on rank {rank}",
                expected=f"{first[differs[0]] ** 0.5:.9g}",
                do="use replicated='sum' for partial sums (sequence parallelism), 'average' for copies rounded apart",
            )

    def _found_in_sums(self, step: int) -> NonFiniteGradient | None:
        """The error for NaN or Inf that this rank contributed to a sum of replicas."""
        for bad in self.group.progress.bad:
            for slot, place in self._travellers:
                if place.offset <= bad.index < place.stop and bad.rank == self._accumulator.layout.tp_rank:
                    return NonFiniteGradient(slot.name, bad.index - place.offset, bad.value, step=step)
        return None


@final
class _Replicas:
    """Memory for the replicated gradients that are exchanged, side by side."""

    def __init__(
        self, accumulator: PerBlockGradientAccumulator, layout: GradientLayout, slots: Sequence[Slot], *, average: bool
    ) -> None:
        self._kernels = accumulator.kernels
        self._divisor = accumulator.layout.tp_size if average else 1
        self._memory = self._kernels.device.allocate(layout.arena_size)
        self._arena = self._kernels.arena([self._memory.part(slot.offset, slot.stop) for slot in slots], self._memory)
        with self._arena.in_order():
            self._kernels.fill_zero([self._memory])

    @cached_property
    def in_parts(self) -> Any:
        """The memory that the exchange sums, or on a GPU the object that copies its shares, cached with its rows."""
        return self._kernels.device.in_parts(self._memory) if self._memory.size else np.empty(0, np.float32)

    def in_order(self) -> AbstractContextManager[None]:
        """A context in which the exchange's copies wait for the work queued on the memory."""
        return self._arena.in_order()

    def take(self, targets: Sequence[Buffer]) -> None:
        """Copy this rank's gradients to the memory that is exchanged."""
        with self._arena.in_order():
            self._kernels.scale(targets, np.float32(1), self._arena.targets)

    def totals(self) -> Float64:
        """Squared sums of the values that `put_back` writes; it may write twice, so the memory keeps the sums."""
        self._kernels.measure(self._arena)
        return self._kernels.totals(self._arena) / self._divisor**2

    def put_back(self, targets: Sequence[Buffer]) -> None:
        """Write the sums, or averages, to the arena."""
        with self._arena.in_order():
            self._kernels.scale(self._arena.targets, np.float32(1 / self._divisor), targets)


def _described(weights: Sequence[float]) -> str:
    """A window's micro-batches as text, equal only if all weights are equal."""
    shown = ", ".join(f"{weight:.9g}" for weight in weights)
    if len(weights) > _WEIGHTS_SHOWN:
        shown = f"{shown.split(', ')[0]}, ... (sha256 {hashlib.sha256(shown.encode()).hexdigest()[:12]})"
    return f"{len(weights)} micro-batches of weight {shown}" if weights else "no micro-batch"


def _named() -> AbstractContextManager[None]:
    return in_group("in the tensor-parallel group")


def _found_by(tp_rank: int, facts: Any, step: int, known: Container[str]) -> NonFiniteGradient | None:
    if facts is None:
        return None
    try:
        component, index, value, rank = facts
        found = NonFiniteGradient(component, int(index), float(value), step=step, rank=rank, tp_rank=tp_rank)
    except (ValueError, TypeError, OverflowError) as fault:
        raise ProtocolError(f"the finding of rank {tp_rank} cannot be read ({fault})") from None
    if not isinstance(component, str) or component not in known or not isinstance(rank, (int, type(None))):
        raise ProtocolError(f"the finding of rank {tp_rank} is impossible", got=f"{component!r} of rank {rank!r}")
    return found
