"""The benchmarks of a GPU, one by one in a process: `python measured/gpu_bench.py step norm --json step.json`.

They are those of `gradengine bench gpu`, and more; typer and rich need not be installed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from gpu_results import write_whole
from gpu_variants import calls, compiled, count_launches, finalise, half_absent, hand_back, lora, step_calls

from gradengine import GradientLayout
from gradengine.bench.device import Gpu, open_gpu
from gradengine.bench.harness import Benchmark, Report, Variant, as_json, measure, reason, yardstick
from gradengine.bench.parts import accumulate, clip, norm
from gradengine.bench.step import step
from gradengine.bench.workload import Workload, model_layout
from gradengine.errors import CallerError

TOLERANCES = {"float32": 1e-3, "bfloat16": 3e-2}  # of peers: torch takes a norm in the gradients' dtype
SMALL_ELEMENTS = 1 << 14
ODD = (1, 3, 5, 7)
LORA_BLOCKS = 4
# Of many experts, and an embedding of 128,000 x 4,096: components of 12 and of 16,000 chunks.
SETS = {
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

    def __post_init__(self) -> None:
        if self.options.odd:
            self.gpu.shifts = ODD

    def report(self, name: str) -> Report:
        """Run one benchmark; figures of the device's time are compared with its memory's bandwidth."""
        options, time = self.options, TIMES.get(name, "device")
        size = {"blocks": options.blocks, "hidden": options.hidden}
        if name in SMALL:
            size = {"tensors": options.tensors[SMALL[name]], "elements": options.elements}
        parameters = {"k": options.k, **size, "dtype": options.dtype, "odd": options.odd}
        benchmark = Benchmark(name, VARIANTS[name](self), TOLERANCES[options.dtype], parameters, time)
        if name == "launches":
            return count_launches(self.gpu, benchmark)
        return measure(self.gpu, benchmark, options.rounds, [self._copy] if time == "device" else ())

    @cached_property
    def workload(self) -> Workload:
        """The model's gradients."""
        return Workload.drawn(self.gpu, self.layout, self.options.k, self.options.dtype)

    @property
    def layout(self) -> GradientLayout:
        """The model's layout."""
        layout = model_layout(self.options.blocks, self.options.hidden)
        return GradientLayout.of({slot.name: (slot.size - 3,) for slot in layout.slots}) if self.options.odd else layout

    @property
    def in_fp32(self) -> Benchmarks:
        """These benchmarks, whose gradients must be fp32, as sums and raw fp32 memory are."""
        if self.options.dtype != "float32":
            raise CallerError("this benchmark needs fp32", got=self.options.dtype, expected="--dtype float32")
        return self

    def small(self, name: str) -> Workload:
        """The gradients of a model of a few or of many small tensors, whose time is that of the calls and launches."""
        layout = GradientLayout.of([(self.options.elements,)] * self.options.tensors[SMALL[name]])
        return Workload.drawn(self.gpu, layout, self.options.k, self.options.dtype)

    @property
    def lora(self) -> Workload:
        """The gradients of a few LoRA blocks."""
        hidden = self.options.lora_hidden
        layout = GradientLayout.lora(LORA_BLOCKS, hidden, max(1, hidden // 6), min(16, hidden))
        return Workload.drawn(self.gpu, layout, 1)

    @property
    def holds(self) -> tuple[int, int]:
        """The values of `hold` for ours: one micro-batch, or all."""
        return 1, self.options.k

    @cached_property
    def _copy(self) -> Variant:
        return yardstick(self.gpu)


VARIANTS: Mapping[str, Callable[[Benchmarks], list[Variant]]] = {
    "accumulate": lambda this: accumulate(this.workload.first(2), begun=1),
    "window": lambda this: accumulate(this.workload, this.holds),
    "norm": lambda this: norm(this.workload.first(1)),
    "finalise": lambda this: finalise(this.gpu, {"the model": this.layout, **SETS}),
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
SMALL = {"step-few": 0, "step-many": 1, "half-none": 1, "host": 1, "step-call": 1}  # which of the numbers of tensors
# Which of a sample's times, where it is not the device's.
TIMES = {**dict.fromkeys(("lora", *SMALL), "wall"), **dict.fromkeys(("host", "step-call"), "host")}


def run(benchmarks: Benchmarks, names: Sequence[str], json: Path | None) -> list[str]:
    """Run benchmarks one by one, and return what failed; after a failure the others still run.

    All reports so far are written to the file `json` after each.
    """
    reports: list[Report] = []
    failed: list[str] = []
    for name in names:
        try:
            report = benchmarks.report(name)
        except Exception as fault:  # noqa: BLE001  (whatever it was, the next benchmark may still run)
            failed.append(f"{name}: {reason(fault)}")
            continue
        print(f"{name}: {len(report.rows)} variants, {len(report.absent)} absent", flush=True)
        reports.append(report)
        failed += [f"{name}: {variant}" for variant in report.failed]
        if json is not None:
            write_whole(json, f"{as_json({'reports': reports})}\n")
    return failed


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("names", nargs="+", choices=VARIANTS, metavar="name", help=f"any of {', '.join(VARIANTS)}")
    made.add_argument("--blocks", type=int, default=Options.blocks)
    made.add_argument("--dtype", default=Options.dtype, choices=TOLERANCES)
    made.add_argument("--odd", action="store_true", help="sizes that are no multiple of 8, buffers at odd elements")
    made.add_argument("--rounds", type=int, default=Options.rounds)
    made.add_argument("--compile-limit", type=float, default=Options.compile_limit, help="seconds for each variant")
    made.add_argument("--small", action="store_true", help="small sizes, to try that all runs; figures mean nothing")
    made.add_argument("--json", type=Path)
    return made


def benchmarks_of(given: argparse.Namespace, gpu: Gpu) -> Benchmarks:
    """Return the benchmarks with these options, on a device."""
    options = {name: getattr(given, name) for name in ("blocks", "dtype", "odd", "rounds", "compile_limit")}
    if given.small:
        gpu.scratch = gpu.copied = SMALL_ELEMENTS
        options |= {"blocks": 1, "hidden": 16, "rounds": 2, "lora_hidden": 48, "tensors": (3, 5), "elements": 50}
    return Benchmarks(gpu, Options(**options))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run them; 1 if something failed."""
    given = parser().parse_args(arguments)
    failed = run(benchmarks_of(given, open_gpu()), given.names, given.json)
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
