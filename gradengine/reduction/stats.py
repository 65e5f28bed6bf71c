"""The stats of a step on which all ranks agree, with the weights and counts of all ranks and the norm of a model.

The ranks of a tensor-parallel group hold parts of a model. Squared sums of sharded components add up over the group.
Those of replicated components count once. So all ranks find the norm, the clip scale and the verdict of the whole
model. No gradient is sent. Gradients of replicated components must be the same on all ranks, and their squared sums are
compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

from gradengine.accumulate import PerBlockGradientAccumulator
from gradengine.accumulate.window import ordered_sum
from gradengine.errors import CallerError, ExchangeError, ProtocolError
from gradengine.exchange.exchange import Exchange
from gradengine.exchange.gather import gathered, packed
from gradengine.kernels import Float64
from gradengine.kernels.decision import Scalar
from gradengine.layout import GradientLayout

Flags: TypeAlias = npt.NDArray[np.bool_]
Scale: TypeAlias = tuple[float, int]  # the loss scale, and the finite steps in a row that a dynamic one has seen
Terms: TypeAlias = Mapping[str, str]  # a step's settings by name, as text, which must be the same on all ranks
Finding: TypeAlias = tuple[int, int, float, int | None]  # component's position, index in it, value, data-parallel rank

RUNNING_NORM = "running norm"  # the only term that no caller passes
_FINDINGS = [int, int, float, int], [int, int, float, type(None)]
_SAME_SUMS = 1e-5  # squared sums of equal bytes differ by their rounding only, 1e-6 at most


@dataclass(frozen=True)
class StepStats:
    """The stats of one rank's window, or of the windows of all ranks together."""

    weight: Scalar  # a float, or a device scalar if the ranks sum on their GPUs
    micro_batches: Scalar
    totals: Float64  # squared sum of each component
    unused: Flags
    workers: int = 1  # ranks that had a micro-batch which was not dropped
    stop: Scalar = False  # whether a rank requests a stop; 0.0 or 1.0 if it is a device scalar
    square: float | None = None  # the squared norm of this rank's own sum, if it is known and is to be sent
    by_rank: tuple[StepStats, ...] = ()  # each rank's stats, in rank order, if they agreed on the host
    on_device: Scalar = None  # the part of the divisor that only the device has
    dropped: Scalar = 0  # dropped micro-batches, which are in `micro_batches` and have no weight
    counted: Scalar = None  # `weight`, if micro-batches can be dropped and only the device has it
    ask_device: Callable[[], Flags] | None = None  # returns the flags of all ranks, if `unused` is this rank's own

    def unused_by_all(self) -> Flags:
        """Return the components without a gradient on any rank. If only a device has them, this waits for it."""
        # If this rank has used all components, none is unused by all ranks, and the device need not be read.
        return self.unused if self.ask_device is None or not self.unused.any() else self.ask_device()


def agree(exchange: Exchange, mine: StepStats, step: int, terms: Terms) -> StepStats:
    """Return the same stats on all ranks, with weights and counts summed in rank order.

    The squared sums are this rank's own. They are bitwise equal on all ranks, because the shares' owners sent them.

    Raises:
        ExchangeError: A rank is at a different step, or has different terms.
        ProtocolError: A rank's stats are invalid.
    """
    stats, unused = stats_of_all(exchange, mine, step, terms)
    weight, count = ordered_sum([one.weight for one in stats]), sum(one.micro_batches for one in stats)
    dropped, stop = sum(one.dropped for one in stats), any(one.stop for one in stats)
    workers, by_rank = sum(one.weight > 0 for one in stats), tuple(stats)
    return StepStats(weight, count, mine.totals, unused, workers, stop, by_rank=by_rank, dropped=dropped)


def stats_of_all(
    exchange: Exchange, mine: StepStats, step: int, terms: Terms, window: str = ""
) -> tuple[list[StepStats], Flags]:
    """Return every rank's stats in rank order, and flags of the components without a gradient on any rank.

    Args:
        exchange: The exchange over these ranks.
        mine: This rank's stats.
        step: The step's number, which must be the same on all ranks.
        terms: The step's settings.
        window: The window's weights as text, which must be the same on all ranks too. If it is not empty, the ranks
            also send their squared sums.

    Raises:
        ExchangeError, ProtocolError: As `agree`.
    """
    alike = {**terms, "window": window}
    totals = mine.totals.astype("<f8").tobytes() if window else b""
    facts = [mine.weight, mine.micro_batches, mine.unused.tobytes(), totals, mine.stop, mine.dropped, mine.square]
    own = [alike, *facts]
    # `tell` would keep its answers, but a step that was refused is run again with the right loss scale.
    told = gathered(exchange.all_gather(packed(f"stats of step {step}", own)))
    stats = [_read(rank, facts, own) for rank, facts in enumerate(told)]
    for rank, facts in enumerate(told):
        for name in alike:
            got, expected = facts[0].get(name), told[0][0].get(name)
            if got != expected:
                do = "load one checkpoint on all ranks" if name == RUNNING_NORM else "use the same value on all ranks"
                what = f"rank {rank} has a different {name} than rank 0"
                raise ExchangeError(what, got=got, expected=expected, do=do)
    return stats, np.logical_and.reduce([one.unused for one in stats])


