"""The stats of a step that all ranks agree on: weights and counts of all workers, and the norm of a whole model.

The ranks of a tensor-parallel group hold parts of a model. Squared sums of sharded components add up over the group and
those of replicated ones count once, so that all ranks find the norm, the clip scale and the verdict of the whole model.
No gradient is sent: those of replicated components must be the same on all ranks, and their squared sums are compared.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
import numpy.typing as npt

from gradengine.accumulate import PerBlockGradientAccumulator
from gradengine.accumulate.window import ordered_sum
from gradengine.errors import CallerError, ExchangeError, NonFiniteGradient, ProtocolError
from gradengine.exchange.exchange import Exchange
from gradengine.kernels import Float64
from gradengine.kernels.decision import Scalar
from gradengine.layout import GradientLayout

Flags: TypeAlias = npt.NDArray[np.bool_]

_STEP = struct.Struct("<q")
_HEAD = struct.Struct("<qdqdq")  # step, loss scale and its finite steps, weight, micro-batches
_WINDOW_BYTES = 256  # of a window's weights as text
_SAME_SUMS = 1e-5  # squared sums of equal bytes differ by their rounding only, 1e-6 at most


@dataclass(frozen=True)
class StepStats:
    """One worker's part of a window, or all workers' together."""

    weight: Scalar  # a float, or of ranks that sum on their GPUs an array there, as `micro_batches`
    micro_batches: Scalar
    totals: Float64  # squared sum of each component
    unused: Flags
    workers: int = 1  # workers that had a micro-batch
    on_device: Scalar = None  # the part of the divisor that only the device knows
    ask_device: Callable[[], Flags] | None = None  # tells what no rank used, where `unused` is this rank's own

    def unused_by_all(self) -> Flags:
        """Return the components without a gradient on any rank; where only a device knows them, this waits for it."""
        # A component that this rank has used is not unused: if it has used all, no device need be asked.
        return self.unused if self.ask_device is None or not self.unused.any() else self.ask_device()


class Place(NamedTuple):
    """What must be the same on all ranks in a step.

    Attributes:
        step: The step's number.
        scale: The loss scale.
        tracker: The finite steps in a row that a dynamic loss scale has seen.
    """

    step: int
    scale: float = 1.0
    tracker: int = 0


def agree(exchange: Exchange, mine: StepStats, place: Place) -> StepStats:
    """Return the same stats on all ranks: weights and counts summed in rank order.

    The squared sums are each rank's own: all have them from the shares' owners, bit for bit.

    Raises:
        ExchangeError: A rank is at another step, or has another loss scale.
        ProtocolError: A rank's stats are impossible.
    """
    stats = stats_of_all(exchange, mine, place)
    counts = [one.micro_batches for one in stats]
    weight, workers = ordered_sum([one.weight for one in stats]), len(counts) - counts.count(0)
    return StepStats(weight, sum(counts), mine.totals, unused_by_all(stats), workers)


def unused_by_all(stats: Sequence[StepStats]) -> Flags:
    """Return flags of the components that got no gradient on any rank."""
    flags: Flags = np.logical_and.reduce([one.unused for one in stats])
    return flags


def stats_of_all(exchange: Exchange, mine: StepStats, place: Place, window: str = "") -> list[StepStats]:
    """Return every rank's stats, in rank order.

    Args:
        exchange: The exchange over these ranks.
        mine: This rank's stats.
        place: What must be the same on all of them.
        window: The window's weights as text, where these must be the same too: then the ranks also tell each other
            their squared sums.

    Raises:
        ExchangeError, ProtocolError: As `agree`.
    """
    own = _HEAD.pack(*place, mine.weight, mine.micro_batches) + mine.unused.tobytes()
    if window:
        own += window.encode()[:_WINDOW_BYTES].ljust(_WINDOW_BYTES) + mine.totals.astype("<f8").tobytes()
    parts = exchange.all_gather(own)
    for rank, part in enumerate(parts):
        if (len(part), part[: _STEP.size]) != (len(parts[0]), parts[0][: _STEP.size]):
            got, expected = _call_of(part, len(own)), _call_of(parts[0], len(own))
            do = "a window was finished or dropped on some ranks only: restart all from one checkpoint"
            raise ExchangeError(f"rank {rank} is out of sync with rank 0", got=got, expected=expected, do=do)
    told = [_read(rank, part, mine) for rank, part in enumerate(parts)]
    for rank, (texts, _) in enumerate(told):
        for name, expected in told[0][0].items():
            if texts[name] != expected:
                what, do = f"rank {rank} has another {name} than rank 0", "give all ranks the same in each step"
                raise ExchangeError(what, got=texts[name], expected=expected, do=do)
    return [stats for _, stats in told]


def _call_of(part: bytes, size: int) -> str:
    return f"stats of step {_STEP.unpack_from(part)[0]}" if len(part) == size else f"{len(part)} bytes of another call"


def _read(rank: int, part: bytes, mine: StepStats) -> tuple[dict[str, str], StepStats]:
    """Return two texts by name, which must be the same on all ranks, and the rank's stats."""
    _, scale, tracker, weight, count = _HEAD.unpack_from(part)
    if not (0 < weight < np.inf if count > 0 else (weight, count) == (0, 0)):
        got, expected = f"weight {weight}, {count} micro-batches", "a weight and micro-batches, or 0 and none"
        raise ProtocolError(f"rank {rank}'s stats are impossible", got=got, expected=expected)
    flags = np.frombuffer(part, np.uint8, mine.unused.size, _HEAD.size) != 0
    rest = part[_HEAD.size + flags.size :]  # empty without a window
    totals = np.frombuffer(rest[_WINDOW_BYTES:], "<f8") if rest else mine.totals
    window = rest[:_WINDOW_BYTES].decode(errors="replace").rstrip()
    texts = {"loss_scale": f"{scale!r} for {tracker} steps" if tracker else repr(scale), "window": window}
    return texts, StepStats(weight, count, totals, flags, min(count, 1))


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
            got, expected = f"rank {exchange.rank} of {exchange.world_size}", f"{layout.tp_rank} of {layout.tp_size}"
            do = "connect each rank as its tp_rank of its TensorParallelConfig"
            raise CallerError("tp_exchange does not fit the layout", got=got, expected=f"tp_rank {expected}", do=do)
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
                what = f"replicated gradient '{slot.name}' is not the same on ranks 0 and {rank}"
                got, expected = (f"norm {each[position] ** 0.5:.9g}" for each in (replica, replicas[0]))
                do = "all-reduce it over the group before add(), as sequence parallelism needs"
                raise ExchangeError(what, got=f"{got} on rank {rank}", expected=expected, do=do)
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
    digest = hashlib.sha256(shown.encode()).hexdigest()[:12]
    return f"{len(weights)} micro-batches of weight {shown:.99} (sha256 {digest})"


def _found_by(tp_rank: int, facts: Any, step: int, known: Container[str]) -> NonFiniteGradient | None:
    if facts is None:
        return None
    try:
        component, index, value, rank = facts
        if component in known and isinstance(rank, (int, type(None))):
            return NonFiniteGradient(component, int(index), float(value), step=step, rank=rank, tp_rank=tp_rank)
    except (ValueError, TypeError, OverflowError):
        pass
    raise ProtocolError(f"the finding of rank {tp_rank} is impossible", got=facts)
