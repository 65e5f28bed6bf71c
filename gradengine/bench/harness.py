"""The harness: checks variants, times them in one interleaved run, and makes a report with a row for each.

The same run times the device's memory: by a copy, and by STREAM's triad a = b + s c with s = 1. Bytes counted: the copy
reads one array and writes one, the triad reads two and writes one. On a CPU by NumPy on all cores, on a GPU by the
driver's own copy and CuPy's kernel.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from gradengine.bench.device import Array, Case, Device, Gpu, Missing, Sample, on_all_cpus
from gradengine.bench.machine import load, machine, versions
from gradengine.errors import CallerError, GradientError
from gradengine.kernels.host_threads import available_cpus

__all__ = [
    "COUNTED", "NOISY", "YARDSTICKS", "Absent", "Benchmark", "Report", "ResultsDiffer", "Row", "Variant", "as_json",
    "check", "compared", "count_launches", "in_turn", "interleave", "is_noisy", "measure", "relative_error",
    "yardsticks",
]  # fmt: skip

Result = TypeVar("Result")

YARDSTICKS = _COPY, _TRIAD = "copy", "triad"
NOISY = 1.25  # upper / lower quartile of a ratio's rounds, above which it is not given: 9 in 10 recorded ones are below
_PIECES = 32  # of a yardstick's array, which is so many times the same random numbers
_CHUNK = 262144  # elements: the kernels' own, few enough pieces that threads seldom meet at the GIL

# A launch is a call of the host: of a kernel, or of a graph of many. In a wait the host waits for the device.
COUNTED = ("kernels", "copies", "fills", "launches", "waits")


class ResultsDiffer(GradientError):
    """A variant's result is wrong, so that it is not timed."""


def in_turn(calls: Sequence[Callable[[], object]]) -> Callable[[], None]:
    """One function that makes all of these calls in order."""

    def run() -> None:
        for call in calls:
            call()

    return run


@dataclass(frozen=True)
class Variant:
    """A line of a benchmark, built when its turn comes.

    The benchmark fails if a base or a required variant fails; a peer that fails is only absent.
    """

    name: str  # "ours hold=4", "torch foreach"
    bytes: int  # memory traffic of one run, counted by hand: each pass's reads and writes of whole buffers
    build: Callable[[], Case]
    base: bool = False  # whether the others' times are compared with its own
    required: bool = False
    tolerance: float | None = None  # the largest error that it may have, where that is not the benchmark's


@dataclass(frozen=True)
class Benchmark:
    """Variants that are compared with each other."""

    name: str
    variants: Sequence[Variant]
    tolerance: float  # the largest relative error that counts as the same result
    parameters: Mapping[str, object]  # what to record with the figures
    time: str = "wall"  # which of a sample's times it is about


@dataclass(frozen=True)
class Absent:
    """A variant that does not run here, and why; it keeps its line in the table."""

    variant: str
    why: str


Checked: TypeAlias = tuple[Variant, Case, float]  # one that was built and computes what it should, up to that error


def check(benchmark: Benchmark) -> tuple[list[Checked], list[Absent], list[str]]:
    """Build each variant, run it once and compare its result with fp64's.

    Returns those that can be timed; those that cannot, and why; and the names of the latter that are failures: that are
    wrong, or required, unless something is `Missing`.
    """
    checked: list[Checked] = []
    absent: list[Absent] = []
    failed: list[str] = []
    for variant in benchmark.variants:
        try:
            checked.append(_checked(benchmark, variant))
        except Exception as fault:  # noqa: BLE001, PERF203  (a compiler or a driver may raise anything)
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
    if not error <= tolerance:  # written so that NaN is refused
        raise ResultsDiffer(
            f"{benchmark.name}: '{variant.name}' has a wrong result",
            got=f"a relative error of {error:.3g}",
            expected=f"at most {tolerance:.3g} from the result in fp64",
        )
    return variant, case, error


def reason(fault: Exception) -> str:
    """The reason of a failure in one line; the traceback of another library's error is printed to stderr."""
    if isinstance(fault, Missing):
        return str(fault)
    if not isinstance(fault, GradientError):
        traceback.print_exception(fault, limit=-8, file=sys.stderr)
    first_line = (str(fault).strip().splitlines() or [""])[0]
    return f"{type(fault).__name__}: {first_line}"[:200]


def relative_error(
    results: Sequence[npt.NDArray[np.float32]], expected: Callable[[int], npt.NDArray[np.float64]]
) -> float:
    """The largest difference of any component from its fp64 value, relative to its largest value; NaN if one is NaN."""

    def error(position: int) -> float:
        found, wanted = results[position].reshape(-1), expected(position).reshape(-1)
        if found.size != wanted.size:
            raise ResultsDiffer("a result has another size", got=found.size, expected=wanted.size)
        largest, difference = (float(np.max(np.abs(each), initial=0.0)) for each in (wanted, found - wanted))
        return difference / largest if largest else difference

    return float(np.max(on_all_cpus(error, range(len(results))), initial=0.0))


