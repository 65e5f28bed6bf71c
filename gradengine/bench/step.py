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
from gradengine.engine.result import StepResult

__all__ = ["Lent", "calls", "compiled", "half_absent", "limited", "step", "step_calls"]

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
    """Bytes of the additions, and of `sets` reads or writes of the sum after them."""
    return bytes_of_adding(workload, hold) + sets * workload.sum_bytes


def _start_torch(device: Device) -> None:
    """Run each operation once, so that PyTorch's own start (libraries, threads) is not measured as a case's memory."""
    with contextlib.suppress(Missing):
        peer = Torch.over(device, device.placed([np.ones(1 << 16, np.float32)]))
        peer.add(peer.gradients)
        peer.clip(1.0, divisor=2.0)


def _with_memory(workload: Workload, variant: Variant) -> Variant:
    """The variant, whose case measures its memory from the first allocation to the end of the first step."""

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
    """Our variants: one for each hold, on a GPU both eager and captured."""
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
    """An array that offers DLPack only, as one of a framework that ours does not know."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def __dlpack__(self, **arguments: Any) -> object:
        return self._array.__dlpack__(**arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self._array.__dlpack_device__()
        return device


@final
class Given:
    """Arrays of some kind over the same memory: the same ones in each call, or new ones, as backward makes them."""

    def __init__(self, kind: Callable[[Array], object], memory: Sequence[Array]) -> None:
        self._kind, self._memory = kind, memory
        self.renew()

    def renew(self) -> None:
        """Use new objects from now on, over the same memory."""
        self.arrays = [self._kind(array) for array in self._memory]


def _seen_anew(array: Array) -> Array:
    return array.reshape(array.shape)


def calls(workload: Workload) -> list[Variant]:
    """The call that adds one micro-batch of fp32, by the gradients' kind; and a whole window replayed.

    The gradients are checked tensor by tensor each time, so that their number and kind count.
    """
    gpu, one = workload.device, workload.first(1)
    assert isinstance(gpu, Gpu)

    def add(kind: Callable[[Array], object], *, is_new: bool = False) -> Case:
        accumulator, given = PerBlockGradientAccumulator(one.layout, gpu.kernels), Given(kind, one.batches[0])
        begins = in_turn([accumulator.zero_all, *([given.renew] if is_new else [])])
        adds: list[Callable[[], object]] = [begins, lambda: accumulator.add(given.arrays)]
        return summed(one, adds, 1, lambda: list(accumulator.arrays().values()))

    def torch_add() -> Case:
        peer, adds = adding(one, Torch)
        return summed(one, adds, 1, lambda: peer.gradients)

    kinds: dict[str, Callable[[Array], object]] = {
        "torch tensors": gpu.torch_tensor,
        "arrays by DLPack": Lent,
        "raw buffers": partial(gpu.raw, dtype="float32"),
    }
    new = {"new cupy arrays": _seen_anew, "new torch tensors": gpu.torch_tensor}
    nbytes, window = workload.gradient_bytes + workload.sum_bytes, _bytes(workload, 2, 1)
    replay = partial(_our_step, workload, workload.max_norm, is_captured=True)
    return [
        ours("ours add, cupy arrays", nbytes, partial(add, lambda array: array)),
        *(Variant(f"ours add, {name}", nbytes, partial(add, kind), required=True) for name, kind in kinds.items()),
        *(
            Variant(f"ours add, {name}", nbytes, partial(add, kind, is_new=True), required=True)
            for name, kind in new.items()
        ),
        Variant("ours replay of a window", window, partial(replay, check=True), required=True),
        Variant("ours replay, unchecked", window, partial(replay, check=False), required=True),
        Variant("torch foreach_add_", nbytes + workload.sum_bytes, torch_add),
    ]


def step_calls(workload: Workload) -> list[Variant]:
    """The call of `step`, after one micro-batch, by its destinations: the arena, or arrays of some kind."""
    gpu, one = workload.device, workload.first(1)
    assert isinstance(gpu, Gpu)
    gradients = one.for_ours()[0]

    def begun() -> tuple[GradientEngine, Callable[[], None]]:
        engine = GradientEngine(one.layout, gpu.kernels, max_norm=one.max_norm)
        return engine, partial(engine.add, gradients)

    def in_place() -> Case:
        engine, add = begun()
        return Case(engine.step, lambda: one.error_of_step(list(engine.accumulator.arrays().values())), add)

    def out(kind: Callable[[Array], object], *, is_new: bool = False) -> Case:
        engine, add = begun()
        results = gpu.empty(one.shapes, np.float32)
        gpu.poison(results)
        given = Given(kind, results)
        prepare = in_turn([add, *([given.renew] if is_new else [])])
        return Case(lambda: engine.step(given.arrays), lambda: one.error_of_step(results), prepare)

    def torch_clip() -> Case:
        peer, adds = adding(one, Torch)
        return Case(partial(peer.clip, one.max_norm), lambda: one.error_of_step(peer.gradients), in_turn(adds))

    nbytes = 2 * workload.sum_bytes
    variants = [
        Variant(f"ours step(out=), {new}{name}", nbytes, partial(out, kind, is_new=bool(new)), required=True)
        for name, kind in {"cupy arrays": _seen_anew, "torch tensors": gpu.torch_tensor}.items()
        for new in ("", "new ")
    ]
    torch = Variant("torch clip_grad_norm_", nbytes + workload.sum_bytes, torch_clip)
    return [ours("ours step", nbytes, in_place), *variants, torch]


def half_absent(workload: Workload) -> list[Variant]:
    """A step in which every second gradient is None, beside one of a layout with only the other components."""
    device, count, half = workload.device, workload.count, workload.every_second()

    def of_nones() -> Case:
        engine = GradientEngine(workload.layout, device.kernels, max_norm=half.max_norm, micro_batches=count)
        device.poison(list(engine.accumulator.arrays().values()))
        micro_batches = [
            [None if number % 2 else gradient for number, gradient in enumerate(batch)] for batch in workload.for_ours()
        ]
        run = in_turn([*(partial(engine.add, gradients) for gradients in micro_batches), engine.step])
        expected = [0.5 / count, 0.0]
        found = list(engine.accumulator.arrays().values())
        return Case(run, lambda: workload.error(found, lambda number: expected[number % 2]))

    def of_torch() -> Case:
        peer, adds = adding(half, Torch)
        run = in_turn([*adds, partial(peer.clip, half.max_norm * count)])
        return Case(run, lambda: half.error_of_step(peer.gradients, count))

    alone = partial(_our_step, half, half.max_norm, is_captured=False)
    return [
        ours("ours, these alone", _bytes(half, 2, 1), alone),
        ours("ours, others None", _bytes(half, 2, 1), of_nones),
        Variant("torch foreach, these alone", _bytes(half, 3), of_torch),
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
    """A context with an alarm, for work that may take for ever, such as a compiler's; in the main thread only.

    Raises:
        TimeoutError: The time is up (a compiler may turn this into an error of its own).
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