def _read(rank: int, facts: Any, own: list[Any]) -> StepStats:
    """Return the stats in a rank's facts. The facts must have the types and sizes of this rank's own facts."""
    if isinstance(facts, list) and [*map(type, facts[:-1])] == [*map(type, own[:-1])]:
        _, weight, count, flags, totals, stop, dropped, square = facts
        is_counted = 0 <= dropped <= count and isinstance(square, float | None)
        is_weighed = is_counted and (0 < weight < np.inf if count > dropped else weight == 0)
        if is_weighed and [len(flags), len(totals)] == [*map(len, own[3:5])]:
            told = {"stop": stop, "dropped": dropped, "square": square}
            return StepStats(weight, count, np.frombuffer(totals, "<f8"), np.frombuffer(flags, np.uint8) != 0, **told)
    what, expected = f"rank {rank}'s stats are invalid", "a weight and micro-batches, or 0 and none"
    raise ProtocolError(what, got=facts, expected=expected)


@final
class TensorParallelGroup:
    """One rank's side of the group that shares a model. `exchange` is over its ranks, or None without a group."""

    def __init__(self, accumulator: PerBlockGradientAccumulator) -> None:
        self._accumulator = accumulator
        self._slots = accumulator.layout.slots
        self._is_replicated = np.array([slot.partition == "replicated" for slot in self._slots])
        self.exchange: Exchange | None = None
        self.is_alone = True

    def join(self, exchange: Exchange, step: int, settings: Mapping[str, str]) -> None:
        """Join the group. Its ranks compare settings, and names, shapes and partitions of all components."""
        layout = self._accumulator.layout
        if (exchange.rank, exchange.world_size) != (layout.tp_rank, layout.tp_size):
            got, expected = f"rank {exchange.rank} of {exchange.world_size}", f"{layout.tp_rank} of {layout.tp_size}"
            do = "connect each rank with the tp_rank of its TensorParallelConfig"
            raise CallerError("tp_exchange does not fit the layout", got=got, expected=f"tp_rank {expected}", do=do)
        with _InGroup():  # the layout has no elements, so nothing is summed
            compared = {f"{slot.name} ({slot.partition})": (0, *slot.shape) for slot in self._slots}
            nothing = np.empty(0, np.float32)
            exchange.bind(GradientLayout.of(compared), nothing, step=step, settings=settings, replaces=self.exchange)
            self.exchange, self.is_alone = exchange, exchange.world_size == 1

    def agree(self, mine: StepStats, step: int, terms: Terms) -> StepStats:
        """Return the whole model's stats, which are the same on all ranks of the group. `mine` are this rank's."""
        if self.exchange is None or self.is_alone:
            return mine
        with _InGroup():
            parts, unused = stats_of_all(self.exchange, mine, step, terms, _described(self._accumulator.weights))
            totals = self._totals_of_the_model([part.totals for part in parts])
            return replace(mine, totals=totals, unused=unused, stop=any(part.stop for part in parts))

    def first_found(self, mine: Finding | None, step: int) -> tuple[Finding, int | None] | None:
        """Return the first finding of all ranks in layout order, and its rank. `mine` is this rank's finding."""
        if self.exchange is None or self.is_alone:
            return mine and (mine, None)
        with _InGroup():
            found = []
            for tp_rank, facts in enumerate(self.exchange.tell(f"finding in step {step}", mine)):
                kinds = [*map(type, facts)] if isinstance(facts, list) else []
                if kinds in _FINDINGS and 0 <= facts[0] < len(self._slots):
                    found.append((facts, tp_rank))
                elif facts is not None:
                    raise ProtocolError(f"the finding of rank {tp_rank} is invalid", got=facts)
        return min(found, key=lambda finding: finding[0][0], default=None)

    # ---- inside ----

    def _totals_of_the_model(self, parts: Sequence[Float64]) -> Float64:
        rows = np.array(parts)
        # If one rank's sum is not finite, the sum over the ranks is not either, and all of them refuse the step.
        is_once = self._is_replicated & np.isfinite(rows).all(axis=0)
        for rank, position in np.argwhere(is_once & ~np.isclose(rows, rows[0], rtol=_SAME_SUMS, atol=0.0)):
            name, norms = self._slots[position].name, [f"norm {row[position] ** 0.5:.9g}" for row in rows]
            what = f"replicated gradient '{name}' is not the same on ranks 0 and {rank}"
            do = "all-reduce it over the group before add(), as sequence parallelism needs"
            raise ExchangeError(what, got=f"{norms[rank]} on rank {rank}", expected=norms[0], do=do)
        totals: Float64 = np.where(is_once, rows[0], np.add.accumulate(rows)[-1])
        return totals


class _InGroup(AbstractContextManager[None]):
    """A context in which errors of an exchange begin with the name of the group."""

    def __exit__(self, kind: object, fault: BaseException | None, trace: object) -> None:
        if isinstance(fault, ExchangeError):
            what = f"in the tensor-parallel group: {fault.what}"
            raise type(fault)(what, got=fault.got, expected=fault.expected, do=fault.do) from fault


def _described(weights: Sequence[float]) -> str:
    """Return a window's micro-batches as text. Two texts are equal only if all weights are equal."""
    shown = ", ".join(f"{weight:.9g}" for weight in weights)
    digest = hashlib.sha256(shown.encode()).hexdigest()[:12]
    return f"{len(weights)} micro-batches of weight {shown:.99} (sha256 {digest})"
