"""Step statistics that all ranks agree on: weights, counts, and the squared sums that all of them use."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gradengine.accumulate.window import ordered_sum
from gradengine.errors import ExchangeError, ProtocolError
from gradengine.kernels import Float64
from gradengine.kernels.decision import Scalar
from gradengine.reduction.all_reduce import AllReduce

Flags: TypeAlias = npt.NDArray[np.bool_]

_SAME_SUMS = 1e-5  # squared sums of equal bytes differ by their rounding only, 1e-6 at most


@dataclass(frozen=True)
class StepStats:
    """One worker's part of a window, or all workers' together."""

    weight: Scalar  # a float, or of ranks that sum on their GPUs an array there, as `micro_batches`
    micro_batches: Scalar
    totals: Float64  # squared sum of each component
    unused: Flags
    settings: Mapping[str, str] = field(default_factory=dict)  # those that must be the same on all workers
    place: str = ""  # the tag of the step
    workers: int = 1  # workers that had a micro-batch
    on_device: Scalar = None  # the part of the divisor that only the device knows
    ask_device: Callable[[], Flags] | None = None  # tells what no rank used, where `unused` is this rank's own

    def unused_by_all(self) -> Flags:
        """The components without a gradient on any rank; where only a device knows them, this waits for it."""
        # A component that this rank has used is not unused: if it has used all, no device need be asked.
        return self.unused if self.ask_device is None or not self.unused.any() else self.ask_device()


def agree(group: AllReduce, mine: StepStats) -> StepStats:
    """The same stats on all ranks: weights and counts summed in rank order, rank 0's squared sums.

    All ranks hold the same sums, but a CPU with other vector units may round their squares differently in the last
    bit; one rank's figures make the norm, and with it every byte handed back, the same everywhere.
    """
    stats = stats_of_all(group, mine)
    for rank, theirs in enumerate(stats):
        if not same_sums(theirs.totals, stats[0].totals).all():
            raise ExchangeError(
                f"rank {rank} holds other sums than rank 0",
                got=f"squared norm {theirs.totals.sum():.9g}",
                expected=f"{stats[0].totals.sum():.9g}",
                do="memory or the network corrupted a gradient: restart from a checkpoint",
            )
    return StepStats(
        weight=ordered_sum(one.weight for one in stats),
        micro_batches=sum(one.micro_batches for one in stats),
        totals=stats[0].totals,
        unused=unused_by_all(stats),
        workers=sum(one.workers for one in stats),
    )


def unused_by_all(stats: Sequence[StepStats]) -> Flags:
    """Flags of the components that got no gradient on any rank."""
    flags: Flags = np.logical_and.reduce([one.unused for one in stats])
    return flags


def stats_of_all(group: AllReduce, mine: StepStats) -> list[StepStats]:
    """Every rank's stats, in rank order; raises `ExchangeError` if a rank is at another step, or has other settings."""
    totals, unused = mine.totals.astype("<f8").tobytes(), mine.unused.tobytes()
    told = group.tell(f"tally of {mine.place}", [mine.weight, mine.micro_batches, totals, unused, dict(mine.settings)])
    stats = [_checked(rank, facts, mine) for rank, facts in enumerate(told)]
    first = stats[0].settings
    for rank, name in itertools.product(range(len(stats)), first):
        if stats[rank].settings.get(name) != first[name]:
            raise ExchangeError(
                f"rank {rank} has another {name} than rank 0",
                got=stats[rank].settings.get(name, "nothing"),
                expected=first[name],
                do="build the engines of all workers with the same settings",
            )
    return stats


def same_sums(totals: Float64, first: Float64) -> npt.NDArray[np.bool_]:
    """Flags of the squared sums that differ by no more than their rounding."""
    return np.isclose(totals, first, rtol=_SAME_SUMS, atol=0.0, equal_nan=True)


def _checked(rank: int, facts: Any, mine: StepStats) -> StepStats:
    try:
        weight, micro_batches, totals, unused, settings = facts
        count, squares, flags = int(micro_batches), np.frombuffer(totals, "<f8"), np.frombuffer(unused, np.uint8) != 0
        stats = StepStats(float(weight), count, squares, flags, dict(settings), mine.place, workers=min(count, 1))
    except (ValueError, TypeError, OverflowError) as fault:
        raise ProtocolError(f"rank {rank}'s stats cannot be read ({fault})") from None
    is_weighed = 0 < stats.weight < np.inf if count > 0 else (stats.weight, count) == (0, 0)
    if squares.size != mine.totals.size or flags.size != mine.unused.size or not is_weighed:
        raise ProtocolError(
            f"rank {rank}'s stats are invalid",
            got=f"weight {stats.weight}, {count} micro-batches, {squares.size} components, {flags.size} flags",
            expected=f"a weight and micro-batches, or 0 and none, {mine.totals.size} components",
        )
    return stats
