"""What a run on a GPU found: the same report as the CPU's, with the GPU's own columns."""

from __future__ import annotations

import json
import os
import statistics
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from gradengine.bench.case import Absent, Case, ResultsDiffer, check_results
from gradengine.bench.gpu.device import Gpu, Missing, Sample
from gradengine.bench.gpu.machine import gpu_machine, gpu_versions
from gradengine.bench.machine import load
from gradengine.bench.report import Report, Row, rows_of
from gradengine.bench.timing import in_turn

__all__ = ["COPY", "Entry", "GpuReport", "GpuRow", "built", "measure_on_gpu", "reports_as_json", "write_reports"]

COPY = "copy"
_WARM_UP = 3  # rounds: clocks rise, pools grow


@dataclass(frozen=True)
class Entry:
    """A variant that is still to be built, which may fail without taking the others with it.

    Attributes:
        variant: Its name.
        build: Makes the case.
        ours: A failure of it is a failure of the benchmark, a peer is only absent then; so is ours if it is `Missing`.
    """

    variant: str
    build: Callable[[], Case]
    ours: bool = False


@dataclass(frozen=True)
class GpuRow(Row):
    """One variant's figures on a GPU; `median_s` and `samples_s` are of the time that the benchmark is about.

    Attributes:
        of_copy: GB/s as a share of the device-to-device copy's in the same run; None where there was none.
        device_s: Median between events.
        wall_s: Median from an idle GPU until all is done.
        host_s: Median until the call comes back.
    """

    of_copy: float | None
    device_s: float
    wall_s: float
    host_s: float


@dataclass(frozen=True)
class GpuReport(Report):
    """One benchmark on a GPU, run once.

    Attributes:
        time: Which time the rows are about: "device", "wall" or "host".
        failed: What should have run and did not, or computes something else; the report is good but for those.
    """

    time: str
    failed: Sequence[str]


def measure_on_gpu(
    gpu: Gpu,
    benchmark: str,
    entries: Sequence[Entry],
    rounds: int,
    stopwatch: Callable[[Case], Sample],
    *,
    time: str,
    tolerance: float,
    parameters: Mapping[str, object],
) -> GpuReport:
    """Build and compare each variant, then time those that compute the same, in one interleaved run.

    Args:
        gpu: The device.
        benchmark: Its name.
        entries: The variants, yardsticks among them.
        rounds: Samples of each.
        stopwatch: Takes one.
        time: Which of its times the rows are about.
        tolerance: The largest relative error against fp64 of a variant that names none of its own.
        parameters: What to record with the figures.
    """
    load_before = load()
    cases, errors, absent, failed = built(entries, tolerance)
    samples = in_turn(cases, rounds, stopwatch, warm_up=_WARM_UP, rest=lambda _: None)
    return GpuReport(
        benchmark,
        {**parameters, "rounds": rounds},
        tolerance,
        gpu_machine(gpu.xp),
        gpu_versions(gpu.xp),
        load_before,
        _gpu_rows(cases, errors, samples, time),
        absent,
        time=time,
        failed=failed,
    )


def built(entries: Sequence[Entry], tolerance: float) -> tuple[list[Case], list[float], list[Absent], list[str]]:
    """The cases that can be built and compute the same, their errors, the others and why, and which of those failed."""
    cases: list[Case] = []
    errors: list[float] = []
    absent: list[Absent] = []
    failed: list[str] = []
    for entry in entries:
        try:
            case = entry.build()
            errors += [difference.error for difference in check_results([case], tolerance)]
            cases.append(case)
        except Exception as fault:  # noqa: BLE001, PERF203  (a compiler or a driver may raise anything)
            absent.append(Absent(entry.variant, _reason(fault)))
            if isinstance(fault, Missing):
                continue
            traceback.print_exc(limit=-6, file=sys.stderr)
            if entry.ours or isinstance(fault, ResultsDiffer):
                failed.append(entry.variant)
    return cases, errors, absent, failed


def write_reports(path: Path, reports: Sequence[object]) -> None:
    """All reports so far as one JSON file, replaced as a whole: whoever is killed leaves what was there before."""
    partial_file = path.with_suffix(".partial")
    partial_file.write_text(reports_as_json(reports) + "\n")
    os.replace(partial_file, path)


def reports_as_json(reports: Sequence[object]) -> str:
    """All reports as one JSON text."""
    return json.dumps({"reports": [asdict(report) for report in reports]}, indent=1)  # type: ignore[call-overload]


def _reason(fault: Exception) -> str:
    if isinstance(fault, Missing):
        return str(fault)
    first_line = (str(fault).strip().splitlines() or [""])[0]
    return f"{type(fault).__name__}: {first_line}"[:200]


def _gpu_rows(
    cases: Sequence[Case], errors: Sequence[float], samples: Sequence[Sequence[Sample]], time: str
) -> list[GpuRow]:
    times = [[getattr(sample, time) for sample in series] for series in samples]
    rows = rows_of(cases, errors, times)
    copy = next((row.gb_per_s for row in rows if row.variant == COPY), None)
    return [
        GpuRow(
            **vars(row),
            of_copy=None if copy is None else row.gb_per_s / copy,
            device_s=statistics.median(sample.device for sample in series),
            wall_s=statistics.median(sample.wall for sample in series),
            host_s=statistics.median(sample.host for sample in series),
        )
        for row, series in zip(rows, samples, strict=True)
    ]
