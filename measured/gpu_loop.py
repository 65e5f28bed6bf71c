"""A training step of a GPT of 124 million bf16 parameters by four loops: the stage `loop` of gpu_check.py.

    python measured/gpu_loop.py --json loop.json        on a GPU; `--small` is a tiny model, also where there is none

Each loop has a copy of the model and torch's fused AdamW. A step is K micro-batches, clipped by the global norm:

- torch: backward of loss / K adds up in `.grad`, in bf16; `clip_grad_norm_`
- ours, add: `zero_grad`, backward, `engine.add(gradients_of(model))`; K times
- ours, attach: hooks
- ours, captured: forward and backward of each micro-batch as a graph of torch's, which writes to gradients of its own;
  then one graph of the engine's reads all, adds, clips and hands back

The gradients that each hands to its optimizer in the first step are compared with fp64's sum of the same backward
passes. Then steps take turns.

Peak memory is of a second step, beyond what there was before the loop was built: the most that torch had allocated, or
reserved, and besides what CuPy's pool has taken from the driver, where the arena is. What a graph of torch's needs
between two of its kernels is reserved, and not allocated.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_results import write_whole
from torch.nn import functional

from gradengine import GradientEngine
from gradengine.bench.device import Case, Device, Missing, open_gpu, open_host
from gradengine.bench.harness import Benchmark, Report, Variant, as_json, measure
from gradengine.torch import attach, gradients_of, layout_of

MAX_NORM, LEARNING_RATE = 1.0, 3e-4
TOLERANCE = 5e-2  # of a gradient, of its component's largest: torch's own sum is rounded to bf16's 8 bits K times
WARM_UP = 3  # passes before torch's graph is recorded, as its documentation asks for
SCRATCH = 1 << 14  # elements, where figures mean nothing
Step = Callable[[], object]


@dataclass(frozen=True)
class Sizes:
    """Of the model, of what it reads, and of the run."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50257
    batch: int = 8
    length: int = 1024
    k: int = 4
    rounds: int = 10


class Block(torch.nn.Module):
    """Attention and MLP."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, linear = sizes.width, torch.nn.Linear
        self.heads = sizes.heads
        self.before, self.between = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.attention, self.mixed = linear(width, 3 * width), linear(width, width)
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add both to the residual."""
        split = self.attention(self.before(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mixed(found.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.between(x)), approximate="tanh"))


class Gpt(torch.nn.Module):
    """GPT-2 with a tied head and without dropout."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(sizes.vocabulary, sizes.width)
        self.places = torch.nn.Parameter(0.02 * torch.randn(sizes.length, sizes.width))
        self.blocks = torch.nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.last = torch.nn.LayerNorm(sizes.width)
        torch.nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy of each token after the first."""
        x = self.embedding(tokens[:, :-1]) + self.places
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.last(x), self.embedding.weight)
        return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@dataclass
