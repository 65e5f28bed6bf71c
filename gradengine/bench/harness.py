"""The harness, which checks variants, times them in one interleaved run, and makes a report with a row for each.

The same run times a copy of memory. A CPU copies by NumPy on all cores, a GPU by the driver.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from gradengine.bench.device import Array, Case, Device, Missing, Sample, on_all_cpus
from gradengine.bench.machine import load, machine, versions
from gradengine.errors import CallerError, GradientError
from gradengine.kernels.host_threads import available_cpus

COPY = "copy"
# Largest upper / lower quartile of a ratio's rounds at which the ratio is shown. 9 in 10 recorded ratios are below.
NOISY = 1.25
_PIECES = 32  # pieces of the copied array, each with the same random numbers
_CHUNK = 262144  # elements, as in the kernels, so large that threads seldom contend for the GIL


class ResultsDiffer(GradientError):
    """A variant's result is wrong. The variant is not timed."""


def in_turn(calls: Sequence[Callable[[], object]]) -> Callable[[], None]:
    """Return a function that makes all of these calls in order."""

    def run() -> None:
        for call in calls:
            call()

    return run


@dataclass(frozen=True)
class Variant:
    """A line of a benchmark, built when its turn comes.

    The benchmark fails if a base or a required variant fails. Other variants that fail are absent from the table.
    """

    name: str  # shown in the table
    bytes: int  # memory traffic of one run, counted by hand as reads and writes of whole buffers in each pass
    build: Callable[[], Case]
    base: bool = False  # whether the other variants are compared with this one
    required: bool = False
    tolerance: float | None = None  # largest relative error, None for the benchmark's


@dataclass(frozen=True)
class Benchmark:
    """Variants that are compared with each other."""

    name: str
    variants: Sequence[Variant]
    tolerance: float  # the largest relative error that counts as the same result
    parameters: Mapping[str, object]  # parameters that the report records
    time: str = "wall"  # the field of `Sample` that is compared


@dataclass(frozen=True)
class Absent:
    """A variant that does not run here, and the reason. Both are shown below the table."""

    variant: str
    why: str


Checked: TypeAlias = tuple[Variant, Case, float]  # a variant that was built, its case, and its relative error
Progress: TypeAlias = Callable[[str, int, int], object]  # called with the work that begins, its number, and the last


def silent(what: str, number: int, of: int) -> None:
    """Show no progress."""


def check(benchmark: Benchmark, progress: Progress = silent) -> tuple[list[Checked], list[Absent], list[str]]:
    """Build each variant, run it once and compare its result with fp64's.

    Returns the variants that can be timed, the absent ones with their reasons, and the names of those that failed. An
    absent variant failed if its result is wrong. A base or required variant failed too, unless it raised `Missing`.
    """
    checked: list[Checked] = []
    absent: list[Absent] = []
    failed: list[str] = []
    for number, variant in enumerate(benchmark.variants, start=1):
        progress(f"check {variant.name}", number, len(benchmark.variants))
        try:
            checked.append(_checked(benchmark, variant))
        except Exception as fault:  # noqa: BLE001  (a compiler or a driver may raise anything)
            absent.append(Absent(variant.name, reason(fault)))
            is_needed = variant.base or variant.required or isinstance(fault, ResultsDiffer)
            if is_needed and not isinstance(fault, Missing):
                failed.append(variant.name)
    return checked, absent, failed


def _checked(benchmark: Benchmark, variant: Variant) -> Checked:
    case = variant.build()
    case.prepare()
    case.run()
    error = case.error()
    tolerance = benchmark.tolerance if variant.tolerance is None else variant.tolerance
    if not error <= tolerance:  # true for NaN too
        raise ResultsDiffer(
            f"{benchmark.name}: '{variant.name}' has a wrong result",
            got=f"a relative error of {error:.3g}",
            expected=f"at most {tolerance:.3g} from the result in fp64",
        )
    return variant, case, error


