"""Step statistics that all ranks agree on: weights and counts, and which components got a gradient."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from gradengine.accumulate.window import ordered_sum
from gradengine.errors import ExchangeError, ProtocolError
from gradengine.exchange.exchange import Exchange
from gradengine.kernels import Float64
from gradengine.kernels.decision import Scalar

Flags: TypeAlias = npt.NDArray[np.bool_]

_STEP = struct.Struct("<q")
_HEAD = struct.Struct("<qdqdq")  # step, loss scale and its finite steps, weight, micro-batches
_WINDOW_BYTES = 256  # of a window's weights as text


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
    head = _HEAD.pack(place.step, place.scale, place.tracker, mine.weight, mine.micro_batches)
    body = window.encode()[:_WINDOW_BYTES].ljust(_WINDOW_BYTES) + mine.totals.astype("<f8").tobytes() if window else b""
    own = head + mine.unused.tobytes() + body
    parts = exchange.all_gather(own)
    for rank, part in enumerate(parts):
        if (len(part), part[: _STEP.size]) != (len(parts[0]), parts[0][: _STEP.size]):
            raise ExchangeError(
                f"rank {rank} is out of sync with rank 0",
                got=_call_of(part, len(own)),
                expected=_call_of(parts[0], len(own)),
                do="a window was finished or dropped on some ranks only: restart all from one checkpoint",
            )
        if len(part) != len(own):
            got, expected = f"{len(part)} bytes", f"{len(own)} bytes"
            raise ProtocolError(f"rank {rank}'s stats are of another length", got=got, expected=expected)
    told = [_read(rank, part, mine, bool(window)) for rank, part in enumerate(parts)]
    for rank, theirs in enumerate(told):
        for name, got, expected in zip(_Told._fields[:2], theirs[:2], told[0][:2], strict=True):
            if got != expected:
                do = "give all ranks the same in each step"
                raise ExchangeError(f"rank {rank} has another {name} than rank 0", got=got, expected=expected, do=do)
    return [each.stats for each in told]


class _Told(NamedTuple):
    """What a rank has told: two texts, which must be the same on all ranks, and its stats."""

    loss_scale: str
    window: str
    stats: StepStats


def _call_of(part: bytes, size: int) -> str:
    return f"stats of step {_STEP.unpack_from(part)[0]}" if len(part) == size else f"{len(part)} bytes of another call"


def _read(rank: int, part: bytes, mine: StepStats, has_window: bool) -> _Told:
    _, scale, tracker, weight, count = _HEAD.unpack_from(part)
    if not (0 < weight < np.inf if count > 0 else (weight, count) == (0, 0)):
        got, expected = f"weight {weight}, {count} micro-batches", "a weight and micro-batches, or 0 and none"
        raise ProtocolError(f"rank {rank}'s stats are impossible", got=got, expected=expected)
    flags = np.frombuffer(part, np.uint8, mine.unused.size, _HEAD.size) != 0
    window, totals, rest = "", mine.totals, part[_HEAD.size + flags.size :]
    if has_window:
        window, totals = (
            rest[:_WINDOW_BYTES].decode(errors="replace").rstrip(),
            np.frombuffer(rest[_WINDOW_BYTES:], "<f8"),
        )
    stats = StepStats(weight, count, totals, flags, min(count, 1))
    return _Told(f"{scale!r} for {tracker} steps" if tracker else repr(scale), window, stats)
