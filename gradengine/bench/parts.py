"""The parts of a step one by one: micro-batches are added, a norm is taken, gradients are handed back or clipped.

Bytes counted, of G a micro-batch's gradients and A the sum in fp32; each pass reads or writes whole buffers:

- accumulate, a window: ours reads each G, and for each pass of `hold` micro-batches writes A and, but for the first
  pass, reads A. By hand and torch: write A to zero it; for each micro-batch read G, read A, write A.
- accumulate, one micro-batch to a sum that is there already: read G, read A, write A; the same for all.
- norm: read G. Ours sums in fp64 where it matters; torch in the gradients' dtype. By hand each tensor is squared into
  memory first, which is not counted, nor is the widening of bfloat16.
- hand-back: read A, write A. To bfloat16: ours reads A and writes A / 2; torch multiplies in place (read A, write A)
  and then copies (read A, write A / 2).
- clip, and the same of LoRA's blocks: read G for the norm, read and write G to scale.

Launches on a GPU, of n tensors: ours 1 to add, 2 for a norm, 1 to hand back, 3 to clip. torch foreach: as many as its
kernel arguments hold tensors and chunks for, and n for bfloat16 into fp32. By hand: n or more for each function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from gradengine.accumulate import PerBlockGradientAccumulator
from gradengine.bench.case import Case, Variant, in_turn
from gradengine.bench.device import Array, Gpu, Replay
from gradengine.bench.peers import ByHand, Peer, Torch, adding, by_hand_name, torch_name
from gradengine.bench.workload import Workload, norm_of, widened
from gradengine.clip import FusedClipState, clip_gradients_fused, clip_lora_gradients_fused, init_lora_fused_clip
from gradengine.kernels import ClipPlan
from gradengine.layout import LORA_COMPONENTS

__all__ = ["accumulate", "bytes_of_adding", "clip", "hand_back", "lora", "norm"]

OURS = 1e-6  # the largest error that ours may have, but for rounding to bfloat16
_FACTOR = 0.75  # exact in fp32, and not 1, which would end the kernel at once
_TO_BF16 = 2.0**-8  # relative error of one rounding to bfloat16


# ---- accumulate ----


def accumulate(workload: Workload, holds: Sequence[int] = (1,), *, begun: int = 0) -> list[Variant]:
    """Micro-batches become one fp32 sum, ours in passes of so many as each variant holds.

    As many as have `begun` are in the sum already; the others alone are timed.
    """
    device, by_passes = workload.device, bytes_of_adding(workload, begun=begun)
    ours = [
        Variant(
            "ours" if begun else f"ours hold={hold}",
            bytes_of_adding(workload, hold, begun=begun),
            partial(_our_sum, workload, hold, begun),
            base=True,
            tolerance=OURS,
        )
        for hold in dict.fromkeys(holds)
    ]
    return [
        *ours,
        Variant(by_hand_name(device), by_passes, partial(_sum_of_peer, workload, ByHand, begun)),
        Variant(torch_name(device, workload.dtype), by_passes, partial(_sum_of_peer, workload, Torch, begun)),
    ]


def bytes_of_adding(workload: Workload, hold: int | None = None, *, begun: int = 0) -> int:
    """Traffic of adding what has not begun: by ours in passes of `hold` micro-batches, or by a peer one by one."""
    count = workload.count - begun
    passes = count if hold is None else -(-count // hold)
    first = 0 if begun else 1 if hold is None else -1  # a peer zeroes the sum, ours does not read it
    return count * workload.gradient_bytes + (2 * passes + first) * workload.sum_bytes


def _our_sum(workload: Workload, hold: int, begun: int) -> Case:
    accumulator = PerBlockGradientAccumulator(workload.layout, workload.device.kernels, hold=hold)
    workload.device.poison(list(accumulator.views().values()))
    adds = [partial(accumulator.add, gradients) for gradients in workload.for_ours()]
    calls: list[Callable[[], object]] = [accumulator.zero_all, *adds, accumulator.close]
    return _sum(workload, calls, begun, lambda: list(accumulator.views().values()))


def _sum_of_peer(workload: Workload, kind: type[Peer], begun: int) -> Case:
    peer, calls = adding(workload, kind)
    return _sum(workload, calls, begun, lambda: peer.gradients)


def _sum(
    workload: Workload, calls: Sequence[Callable[[], object]], begun: int, results: Callable[[], Sequence[Any]]
) -> Case:
    """Calls that zero, and add micro-batches, of which as many as have begun are not timed, nor is the zeroing then."""
    untimed = 1 + begun if begun else 0
    return Case(in_turn(calls[untimed:]), lambda: workload.error(results()), prepare=in_turn(calls[:untimed]))


# ---- norm ----


def norm(workload: Workload) -> list[Variant]:
    """The global norm of one micro-batch's gradients as they lie."""
    nbytes = workload.gradient_bytes
    return [
        Variant("ours", nbytes, partial(_our_norm, workload), base=True, tolerance=OURS),
        Variant(by_hand_name(workload.device), nbytes, partial(_norm_of_peer, workload, ByHand)),
        Variant("torch foreach", nbytes, partial(_norm_of_peer, workload, Torch)),
    ]