def reason(fault: Exception) -> str:
    """Return the reason of a failure in one line. Print a traceback to stderr if a different library raised it."""
    if isinstance(fault, Missing):
        return str(fault)
    if not isinstance(fault, GradientError):
        traceback.print_exception(fault, limit=-8, file=sys.stderr)
    first_line = (str(fault).strip().splitlines() or [""])[0]
    return f"{type(fault).__name__}: {first_line}"[:200]


def relative_error(
    results: Sequence[npt.NDArray[np.float32]], expected: Callable[[int], npt.NDArray[np.float64]]
) -> float:
    """Return the largest error of any component, relative to the component's largest fp64 value. NaN stays NaN."""

    def error(position: int) -> float:
        found, wanted = results[position].reshape(-1), expected(position).reshape(-1)
        if found.size != wanted.size:
            raise ResultsDiffer("a result has the wrong size", got=found.size, expected=wanted.size)
        largest, difference = (float(np.max(np.abs(each), initial=0.0)) for each in (wanted, found - wanted))
        return difference / largest if largest else difference

    return float(np.max(on_all_cpus(error, range(len(results))), initial=0.0))


# ---- the report ----


@dataclass(frozen=True)
class Row:
    """One variant's figures. `median_s`, `p10_s`, `p90_s` and `samples_s` are of the time that `Report.time` names."""

    variant: str
    bytes: int  # memory traffic of one run, as counted
    median_s: float
    p10_s: float  # a tenth of the samples were faster
    p90_s: float  # a tenth were slower
    gb_per_s: float  # bytes / median
    of_copy: float | None  # share of the copy's bandwidth in the same run, None without a copy
    device_s: float  # median between events on the stream
    wall_s: float  # median from an idle device until all work is done
    host_s: float  # median until the call returns
    ratios: Mapping[str, float]  # base -> median over rounds of this time / the base's (above 1 the base is faster)
    quartiles: Mapping[str, tuple[float, float]]  # base -> lower and upper quartile over rounds of the same quotient
    error: float  # relative error of the result against fp64
    samples_s: Sequence[float]  # times of all rounds, in order


@dataclass(frozen=True)
class Report:
    """One benchmark, run once."""

    benchmark: str
    parameters: Mapping[str, object]
    tolerance: float  # largest relative error of variants that name no tolerance
    machine: Mapping[str, object]
    versions: Mapping[str, str | None]
    load: float | None  # average load in the minute before, None if the system measures none
    time: str  # time of the rows ("device", "wall" or "host")
    rows: Sequence[Row]
    absent: Sequence[Absent]
    failed: Sequence[str]  # absent variants that should have run, or whose result is wrong
    noisy: bool  # whether a ratio's rounds differ too much for one figure


def as_json(report: Report | Mapping[str, Sequence[Report]]) -> str:
    """Return the report as JSON, samples included."""
    return json.dumps(report, indent=1, default=asdict)


def measure(
    device: Device, benchmark: Benchmark, rounds: int, beside: Sequence[Variant] = (), progress: Progress = silent
) -> Report:
    """Check the results of all variants and of those in `beside`, then time the correct ones in one interleaved run."""
    load_before = load()
    benchmark = replace(benchmark, variants=[*benchmark.variants, *beside])
    checked, absent, failed = check(benchmark, progress)
    cases = [case for _, case, _ in checked]
    samples = interleave(cases, rounds, device.sample, warm_up=device.warm_up, progress=progress)
    rows = _rows(checked, samples, benchmark.time)
    return Report(
        benchmark.name, {**benchmark.parameters, "rounds": rounds}, benchmark.tolerance, machine(device.xp),
        versions(device.xp), load_before, benchmark.time, rows, absent, failed,
        noisy=any(is_noisy(row, base) for row, base in compared(rows)),
    )  # fmt: skip


def interleave(
    cases: Sequence[Case],
    rounds: int,
    sample: Callable[[Case], Sample],
    *,
    warm_up: int,
    progress: Progress = silent,
) -> list[list[Sample]]:
    """Take one sample of each case in each round, so that a slow moment of the machine slows all cases alike.

    Samples of the first `warm_up` rounds are dropped. Raises `CallerError` if there is no round.
    """
    if rounds < 1:
        raise CallerError("too few rounds", got=rounds, expected="at least 1")
    taken, was_enabled = [], gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for number in range(warm_up + rounds):
            progress("round", number + 1, warm_up + rounds)
            taken.append([sample(case) for case in cases])
    finally:
        if was_enabled:
            gc.enable()
    return [list(series) for series in zip(*taken[warm_up:], strict=True)]


