"""A worker's side of its tensor-parallel group, whose ranks agree on the whole model's norm.

Each rank holds a part of the model. Squared sums of sharded components add up over the group and those of replicated
ones count once, so that all ranks find the norm, the clip scale and the verdict of the whole model. No gradient is
sent: those of replicated components must be the same on all ranks, and their squared sums are compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, final

import numpy as np

from gradengine.accumulate import PerBlockGradientAccumulator
from gradengine.errors import CallerError, ExchangeError, NonFiniteGradient, ProtocolError
from gradengine.exchange.exchange import Exchange
from gradengine.kernels import Float64
from gradengine.layout import GradientLayout
from gradengine.reduction.stats import Place, StepStats, stats_of_all, unused_by_all

_SAME_SUMS = 1e-5  # squared sums of equal bytes differ by their rounding only, 1e-6 at most
_WEIGHTS_SHOWN = 8


@final
class TensorParallelGroup:
    """One rank's side of the group that shares a model; `exchange` is over its ranks, None without a group."""

    def __init__(self, accumulator: PerBlockGradientAccumulator) -> None:
        self._accumulator = accumulator
        self._slots = accumulator.layout.slots
        self._is_replicated = np.array([slot.partition == "replicated" for slot in self._slots])
        self.exchange: Exchange | None = None
        self.is_alone = True

    @property
    def described(self) -> str:
        """The group's size as text, which must be the same on all workers."""
        return "none" if self.exchange is None else f"{self.exchange.world_size} ranks"

    def join(self, exchange: Exchange, step: int, settings: Mapping[str, str]) -> None:
        """Join the group; its ranks compare settings, and names, shapes and partitions of all components."""
        layout = self._accumulator.layout
        if (exchange.rank, exchange.world_size) != (layout.tp_rank, layout.tp_size):
            raise CallerError(
                "tp_exchange does not fit the layout",
                got=f"rank {exchange.rank} of {exchange.world_size}",
                expected=f"tp_rank {layout.tp_rank} of tp_size {layout.tp_size}",
                do="connect each rank as its tp_rank of its TensorParallelConfig",
            )
        with _InGroup():  # the layout has no elements: nothing is summed
            compared = {f"{slot.name} ({slot.partition})": (0, *slot.shape) for slot in self._slots}
            nothing, size = np.empty(0, np.float32), exchange.world_size
            exchange.bind(GradientLayout.of(compared), nothing, step=step, settings=settings, replaces=self.exchange)
            self.exchange, self.is_alone = exchange, size == 1

    def agree(self, mine: StepStats, place: Place) -> StepStats:
        """Return the whole model's stats from this rank's: the same on all ranks of the group."""
        if self.exchange is None or self.is_alone:
            return mine
        with _InGroup():
            parts = stats_of_all(self.exchange, mine, place, _described(self._accumulator.weights))
            totals = self._totals_of_the_model([part.totals for part in parts])
            return replace(mine, totals=totals, unused=unused_by_all(parts))

    def tell_non_finite(self, mine: NonFiniteGradient | None, step: int) -> NonFiniteGradient | None:
        """Return the first error, in layout order, that a rank found; the same on each. `mine` is this rank's."""
        if self.exchange is None or self.is_alone:
            return mine
        order = {slot.name: i for i, slot in enumerate(self._slots)}
        with _InGroup():
            facts = None if mine is None else [mine.component, mine.index, float(mine.value), mine.rank]
            told = self.exchange.tell(f"finding in step {step}", facts)
            found = [_found_by(rank, facts, step, order) for rank, facts in enumerate(told)]
        return min((f for f in found if f is not None), key=lambda f: order[f.component], default=None)

    # ---- inside ----

    def _totals_of_the_model(self, parts: Sequence[Float64]) -> Float64:
        totals: Float64 = np.add.accumulate(parts)[-1]
        replicas = np.array(parts)[:, self._is_replicated]
        is_finite = np.isfinite(replicas).all(axis=0)
        for rank, replica in enumerate(replicas):
            for position in np.flatnonzero(is_finite & ~np.isclose(replica, replicas[0], rtol=_SAME_SUMS, atol=0.0)):
                slot = self._slots[np.flatnonzero(self._is_replicated)[position]]
                raise ExchangeError(
                    f"replicated gradient '{slot.name}' is not the same on ranks 0 and {rank}",
                    got=f"norm {replica[position] ** 0.5:.9g} on rank {rank}",
                    expected=f"{replicas[0, position] ** 0.5:.9g}",
                    do="all-reduce it over the group before add(), as sequence parallelism needs",
                )
        # Where one rank's is not finite the sum over the ranks is not either: all of them refuse the step.
        totals[self._is_replicated] = np.where(is_finite, replicas[0], totals[self._is_replicated])
        return totals


class _InGroup(AbstractContextManager[None]):
    """A context in which errors of an exchange begin with the name of the group."""

    def __exit__(self, kind: object, fault: BaseException | None, trace: object) -> None:
        if isinstance(fault, ExchangeError):
            what = f"in the tensor-parallel group: {fault.what}"
            raise type(fault)(what, got=fault.got, expected=fault.expected, do=fault.do) from fault


def _described(weights: Sequence[float]) -> str:
    """A window's micro-batches as text, equal only if all weights are equal."""
    shown = ", ".join(f"{weight:.9g}" for weight in weights)
    if len(weights) > _WEIGHTS_SHOWN:
        shown = f"{shown.split(', ')[0]}, ... (sha256 {hashlib.sha256(shown.encode()).hexdigest()[:12]})"
    return f"{len(weights)} micro-batches of weight {shown}" if weights else "no micro-batch"


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
