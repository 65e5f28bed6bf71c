"""Seconds of a training step with `gradengine.torch.attach`, beside DistributedDataParallel over gloo, and memory.

Run:    torchrun --nproc-per-node 2 measured/ddp.py                  both take turns: seconds of a step, and their ratio
        torchrun --nproc-per-node 2 measured/ddp.py --way ddp        one alone: the most memory of rank 0 beyond its
        torchrun --nproc-per-node 2 measured/ddp.py --way attach     model (a process cannot take its peak back)

A step is `--micro-batches` of a small GPT, clipped by the global norm, and SGD, which has no memory of its own. DDP
sums in the last micro-batch alone (`no_sync` before). Weights are compared first; the slowest rank counts. Memory is
taken over Unix sockets: of shared memory each rank's peak would have the other's arena, too.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from gpu_loop import Gpt, Sizes
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from gradengine import GradientEngine, connect
from gradengine.torch import attach, layout_of

MAX_NORM, LEARNING_RATE = 1.0, 0.01
ROWS, VOCABULARY, HEAD_WIDTH = 2, 1024, 64
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}  # of a weight: bfloat16 has 8 bits
KILOBYTE = 1 if sys.platform == "darwin" else 1024  # what ru_maxrss counts in

Step = Callable[[list[torch.Tensor]], None]


def with_ddp(model: torch.nn.Module) -> Step:
    """The step by torch alone."""
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)

    def step(batches: list[torch.Tensor]) -> None:
        for number, batch in enumerate(batches, start=1):
            with contextlib.nullcontext() if number == len(batches) else parallel.no_sync():
                (parallel(batch) / len(batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return step


def with_attach(model: torch.nn.Module, micro_batches: int, link: str | None = None) -> Step:
    """The step by an engine; None is the link that ranks of one host have."""
    exchange = connect(process_group=distributed.group.WORLD, link=link)
    engine = GradientEngine(layout_of(model), max_norm=MAX_NORM, micro_batches=micro_batches, exchange=exchange)
    attached, optimizer = attach(model, engine), torch.optim.SGD(model.parameters(), LEARNING_RATE)

    def step(batches: list[torch.Tensor]) -> None:
        for batch in batches:
            model(batch).backward()
        attached.step()
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds(step: Step, batches: list[torch.Tensor]) -> float:
    """The slowest rank's, of one step that all begin together."""
    distributed.barrier()
    begin = time.perf_counter()
    step(batches)
    took = torch.tensor(time.perf_counter() - begin)
    distributed.all_reduce(took, distributed.ReduceOp.MAX)
    return float(took)


def compared(model: Gpt, batches: Callable[[], list[torch.Tensor]], options: argparse.Namespace) -> dict[str, float]:
    """Median seconds of a step by each way, and of the ratio; exits where the weights differ."""
    other = copy.deepcopy(model)
    steps = [with_ddp(model), with_attach(other, options.micro_batches)]
    given = batches()
    for step in steps:
        step(given)
    for (name, theirs), ours in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=0, atol=TOLERANCE[options.dtype], msg=lambda text, name=name: f"{name}: {text}"
        )
    rounds = []
    for _ in range(options.repeats):
        given = batches()
        rounds.append([seconds(step, given) for step in steps])
    ddp, ours = zip(*rounds, strict=True)
    ratios = [b / a for a, b in rounds]
    return {
        "ddp": statistics.median(ddp),
        "attach": statistics.median(ours),
        "attach_per_ddp": statistics.median(ratios),
    }


def peak(model: Gpt, batches: Callable[[], list[torch.Tensor]], options: argparse.Namespace) -> dict[str, float]:
    """The most memory of this rank beyond what it had with the model alone, in MiB, and the model's own."""
    model(batches()[0]).backward()  # what torch's first pass takes is not the way's
    model.zero_grad()
    before = _peak()
    step = with_ddp(model) if options.way == "ddp" else with_attach(model, options.micro_batches, "unix")
    for _ in range(3):
        step(batches())
    size = sum(each.nbytes for each in model.parameters())
    return {"more_mib": (_peak() - before) / 2**20, "model_mib": size / 2**20}


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KILOBYTE


def main() -> None:
    """Measure, and print on rank 0."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--way", choices=["ddp", "attach"])
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--dtype", choices=list(TOLERANCE), default="float32")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    distributed.init_process_group("gloo")
    torch.manual_seed(0)
    heads = options.width // HEAD_WIDTH
    sizes = Sizes(options.blocks, options.width, heads, VOCABULARY, batch=ROWS, length=options.length)
    model = Gpt(sizes).to(getattr(torch, options.dtype))
    own = torch.Generator().manual_seed(1 + distributed.get_rank())

    def batches() -> list[torch.Tensor]:
        shape = (ROWS, options.length + 1)
        return [torch.randint(VOCABULARY, shape, generator=own) for _ in range(options.micro_batches)]

    found: dict[str, Any] = {**vars(options), "ranks": distributed.get_world_size()}
    found |= (peak if options.way else compared)(model, batches, options)
    if distributed.get_rank() == 0:
        print(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
