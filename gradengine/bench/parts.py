"""The parts of the step one by one: add micro-batches, compute a norm, clip.

Bytes counted, of G a micro-batch's gradients and A the sum in fp32; each pass reads or writes whole buffers:

- accumulate, a window: ours reads each G, and for each pass of `hold` micro-batches writes A and, but for the first
  pass, reads A. By hand and torch: write A to zero it; for each micro-batch read G, read A, write A.
- accumulate, one micro-batch to a sum that is there already: read G, read A, write A; the same for all.
- norm: read G. Ours sums in fp64 where it matters; torch in the gradients' dtype. By hand each tensor is squared into
  memory first, which is not counted, nor is the widening of bfloat16.
- clip: read G for the norm, read and write G to scale.

Launches on a GPU, of n tensors: ours 1 to add, 2 for a norm, 3 to clip. torch foreach: as
many as its kernel arguments hold tensors and chunks for, and n for bfloat16 into fp32. By hand: n or more for each
function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from gradengine.accumulate import PerBlockGradientAccumulator
from gradengine.bench.device import Array, Case
from gradengine.bench.harness import Variant, in_turn
from gradengine.bench.peers import ByHand, Peer, adding, peers, torch_name
from gradengine.bench.workload import Workload, norm_of, widened
from gradengine.clip import FusedClipState, clip_gradients_fused
from gradengine.kernels import ClipPlan

_OURS = 1e-6  # the largest error that ours may have, but for rounding to bfloat16
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


# ---- clip ----


def restored(workload: Workload) -> tuple[list[Array], Callable[[], None]]:
    """Arrays with the first micro-batch's values, and a function that restores the values."""
    device = workload.device
    originals, arrays = (device.placed(workload.values[0]) for _ in range(2))
    return arrays, partial(device.copy, arrays, originals)


def clip(workload: Workload) -> list[Variant]:
    """Clip one micro-batch's gradients in place by their global norm."""
    device, bound, nbytes = workload.device, _KEPT * workload.norm, 3 * workload.gradient_bytes

    def of_ours(arrays: list[Array]) -> Callable[[], object]:
        state = FusedClipState([array.size for array in arrays], device.kernels)
        return partial(clip_gradients_fused, workload.as_taken(arrays), bound, state)

    def of_peer(kind: type[Peer]) -> Case:
        return clipped(workload, bound, lambda arrays: partial(kind.over(device, arrays).clip, bound))

    tolerance = _OURS if workload.dtype == "float32" else _TO_BF16
    own = ours("ours", nbytes, partial(clipped, workload, bound, of_ours), tolerance)
    return [own, *peers(workload, nbytes, of_peer)]


def clipped(
    workload: Workload,
    bound: float,
    clip_of: Callable[[list[Array]], Callable[[], object]],
    groups: Sequence[slice] = (slice(None),),
) -> Case:
    """Clip groups of the gradients, by position, each by its own norm; `clip_of` makes the function for a group."""
    arrays, put_back = restored(workload)
    run: Callable[[], object] = in_turn([clip_of(arrays[group]) for group in groups])
    factors = [min(1.0, bound / norm_of(workload.sums[group])) for group in groups for _ in arrays[group]]
    return Case(run, lambda: workload.error(arrays, factors.__getitem__), put_back)
