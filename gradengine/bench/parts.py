"""The parts of the step one by one: add micro-batches, compute a norm, finalise, hand back, clip.

Bytes counted, of G a micro-batch's gradients and A the sum in fp32; each pass reads or writes whole buffers:

- accumulate, a window: ours reads each G, and for each pass of `hold` micro-batches writes A and, but for the first
  pass, reads A. By hand and torch: write A to zero it; for each micro-batch read G, read A, write A.
- accumulate, one micro-batch to a sum that is there already: read G, read A, write A; the same for all.
- norm: read G. Ours sums in fp64 where it matters; torch in the gradients' dtype. By hand each tensor is squared into
  memory first, which is not counted, nor is the widening of bfloat16.
- finalise: 12 bytes a chunk, 48 a component; it is not memory's bandwidth that takes its time.
- hand-back: read A, write A. To bfloat16: ours reads A and writes A / 2; torch multiplies in place (read A, write A)
  and then copies (read A, write A / 2).
- clip, and the same of LoRA's blocks: read G for the norm, read and write G to scale.

Launches on a GPU, of n tensors: ours 1 to add, to finalise or to hand back, 2 for a norm, 3 to clip. torch foreach: as
many as its kernel arguments hold tensors and chunks for, and n for bfloat16 into fp32. By hand: n or more for each
function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from gradengine.accumulate import PerBlockGradientAccumulator
from gradengine.arrays.buffer import Buffer
from gradengine.bench.device import Array, Case, Gpu, launching
from gradengine.bench.harness import Variant, in_turn
from gradengine.bench.peers import ByHand, Peer, Torch, adding, peers, torch_name
from gradengine.bench.workload import Workload, norm_of, widened
from gradengine.clip import FusedClipState, clip_gradients_fused, clip_lora_gradients_fused, init_lora_fused_clip
from gradengine.kernels import Arena, ClipPlan, chunk_for
from gradengine.kernels.graphs import CudaGraph
from gradengine.layout import LORA_COMPONENTS, GradientLayout

__all__ = ["accumulate", "bytes_of_adding", "clip", "finalise", "hand_back", "lora", "norm", "ours", "summed"]

_OURS = 1e-6  # the largest error that ours may have, but for rounding to bfloat16
_FACTOR = 0.75  # exact in fp32, and not 1, which would end the kernel at once
_KEPT = 0.7  # of a norm that is clipped: a power of 2 would round nothing
_TO_BF16 = 2.0**-8  # relative error of one rounding to bfloat16


def ours(name: str, nbytes: int, build: Callable[[], Case], tolerance: float = _OURS) -> Variant:
    """A variant that the others are compared with."""
    return Variant(name, nbytes, build, base=True, tolerance=tolerance)


# ---- accumulate ----


def accumulate(workload: Workload, holds: Sequence[int] = (1,), *, begun: int = 0) -> list[Variant]:
    """Add micro-batches to one fp32 sum, ours in passes of as many as each variant holds.

    The first `begun` are in the sum already; only the others are timed.
    """
    device = workload.device
    untimed = 1 + begun if begun else 0  # the zeroing, and what has begun

    def of_ours(hold: int) -> Case:
        accumulator = PerBlockGradientAccumulator(workload.layout, device.kernels, hold=hold)
        device.poison(list(accumulator.arrays().values()))
        adds = [partial(accumulator.add, gradients) for gradients in workload.for_ours()]
        calls: list[Callable[[], object]] = [accumulator.zero_all, *adds, accumulator.close]
        return summed(workload, calls, untimed, lambda: list(accumulator.arrays().values()))

    def of_peer(kind: type[Peer]) -> Case:
        peer, calls = adding(workload, kind)
        return summed(workload, calls, untimed, lambda: peer.gradients)

    def held(hold: int) -> Variant:
        name, nbytes = "ours" if begun else f"ours hold={hold}", bytes_of_adding(workload, hold, begun=begun)
        return ours(name, nbytes, partial(of_ours, hold))

    by_peers = peers(workload, bytes_of_adding(workload, begun=begun), of_peer, torch_name(workload))
    return [*map(held, dict.fromkeys(holds)), *by_peers]


def bytes_of_adding(workload: Workload, hold: int | None = None, *, begun: int = 0) -> int:
    """Bytes of adding all micro-batches but the first `begun`: ours in passes of `hold`, a peer one by one."""
    count = workload.count - begun
    passes = count if hold is None else -(-count // hold)
    first = 0 if begun else 1 if hold is None else -1  # a peer zeroes the sum, ours does not read it
    return count * workload.gradient_bytes + (2 * passes + first) * workload.sum_bytes


def summed(
    workload: Workload, calls: Sequence[Callable[[], object]], untimed: int, results: Callable[[], Sequence[Any]]
) -> Case:
    """Calls that zero a sum and add the workload's micro-batches to it; the first few are not timed."""
    return Case(in_turn(calls[untimed:]), lambda: workload.error(results()), prepare=in_turn(calls[:untimed]))


# ---- norm ----


def norm(workload: Workload) -> list[Variant]:
    """The global norm of one micro-batch's gradients, read in place."""

    def of_ours() -> Case:
        kernels = workload.device.kernels
        arena = kernels.arena([kernels.device.view(gradient, "gradient") for gradient in workload.for_ours()[0]])
        plan = ClipPlan((0,) * len(workload.shapes), (workload.max_norm,))

        def run() -> Any:
            kernels.measure(arena)
            return kernels.finalise(arena, plan, 1.0, zero_if_bad=False)

        return Case(run, error=lambda: workload.error_of_norm(float(run().norm)))

    def of_peer(kind: type[Peer]) -> Case:
        peer = kind.over(workload.device, workload.batches[0])
        if isinstance(peer, ByHand):
            peer = ByHand([widened(gradient) for gradient in peer.gradients])
        return Case(peer.norm, error=lambda: workload.error_of_norm(float(peer.norm())))

    nbytes = workload.gradient_bytes
    return [ours("ours", nbytes, of_ours), *peers(workload, nbytes, of_peer)]


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
        return Variant(f"ours, {name}", nbytes, partial(case, layout), base=is_first, required=True, tolerance=_OURS)

    return [variant(name, layout, is_first=not number) for number, (name, layout) in enumerate(layouts.items())]