def median_ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """Return the median of time / base over the rounds. Both times of a pair are of the same round."""
    return statistics.median(time / other for time, other in zip(times, base, strict=True))


def _quartiles(times: Sequence[float], base: Sequence[float]) -> tuple[float, float]:
    """Return the lower and the upper quartile of time / base over the rounds."""
    lower, upper = np.quantile(np.divide(times, base), (0.25, 0.75)).tolist()
    return lower, upper


def compared(rows: Sequence[Row]) -> list[tuple[Row, str]]:
    """Return each row with each base that it is compared with. The copy is not compared, and no row with itself."""
    return [(row, base) for row in rows if row.variant != COPY for base in row.ratios if base != row.variant]


def is_noisy(row: Row, base: str) -> bool:
    """Return whether the rounds differ too much for one ratio, the quartiles by more than a factor of `NOISY`."""
    lower, upper = row.quartiles[base]
    return not upper <= NOISY * lower  # NaN is noisy


def _rows(checked: Sequence[Checked], samples: Sequence[Sequence[Sample]], time: str) -> list[Row]:
    named = {variant.name: series for (variant, _, _), series in zip(checked, samples, strict=True)}
    times = {name: [getattr(sample, time) for sample in series] for name, series in named.items()}
    rates = {variant.name: variant.bytes / statistics.median(times[variant.name]) for variant, _, _ in checked}
    bases = [variant.name for variant, _, _ in checked if variant.base]

    def row(variant: Variant, _: Case, error: float) -> Row:
        name = variant.name
        p10, median, p90 = np.quantile(times[name], (0.1, 0.5, 0.9)).tolist()
        device, wall, host = (statistics.median(seconds) for seconds in zip(*named[name], strict=True))
        return Row(
            variant=name, bytes=variant.bytes, median_s=median, p10_s=p10, p90_s=p90, gb_per_s=rates[name] / 1e9,
            of_copy=rates[name] / rates[COPY] if COPY in rates else None,
            device_s=device, wall_s=wall, host_s=host, error=error, samples_s=times[name],
            ratios={base: median_ratio(times[name], times[base]) for base in bases},
            quartiles={base: _quartiles(times[name], times[base]) for base in bases},
        )  # fmt: skip

    return [row(*each) for each in checked]


def yardstick(device: Device) -> Variant:
    """Return the copy that shows the memory bandwidth. It copies random numbers, since zeros are copied faster."""
    piece = np.random.default_rng(1).standard_normal(device.copied // _PIECES, np.float32)

    @cache
    def arrays() -> list[Array]:
        source, target = (device.xp.empty((_PIECES, piece.size), np.float32) for _ in range(2))
        source[...] = device.xp.asarray(piece)
        device.poison([target])
        return [device.by_hand(array.reshape(-1)) for array in (source, target)]

    def copy(source: Array, target: Array, part: slice) -> None:
        np.copyto(target[part], source[part])

    @cache  # seconds on a GPU, and needed in each benchmark
    def error() -> float:
        return relative_error(list(device.read(arrays()[1]).reshape(_PIECES, -1)), lambda _: piece.astype(np.float64))

    def case() -> Case:
        return Case(partial(spread, device, partial(copy, *arrays()), size), error)

    size = _PIECES * piece.size
    return Variant(COPY, 2 * 4 * size, case, required=True, tolerance=1e-6)


def spread(device: Device, work: Callable[[slice], object], size: int) -> None:
    """Do elementwise work on arrays of that size, in one call on a GPU, in chunks on all CPUs of the host."""
    if device.is_gpu:
        work(slice(size))
        return
    cpus = available_cpus()

    def share(number: int) -> None:
        end = size * (number + 1) // cpus
        for start in range(size * number // cpus, end, _CHUNK):
            work(slice(start, min(end, start + _CHUNK)))

    on_all_cpus(share, range(cpus))
