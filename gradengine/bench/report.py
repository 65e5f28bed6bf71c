"""One interleaved run, and what it found: a row for each variant, and the same with every sample as JSON."""

from __future__ import annotations

import gc
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import numpy as np

from gradengine.bench.case import Absent, Benchmark, Case, Checked, check
from gradengine.bench.device import Device, Sample
from gradengine.bench.machine import load, machine, versions
from gradengine.bench.yardstick import COPY, TRIAD, Yardsticks
from gradengine.errors import CallerError

__all__ = ["Report", "Row", "interleave", "measure", "median_ratio"]


@dataclass(frozen=True)
class Row:
    """One variant's figures; `median_s`, the quantiles and `samples_s` are of the time that the benchmark is about."""

    variant: str
    bytes: int  # memory traffic of one run, as counted
    median_s: float
    p10_s: float  # a tenth of the samples were faster
    p90_s: float  # a tenth were slower
    gb_per_s: float  # bytes / median
    of_copy: float | None  # that, as a share of the copy's bandwidth in the same run, where there was a copy
    of_triad: float | None  # the same of the triad's
    device_s: float  # median between events on the stream
    wall_s: float  # median from an idle device until all is done
    host_s: float  # median until the call comes back
    ratios: Mapping[str, float]  # base -> median of this time / the base's, round by round: above 1 the base is faster
    error: float  # relative, of its result against fp64
    arenas: float | None  # memory beyond the gradients, in fp32 gradient sets, where measured
    samples_s: Sequence[float]  # of every round, in order


@dataclass(frozen=True)
class Report:
    """One benchmark, run once."""

    benchmark: str
    parameters: Mapping[str, object]
    tolerance: float  # the largest error, before anything was timed, of a variant that has none of its own
    machine: Mapping[str, object]
    versions: Mapping[str, str | None]
    load: float | None  # average over the minute before, where the system keeps one
    time: str  # which the rows are about: "device", "wall" or "host"
    rows: Sequence[Row]
    absent: Sequence[Absent]
    failed: Sequence[str]  # of those absent, what should have run and did not, or computes something else

    @property
    def bases(self) -> list[str]:
        """The variants with which the others are compared."""
        return list(self.rows[0].ratios) if self.rows else []

    def as_json(self) -> str:
        """All of it, samples included."""
        return json.dumps(asdict(self), indent=1)


def measure(device: Device, benchmark: Benchmark, rounds: int, yardsticks: Yardsticks | None = None) -> Report:
    """Check every variant's result, then time those that are right, and the yardsticks, in one interleaved run."""
    load_before = load()
    variants = [*benchmark.variants, *(yardsticks.variants if yardsticks else [])]
    checked, absent, failed = check(replace(benchmark, variants=variants))
    samples = interleave([each.case for each in checked], rounds, device.sample, warm_up=device.warm_up)
    return Report(
        benchmark.name,
        {**benchmark.parameters, "rounds": rounds},
        benchmark.tolerance,
        machine(device.xp),
        versions(device.xp),
        load_before,
        benchmark.time,
        _rows(checked, samples, benchmark.time),
        absent,
        failed,
    )


def interleave(
    cases: Sequence[Case], rounds: int, sample: Callable[[Case], Sample], *, warm_up: int
) -> list[list[Sample]]:
    """Sample each case once in each round, so that what slows the machine slows them alike.

    Returns:
        For each case its samples, round by round, those of the `warm_up` rounds before them dropped.

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


def _rows(checked: Sequence[Checked], samples: Sequence[Sequence[Sample]], time: str) -> list[Row]:
    names = [each.variant.name for each in checked]
    times = {name: [getattr(each, time) for each in series] for name, series in zip(names, samples, strict=True)}
    rates = {each.variant.name: each.variant.bytes / statistics.median(times[each.variant.name]) for each in checked}
    bases = [each.variant.name for each in checked if each.variant.base]

    def row(each: Checked, series: Sequence[Sample]) -> Row:
        name = each.variant.name
        p10, median, p90 = np.quantile(times[name], (0.1, 0.5, 0.9)).tolist()
        device, wall, host = (statistics.median(seconds) for seconds in zip(*series, strict=True))
        return Row(
            variant=name,
            bytes=each.variant.bytes,
            median_s=median,
            p10_s=p10,
            p90_s=p90,
            gb_per_s=rates[name] / 1e9,
            of_copy=rates[name] / rates[COPY] if COPY in rates else None,
            of_triad=rates[name] / rates[TRIAD] if TRIAD in rates else None,
            device_s=device,
            wall_s=wall,
            host_s=host,
            ratios={base: median_ratio(times[name], times[base]) for base in bases},
            error=each.error,
            arenas=each.case.arenas,
            samples_s=times[name],
        )

    return [row(each, series) for each, series in zip(checked, samples, strict=True)]


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
