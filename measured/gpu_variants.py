"""The variants that gpu_bench.py measures beside those of `gradengine bench gpu`: what its own developers ask.

Bytes counted, of G a micro-batch's gradients and A the sum in fp32:

- finalise: 12 bytes a chunk, 48 a component. Memory's bandwidth does not limit it.
- hand-back: read A, write A. To bfloat16: ours reads A and writes A / 2; torch multiplies in place (read A, write A)
  and then copies (read A, write A / 2).
- lora: read G for the norm, read and write G to scale.
- torch.compile: the fewest that it can move. By micro-batch 4 G, A as ours hold=1, norm A, multiply 2 A. The whole
  window writes A once.
"""

from __future__ import annotations

import contextlib
import math
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, final

import numpy as np

from gradengine import GradientEngine, GradientLayout, PerBlockGradientAccumulator
from gradengine.arrays.buffer import Buffer
from gradengine.bench.device import Array, Case, Gpu, Tensor, launching
from gradengine.bench.harness import Benchmark, Report, Variant, check, in_turn
from gradengine.bench.machine import machine, versions
from gradengine.bench.parts import clipped, ours, restored, summed
from gradengine.bench.peers import Peer, Torch, adding, peers
from gradengine.bench.step import bytes_of_step, our_step, our_steps
from gradengine.bench.workload import Workload
from gradengine.clip import clip_lora_gradients_fused, init_lora_fused_clip
from gradengine.kernels import Arena, ClipPlan
from gradengine.kernels.launch import chunk_for
from gradengine.layout import LORA_COMPONENTS

FACTOR = 0.75  # exact in fp32, and not 1, which would end the kernel at once
TO_BF16 = 2.0**-8  # relative error of one rounding to bfloat16
OURS = 1e-6  # the largest error that ours may have, but for that
# A launch is a call of the host: of a kernel, or of a graph of many. In a wait the host waits for the device.
COUNTED = ("kernels", "copies", "fills", "launches", "waits")


# ---- finalise ----


