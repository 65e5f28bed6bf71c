"""What a step asks of a GPU: kernels, copies, fills, calls that launch, calls that wait; counted, not timed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from gradengine.bench.case import Absent, Benchmark, check
from gradengine.bench.device import Gpu
from gradengine.bench.machine import machine, versions

__all__ = ["Count", "Counts", "LaunchReport", "count_launches", "counts_of", "profiled"]


@dataclass(frozen=True)
class Counts:
    """Of one run."""

    kernels: int = 0
    copies: int = 0
    fills: int = 0
    launches: int = 0  # calls of the host that launch: a kernel, or a graph of many
    waits: int = 0  # calls in which the host waits for the device

    def less(self, other: Counts) -> Counts:
        """What is beyond another's; never below 0."""
        theirs = asdict(other)
        return Counts(**{name: max(0, mine - theirs[name]) for name, mine in asdict(self).items()})


Count = Callable[[Callable[[], object]], Counts]  # what counts one call


@dataclass(frozen=True)
class LaunchReport:
    """The counts of each variant of a step."""

    benchmark: str
    parameters: Mapping[str, object]
    machine: Mapping[str, object]
    versions: Mapping[str, str | None]
    rows: Mapping[str, Counts]
    absent: Sequence[Absent]
    failed: Sequence[str]  # what should have run and did not, and ours that wait for the device


def count_launches(gpu: Gpu, benchmark: Benchmark, count: Count) -> LaunchReport:
    """Run each variant that computes the same once under a profiler."""
    checked, absent, failed = check(benchmark)
    rows, of_nothing = {}, count(lambda: None)  # the profiler's own
    for each in checked:
        each.case.prepare()
        gpu.wait()
        rows[each.variant.name] = count(each.case.run).less(of_nothing)
    waiting = [f"{each.variant.name} waits" for each in checked if each.variant.base and rows[each.variant.name].waits]
    where = (machine(gpu.xp), versions(gpu.xp))
    return LaunchReport(benchmark.name, benchmark.parameters, *where, rows, absent, [*failed, *waiting])


def profiled(gpu: Gpu) -> Count:
    """Counts by torch's profiler, which sees every call of the process, CuPy's too; raises as `Device.torch`."""
    profiler = gpu.torch.profiler
    activities = [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.CUDA]

    def count(run: Callable[[], object]) -> Counts:
        with profiler.profile(activities=activities) as found:
            run()
        return counts_of((str(event.device_type), event.name) for event in found.events())

    return count


def counts_of(events: Iterable[tuple[str, str]]) -> Counts:
    """Counts of (device type, name) pairs, as torch's profiler gives them.

    Example:
        >>> counts_of([("DeviceType.CPU", "cuLaunchKernel"), ("DeviceType.CUDA", "accumulate_1_small")])
        Counts(kernels=1, copies=0, fills=0, launches=1, waits=0)
    """
    kinds = (_kind(name, on_device=device.endswith("CUDA")) for device, name in events)
    return Counts(**Counter(kind for kind in kinds if kind))


def _kind(name: str, *, on_device: bool) -> str | None:
    if on_device:
        return "copies" if name.startswith("Memcpy") else "fills" if name.startswith("Memset") else "kernels"
    if not name.startswith("cu"):
        return None  # an operator of torch
    if "Launch" in name:
        return "launches"
    return "waits" if "Synchronize" in name or name in {"cudaMemcpy", "cuMemcpyDtoH_v2"} else None
