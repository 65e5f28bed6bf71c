"""One interleaved run: every variant once in each round, so that what slows the machine slows them alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from gradengine.bench.case import Case
from gradengine.errors import CallerError

__all__ = ["in_turn", "interleave", "median_ratio", "quantile"]

Sample = TypeVar("Sample")

_REST_SECONDS = 0.03  # OpenMP's threads spin on for milliseconds after PyTorch is done, on the next variant's CPUs


def interleave(
    cases: Sequence[Case],
    rounds: int,
    *,
    warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    rest: Callable[[float], None] = time.sleep,
) -> list[list[float]]:
    """Time the cases in turn: first, second, ..., last, first, second, ....

    Args:
        cases: What to time.
        rounds: Samples of each.
        warm_up: Rounds before them whose times are dropped: pages are touched, threads started.
        clock: Seconds.
        rest: Waits before each sample.

    Returns:
        For each case its seconds, round by round.

    Raises:
        CallerError: There is no round.

    Example:
        >>> ticks = iter(range(100))
        >>> case = Case("add", "numpy", 8, run=lambda: next(ticks), error=lambda: 0.0)
        >>> interleave([case], rounds=3, clock=lambda: float(next(ticks)))
        [[2.0, 2.0, 2.0]]
    """
    return in_turn(cases, rounds, lambda case: _timed(case, clock), warm_up=warm_up, rest=rest)


def in_turn(
    cases: Sequence[Case],
    rounds: int,
    timed: Callable[[Case], Sample],
    *,
    warm_up: int,
    rest: Callable[[float], None],
) -> list[list[Sample]]:
    """As `interleave`, with samples of any kind.

    Args:
        cases: What to time.
        rounds: Samples of each.
        timed: Takes one.
        warm_up: Rounds before them whose samples are dropped.
        rest: Waits before each sample.
    """
    if rounds < 1:
        raise CallerError("too few rounds", got=rounds, expected="at least 1")
    samples: list[list[Sample]] = [[] for _ in cases]
    with _collector_paused():
        for number in range(warm_up + rounds):
            for case, kept in zip(cases, samples, strict=True):
                rest(_REST_SECONDS)
                sample = timed(case)
                if number >= warm_up:
                    kept.append(sample)
    return samples


def median_ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """The median of time / base, taken pair by pair: both of a pair ran in the same round, a moment apart.

    >>> median_ratio([2.0, 20.0, 6.0], [1.0, 10.0, 2.0])
    2.0
    """
    return statistics.median(time / other for time, other in zip(times, base, strict=True))


def quantile(times: Sequence[float], share: float) -> float:
    """The value below which `share` of the samples lie, linear between neighbours.

    >>> quantile([3.0, 1.0, 2.0], 0.75)
    2.5
    """
    ordered = sorted(times)
    place = share * (len(ordered) - 1)
    below = min(int(place), len(ordered) - 2)
    if below < 0:
        return ordered[0]
    return ordered[below] + (place - below) * (ordered[below + 1] - ordered[below])


def _timed(case: Case, clock: Callable[[], float]) -> float:
    case.prepare()
    start = clock()
    case.run()
    return clock() - start


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
