"""The GPU's benchmarks by name, and running several in one process; no package of the command line is needed here."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from gradengine.bench.case import Case
from gradengine.bench.gpu.device import Gpu, Sample, Stopwatch
from gradengine.bench.gpu.launches import Counts, LaunchReport, count_launches, profiled
from gradengine.bench.gpu.parts import accumulate_entries, hand_back_entries, norm_entries
from gradengine.bench.gpu.report import Entry, GpuReport, measure_on_gpu, write_reports
from gradengine.bench.gpu.small import host_entries, lora_entries
from gradengine.bench.gpu.step import compiled_entries, step_entries
from gradengine.bench.gpu.workload import DeviceWorkload, model_layout
from gradengine.bench.gpu.yardstick import Yardsticks
from gradengine.errors import CallerError

__all__ = ["Benchmarks", "run"]

_TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2}  # of peers: torch takes a norm in the gradients' dtype


@dataclass(frozen=True)
class Benchmarks:
    """The GPU's benchmarks by name, over one workload.

    Attributes:
        device: Where.
        blocks: Transformer blocks.
        hidden: Hidden size.
        k: Micro-batches of a step.
        dtype: Of the gradients.
        odd: Sizes that are no multiple of 8, at odd elements.
        rounds: Samples of each variant.
        compile_limit: Seconds that each of torch's compiled variants may take to compile.
        lora_hidden: Hidden size of the LoRA blocks.
        clock: The host's; the real one if None.
        count: What counts launches; torch's profiler if None.
    """

    device: Gpu
    blocks: int = 24
    hidden: int = 1024
    k: int = 4
    dtype: str = "float32"
    odd: bool = False
    rounds: int = 20
    compile_limit: float = 100.0
    lora_hidden: int = 1536
    clock: Callable[[], float] | None = None
    count: Callable[[Callable[[], object]], Counts] | None = None

    @property
    def names(self) -> dict[str, Callable[[], GpuReport | LaunchReport]]:
        """What can be run."""
        return {
            "accumulate": lambda: self._device("accumulate", accumulate_entries(self._workload.first(2))),
            "norm": lambda: self._device("norm", norm_entries(self._workload.first(1))),
            "hand-back": lambda: self._hand_back("hand-back", to_bf16=False),
            "hand-back-bf16": lambda: self._hand_back("hand-back-bf16", to_bf16=True),
            "step": lambda: self._device("step", step_entries(self._workload)),
            "compiled": lambda: self._device("compiled", compiled_entries(self._workload, self.compile_limit)),
            "lora": lambda: self._timed("lora", lora_entries(self.device, self.lora_hidden), "wall"),
            "host": lambda: self._timed("host", host_entries(self._workload), "host"),
            "launches": self._launches,
        }

    @cached_property
    def _workload(self) -> DeviceWorkload:
        layout = model_layout(self.blocks, self.hidden, odd=self.odd)
        return DeviceWorkload.drawn(self.device, layout, self.k, self.dtype, odd=self.odd)

    @cached_property
    def _stopwatch(self) -> Callable[[Case], Sample]:
        return Stopwatch(self.device) if self.clock is None else Stopwatch(self.device, self.clock)

    @cached_property
    def _yardsticks(self) -> Yardsticks:
        return Yardsticks(self.device)

    @property
    def _parameters(self) -> dict[str, object]:
        names = ("k", "blocks", "hidden", "dtype", "odd")
        return {name: getattr(self, name) for name in names}

    def _hand_back(self, name: str, *, to_bf16: bool) -> GpuReport:
        if self.dtype != "float32":
            raise CallerError(f"{name} starts from the sum in fp32", got=self.dtype, expected="--dtype float32")
        return self._device(name, hand_back_entries(self._workload.first(1), to_bf16=to_bf16))

    def _device(self, name: str, entries: Sequence[Entry]) -> GpuReport:
        return self._timed(name, [*entries, *self._yardsticks.entries(name)], "device")

    def _timed(self, name: str, entries: Sequence[Entry], time: str) -> GpuReport:
        return measure_on_gpu(
            self.device,
            name,
            entries,
            self.rounds,
            self._stopwatch,
            time=time,
            tolerance=_TOLERANCE[self.dtype],
            parameters=self._parameters,
        )

    def _launches(self) -> LaunchReport:
        count = self.count or profiled(self.device)
        entries, tolerance = step_entries(self._workload), _TOLERANCE[self.dtype]
        return count_launches(self.device, entries, count, tolerance=tolerance, parameters=self._parameters)


def run(
    benchmarks: Benchmarks,
    names: Sequence[str],
    json: Path | None,
    show: Callable[[GpuReport | LaunchReport], object],
) -> list[str]:
    """Run benchmarks one by one; one that fails leaves the others their turn.

    Args:
        benchmarks: All of them.
        names: Which.
        json: Where the reports go, after each benchmark anew.
        show: Shows each report as soon as it is there.

    Returns:
        What failed.

    Raises:
        CallerError: There is no benchmark of that name.
    """
    unknown = [name for name in names if name not in benchmarks.names]
    if unknown:
        raise CallerError("no such benchmark", got=unknown[0], expected=", ".join(benchmarks.names))
    reports: list[GpuReport | LaunchReport] = []
    failed: list[str] = []
    for name in names:
        try:
            report = benchmarks.names[name]()
        except Exception as fault:  # noqa: BLE001  (whatever it was, the next benchmark may still run)
            traceback.print_exc(limit=-8, file=sys.stderr)
            failed.append(f"{name}: {type(fault).__name__}: {fault}")
            continue
        show(report)
        reports.append(report)
        failed += [f"{name}: {variant}" for variant in report.failed]
        if json is not None:
            write_reports(json, reports)
    return failed
