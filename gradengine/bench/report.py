"""What a run found: rows for a table, and the same with every sample as JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from gradengine.bench.case import Absent, Case, check_results
from gradengine.bench.machine import load, machine, versions
from gradengine.bench.timing import interleave, median_ratio, quantile
from gradengine.bench.yardstick import TRIAD

__all__ = ["Report", "Row", "measure", "rows_of"]


@dataclass(frozen=True)
class Row:
    """One variant's figures.

    Attributes:
        variant: What was measured.
        bytes: Memory traffic of one run, as counted.
        median_s: Seconds.
        p10_s: Seconds; a tenth of the samples were faster.
        p90_s: Seconds; a tenth were slower.
        gb_per_s: Bytes / median.
        of_triad: That, as a share of the triad's bandwidth in the same run; None where there was no triad.
        ratios: Variant of ours -> the median of this variant's time / its time, round by round: above 1 ours is faster.
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
    of_triad: float | None
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
        tolerance: The relative error that every result kept before anything was timed.
        machine: Where it ran.
        versions: What it ran.
        load: The machine's load average over the minute before; None where the system keeps none.
        rows: The variants, in order.
        absent: Those that could not run, and why.
    """

    benchmark: str
    parameters: Mapping[str, object]
    tolerance: float
    machine: Mapping[str, object]
    versions: Mapping[str, str | None]
    load: float | None
    rows: Sequence[Row]
    absent: Sequence[Absent]

    @property
    def bases(self) -> list[str]:
        """The variants of ours, with which the others are compared."""
        return list(self.rows[0].ratios) if self.rows else []

    def as_json(self) -> str:
        """All of it, samples included."""
        return json.dumps(asdict(self), indent=1)


def measure(
    benchmark: str,
    entries: Sequence[Case | Absent],
    rounds: int,
    *,
    tolerance: float,
    parameters: Mapping[str, object],
) -> Report:
    """Compare all results, then time all cases in one interleaved run.

    Args:
        benchmark: Its name.
        entries: The variants, yardsticks among them.
        rounds: Samples of each.
        tolerance: The largest relative error against fp64.
        parameters: What to record with the figures.

    Raises:
        ResultsDiffer: A variant computes something else; nothing is timed then.
    """
    load_before = load()
    cases = [entry for entry in entries if isinstance(entry, Case)]
    errors = [difference.error for difference in check_results(cases, tolerance)]
    samples = interleave(cases, rounds)
    return Report(
        benchmark,
        {**parameters, "rounds": rounds},
        tolerance,
        machine(),
        versions(),
        load_before,
        rows_of(cases, errors, samples),
        [entry for entry in entries if isinstance(entry, Absent)],
    )


def rows_of(cases: Sequence[Case], errors: Sequence[float], samples: Sequence[Sequence[float]]) -> list[Row]:
    """The figures of cases from their seconds, each compared with each of ours."""
    ours = {case.variant: times for case, times in zip(cases, samples, strict=True) if case.ours}
    bandwidths = [case.bytes / statistics.median(times) / 1e9 for case, times in zip(cases, samples, strict=True)]
    triad = next((width for case, width in zip(cases, bandwidths, strict=True) if case.variant == TRIAD), None)
    return [
        Row(
            variant=case.variant,
            bytes=case.bytes,
            median_s=statistics.median(times),
            p10_s=quantile(times, 0.1),
            p90_s=quantile(times, 0.9),
            gb_per_s=width,
            of_triad=None if triad is None else width / triad,
            ratios={variant: median_ratio(times, base) for variant, base in ours.items()},
            error=error,
            arenas=case.arenas,
            samples_s=list(times),
        )
        for case, error, times, width in zip(cases, errors, samples, bandwidths, strict=True)
    ]
