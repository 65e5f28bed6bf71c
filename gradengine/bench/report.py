"""What a run found: a row for each variant, and the same with every sample as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from gradengine.bench.case import Absent, Benchmark, Checked, check
from gradengine.bench.device import Device
from gradengine.bench.machine import load, machine, versions
from gradengine.bench.timing import Sample, interleave, median_ratio
from gradengine.bench.yardstick import COPY, TRIAD, Yardsticks

__all__ = ["Report", "Row", "measure"]


@dataclass(frozen=True)
class Row:
    """One variant's figures; `median_s`, the quantiles and `samples_s` are of the time that the benchmark is about.

    Attributes:
        variant: What was measured.
        bytes: Memory traffic of one run, as counted.
        median_s: Seconds.
        p10_s: Seconds; a tenth of the samples were faster.
        p90_s: Seconds; a tenth were slower.
        gb_per_s: Bytes / median.
        of_copy: That, as a share of the copy's bandwidth in the same run; None where there was no copy.
        of_triad: The same of the triad's.
        device_s: Median between events on the stream.
        wall_s: Median from an idle device until all is done.
        host_s: Median until the call comes back.
        ratios: Base -> the median of this variant's time / its time, round by round: above 1 the base is faster.
        error: Relative error of its result against fp64.
        arenas: Memory beyond the gradients, in fp32 gradient sets; None where not measured.
        samples_s: Seconds of every round, in order.
    """

    variant: str
    bytes: int
    median_s: float
    p10_s: float
    p90_s: float
    gb_per_s: float
    of_copy: float | None
    of_triad: float | None
    device_s: float
    wall_s: float
    host_s: float
    ratios: Mapping[str, float]
    error: float
    arenas: float | None
    samples_s: Sequence[float]


@dataclass(frozen=True)
class Report:
    """One benchmark, run once.

    Attributes:
        benchmark: Its name.
        parameters: What it was run with.
        tolerance: The largest error against fp64, before anything was timed, of a variant that has none of its own.
        machine: Where it ran.
        versions: What it ran.
        load: The machine's load average over the minute before; None where the system keeps none.
        time: Which time the rows are about: "device", "wall" or "host".
        rows: The variants, in order.
        absent: Those that did not run, and why.
        failed: Of those, what should have run and did not, or computes something else.
    """

    benchmark: str
    parameters: Mapping[str, object]
    tolerance: float
    machine: Mapping[str, object]
    versions: Mapping[str, str | None]
    load: float | None
    time: str
    rows: Sequence[Row]
    absent: Sequence[Absent]
    failed: Sequence[str]

    @property
    def bases(self) -> list[str]:
        """The variants with which the others are compared."""
        return list(self.rows[0].ratios) if self.rows else []

    def as_json(self) -> str:
        """All of it, samples included."""
        return json.dumps(asdict(self), indent=1)


def measure(device: Device, benchmark: Benchmark, rounds: int, yardsticks: Yardsticks | None = None) -> Report:
    """Check every variant's result, then time those that compute the same, in one interleaved run.

    Args:
        device: Where.
        benchmark: What.
        rounds: Samples of each variant.
        yardsticks: The device's, if its bandwidth is to be taken in the same run.
    """
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


def _rows(checked: Sequence[Checked], samples: Sequence[Sequence[Sample]], time: str) -> list[Row]:
    times = {
        each.variant.name: [float(getattr(sample, time)) for sample in series]
        for each, series in zip(checked, samples, strict=True)
    }
    bases = {each.variant.name: times[each.variant.name] for each in checked if each.variant.base}
    bandwidths = {
        each.variant.name: each.variant.bytes / statistics.median(times[each.variant.name]) / 1e9 for each in checked
    }

    def share(name: str, yardstick: str) -> float | None:
        return bandwidths[name] / bandwidths[yardstick] if yardstick in bandwidths else None

    def row(each: Checked, series: Sequence[Sample]) -> Row:
        name = each.variant.name
        p10, median, p90 = (float(value) for value in np.quantile(times[name], (0.1, 0.5, 0.9)))
        device, wall, host = (statistics.median(each_time) for each_time in zip(*series, strict=True))
        return Row(
            variant=name,
            bytes=each.variant.bytes,
            median_s=median,
            p10_s=p10,
            p90_s=p90,
            gb_per_s=bandwidths[name],
            of_copy=share(name, COPY),
            of_triad=share(name, TRIAD),
            device_s=device,
            wall_s=wall,
            host_s=host,
            ratios={base: median_ratio(times[name], of_base) for base, of_base in bases.items()},
            error=each.error,
            arenas=each.case.arenas,
            samples_s=times[name],
        )

    return [row(each, series) for each, series in zip(checked, samples, strict=True)]
