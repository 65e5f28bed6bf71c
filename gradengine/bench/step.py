"""The whole step of a window of K micro-batches: added, checked, clipped, averaged, handed back.

Bytes counted, of G a micro-batch's gradients and A the sum in fp32; for each element at K = 4 in fp32 (bfloat16):

| variant | reads and writes | bytes an element |
|---|---|---|
| ours hold=1 | 4 G; A written by the first, read and written by the others; hand back 2 A | 16 + 28 + 8 = 52 (44) |
| ours hold=4 | 4 G; A written once; hand back 2 A | 16 + 4 + 8 = 28 (20) |
| torch foreach, sum | zero A; 4 x (G + 2 A); norm A; multiply 2 A | 4 + 48 + 4 + 8 = 64 (56) |
| torch foreach, mean | the same, and 2 A for the average, which ours always takes | 72 (64) |
| torch foreach, sum, graph | as sum | 64 (56) |
| torch.compile, by micro-batch | 4 G; A as ours hold=1; norm A; multiply 2 A: the fewest that it can move | 56 (48) |
| torch.compile, whole window | 4 G; A written once; norm A; multiply 2 A: the fewest | 32 (24) |
| by hand | as torch sum (and what its temporaries take, which is not counted) | 64 (56) |

Launches on a GPU for n = 218 tensors: ours K + 2 (hold=1) and 3 (hold=4), replayed 1 launch of the host's; torch
foreach 1 for each list that its kernel arguments hold: about ceil(6190 chunks of 65536 / 320), or / 2240 in builds for
CUDA 13, for each of the 2 + K passes, plus the norm's second stage, and n for each micro-batch of bfloat16; by hand n
for each pass, n waits for the norm. `bench gpu launches` counts them.
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
    """Ours without holding and with it, by hand, and torch; on a GPU ours and torch as CUDA graphs too.

    Torch is given the average for nothing (as where the loss was divided by K), and once more with a pass for it.
    """
    device, bound, by_passes = workload.device, workload.max_norm, bytes_of_step(workload, 3)

    def of_peer(kind: type[Peer], *, averages: bool, is_recorded: bool = False) -> Case:
        peer, adds = adding(workload, kind)
        # A sum clipped to K max_norm is K times the average clipped to max_norm: no pass is charged for the average.
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
    """Bytes of the additions, and of `sets` reads or writes of the sum after them."""
    return bytes_of_adding(workload, hold) + sets * workload.sum_bytes


def our_steps(workload: Workload, holds: Sequence[int]) -> list[Variant]:
    """Our variants: one for each hold, on a GPU both eager and captured."""
    ways = {"": False, ", captured": True} if workload.device.is_gpu else {"": False}
    case = partial(our_step, workload, workload.max_norm)
    return [
        ours(f"ours hold={hold}{way}", bytes_of_step(workload, 2, hold), partial(case, hold, is_captured=is_captured))
        for hold in dict.fromkeys(holds)
        for way, is_captured in ways.items()
    ]


def our_step(workload: Workload, bound: float, hold: int = 1, *, is_captured: bool, **replay: Any) -> Case:
    """Return our step; `replay` is how it is replayed, if it is captured."""
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