# ---- the report ----


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
    quartiles: Mapping[str, tuple[float, float]]  # base -> the lower and the upper quartile of the same
    error: float  # relative, of its result against fp64
    arenas: float | None  # memory beyond the gradients, in fp32 gradient sets, where measured
    samples_s: Sequence[float]  # of every round, in order


@dataclass(frozen=True)
class Report:
    """One benchmark, run once; if its launches were counted, the rows are variant -> counts, and no time was taken."""

    benchmark: str
    parameters: Mapping[str, object]
    tolerance: float  # the largest error, before anything was timed, of a variant that has none of its own
    machine: Mapping[str, object]
    versions: Mapping[str, str | None]
    load: float | None  # average over the minute before, where the system keeps one
    time: str  # which the rows are about: "device", "wall" or "host"
    rows: Sequence[Row] | Mapping[str, Mapping[str, int]]
    absent: Sequence[Absent]
    failed: Sequence[str]  # of those absent, what should have run and did not, or computes something else
    noisy: bool  # whether a ratio's rounds differ too much for one figure


def as_json(report: Report | Mapping[str, Sequence[Report]]) -> str:
    """The report as JSON, samples included."""
    return json.dumps(report, indent=1, default=asdict)


def measure(device: Device, benchmark: Benchmark, rounds: int, beside: Sequence[Variant] = ()) -> Report:
    """Check every variant's result, then time the right ones, and the yardsticks, in one interleaved run."""
    load_before = load()
    parameters, variants = {**benchmark.parameters, "rounds": rounds}, [*benchmark.variants, *beside]
    benchmark = replace(benchmark, parameters=parameters, variants=variants)
    checked, absent, failed = check(benchmark)
    samples = interleave([case for _, case, _ in checked], rounds, device.sample, warm_up=device.warm_up)
    return _report(device, benchmark, _rows(checked, samples, benchmark.time), absent, failed, load_before)


def interleave(
    cases: Sequence[Case], rounds: int, sample: Callable[[Case], Sample], *, warm_up: int
) -> list[list[Sample]]:
    """Each case's samples, one from each round, so that a slow moment of the machine slows all cases alike.

    Samples of the first `warm_up` rounds are dropped; raises `CallerError` if there is no round.
    """
    if rounds < 1:
        raise CallerError("too few rounds", got=rounds, expected="at least 1")
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        taken = [[sample(case) for case in cases] for _ in range(warm_up + rounds)]
    finally:
        if was_enabled:
            gc.enable()
    return [list(series) for series in zip(*taken[warm_up:], strict=True)]


def median_ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """The median of time / base, taken pair by pair: both of a pair ran in the same round, a moment apart."""
    return statistics.median(time / other for time, other in zip(times, base, strict=True))


def _quartiles(times: Sequence[float], base: Sequence[float]) -> tuple[float, float]:
    """The lower and the upper quartile of time / base, taken pair by pair: half of the rounds lie between them."""
    lower, upper = np.quantile(np.divide(times, base), (0.25, 0.75)).tolist()
    return lower, upper


def compared(rows: Sequence[Row]) -> list[tuple[Row, str]]:
    """Each row with each base that it is compared with: bases other than itself; yardsticks are not compared."""
    return [(row, base) for row in rows if row.variant not in YARDSTICKS for base in row.ratios if base != row.variant]


def is_noisy(row: Row, base: str) -> bool:
    """Whether the rounds differ too much for one ratio: the quartiles by more than a factor of 1.25."""
    lower, upper = row.quartiles[base]
    return not upper <= NOISY * lower  # NaN is noisy


def _rows(checked: Sequence[Checked], samples: Sequence[Sequence[Sample]], time: str) -> list[Row]:
    named = {variant.name: series for (variant, _, _), series in zip(checked, samples, strict=True)}
    times = {name: [getattr(sample, time) for sample in series] for name, series in named.items()}
    rates = {variant.name: variant.bytes / statistics.median(times[variant.name]) for variant, _, _ in checked}
    bases = [variant.name for variant, _, _ in checked if variant.base]

    def row(variant: Variant, case: Case, error: float) -> Row:
        name = variant.name
        p10, median, p90 = np.quantile(times[name], (0.1, 0.5, 0.9)).tolist()
        device, wall, host = (statistics.median(seconds) for seconds in zip(*named[name], strict=True))
        return Row(
            variant=name, bytes=variant.bytes, median_s=median, p10_s=p10, p90_s=p90, gb_per_s=rates[name] / 1e9,
            of_copy=rates[name] / rates[_COPY] if _COPY in rates else None,
            of_triad=rates[name] / rates[_TRIAD] if _TRIAD in rates else None,
            device_s=device, wall_s=wall, host_s=host, error=error, arenas=case.arenas, samples_s=times[name],
            ratios={base: median_ratio(times[name], times[base]) for base in bases},
            quartiles={base: _quartiles(times[name], times[base]) for base in bases},
        )  # fmt: skip

    return [row(*each) for each in checked]


