"""The GPU's benchmarks by name, and running several in one process; no package of the command line is needed here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from gradengine.bench.device import Gpu
from gradengine.bench.harness import Benchmark, Report, Variant, as_json, count_launches, measure, reason, yardsticks
from gradengine.bench.parts import accumulate, clip, finalise, hand_back, lora, norm
from gradengine.bench.step import calls, compiled, half_absent, step, step_calls
from gradengine.bench.workload import Workload, model_layout
from gradengine.errors import CallerError
from gradengine.layout import GradientLayout

__all__ = ["NAMES", "Benchmarks", "Options", "run"]

_TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2}  # of peers: torch takes a norm in the gradients' dtype
_LORA_BLOCKS = 4
# Of many experts, and an embedding of 128,000 x 4,096: components of 12 and of 16,000 chunks.
_SETS = {
    "1,000 components": GradientLayout.of([(12 << 15,)] * 1000),
    "one component": GradientLayout.of([(16000 << 15,)]),
}


@dataclass(frozen=True)
class Options:
    """The options of a run."""

    k: int = 4  # micro-batches of a step
    blocks: int = 24  # transformer blocks, beside the LM head
    hidden: int = 1024  # hidden size
    dtype: str = "float32"
    odd: bool = False  # sizes no multiple of 8, buffers at odd elements
    rounds: int = 20  # samples of each variant
    compile_limit: float = 100.0  # seconds that each of torch's compiled variants may take to compile
    lora_hidden: int = 1536  # hidden size of the LoRA blocks
    tensors: tuple[int, int] = (34, 218)  # of the small models, all alike
    elements: int = 10_000  # of each of these tensors


@dataclass(frozen=True)
class Benchmarks:
    """The benchmarks of one run, over one workload."""

    gpu: Gpu
    options: Options = field(default_factory=Options)

    def report(self, name: str) -> Report:
        """Run one benchmark; figures of the device's time are compared with its memory's bandwidth."""
        options, time = self.options, _TIMES.get(name, "device")
        parameters = {"k": options.k, **self._size(name), "dtype": options.dtype, "odd": options.odd}
        benchmark = Benchmark(name, _VARIANTS[name](self), _TOLERANCE[options.dtype], parameters, time)
        if name == "launches":
            return count_launches(self.gpu, benchmark)
        return measure(self.gpu, benchmark, options.rounds, self._yardsticks if time == "device" else ())

    @cached_property
    def workload(self) -> Workload:
        """The model's gradients."""
        options = self.options
        return Workload.drawn(self.gpu, self.layout, options.k, options.dtype, odd=options.odd)

    @property
    def layout(self) -> GradientLayout:
        """The model's."""
        return model_layout(self.options.blocks, self.options.hidden, odd=self.options.odd)

    @property
    def in_fp32(self) -> Benchmarks:
        """These, whose gradients must be fp32, as sums and raw fp32 memory are."""
        if self.options.dtype != "float32":
            raise CallerError("this benchmark needs fp32", got=self.options.dtype, expected="--dtype float32")
        return self

    def small(self, name: str) -> Workload:
        """The gradients of a model of a few or of many small tensors, whose time is that of the calls and launches."""
        layout = GradientLayout.of([(self.options.elements,)] * self.options.tensors[_SMALL[name]])
        return Workload.drawn(self.gpu, layout, self.options.k, self.options.dtype, odd=self.options.odd)

    @property
    def lora(self) -> Workload:
        """The gradients of a few LoRA blocks."""
        hidden = self.options.lora_hidden
        layout = GradientLayout.lora(_LORA_BLOCKS, hidden, max(1, hidden // 6), min(16, hidden))
        return Workload.drawn(self.gpu, layout, 1)

    @property
    def holds(self) -> tuple[int, int]:
        """The values of `hold` for ours: one micro-batch, or all."""
        return 1, self.options.k

    def _size(self, name: str) -> dict[str, int]:
        options = self.options
        if name in _SMALL:
            return {"tensors": options.tensors[_SMALL[name]], "elements": options.elements}
        return {"blocks": options.blocks, "hidden": options.hidden}

    @cached_property
    def _yardsticks(self) -> list[Variant]:
        return yardsticks(self.gpu)


_VARIANTS: Mapping[str, Callable[[Benchmarks], list[Variant]]] = {
    "accumulate": lambda this: accumulate(this.workload.first(2), begun=1),
    "window": lambda this: accumulate(this.workload, this.holds),
    "norm": lambda this: norm(this.workload.first(1)),
    "finalise": lambda this: finalise(this.gpu, {"the model": this.layout, **_SETS}),
    "hand-back": lambda this: hand_back(this.in_fp32.workload.first(1), to_bf16=False),
    "hand-back-bf16": lambda this: hand_back(this.in_fp32.workload.first(1), to_bf16=True),
    "clip": lambda this: clip(this.workload.first(1)),
    "step": lambda this: step(this.workload, this.holds),
    "step-few": lambda this: step(this.small("step-few"), this.holds),
    "step-many": lambda this: step(this.small("step-many"), this.holds),
    "half-none": lambda this: half_absent(this.small("half-none")),
    "compiled": lambda this: compiled(this.workload, this.options.compile_limit),
    "lora": lambda this: lora(this.lora),
    "host": lambda this: calls(this.in_fp32.small("host")),
    "step-call": lambda this: step_calls(this.small("step-call")),
    "launches": lambda this: step(this.workload, this.holds),
}
_SMALL = {"step-few": 0, "step-many": 1, "half-none": 1, "host": 1, "step-call": 1}  # which of the numbers of tensors
# Which of a sample's times, where it is not the device's.
_TIMES = {**dict.fromkeys(("lora", *_SMALL), "wall"), **dict.fromkeys(("host", "step-call"), "host")}
NAMES = tuple(_VARIANTS)


def run(benchmarks: Benchmarks, names: Sequence[str], json: Path | None, show: Callable[[Report], object]) -> list[str]:
    """Run benchmarks one by one, and return what failed; after a failure the others still run.

    Each report is shown at once, and all reports so far are written to the file `json` again.
    """
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise CallerError("unknown benchmark", got=unknown[0], expected=", ".join(NAMES))
    reports: list[Report] = []
    failed: list[str] = []
    for name in names:
        try:
            report = benchmarks.report(name)
        except Exception as fault:  # noqa: BLE001  (whatever it was, the next benchmark may still run)
            failed.append(f"{name}: {reason(fault)}")
            continue
        show(report)
        reports.append(report)
        failed += [f"{name}: {variant}" for variant in report.failed]
        if json is not None:  # as a whole: whoever is killed leaves what was there before
            partial_file = json.with_suffix(".partial")
            partial_file.write_text(f"{as_json({'reports': reports})}\n")
            os.replace(partial_file, json)
    return failed
