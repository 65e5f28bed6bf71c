"""The benchmarks of single parts of the step, which add micro-batches, compute a norm, or clip.

Bytes are counted as reads and writes of whole buffers. G is the gradients of one micro-batch, A is the sum in fp32.

- accumulate, a window: gradengine reads each G. Each pass of `hold` micro-batches writes A, and reads A except in the
  first pass. By hand and torch write A to zero it, then read G, read A and write A for each micro-batch.
- accumulate, one micro-batch added to an existing sum: all read G, read A and write A.
- norm: all read G. gradengine sums partly in fp64, torch in the gradients' dtype. By hand, the memory for each tensor's
  squares and for widened bfloat16 is not counted.
- clip: all read G for the norm, then read and write G to scale.

Launches on a GPU for n tensors: gradengine needs 1 to add, 2 for a norm and 3 to clip. torch foreach launches once for
as many tensors and chunks as its kernel arguments hold, and n times to add bfloat16 to fp32. By hand launches n times
or more for each function.
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

_OURS = 1e-6  # largest relative error of gradengine's fp32 results
_KEPT = 0.7  # clip bound / norm, not a power of 2, which would need no rounding
_TO_BF16 = 2.0**-8  # relative error of one rounding to bfloat16


def ours(name: str, nbytes: int, build: Callable[[], Case], tolerance: float = _OURS) -> Variant:
    """Return a variant that the others are compared with."""
    return Variant(name, nbytes, build, base=True, tolerance=tolerance)


# ---- accumulate ----


def accumulate(workload: Workload, holds: Sequence[int] = (1,), *, begun: int = 0) -> list[Variant]:
    """Return variants that add micro-batches to one fp32 sum, for gradengine one for each number of `holds`.

    The first `begun` micro-batches are in the sum already. Only the others are timed.
    """
    device = workload.device
    untimed = 1 + begun if begun else 0  # calls that zero the sum and add the first micro-batches

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
    """Return the bytes of adding all micro-batches except the first `begun`, in passes of `hold`.

    If `hold` is None, a peer adds them one by one.
    """
    count = workload.count - begun
    passes = count if hold is None else -(-count // hold)
    # A peer writes zeros to the sum first. gradengine's first pass does not read the sum.
    first = 0 if begun else 1 if hold is None else -1
    return count * workload.gradient_bytes + (2 * passes + first) * workload.sum_bytes


def summed(
    workload: Workload, calls: Sequence[Callable[[], object]], untimed: int, results: Callable[[], Sequence[Any]]
) -> Case:
    """Return a case of calls that zero a sum and add micro-batches to it. The first `untimed` calls are not timed."""
    return Case(in_turn(calls[untimed:]), lambda: workload.error(results()), prepare=in_turn(calls[:untimed]))


# ---- norm ----


def norm(workload: Workload) -> list[Variant]:
    """Return variants that compute the global norm of one micro-batch's gradients, read in place."""

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
    """Return arrays with the first micro-batch's values, and a function that restores these values."""
    device = workload.device
    originals, arrays = (device.placed(workload.values[0]) for _ in range(2))
    return arrays, partial(device.copy, arrays, originals)


def clip(workload: Workload) -> list[Variant]:
    """Return variants that clip one micro-batch's gradients in place by their global norm."""
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
    """Return a case that clips groups of gradients, each by the group's norm. `clip_of` makes the call for a group."""
    arrays, put_back = restored(workload)
    run: Callable[[], object] = in_turn([clip_of(arrays[group]) for group in groups])
    factors = [min(1.0, bound / norm_of(workload.sums[group])) for group in groups for _ in arrays[group]]
    return Case(run, lambda: workload.error(arrays, factors.__getitem__), put_back)
