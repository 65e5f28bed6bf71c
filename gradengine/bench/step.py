"""The benchmark of the whole step, which adds K micro-batches, checks, clips, averages and writes the result.

G is the gradients of one micro-batch, A is the sum in fp32. The bytes of an element are for K = 4 in fp32 (bfloat16).

| variant | reads and writes | bytes an element |
|---|---|---|
| ours hold=1 | 4 G + A (first micro-batch) + 3 x 2 A (others) + 2 A (result) | 16 + 28 + 8 = 52 (44) |
| ours hold=4 | 4 G + A (sum) + 2 A (result) | 16 + 4 + 8 = 28 (20) |
| torch foreach, sum | A (zero) + 4 x (G + 2 A) + A (norm) + 2 A (multiply) | 4 + 48 + 4 + 8 = 64 (56) |
| torch foreach, mean | the same + 2 A (average, which gradengine includes) | 72 (64) |
| torch foreach, sum, graph | as sum | 64 (56) |
| torch.compile, by micro-batch | 4 G + 7 A (sum) + A (norm) + 2 A (multiply), the fewest possible | 56 (48) |
| torch.compile, whole window | 4 G + A (sum) + A (norm) + 2 A (multiply), the fewest possible | 32 (24) |
| by hand | as torch sum, without counting its temporaries | 64 (56) |

Launches on a GPU for n = 218 tensors: gradengine needs K + 2 (hold=1) or 3 (hold=4), and a replay needs 1 launch by the
host. torch foreach needs 1 for each list that fits its kernel arguments. These are about ceil(6190 chunks of 65536 /
320) for each of the 2 + K passes, or / 2240 in builds for CUDA 13. The norm's second stage adds to them, and n for each
micro-batch of bfloat16. By hand needs n for each pass, and waits n times for the norm. `measured/gpu_bench.py launches`
counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from gradengine.bench.device import Case, Gpu
from gradengine.bench.harness import Variant, in_turn
from gradengine.bench.parts import bytes_of_adding, ours
from gradengine.bench.peers import ByHand, Peer, Torch, adding, peers, torch_name
from gradengine.bench.workload import Workload
from gradengine.engine import GradientEngine
from gradengine.engine.result import StepResult


def step(workload: Workload, holds: Sequence[int]) -> list[Variant]:
    """Return the step's variants: gradengine with each of `holds`, by hand, and torch. A GPU adds CUDA graphs of both.

    torch runs once with a loss that was divided by K, which costs no pass, and once with a pass for the average.
    """
    device, bound, by_passes = workload.device, workload.max_norm, bytes_of_step(workload, 3)

    def of_peer(kind: type[Peer], *, averages: bool, is_recorded: bool = False) -> Case:
        peer, adds = adding(workload, kind)
        # The average needs no pass, since a sum clipped to K max_norm is K times the average clipped to max_norm.
        times = 1 if averages else workload.count
        run: Callable[[], object] = in_turn([*adds, partial(peer.clip, bound * times, workload.count // times)])
        if is_recorded:
            assert isinstance(device, Gpu)
            run = device.recorded(run)
        return Case(run, lambda: workload.error_of_step(peer.gradients, times))

    name = torch_name(workload)
    graph = Variant(f"{name}, sum, graph", by_passes, partial(of_peer, Torch, averages=False, is_recorded=True))
    return [
        *our_steps(workload, holds),
        *peers(workload, by_passes, lambda kind: of_peer(kind, averages=kind is ByHand), f"{name}, sum"),
        Variant(f"{name}, mean", bytes_of_step(workload, 5), partial(of_peer, Torch, averages=True)),
        *([graph] if device.is_gpu else []),
    ]


def bytes_of_step(workload: Workload, sets: int, hold: int | None = None) -> int:
    """Return the bytes of the additions, and of `sets` reads or writes of the sum after them."""
    return bytes_of_adding(workload, hold) + sets * workload.sum_bytes


def our_steps(workload: Workload, holds: Sequence[int]) -> list[Variant]:
    """Return gradengine's variants, one for each of `holds`. On a GPU each is both eager and captured."""
    ways = {"": False, ", captured": True} if workload.device.is_gpu else {"": False}
    case = partial(our_step, workload, workload.max_norm)
    return [
        ours(f"ours hold={hold}{way}", bytes_of_step(workload, 2, hold), partial(case, hold, is_captured=is_captured))
        for hold in dict.fromkeys(holds)
        for way, is_captured in ways.items()
    ]


def our_step(workload: Workload, bound: float, hold: int = 1, *, is_captured: bool, **replay: Any) -> Case:
    """Return gradengine's step. `replay` holds the arguments of its replay, if the step is captured."""
    kernels, count = workload.device.kernels, workload.count
    engine = GradientEngine(workload.layout, kernels, max_norm=bound, micro_batches=count, hold=hold)
    workload.device.poison(list(engine.accumulator.arrays().values()))
    micro_batches = workload.for_ours()

    def run() -> StepResult:
        for gradients in micro_batches:
            engine.add(gradients)
        return engine.step()

    if is_captured:
        with engine.capture() as graph:
            run()
        run = partial(graph.replay, **replay)

    def error() -> float:
        norm = float(run().norm)
        found = workload.error_of_step(list(engine.accumulator.arrays().values()))
        return float(np.max([found, workload.error_of_norm(norm)]))  # NaN stays NaN

    return Case(run, error)
