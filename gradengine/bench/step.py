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

import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from gradengine.bench.case import Case, Missing, Variant, in_turn
from gradengine.bench.device import Device, Gpu, Tensor
from gradengine.bench.parts import OURS, bytes_of_adding
from gradengine.bench.peers import ByHand, Peer, Torch, adding, by_hand_name, torch_name
from gradengine.bench.workload import Workload
from gradengine.engine import GradientEngine
from gradengine.result import StepResult

__all__ = ["compiled", "limited", "step"]

_LEAST_BYTES = 1 << 20  # of a set whose memory is measured: below it the interpreter's own growth is all that is seen


def step(workload: Workload, holds: Sequence[int]) -> list[Variant]:
    """Ours without holding and with it, by hand, and torch; on a GPU ours and torch as CUDA graphs too.

    Torch is given the average for nothing (as where the loss was divided by K), and once more with a pass for it.
    """
    device, by_passes = workload.device, _bytes(workload, 3)
    torch, bound = torch_name(device, workload.dtype), workload.max_norm  # the benchmark's own work and memory
    add_and_clip = partial(_of_peer, workload, bound)
    peers = [
        Variant(by_hand_name(device), by_passes, partial(add_and_clip, ByHand, averages=True)),
        Variant(f"{torch}, sum", by_passes, partial(add_and_clip, Torch, averages=False)),
        Variant(f"{torch}, mean", _bytes(workload, 5), partial(add_and_clip, Torch, averages=True)),
    ]
    if isinstance(device, Gpu):
        graph = partial(add_and_clip, Torch, averages=False, recorded=device.recorded)
        peers.append(Variant(f"{torch}, sum, graph", by_passes, graph))
    _start_torch(device)
    return [_with_memory(workload, variant) for variant in (*_ours(workload, holds), *peers)]


def compiled(workload: Workload, limit: float) -> list[Variant]:
    """On a GPU ours beside `torch.compile` of the same, whose two ways may each take `limit` seconds to compile."""
    count, build = workload.count, partial(_compiled, workload, limit)
    return [
        *_ours(workload, (1, count)),
        Variant("torch.compile, by micro-batch", _bytes(workload, 3, 1), partial(build, whole=False)),
        Variant("torch.compile, whole window", _bytes(workload, 3, count), partial(build, whole=True)),
    ]


def _bytes(workload: Workload, sets: int, hold: int | None = None) -> int:
    """Of the additions, and of as many reads or writes of the sum after them."""
    return bytes_of_adding(workload, hold) + sets * workload.sum_bytes


def _start_torch(device: Device) -> None:
    """Each operation once, so that PyTorch's own start (libraries, threads) counts as nobody's memory."""
    with contextlib.suppress(Missing):
        peer = Torch.over(device, device.placed([np.ones(1 << 16, np.float32)]))
        peer.add(peer.gradients)
        peer.clip(1.0, divisor=2.0)


def _with_memory(workload: Workload, variant: Variant) -> Variant:
    """Its case says what it took from its first allocation to the end of its first step."""

    def build_and_run() -> Case:
        case = variant.build()
        case.run()
        return case

    def build() -> Case:
        case, grown = workload.device.peak_growth(build_and_run)
        if grown is None or workload.sum_bytes < _LEAST_BYTES:
            return case
        return replace(case, arenas=grown / workload.sum_bytes)

    return replace(variant, build=build)


def _ours(workload: Workload, holds: Sequence[int]) -> list[Variant]:
    """For each hold, on a GPU eager and captured."""
    ways = {"": False, ", captured": True} if isinstance(workload.device, Gpu) else {"": False}
    bound = workload.max_norm
    return [
        Variant(
            f"ours hold={hold}{way}",
            _bytes(workload, 2, hold),
            partial(_our_step, workload, bound, hold, is_captured=is_captured),
            base=True,
            tolerance=OURS,
        )
        for hold in dict.fromkeys(holds)
        for way, is_captured in ways.items()
    ]


def _our_step(workload: Workload, bound: float, hold: int, *, is_captured: bool) -> Case:
    kernels, count = workload.device.kernels, workload.count
    engine = GradientEngine(workload.layout, kernels, max_norm=bound, micro_batches=count, hold=hold)
    workload.device.poison(list(engine.accumulator.views().values()))
    micro_batches = workload.for_ours()

    def eager() -> StepResult:
        for gradients in micro_batches:
            engine.add(gradients)
        return engine.step()

    run: Callable[[], StepResult] = eager
    if is_captured:
        with engine.capture() as graph:
            eager()
        run = graph.replay

    def error() -> float:
        norm = float(run().norm)
        found = workload.error_of_step(list(engine.accumulator.views().values()))
        return float(np.max([found, workload.error_of_norm(norm)]))  # NaN stays NaN

    return Case(run, error)


def _of_peer(
    workload: Workload,
    bound: float,
    kind: type[Peer],
    *,
    averages: bool,
    recorded: Callable[[Callable[[], object]], Callable[[], object]] | None = None,
) -> Case:
    peer, adds = adding(workload, kind)
    # A sum clipped to K max_norm is K times the average clipped to max_norm: no pass is charged for the average.
    times = 1 if averages else workload.count
    run: Callable[[], object] = in_turn([*adds, partial(peer.clip, bound * times, workload.count // times)])
    return Case(recorded(run) if recorded else run, lambda: workload.error_of_step(peer.gradients, times))


def _compiled(workload: Workload, limit: float, *, whole: bool) -> Case:
    """The step as functions over lists of tensors: a call for each micro-batch, as backward makes them, or for all."""
    torch, bound = workload.device.torch, workload.max_norm * workload.count
    assert isinstance(workload.device, Gpu)

    def add(totals: list[Tensor], gradients: list[Tensor]) -> None:
        torch._foreach_add_(totals, gradients)

    def begin(totals: list[Tensor], gradients: list[Tensor]) -> None:
        torch._foreach_zero_(totals)
        torch._foreach_add_(totals, gradients)

    def clip(totals: list[Tensor]) -> None:
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(totals)))
        torch._foreach_mul_(totals, torch.clamp(bound / (norm + 1e-6), max=1.0))

    def window(totals: list[Tensor], micro_batches: list[list[Tensor]]) -> None:
        torch._foreach_zero_(totals)
        for gradients in micro_batches:
            torch._foreach_add_(totals, gradients)
        clip(totals)

    totals: Any = Torch.sums_for(workload).gradients
    micro_batches = [workload.device.tensors(batch) for batch in workload.batches]
    compile_ = workload.device.compiled
    begins, adds, clips, windows = compile_(begin), compile_(add), compile_(clip), compile_(window)

    def by_micro_batch() -> None:
        begins(totals, micro_batches[0])
        for gradients in micro_batches[1:]:
            adds(totals, gradients)
        clips(totals)

    def run() -> None:
        windows(totals, micro_batches) if whole else by_micro_batch()

    with limited(limit):  # compiled here, so that it is no part of any time
        run()
        run()
    return Case(run, error=lambda: workload.error_of_step(totals, workload.count))


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """An alarm for what may take for ever, such as a compiler; in the main thread only.

    Raises:
        TimeoutError: The time is up (or what that became on its way through the compiler).
    """

    def ring(*_: object) -> None:
        raise TimeoutError(f"not done within {seconds:g} s")

    before: Callable[..., Any] | int | None = signal.signal(signal.SIGALRM, ring)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)
        signal.signal(signal.SIGALRM, before)
