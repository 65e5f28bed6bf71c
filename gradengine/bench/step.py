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
from typing import Any, final

import numpy as np

from gradengine.accumulate import PerBlockGradientAccumulator
from gradengine.bench.device import Array, Case, Device, Gpu, Missing, Tensor, peak_growth
from gradengine.bench.harness import Variant, in_turn
from gradengine.bench.parts import bytes_of_adding, ours, summed
from gradengine.bench.peers import ByHand, Peer, Torch, adding, peers, torch_name
from gradengine.bench.workload import Workload
from gradengine.engine import GradientEngine
from gradengine.result import StepResult

__all__ = ["Lent", "calls", "compiled", "limited", "step"]

_LEAST_BYTES = 1 << 20  # of a set whose memory is measured: below it the interpreter's own growth is all that is seen


def step(workload: Workload, holds: Sequence[int]) -> list[Variant]:
    """Ours without holding and with it, by hand, and torch; on a GPU ours and torch as CUDA graphs too.

    Torch is given the average for nothing (as where the loss was divided by K), and once more with a pass for it.
    """
    device, bound, by_passes = workload.device, workload.max_norm, _bytes(workload, 3)

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
    variants = [
        *_ours(workload, holds),
        *peers(workload, by_passes, lambda kind: of_peer(kind, averages=kind is ByHand), f"{name}, sum"),
        Variant(f"{name}, mean", _bytes(workload, 5), partial(of_peer, Torch, averages=True)),
        *([graph] if device.is_gpu else []),
    ]
    if device.is_gpu:
        return variants
    _start_torch(device)
    return [_with_memory(workload, variant) for variant in variants]


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
        case, grown = peak_growth(build_and_run)
        if grown is None or workload.sum_bytes < _LEAST_BYTES:
            return case
        return replace(case, arenas=grown / workload.sum_bytes)

    return replace(variant, build=build)


def _ours(workload: Workload, holds: Sequence[int]) -> list[Variant]:
    """For each hold, on a GPU eager and captured."""
    ways = {"": False, ", captured": True} if workload.device.is_gpu else {"": False}
    case = partial(_our_step, workload, workload.max_norm)
    return [
        ours(f"ours hold={hold}{way}", _bytes(workload, 2, hold), partial(case, hold, is_captured=is_captured))
        for hold in dict.fromkeys(holds)
        for way, is_captured in ways.items()
    ]


def _our_step(workload: Workload, bound: float, hold: int = 1, *, is_captured: bool, **replay: Any) -> Case:
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


# ---- on a GPU alone: the host's time ----


@final
class Lent:
    """An array of which DLPack alone is to be seen: what ours gets of a framework that it does not know."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def __dlpack__(self, **arguments: Any) -> object:
        return self._array.__dlpack__(**arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self._array.__dlpack_device__()
        return device


def calls(workload: Workload) -> list[Variant]:
    """The call that takes one micro-batch of fp32, by what the gradients come as; and a whole window replayed.

    What is given is checked tensor by tensor each time, so that the tensors' number and what they come as count.
    """
    gpu, one = workload.device, workload.first(1)
    assert isinstance(gpu, Gpu)

    def add(kind: Callable[[Array], object]) -> Case:
        accumulator = PerBlockGradientAccumulator(one.layout, gpu.kernels)
        given = [kind(array) for array in one.batches[0]]
        adds: list[Callable[[], object]] = [accumulator.zero_all, partial(accumulator.add, given)]
        return summed(one, adds, 1, lambda: list(accumulator.arrays().values()))

    def torch_add() -> Case:
        peer, adds = adding(one, Torch)
        return summed(one, adds, 1, lambda: peer.gradients)

    kinds: dict[str, Callable[[Array], object]] = {
        "torch tensors": gpu.torch_tensor,
        "arrays by DLPack": Lent,
        "raw buffers": partial(gpu.raw, dtype="float32"),
    }
    nbytes, window = workload.gradient_bytes + workload.sum_bytes, _bytes(workload, 2, 1)
    replay = partial(_our_step, workload, workload.max_norm, is_captured=True)
    return [
        ours("ours add, cupy arrays", nbytes, partial(add, lambda array: array)),
        *(Variant(f"ours add, {name}", nbytes, partial(add, kind), required=True) for name, kind in kinds.items()),
        Variant("ours replay of a window", window, partial(replay, check=True), required=True),
        Variant("ours replay, unchecked", window, partial(replay, check=False), required=True),
        Variant("torch foreach_add_", nbytes + workload.sum_bytes, torch_add),
    ]


# ---- on a GPU alone: torch.compile ----


def compiled(workload: Workload, limit: float) -> list[Variant]:
    """Ours beside `torch.compile` of the same, whose two ways may each take `limit` seconds to compile."""
    count, build = workload.count, partial(_compiled, workload, limit)
    return [
        *_ours(workload, (1, count)),
        Variant("torch.compile, by micro-batch", _bytes(workload, 3, 1), partial(build, is_whole=False)),
        Variant("torch.compile, whole window", _bytes(workload, 3, count), partial(build, is_whole=True)),
    ]


def _compiled(workload: Workload, limit: float, *, is_whole: bool) -> Case:
    """The step as functions over lists of tensors: a call for each micro-batch, as backward makes them, or for all."""
    gpu, torch, bound = workload.device, workload.device.torch, workload.max_norm * workload.count
    assert isinstance(gpu, Gpu)

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

    totals = Torch.sums_for(workload).gradients
    first, *others = micro_batches = [[gpu.tensor(array) for array in batch] for batch in workload.batches]
    if is_whole:
        run: Callable[[], object] = partial(gpu.compiled(window), totals, micro_batches)
    else:
        begins, adds, clips = gpu.compiled(begin), gpu.compiled(add), gpu.compiled(clip)
        by_one = (partial(adds, totals, gradients) for gradients in others)
        run = in_turn([partial(begins, totals, first), *by_one, partial(clips, totals)])
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
