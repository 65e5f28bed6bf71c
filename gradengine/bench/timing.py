"""One interleaved run: every case once in each round, so that what slows the machine slows them alike."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from gradengine.bench.case import Case
from gradengine.errors import CallerError

__all__ = ["Sample", "interleave", "median_ratio"]


class Sample(NamedTuple):
    """One run in seconds; on the host all three are the same.

    Attributes:
        device: Between two events on the stream, queued behind other work: what the GPU takes.
        wall: From an idle device, by the host's clock, until all is done.
        host: Until the call comes back: what the training loop's thread pays.
    """

    device: float
    wall: float
    host: float


def interleave(
    cases: Sequence[Case], rounds: int, sample: Callable[[Case], Sample], *, warm_up: int
) -> list[list[Sample]]:
    """Time the cases in turn: first, second, ..., last, first, second, ....

    Args:
        cases: What to time.
        rounds: Samples of each.
        sample: Prepares and runs a case, and takes its times.
        warm_up: Rounds before them whose samples are dropped: pages are touched, threads started, clocks rise.

    Returns:
        For each case its samples, round by round.

    Raises:
        CallerError: There is no round.
    """
    if rounds < 1:
        raise CallerError("too few rounds", got=rounds, expected="at least 1")
    with _collector_paused():
        taken = [[sample(case) for case in cases] for _ in range(warm_up + rounds)]
    return [list(series) for series in zip(*taken[warm_up:], strict=True)]


def median_ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """The median of time / base, taken pair by pair: both of a pair ran in the same round, a moment apart.

    >>> median_ratio([2.0, 20.0, 6.0], [1.0, 10.0, 2.0])
    2.0
    """
    return statistics.median(time / other for time, other in zip(times, base, strict=True))


@contextmanager
def _collector_paused() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
