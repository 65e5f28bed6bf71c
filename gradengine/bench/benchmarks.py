"""The GPU's benchmarks by name, and running several in one process; no package of the command line is needed here."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from json import dumps
from pathlib import Path

from gradengine.bench.calls import calls
from gradengine.bench.case import Benchmark, Variant, reason
from gradengine.bench.device import Gpu
from gradengine.bench.launches import Count, LaunchReport, count_launches, profiled
from gradengine.bench.parts import accumulate, clip, hand_back, lora, norm
from gradengine.bench.report import Report, measure
from gradengine.bench.step import compiled, step
from gradengine.bench.workload import Workload, model_layout
from gradengine.bench.yardstick import Yardsticks
from gradengine.errors import CallerError
from gradengine.layout import GradientLayout

__all__ = ["NAMES", "Benchmarks", "Options", "as_json", "run"]

NAMES = (
    *("accumulate", "window", "norm", "hand-back", "hand-back-bf16", "clip"),
    *("step", "compiled", "lora", "host", "launches"),
)

_TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2}  # of peers: torch takes a norm in the gradients' dtype
_LORA_BLOCKS = 4


@dataclass(frozen=True)
class Options:
    """What a run is of."""

    k: int = 4  # micro-batches of a step
    blocks: int = 24  # transformer blocks, beside the LM head
    hidden: int = 1024  # hidden size
    dtype: str = "float32"
    odd: bool = False  # sizes no multiple of 8, buffers at odd elements
    rounds: int = 20  # samples of each variant
    compile_limit: float = 100.0  # seconds that each of torch's compiled variants may take to compile
    lora_hidden: int = 1536  # hidden size of the LoRA blocks


@dataclass(frozen=True)
class Benchmarks:
    """The benchmarks of one run, over one workload."""

    gpu: Gpu
    options: Options = field(default_factory=Options)
    count: Count | None = None  # what counts launches; torch's profiler if None

    @property
    def names(self) -> dict[str, Callable[[], Report | LaunchReport]]:
        """What can be run."""
        return {
            "accumulate": lambda: self._timed("accumulate", accumulate(self._workload.first(2), begun=1)),
            "window": lambda: self._timed("window", accumulate(self._workload, (1, self.options.k))),
            "norm": lambda: self._timed("norm", norm(self._workload.first(1))),
            "hand-back": lambda: self._timed("hand-back", hand_back(self._in_fp32.first(1), to_bf16=False)),
            "hand-back-bf16": lambda: self._timed("hand-back-bf16", hand_back(self._in_fp32.first(1), to_bf16=True)),
            "clip": lambda: self._timed("clip", clip(self._workload.first(1))),
            "step": lambda: self._timed("step", step(self._workload, (1, self.options.k))),
            "compiled": lambda: self._timed("compiled", compiled(self._workload, self.options.compile_limit)),
            "lora": lambda: self._timed("lora", lora(self._lora), "wall"),
            "host": lambda: self._timed("host", calls(self._in_fp32), "host"),
            "launches": lambda: count_launches(
                self.gpu, self._benchmark("launches", step(self._workload, (1, self.options.k))), self._count
            ),
        }

    def _timed(self, name: str, variants: Sequence[Variant], time: str = "device") -> Report:
        """What is about the device's time is compared with what its memory can do."""
        yardsticks = self._yardsticks if time == "device" else None
        return measure(self.gpu, self._benchmark(name, variants, time), self.options.rounds, yardsticks)

    def _benchmark(self, name: str, variants: Sequence[Variant], time: str = "device") -> Benchmark:
        parameters = {key: getattr(self.options, key) for key in ("k", "blocks", "hidden", "dtype", "odd")}
        return Benchmark(name, variants, _TOLERANCE[self.options.dtype], parameters, time)

    @cached_property
    def _workload(self) -> Workload:
        options = self.options
        layout = model_layout(options.blocks, options.hidden, odd=options.odd)
        return Workload.drawn(self.gpu, layout, options.k, options.dtype, odd=options.odd)

    @property
    def _in_fp32(self) -> Workload:
        """The same, of which one micro-batch may be taken for a sum, or as raw memory of fp32."""
        if self.options.dtype != "float32":
            raise CallerError("no such benchmark of this dtype", got=self.options.dtype, expected="--dtype float32")
        return self._workload

    @property
    def _lora(self) -> Workload:
        hidden = self.options.lora_hidden
        layout = GradientLayout.lora(_LORA_BLOCKS, hidden, max(1, hidden // 6), min(16, hidden))
        return Workload.drawn(self.gpu, layout, 1)

    @cached_property
    def _yardsticks(self) -> Yardsticks:
        return Yardsticks(self.gpu)

    @property
    def _count(self) -> Count:
        return self.count or profiled(self.gpu)


def run(
    benchmarks: Benchmarks,
    names: Sequence[str],
    json: Path | None,
    show: Callable[[Report | LaunchReport], object],
) -> list[str]:
    """Run benchmarks one by one; one that fails leaves the others their turn.

    Each report is shown as soon as it is there, and all so far go to the file `json` anew.

    Returns:
        What failed.

    Raises:
        CallerError: There is no benchmark of that name.
    """
    unknown = [name for name in names if name not in benchmarks.names]
    if unknown:
        raise CallerError("no such benchmark", got=unknown[0], expected=", ".join(benchmarks.names))
    reports: list[Report | LaunchReport] = []
    failed: list[str] = []
    for name in names:
        try:
            report = benchmarks.names[name]()
        except Exception as fault:  # noqa: BLE001  (whatever it was, the next benchmark may still run)
            failed.append(f"{name}: {reason(fault)}")
            continue
        show(report)
        reports.append(report)
        failed += [f"{name}: {variant}" for variant in report.failed]
        if json is not None:
            _replace(json, as_json(reports))
    return failed


def as_json(reports: Sequence[Report | LaunchReport]) -> str:
    """All reports as one JSON text."""
    return dumps({"reports": [asdict(report) for report in reports]}, indent=1)


def _replace(path: Path, text: str) -> None:
    """As a whole: whoever is killed leaves what was there before."""
    partial_file = path.with_suffix(".partial")
    partial_file.write_text(f"{text}\n")
    os.replace(partial_file, path)
