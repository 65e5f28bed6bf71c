"""What a step asks of a GPU: kernels, copies, fills, calls that launch, calls that wait; counted, not timed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeAlias

from gradengine.bench.case import Benchmark, check
from gradengine.bench.device import Gpu
from gradengine.bench.report import Report, report_of

__all__ = ["COUNTED", "Count", "count_launches", "counts_of", "profiled"]

# A launch is a call of the host: of a kernel, or of a graph of many. In a wait the host waits for the device.
COUNTED = ("kernels", "copies", "fills", "launches", "waits")

Count: TypeAlias = "Callable[[Callable[[], object]], Counter[str]]"  # what counts one call


def count_launches(gpu: Gpu, benchmark: Benchmark, count: Count) -> Report:
    """Run each variant that computes the same once under a profiler; ours that wait for the device have failed."""
    checked, absent, failed = check(benchmark)
    rows, of_nothing = {}, count(lambda: None)  # the profiler's own
    for each in checked:
        each.case.prepare()
        gpu.wait()
        found = count(each.case.run) - of_nothing
        rows[each.variant.name] = {kind: found[kind] for kind in COUNTED}
    waiting = [
        f"{each.variant.name} waits" for each in checked if each.variant.base and rows[each.variant.name]["waits"]
    ]
    return report_of(gpu, benchmark, rows, absent, [*failed, *waiting])


def profiled(gpu: Gpu) -> Count:
    """Counts by torch's profiler, which sees every call of the process, CuPy's too; raises as `Device.torch`."""
    profiler = gpu.torch.profiler
    activities = [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.CUDA]

    def count(run: Callable[[], object]) -> Counter[str]:
        with profiler.profile(activities=activities) as found:
            run()
        return counts_of((str(event.device_type), event.name) for event in found.events())

    return count


def counts_of(events: Iterable[tuple[str, str]]) -> Counter[str]:
    """Counts of (device type, name) pairs, as torch's profiler gives them.

    >>> sorted(counts_of([("DeviceType.CPU", "cuLaunchKernel"), ("DeviceType.CUDA", "accumulate_1_small")]).items())
    [('kernels', 1), ('launches', 1)]
    """
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