# ---- hand back ----


def hand_back(workload: Workload, *, to_bf16: bool) -> list[Variant]:
    """Multiply one micro-batch of fp32: in place, or to bfloat16 destinations, which is not done by hand."""
    device, whole = workload.device, workload.sum_bytes

    def case(kind: type[Peer] | None = None) -> Case:
        arrays, put_back = _restored(workload)
        results = device.empty(workload.shapes, np.uint16, odd=workload.odd) if to_bf16 else arrays
        if to_bf16:
            device.poison(results)
        run = by_ours(arrays, results) if kind is None else by_peer(kind.over(device, arrays), results)
        return Case(run, lambda: workload.error(results, _FACTOR), put_back)

    def by_ours(arrays: list[Array], results: list[Array]) -> Callable[[], object]:
        given = [device.raw(result) for result in results] if to_bf16 else results
        views = device.kernels.device.writable_views
        sources, destinations = (views(each, [""] * len(each)) for each in (arrays, given))
        return lambda: device.kernels.scale(sources, np.float32(_FACTOR), destinations)

    def by_peer(peer: Peer, results: list[Array]) -> Callable[[], object]:
        if not to_bf16:
            return partial(peer.scale, _FACTOR)
        tensors = [device.tensor(result) for result in results]
        return in_turn([partial(peer.scale, _FACTOR), partial(device.torch._foreach_copy_, tensors, peer.gradients)])

    if not to_bf16:
        return [ours("ours", 2 * whole, case), *peers(workload, 2 * whole, case)]
    return [
        ours("ours", whole * 3 // 2, case, _TO_BF16),
        Variant("torch foreach", whole * 7 // 2, partial(case, Torch), tolerance=_TO_BF16),
    ]


def _restored(workload: Workload) -> tuple[list[Array], Callable[[], None]]:
    """Arrays with the first micro-batch's values, and a function that restores the values."""
    device = workload.device
    originals, arrays = (device.placed(workload.values[0], odd=workload.odd) for _ in range(2))
    return arrays, partial(device.copy, arrays, originals)


# ---- clip ----


def clip(workload: Workload) -> list[Variant]:
    """Clip one micro-batch's gradients in place by their global norm."""
    device, bound, nbytes = workload.device, _KEPT * workload.norm, 3 * workload.gradient_bytes
    clipped = partial(_clipped, workload, bound, [slice(None)])

    def of_ours(arrays: list[Array]) -> Callable[[], object]:
        state = FusedClipState([array.size for array in arrays], device.kernels)
        return partial(clip_gradients_fused, workload.as_taken(arrays), bound, state)

    def of_peer(kind: type[Peer]) -> Case:
        return clipped(lambda arrays: partial(kind.over(device, arrays).clip, bound))

    tolerance = _OURS if workload.dtype == "float32" else _TO_BF16
    return [ours("ours", nbytes, partial(clipped, of_ours), tolerance), *peers(workload, nbytes, of_peer)]


def lora(workload: Workload) -> list[Variant]:
    """On a GPU clip each block of a LoRA layout by its own norm: eager, and replayed as a CUDA graph."""
    gpu, bound, nbytes = workload.device, 1.0, 3 * workload.gradient_bytes
    assert isinstance(gpu, Gpu)
    count = len(LORA_COMPONENTS)
    blocks = [slice(start, start + count) for start in range(0, len(workload.layout.slots), count)]
    clipped = partial(_clipped, workload, bound, blocks)

    def of_ours(arrays: list[Array]) -> Callable[[], object]:
        block = dict(zip(LORA_COMPONENTS, arrays, strict=True))
        return partial(clip_lora_gradients_fused, block, bound, init_lora_fused_clip(block, gpu.kernels))

    def of_torch(arrays: list[Array]) -> Callable[[], object]:
        return partial(Torch.over(gpu, arrays).clip, bound)

    return [
        ours("ours replayed", nbytes, partial(clipped, of_ours, partial(_recorded, gpu))),
        ours("ours eager", nbytes, partial(clipped, of_ours)),
        Variant("torch foreach", nbytes, partial(clipped, of_torch)),
        Variant("torch foreach, graph", nbytes, partial(clipped, of_torch, gpu.recorded)),
    ]


def _clipped(
    workload: Workload,
    bound: float,
    groups: Sequence[slice],
    clip_of: Callable[[list[Array]], Callable[[], object]],
    recorded: Callable[[Callable[[], object]], Callable[[], object]] | None = None,
) -> Case:
    """Clip groups of the gradients, by position, each by its own norm; `clip_of` makes the function for a group."""
    arrays, put_back = _restored(workload)
    run: Callable[[], object] = in_turn([clip_of(arrays[group]) for group in groups])
    factors = [min(1.0, bound / norm_of(workload.sums[group])) for group in groups for _ in arrays[group]]
    return Case(recorded(run) if recorded else run, lambda: workload.error(arrays, factors.__getitem__), put_back)


def _recorded(gpu: Gpu, run: Callable[[], object]) -> Callable[[], object]:
    run()  # what is made at the first call is no part of the graph
    graph = gpu.kernels.device.graph()
    assert isinstance(graph, CudaGraph)
    with graph:
        run()
    return launching(graph.graph.launch, run)