def _report(
    device: Device,
    benchmark: Benchmark,
    rows: Sequence[Row] | Mapping[str, Mapping[str, int]],
    absent: Sequence[Absent],
    failed: Sequence[str],
    load_before: float | None = None,
) -> Report:
    name, parameters, tolerance = benchmark.name, benchmark.parameters, benchmark.tolerance
    where = machine(device.xp), versions(device.xp)
    noisy = not isinstance(rows, Mapping) and any(is_noisy(row, base) for row, base in compared(rows))
    return Report(name, parameters, tolerance, *where, load_before, benchmark.time, rows, absent, failed, noisy)


def yardsticks(device: Device) -> list[Variant]:
    """The copy and the triad; their three arrays are of random numbers, as zeros would be faster than data."""
    piece = np.random.default_rng(1).standard_normal(device.copied // _PIECES, np.float32)
    size = _PIECES * piece.size

    @cache
    def arrays() -> list[Array]:
        made = device.empty([(_PIECES, piece.size)] * 3, np.float32)
        for array in made[:2]:
            array[...] = device.xp.asarray(piece)
        device.poison(made[2:])
        return [device.by_hand(array.reshape(-1)) for array in made]

    def copy(source: Array, _: Array, target: Array, part: slice) -> None:
        np.copyto(target[part], source[part])

    def triad(one: Array, other: Array, target: Array, part: slice) -> None:
        np.add(one[part], other[part], out=target[part])

    @cache  # a benchmark's check of them takes seconds on a GPU, and each benchmark has them
    def error(factor: float) -> float:
        found = device.read(arrays()[2]).reshape(_PIECES, -1)
        return relative_error(list(found), lambda _: piece.astype(np.float64) * factor)

    def case(work: Callable[..., None], factor: float) -> Case:
        return Case(partial(spread, device, partial(work, *arrays()), size), partial(error, factor))

    return [
        Variant(_COPY, 2 * 4 * size, partial(case, copy, 1.0), required=True, tolerance=1e-6),
        Variant(_TRIAD, 3 * 4 * size, partial(case, triad, 2.0), tolerance=1e-6),
    ]


def spread(device: Device, work: Callable[[slice], object], size: int) -> None:
    """Do elementwise work on arrays of that size: on a GPU at once; on the host each CPU a share, chunk by chunk."""
    if device.is_gpu:
        work(slice(size))
        return
    cpus = available_cpus()

    def share(number: int) -> None:
        end = size * (number + 1) // cpus
        for start in range(size * number // cpus, end, _CHUNK):
            work(slice(start, min(end, start + _CHUNK)))

    on_all_cpus(share, range(cpus))


# ---- launches ----


def count_launches(gpu: Gpu, benchmark: Benchmark) -> Report:
    """Run each variant that computes the same once under a profiler; ours that wait for the device have failed."""
    count, rows = profiled(gpu), {}
    checked, absent, failed = check(benchmark)
    of_nothing = count(lambda: None)  # the profiler's own
    for variant, case, _ in checked:
        case.prepare()
        gpu.wait()
        found = count(case.run) - of_nothing
        rows[variant.name] = {kind: found[kind] for kind in COUNTED}
        if variant.base and found["waits"]:
            failed.append(f"{variant.name} waits")
    return _report(gpu, benchmark, rows, absent, failed)


def profiled(gpu: Gpu) -> Callable[[Callable[[], object]], Counter[str]]:
    """A function that counts a call's launches by torch's profiler, CuPy's included; raises as `Device.torch`."""
    profiler = gpu.torch.profiler
    activities = [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.CUDA]

    def count(run: Callable[[], object]) -> Counter[str]:
        with profiler.profile(activities=activities) as found:
            run()
        return counts_of((str(event.device_type), event.name) for event in found.events())

    return count


def counts_of(events: Iterable[tuple[str, str]]) -> Counter[str]:
    """Counts of (device type, name) pairs, as torch's profiler gives them."""
    kinds = (_kind(name, on_device=device.endswith("CUDA")) for device, name in events)
    return Counter(kind for kind in kinds if kind)


def _kind(name: str, *, on_device: bool) -> str | None:
    if on_device:
        return "copies" if name.startswith("Memcpy") else "fills" if name.startswith("Memset") else "kernels"
    if not name.startswith("cu"):
        return None  # an operator of torch
    if "Launch" in name:
        return "launches"
    return "waits" if "Synchronize" in name or name in {"cudaMemcpy", "cuMemcpyDtoH_v2"} else None