class Loops:
    """The four loops over one model and one set of micro-batches.

    Attributes:
        peaks: What each took in its second step, in bytes, where that is known.
    """

    device: Device
    sizes: Sizes
    peaks: dict[str, dict[str, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes, where = self.sizes, self.device.torch_device
        torch.manual_seed(0)
        self.model = Gpt(sizes).to(where, torch.bfloat16)
        shape = (sizes.k, sizes.batch, sizes.length + 1)
        self.batches = torch.randint(sizes.vocabulary, shape, device=where).unbind()
        self.expected = self._expected()

    def _expected(self) -> list[torch.Tensor]:
        """What an optimizer should get, in fp32: the mean over micro-batches, clipped, of sums in fp64."""
        parameters = list(self.model.parameters())
        sums = [torch.zeros_like(each, dtype=torch.float64) for each in parameters]
        for batch in self.batches:
            self.model(batch).backward()
            for total, each in zip(sums, parameters, strict=True):
                total.add_(each.grad)
            self.model.zero_grad()
        means = [total / len(self.batches) for total in sums]
        norm = float(torch.stack([each.square().sum() for each in means]).sum().sqrt())
        return [(each * min(1.0, MAX_NORM / norm)).float() for each in means]

    def variants(self) -> list[Variant]:
        """One for each loop; no bytes are counted, as most of the time is the model's own."""
        loops = {"torch": self._torch, "ours add": self._add, "ours attach": self._attach, "ours captured": self._graph}
        return [
            Variant(name, 0, partial(self._case, name, loop), base=name == "torch", required=True)
            for name, loop in loops.items()
        ]

    def _case(self, name: str, loop: Callable[[torch.nn.Module, torch.optim.Optimizer], Step]) -> Case:
        self._drop_unused()
        before = self._memory()
        model = copy.deepcopy(self.model)
        step = loop(model, torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=True))

        def error() -> float:
            pairs = zip(model.parameters(), self.expected, strict=True)
            errors = [(each.grad - wanted).abs().max() / wanted.abs().max() for each, wanted in pairs]
            found = float(torch.stack(errors).max())  # NaN where one is
            if self.device.is_gpu:
                torch.cuda.reset_peak_memory_stats()
                step()
                self.peaks[name] = {kind: size - before[kind] for kind, size in self._memory().items()}
            return found

        return Case(step, error)

    def _drop_unused(self) -> None:
        gc.collect()
        if self.device.is_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self.device.xp.get_default_memory_pool().free_all_blocks()

    def _memory(self) -> dict[str, int]:
        """The most bytes since the peaks were reset."""
        if not self.device.is_gpu:
            return {}
        pooled = self.device.xp.get_default_memory_pool().total_bytes()
        peaks = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        return {kind: size + pooled for kind, size in peaks.items()}

    def _engine(self, model: torch.nn.Module, hold: int = 1) -> GradientEngine:
        where, k = "cuda:0" if self.device.is_gpu else "cpu", self.sizes.k
        return GradientEngine(layout_of(model), where, max_norm=MAX_NORM, micro_batches=k, hold=hold)

    def _torch(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        def step() -> None:
            optimizer.zero_grad()
            for batch in self.batches:
                (model(batch) / len(self.batches)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()

        return step

    def _add(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        engine = self._engine(model)

        def step() -> None:
            for batch in self.batches:
                optimizer.zero_grad()
                model(batch).backward()
                engine.add(gradients_of(model))
            engine.step(out=gradients_of(model))
            optimizer.step()

        return step

    def _attach(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        attached = attach(model, self._engine(model))

        def step() -> None:
            optimizer.zero_grad()
            for batch in self.batches:
                model(batch).backward()
            attached.step()
            optimizer.step()

        return step

    def _graph(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        if not self.device.is_gpu:
            raise Missing("a CPU has no graphs")
        pool, engine = torch.cuda.graph_pool_handle(), self._engine(model, hold=self.sizes.k)
        passes = [Pass(model, batch, pool) for batch in self.batches]
        optimizer.zero_grad()
        out = gradients_of(model, allocate=True)
        with engine.capture() as window:
            for each in passes:
                engine.add(each.gradients)
            engine.step(out=out)

        def step() -> None:
            for each, batch in zip(passes, self.batches, strict=True):
                each.replay(batch)
            window.replay()
            optimizer.step()

        return step


class Pass:
    """Forward and backward of one micro-batch as a graph of torch's, with tokens and gradients of its own.

    All share the memory of what is between: they are replayed in the order in which they were recorded.
    """

    def __init__(self, model: torch.nn.Module, batch: torch.Tensor, pool: Any) -> None:
        self._tokens, self._graph = batch.clone(), torch.cuda.CUDAGraph()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                model.zero_grad()
                model(self._tokens).backward()
        torch.cuda.current_stream().wait_stream(side)
        model.zero_grad()
        with torch.cuda.graph(self._graph, pool=pool):
            model(self._tokens).backward()
        self.gradients = gradients_of(model)

    def replay(self, batch: torch.Tensor) -> None:
        """Write this micro-batch's gradients to where they were recorded."""
        self._tokens.copy_(batch)
        self._graph.replay()


def opened(*, small: bool) -> Device:
    """The first GPU; where there is none, and sizes are small, the CPU."""
    if not small or torch.cuda.is_available():
        gpu = open_gpu()
        if small:
            gpu.scratch = gpu.copied = SCRATCH
        return gpu
    host = open_host(SCRATCH)
    host.rest = host.work = 0.0  # type: ignore[attr-defined]
    return host


def measured(device: Device, sizes: Sizes) -> Report:
    """Compare the loops, then time them."""
    loops = Loops(device, sizes)
    parameters = {**vars(sizes), "dtype": "bfloat16", "odd": False}
    report = measure(device, Benchmark("loop", loops.variants(), TOLERANCE, parameters, "wall"), sizes.rounds)
    return replace(report, parameters={**report.parameters, "peak_bytes": loops.peaks})


def shown(report: Report) -> list[str]:
    """A line for each loop: milliseconds of a step, the host's part in it, the gradients' error, and gigabytes."""
    lines = []
    for row in report.rows:
        peaks = report.parameters["peak_bytes"].get(row.variant, {})
        facts = [f"{1e3 * row.wall_s:.2f} ms", f"host {1e3 * row.host_s:.2f} ms", f"error {row.error:.1e}"]
        facts += [f"{size / 1e9:.2f} GB {kind}" for kind, size in peaks.items()]
        lines.append(f"{report.benchmark}: {row.variant}: {', '.join(facts)}")
    lines += [f"absent: {each.variant}: {each.why}" for each in report.absent]
    return [*lines, *(f"failed: {report.benchmark}: {name}" for name in report.failed)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the loops; 1 if one failed or has other gradients."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("batch", "length", "k", "rounds"):
        made.add_argument(f"--{name}", type=int, default=getattr(Sizes, name))
    made.add_argument("--small", action="store_true", help="tiny sizes, to try that all runs; figures mean nothing")
    made.add_argument("--json", type=Path)
    given = made.parse_args(arguments)
    sizes = Sizes(batch=given.batch, length=given.length, k=given.k, rounds=given.rounds)
    if given.small:
        sizes = Sizes(layers=1, width=32, heads=2, vocabulary=53, batch=2, length=16, k=given.k, rounds=1)
    report = measured(opened(small=given.small), sizes)
    print(*shown(report), sep="\n")
    if given.json is not None:
        write_whole(given.json, f"{as_json({'reports': [report]})}\n")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
