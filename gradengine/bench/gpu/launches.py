"""What a step asks of the device: kernels, copies, fills, calls that launch, calls that wait; counted, not timed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradengine.bench.case import Absent, Case
from gradengine.bench.gpu.device import Gpu
from gradengine.bench.gpu.machine import gpu_machine, gpu_versions
from gradengine.bench.gpu.report import Entry, built
from gradengine.bench.gpu.torch_peers import torch_of

__all__ = ["Counts", "LaunchReport", "count_launches", "counts_of", "profiled"]


@dataclass(frozen=True)
class Counts:
    """Of one run.

    Attributes:
        kernels: Kernels that the device ran.
        copies: Copies that it ran.
        fills: Fills that it ran.
        launches: Calls of the host that launch: a kernel, or a graph of many.
        waits: Calls in which the host waits for the device.
    """

    kernels: int
    copies: int
    fills: int
    launches: int
    waits: int

    def less(self, other: Counts) -> Counts:
        """What is beyond another's; never below 0."""
        mine, theirs = asdict(self), asdict(other)
        return Counts(**{name: max(0, mine[name] - theirs[name]) for name in mine})


@dataclass(frozen=True)
class LaunchReport:
    """The counts of each variant of a step.

    Attributes:
        benchmark: "launches".
        parameters: What it was run with.
        machine: Where.
        versions: What.
        rows: Counts by variant.
        absent: Those that could not run, and why.
        failed: What should have run and did not, and ours that wait for the device.
    """

    benchmark: str
    parameters: Mapping[str, object]
    machine: Mapping[str, object]
    versions: Mapping[str, str | None]
    rows: Mapping[str, Counts]
    absent: Sequence[Absent]
    failed: Sequence[str]


def count_launches(
    gpu: Gpu,
    entries: Sequence[Entry],
    profile: Callable[[Callable[[], object]], Counts],
    *,
    tolerance: float,
    parameters: Mapping[str, object],
) -> LaunchReport:
    """Run each variant once under a profiler.

    Args:
        gpu: The device.
        entries: The variants.
        profile: What counts one call.
        tolerance: As for timing: what computes something else is not counted.
        parameters: What to record.
    """
    cases, _, absent, failed = built(entries, tolerance)
    nothing = profile(lambda: None)  # the profiler's own
    rows = {case.variant: _counted(gpu, case, profile).less(nothing) for case in cases}
    waiting = [f"{case.variant} waits" for case in cases if case.ours and rows[case.variant].waits]
    machine, versions = gpu_machine(gpu.xp), gpu_versions(gpu.xp)
    return LaunchReport("launches", parameters, machine, versions, rows, absent, [*failed, *waiting])


def profiled(gpu: Gpu) -> Callable[[Callable[[], object]], Counts]:
    """Counts by torch's profiler, which sees every call of the process, CuPy's too."""
    profiler = torch_of(gpu).profiler
    activities = [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.CUDA]

    def profile(run: Callable[[], object]) -> Counts:
        with profiler.profile(activities=activities) as found:
            run()
        return counts_of((str(event.device_type), event.name) for event in found.events())

    return profile


def counts_of(events: Any) -> Counts:
    """Counts of (device type, name) pairs, as torch's profiler gives them.

    Example:
        >>> counts_of([("DeviceType.CPU", "cuLaunchKernel"), ("DeviceType.CUDA", "accumulate_1_small")])
        Counts(kernels=1, copies=0, fills=0, launches=1, waits=0)
    """
    return Counts(**{name: count for name, count in _named(events).items() if name})


def _named(events: Any) -> Counter[str]:
    found = Counter({"kernels": 0, "copies": 0, "fills": 0, "launches": 0, "waits": 0})
    for device, name in events:
        found[_kind(device.endswith("CUDA"), name)] += 1
    return found


def _kind(on_device: bool, name: str) -> str:
    if on_device:
        return "copies" if name.startswith("Memcpy") else "fills" if name.startswith("Memset") else "kernels"
    if not name.startswith("cu"):
        return ""  # an operator of torch
    if "Launch" in name:
        return "launches"
    return "waits" if "Synchronize" in name or name in {"cudaMemcpy", "cuMemcpyDtoH_v2"} else ""


def _counted(gpu: Gpu, case: Case, profile: Callable[[Callable[[], object]], Counts]) -> Counts:
    case.prepare()
    gpu.wait()
    return profile(case.run)