def finalise(gpu: Gpu, layouts: Mapping[str, GradientLayout]) -> list[Variant]:
    """What follows a measurement, alone: squared sums that are there already, of gradients that are not."""

    def case(layout: GradientLayout) -> Case:
        kernels, sizes = gpu.kernels, [slot.size for slot in layout.slots]
        partials = kernels.partial_sums(sizes)
        squares = np.random.default_rng(2).exponential(size=sum(partials.counts))
        arena = Arena(tuple(Buffer(0, size, "float32", (size,), True, None) for size in sizes), partials)
        with arena.in_order():
            partials.values.set(squares)
        run = partial(kernels.finalise, arena, ClipPlan((0,) * len(sizes), (1.0,)), 1.0, zero_if_bad=False)
        expected = math.sqrt(math.fsum(squares))
        return Case(run, error=lambda: abs(float(run().norm) - expected) / expected)

    def variant(name: str, layout: GradientLayout, *, is_first: bool) -> Variant:
        chunk = chunk_for(layout.num_elements)
        chunks = sum(-(-slot.size // chunk) for slot in layout.slots)
        nbytes = 12 * chunks + 48 * len(layout.slots)
        return Variant(f"ours, {name}", nbytes, partial(case, layout), base=is_first, required=True, tolerance=OURS)

    return [variant(name, layout, is_first=not number) for number, (name, layout) in enumerate(layouts.items())]


# ---- hand back ----


def hand_back(workload: Workload, *, to_bf16: bool) -> list[Variant]:
    """Multiply one micro-batch of fp32: in place, or to bfloat16 destinations, which is not done by hand."""
    device, whole = workload.device, workload.sum_bytes

    def case(kind: type[Peer] | None = None) -> Case:
        arrays, put_back = restored(workload)
        results = device.empty(workload.shapes, np.uint16) if to_bf16 else arrays
        if to_bf16:
            device.poison(results)
        run = by_ours(arrays, results) if kind is None else by_peer(kind.over(device, arrays), results)
        return Case(run, lambda: workload.error(results, FACTOR), put_back)

    def by_ours(arrays: list[Array], results: list[Array]) -> Callable[[], object]:
        given = [device.raw(result) for result in results] if to_bf16 else results
        views = device.kernels.device.writable_views
        sources, destinations = (views(each, [""] * len(each)) for each in (arrays, given))
        return lambda: device.kernels.scale(sources, np.float32(FACTOR), destinations)

    def by_peer(peer: Peer, results: list[Array]) -> Callable[[], object]:
        if not to_bf16:
            return partial(peer.scale, FACTOR)
        tensors = [device.tensor(result) for result in results]
        return in_turn([partial(peer.scale, FACTOR), partial(device.torch._foreach_copy_, tensors, peer.gradients)])

    if not to_bf16:
        return [ours("ours", 2 * whole, case), *peers(workload, 2 * whole, case)]
    return [
        ours("ours", whole * 3 // 2, case, TO_BF16),
        Variant("torch foreach", whole * 7 // 2, partial(case, Torch), tolerance=TO_BF16),
    ]


# ---- LoRA ----


def lora(workload: Workload) -> list[Variant]:
    """Clip each block of a LoRA layout by its own norm: eager, and replayed as a CUDA graph."""
    gpu, bound, nbytes, count = workload.device, 1.0, 3 * workload.gradient_bytes, len(LORA_COMPONENTS)
    blocks = [slice(start, start + count) for start in range(0, len(workload.layout.slots), count)]

    def of_ours(arrays: list[Array]) -> Callable[[], object]:
        block = dict(zip(LORA_COMPONENTS, arrays, strict=True))
        return partial(clip_lora_gradients_fused, block, bound, init_lora_fused_clip(block, gpu.kernels))

    def of_torch(arrays: list[Array]) -> Callable[[], object]:
        return partial(Torch.over(gpu, arrays).clip, bound)

    def case(clip_of: Callable[[list[Array]], Callable[[], object]], recorded: Callable | None = None) -> Case:
        made = clipped(workload, bound, clip_of, blocks)
        return replace(made, run=recorded(made.run)) if recorded else made

    return [
        ours("ours replayed", nbytes, partial(case, of_ours, partial(_recorded, gpu))),
        ours("ours eager", nbytes, partial(case, of_ours)),
        Variant("torch foreach", nbytes, partial(case, of_torch)),
        Variant("torch foreach, graph", nbytes, partial(case, of_torch, gpu.recorded)),
    ]


def _recorded(gpu: Gpu, run: Callable[[], object]) -> Callable[[], object]:
    run()  # what is made at the first call is no part of the graph
    graph = gpu.kernels.device.graph()
    with graph:
        run()
    return launching(graph.graph.launch, run)


# ---- the host's time ----


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


def torch_tensor(gpu: Gpu, array: Array) -> object:
    """Return the array as a torch tensor, which ours recognises and asks for its address."""
    return gpu.tensor(array)


def _seen_anew(array: Array) -> Array:
    return array.reshape(array.shape)


def calls(workload: Workload) -> list[Variant]:
    """The call that adds one micro-batch of fp32, by the gradients' kind; and a whole window replayed.

    The gradients are checked tensor by tensor each time, so that their number and kind count.
    """
    gpu, one = workload.device, workload.first(1)

    def add(kind: Callable[[Array], object], *, is_new: bool = False) -> Case:
        accumulator, given = PerBlockGradientAccumulator(one.layout, gpu.kernels), Given(kind, one.batches[0])
        begins = in_turn([accumulator.zero_all, *([given.renew] if is_new else [])])
        adds: list[Callable[[], object]] = [begins, lambda: accumulator.add(given.arrays)]
        return summed(one, adds, 1, lambda: list(accumulator.arrays().values()))

    def torch_add() -> Case:
        peer, adds = adding(one, Torch)
        return summed(one, adds, 1, lambda: peer.gradients)

    kinds: dict[str, Callable[[Array], object]] = {
        "torch tensors": partial(torch_tensor, gpu),
        "arrays by DLPack": Lent,
        "raw buffers": partial(gpu.raw, dtype="float32"),
    }
    new = {"new cupy arrays": _seen_anew, "new torch tensors": partial(torch_tensor, gpu)}
    nbytes, window = workload.gradient_bytes + workload.sum_bytes, bytes_of_step(workload, 2, 1)
    replay = partial(our_step, workload, workload.max_norm, is_captured=True)
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
        for name, kind in {"cupy arrays": _seen_anew, "torch tensors": partial(torch_tensor, gpu)}.items()
        for new in ("", "new ")
    ]
    torch = Variant("torch clip_grad_norm_", nbytes + workload.sum_bytes, torch_clip)
    return [ours("ours step", nbytes, in_place), *variants, torch]


def half_absent(workload: Workload) -> list[Variant]:
    """A step in which every second gradient is None, beside one of a layout with only the other components."""
    device, count, half = workload.device, workload.count, _every_second(workload)

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

    alone = partial(our_step, half, half.max_norm, is_captured=False)
    return [
        ours("ours, these alone", bytes_of_step(half, 2, 1), alone),
        ours("ours, others None", bytes_of_step(half, 2, 1), of_nones),
        Variant("torch foreach, these alone", bytes_of_step(half, 3), of_torch),
    ]


def _every_second(workload: Workload) -> Workload:
    """Return a workload of the first component, the third and so on, in the same memory."""
    layout = GradientLayout.of({slot.name: slot.shape for slot in workload.layout.slots[::2]})
    values, batches = ([each[::2] for each in whole] for whole in (workload.values, workload.batches))
    return replace(workload, layout=layout, values=values, batches=batches)


# ---- torch.compile ----


def compiled(workload: Workload, limit: float) -> list[Variant]:
    """Ours beside `torch.compile` of the same, whose two ways may each take `limit` seconds to compile."""
    count, build = workload.count, partial(_compiled, workload, limit)
    return [
        *our_steps(workload, (1, count)),
        Variant("torch.compile, by micro-batch", bytes_of_step(workload, 3, 1), partial(build, is_whole=False)),
        Variant("torch.compile, whole window", bytes_of_step(workload, 3, count), partial(build, is_whole=True)),
    ]


def torch_compiled(gpu: Gpu, function: Callable[..., object]) -> Callable[..., object]:
    """Return the function, compiled by `torch.compile`."""
    return gpu.torch.compile(function, fullgraph=True, dynamic=False)


def _compiled(workload: Workload, limit: float, *, is_whole: bool) -> Case:
    """The step as functions over lists of tensors: a call for each micro-batch, as backward makes them, or for all."""
    gpu, torch, bound = workload.device, workload.device.torch, workload.max_norm * workload.count

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
        run: Callable[[], object] = partial(torch_compiled(gpu, window), totals, micro_batches)
    else:
        begins, adds, clips = (torch_compiled(gpu, each) for each in (begin, add, clip))
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


# ---- launches ----


def count_launches(gpu: Gpu, benchmark: Benchmark) -> Report:
    """Run each variant that computes the same once under a profiler. Ours fail if they wait for the device.

    The report's rows are variant -> counts.
    """
    count, rows = profiled(gpu), {}
    checked, absent, failed = check(benchmark)
    of_nothing = count(lambda: None)  # the profiler's own
    for variant, case, _ in checked:
        case.prepare()
        gpu.wait()
        found = count(case.run) - of_nothing
        rows[variant.name] = {kind: found[kind] for kind in COUNTED}
        if variant.base and found["waits"]:
            failed.append(f"{variant.name} waits")
    facts = benchmark.name, benchmark.parameters, benchmark.tolerance, machine(gpu.xp), versions(gpu.xp)
    return Report(*facts, None, benchmark.time, rows, absent, failed, noisy=False)


def profiled(gpu: Gpu) -> Callable[[Callable[[], object]], Counter[str]]:
    """A function that counts a call's launches by torch's profiler, CuPy's included; raises as `Device.torch`."""
    profiler = gpu.torch.profiler
    activities = [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.CUDA]

    def count(run: Callable[[], object]) -> Counter[str]:
        with profiler.profile(activities=activities) as found:
            run()
        return counts_of((str(event.device_type), event.name) for event in found.events())

    return count


def counts_of(events: Iterable[tuple[str, str]]) -> Counter[str]:
    """Counts of (device type, name) pairs, as torch's profiler gives them."""
    kinds = (_kind(name, on_device=device.endswith("CUDA")) for device, name in events)
    return Counter(kind for kind in kinds if kind)


def _kind(name: str, *, on_device: bool) -> str | None:
    if on_device:
        return "copies" if name.startswith("Memcpy") else "fills" if name.startswith("Memset") else "kernels"
    if not name.startswith("cu"):
        return None  # an operator of torch
    if "Launch" in name:
        return "launches"
    return "waits" if "Synchronize" in name or name in {"cudaMemcpy", "cuMemcpyDtoH_v2"} else None