def _our_norm(workload: Workload) -> Case:
    kernels = workload.device.kernels
    views = [kernels.device.view(gradient, "gradient") for gradient in workload.for_ours()[0]]
    arena = kernels.arena(views)
    plan = ClipPlan((0,) * len(views), (workload.max_norm,))

    def run() -> Any:
        kernels.measure(arena)
        return kernels.finalise(arena, plan, 1.0, zero_if_bad=False)

    return Case(run, error=lambda: workload.error_of_norm(float(run().norm)))


def _norm_of_peer(workload: Workload, kind: type[Peer]) -> Case:
    peer = kind.over(workload.device, workload.batches[0])
    if isinstance(peer, ByHand):
        peer = ByHand([widened(gradient) for gradient in peer.gradients])
    return Case(peer.norm, error=lambda: workload.error_of_norm(float(peer.norm())))


# ---- hand back ----


def hand_back(workload: Workload, *, to_bf16: bool) -> list[Variant]:
    """One micro-batch of fp32 is multiplied: in place, or into bfloat16 destinations, which nobody writes by hand."""
    tolerance, whole = _TO_BF16 if to_bf16 else OURS, workload.sum_bytes
    ours, torch = (whole * 3 // 2, whole * 7 // 2) if to_bf16 else (2 * whole, 2 * whole)
    by_hand = Variant(by_hand_name(workload.device), 2 * whole, partial(_hand_back_of_peer, workload, ByHand))
    return [
        Variant("ours", ours, partial(_our_hand_back, workload, to_bf16=to_bf16), base=True, tolerance=tolerance),
        *([] if to_bf16 else [by_hand]),
        Variant(
            "torch foreach", torch, partial(_hand_back_of_peer, workload, Torch, to_bf16=to_bf16), tolerance=tolerance
        ),
    ]


def _our_hand_back(workload: Workload, *, to_bf16: bool) -> Case:
    kernels, (arrays, put_back) = workload.device.kernels, _restored(workload)
    results = _bf16_like(workload) if to_bf16 else arrays
    given = [workload.device.raw(result) for result in results] if to_bf16 else arrays
    sources, destinations = (kernels.device.writable_views(each, [""] * len(each)) for each in (arrays, given))
    return Case(
        lambda: kernels.scale(sources, np.float32(_FACTOR), destinations),
        error=lambda: workload.error(results, _FACTOR),
        prepare=put_back,
    )


def _hand_back_of_peer(workload: Workload, kind: type[Peer], *, to_bf16: bool = False) -> Case:
    arrays, put_back = _restored(workload)
    peer = kind.over(workload.device, arrays)
    if not to_bf16:
        return Case(lambda: peer.scale(_FACTOR), error=lambda: workload.error(arrays, _FACTOR), prepare=put_back)
    results = _bf16_like(workload)
    destinations, torch = workload.device.tensors(results), workload.device.torch

    def run() -> None:
        peer.scale(_FACTOR)
        torch._foreach_copy_(destinations, peer.gradients)

    return Case(run, error=lambda: workload.error(results, _FACTOR), prepare=put_back)


def _restored(workload: Workload, *, odd: bool = False) -> tuple[list[Array], Callable[[], None]]:
    """Arrays with the first micro-batch's values, and what puts the values back."""
    device, values = workload.device, workload.values[0]
    originals, arrays = device.placed(values, odd=odd), device.placed(values, odd=odd)
    return arrays, lambda: device.copy(arrays, originals)


def _bf16_like(workload: Workload) -> list[Array]:
    results = workload.device.empty(workload.shapes, np.uint16, odd=workload.odd)
    workload.device.poison(results)
    return results


# ---- clip ----


def clip(workload: Workload) -> list[Variant]:
    """One micro-batch's gradients are clipped where they lie, by their global norm."""
    device, bound, nbytes = workload.device, workload.max_norm, 3 * workload.gradient_bytes
    clipped = partial(_clipped, workload, bound, [slice(None)])

    def ours(arrays: list[Array]) -> Callable[[], object]:
        state = FusedClipState([array.size for array in arrays], device.kernels)
        return partial(clip_gradients_fused, workload.as_taken(arrays), bound, state)

    def of_peer(kind: type[Peer], arrays: list[Array]) -> Callable[[], object]:
        return partial(kind.over(device, arrays).clip, bound)

    tolerance = OURS if workload.dtype == "float32" else _TO_BF16
    return [
        Variant("ours", nbytes, partial(clipped, ours), base=True, tolerance=tolerance),
        Variant(by_hand_name(device), nbytes, partial(clipped, partial(of_peer, ByHand))),
        Variant("torch foreach", nbytes, partial(clipped, partial(of_peer, Torch))),
    ]


def lora(workload: Workload) -> list[Variant]:
    """On a GPU each block of a LoRA layout is clipped by its own norm: eager, and replayed as a CUDA graph."""
    gpu, bound, nbytes = workload.device, 1.0, 3 * workload.gradient_bytes
    assert isinstance(gpu, Gpu)
    count = len(LORA_COMPONENTS)
    blocks = [slice(start, start + count) for start in range(0, len(workload.layout.slots), count)]
    clipped = partial(_clipped, workload, bound, blocks)

    def ours(arrays: list[Array]) -> Callable[[], object]:
        block = dict(zip(LORA_COMPONENTS, arrays, strict=True))
        return partial(clip_lora_gradients_fused, block, bound, init_lora_fused_clip(block, gpu.kernels))

    def of_torch(arrays: list[Array]) -> Callable[[], object]:
        return partial(Torch.over(gpu, arrays).clip, bound)

    our_graph, graph_of_torch = (
        partial(clipped, ours, partial(_recorded, gpu)),
        partial(clipped, of_torch, gpu.recorded),
    )
    return [
        Variant("ours replayed", nbytes, our_graph, base=True, tolerance=OURS),
        Variant("ours eager", nbytes, partial(clipped, ours), base=True, tolerance=OURS),
        Variant("torch foreach", nbytes, partial(clipped, of_torch)),
        Variant("torch foreach, graph", nbytes, graph_of_torch),
    ]


def _clipped(
    workload: Workload,
    bound: float,
    groups: Sequence[slice],
    clip_of: Callable[[list[Array]], Callable[[], object]],
    recorded: Callable[[Callable[[], object]], Callable[[], object]] | None = None,
) -> Case:
    """Groups of the gradients, by position, each clipped by its own norm; `clip_of` makes what clips a group."""
    arrays, put_back = _restored(workload, odd=workload.odd)
    run: Callable[[], object] = in_turn([clip_of(arrays[group]) for group in groups])
    factors = [min(1.0, bound / norm_of(workload.sums[group])) for group in groups for _ in arrays[group]]
    return Case(recorded(run) if recorded else run, lambda: workload.error(arrays, factors.__getitem__), put_back)


def _recorded(gpu: Gpu, run: Callable[[], object]) -> Callable[[], object]:
    run()  # what is made at the first call is no part of the graph
    graphs = gpu.kernels.device.graphs
    assert graphs is not None
    with graphs.recording() as recorded:
        run()
    return Replay(recorded.graph.launch, kept=run)
