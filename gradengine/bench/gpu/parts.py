"""The three kernels one by one: a micro-batch is added to a full arena, a norm is taken, gradients are handed back.

Bytes counted, of G a micro-batch's gradients and A the sum in fp32; each pass reads or writes whole buffers:

- accumulate: read G, read A, write A; the same for all. Ours takes the norm's squared sums in the same pass.
- norm: read G (fp32 or bf16). Ours sums in fp64 where it matters; torch in the gradients' dtype. By hand each tensor is
  squared into memory first, which is not counted.
- hand-back: read A, write A. hand-back-bf16: ours reads A and writes A / 2; torch multiplies in place (read A, write A)
  and then copies (read A, write A / 2).

Launches, of n tensors: ours 1, 2 and 1. torch foreach: as many as its kernel arguments hold tensors and chunks for, and
n for bf16 into fp32. By hand: n or more for each function called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from gradengine.accumulate import PerBlockGradientAccumulator
from gradengine.bench import by_hand
from gradengine.bench.case import Case
from gradengine.bench.gpu.device import Array, raw
from gradengine.bench.gpu.report import Entry
from gradengine.bench.gpu.torch_peers import arrays_of, empty_totals, foreach_add, torch_of
from gradengine.bench.gpu.workload import DeviceWorkload
from gradengine.bench.workload import widened
from gradengine.kernels import ClipPlan

__all__ = ["accumulate_entries", "hand_back_entries", "norm_entries"]

_FACTOR = 0.75  # exact in fp32, and not 1, which would end the kernel at once
_TO_BF16 = 2.0**-8  # relative error of one rounding to bf16
_OURS = 1e-6


def accumulate_entries(workload: DeviceWorkload) -> list[Entry]:
    """One micro-batch is added to an arena that holds one already.

    Args:
        workload: Two micro-batches.
    """
    return [
        Entry("ours", partial(_our_accumulate, workload), ours=True),
        Entry("torch foreach", partial(_torch_accumulate, workload)),
        Entry("cupy by hand", partial(_accumulate_by_hand, workload)),
    ]


def norm_entries(workload: DeviceWorkload) -> list[Entry]:
    """The global norm of gradients as they lie.

    Args:
        workload: One micro-batch.
    """
    return [
        Entry("ours", partial(_our_norm, workload), ours=True),
        Entry("torch foreach", partial(_torch_norm, workload)),
        Entry("cupy by hand", partial(_norm_by_hand, workload)),
    ]


def hand_back_entries(workload: DeviceWorkload, *, to_bf16: bool) -> list[Entry]:
    """A set in fp32 is multiplied: in place, or into bf16 destinations.

    Args:
        workload: One micro-batch of fp32.
        to_bf16: The latter.
    """
    entries = [
        Entry("ours", partial(_our_hand_back, workload, to_bf16=to_bf16), ours=True),
        Entry("torch foreach", partial(_torch_hand_back, workload, to_bf16=to_bf16)),
    ]
    return entries if to_bf16 else [*entries, Entry("cupy by hand", partial(_hand_back_by_hand, workload))]


# ---- accumulate ----


def _accumulate_case(workload: DeviceWorkload, variant: str, run: Callable[[], object], **facts: Any) -> Case:
    nbytes = workload.host.gradient_bytes + 2 * workload.host.total_bytes
    return Case("accumulate", variant, nbytes, run, **facts)


def _our_accumulate(workload: DeviceWorkload) -> Case:
    accumulator = PerBlockGradientAccumulator(workload.layout, workload.gpu.kernels)
    workload.gpu.poison(accumulator.targets)
    first, second = workload.for_engine()

    def prepare() -> None:
        accumulator.zero_all()
        accumulator.add(first)

    return _accumulate_case(
        workload,
        "ours",
        lambda: accumulator.add(second),
        error=lambda: workload.error([view.get() for view in accumulator.views().values()], 1),
        prepare=prepare,
        ours=True,
        tolerance=_OURS,
    )


def _torch_accumulate(workload: DeviceWorkload) -> Case:
    gpu, totals = workload.gpu, empty_totals(workload.gpu, workload.shapes)
    first, second = workload.for_torch()

    def prepare() -> None:
        totals.zero()
        foreach_add(gpu, totals, first)

    return _accumulate_case(
        workload,
        "torch foreach",
        lambda: foreach_add(gpu, totals, second),
        error=lambda: workload.error(arrays_of(totals.gradients), 1),
        prepare=prepare,
    )


def _accumulate_by_hand(workload: DeviceWorkload) -> Case:
    arrays = workload.gpu.empty(workload.shapes, np.float32, odd=False)
    totals = [workload.gpu.by_hand(array) for array in arrays]
    first, second = workload.for_hand()

    def prepare() -> None:
        by_hand.zero(totals)
        by_hand.add(totals, first)

    return _accumulate_case(
        workload,
        "cupy by hand",
        lambda: by_hand.add(totals, second),
        error=lambda: workload.error([array.get() for array in arrays], 1),
        prepare=prepare,
    )


# ---- norm ----


def _norm_case(workload: DeviceWorkload, variant: str, run: Callable[[], object], **facts: Any) -> Case:
    return Case("norm", variant, workload.host.gradient_bytes, run, **facts)


def _our_norm(workload: DeviceWorkload) -> Case:
    kernels = workload.gpu.kernels
    views = [kernels.view(gradient, "gradient") for gradient in workload.for_engine()[0]]
    sums = kernels.squared_sums([view.size for view in views])
    chunks = sums.all_chunks(range(len(views)))
    plan = ClipPlan((0,) * len(views), (workload.max_norm,))

    def run() -> Any:
        kernels.measure(views, sums, chunks)
        return kernels.finalise(None, sums, plan, 1.0, zero_if_bad=False)

    def error() -> float:
        return workload.error_of_norm(float(run().norm))

    return _norm_case(workload, "ours", run, error=error, ours=True, tolerance=_OURS)


def _torch_norm(workload: DeviceWorkload) -> Case:
    torch = torch_of(workload.gpu)
    gradients = workload.for_torch()[0]

    def run() -> Any:
        return torch.nn.utils.get_total_norm(gradients, foreach=True)

    return _norm_case(workload, "torch foreach", run, error=lambda: workload.error_of_norm(float(run())))


def _norm_by_hand(workload: DeviceWorkload) -> Case:
    gradients = [widened(gradient) for gradient in workload.for_hand()[0]]  # bf16: not charged for

    def run() -> float:
        return by_hand.norm_of(gradients)

    return _norm_case(workload, "cupy by hand", run, error=lambda: workload.error_of_norm(run()))


# ---- hand back ----


class _Restored:
    """A set in fp32 that is put back before each run by one copy.

    Attributes:
        parts: Each component, as ours has it.
        arrays: The same as arrays.
    """

    def __init__(self, workload: DeviceWorkload) -> None:
        self._gpu, layout = workload.gpu, workload.layout
        kernels = self._gpu.kernels
        self._original, self._memory = kernels.allocate(layout.arena_size), kernels.allocate(layout.arena_size)
        kernels.fill_zero([self._original])
        for slot, values in zip(layout.slots, workload.host.micro_batches[0], strict=True):
            kernels.array(self._original.part(slot.offset, slot.stop), slot.shape).set(widened(values))
        self.parts = [self._memory.part(slot.offset, slot.stop) for slot in layout.slots]
        self.arrays = [kernels.array(part, slot.shape) for part, slot in zip(self.parts, layout.slots, strict=True)]

    def put_back(self) -> None:
        """Queue the copy."""
        self._gpu.copy(self._memory.pointer, self._original.pointer, self._original.nbytes)


def _hand_back_case(
    workload: DeviceWorkload,
    variant: str,
    run: Callable[[], object],
    memory: _Restored,
    results: Sequence[Array],
    passes: float,
    *,
    to_bf16: bool,
) -> Case:
    """A case that moves `passes` times the set in fp32."""
    return Case(
        "hand-back",
        variant,
        round(passes * workload.host.total_bytes),
        run,
        error=lambda: workload.error([result.get() for result in results], _FACTOR),
        prepare=memory.put_back,
        ours=variant == "ours",
        tolerance=_TO_BF16 if to_bf16 else _OURS,
    )


def _our_hand_back(workload: DeviceWorkload, *, to_bf16: bool) -> Case:
    gpu, memory = workload.gpu, _Restored(workload)
    results, destinations, passes = memory.arrays, memory.parts, 2.0
    if to_bf16:
        results = gpu.empty(workload.shapes, np.uint16, odd=workload.odd)
        destinations = [gpu.kernels.writable_view(raw(array), "destination") for array in results]
        gpu.poison(destinations)
        passes = 1.5

    def run() -> None:
        gpu.kernels.scale(memory.parts, np.float32(_FACTOR), destinations)

    return _hand_back_case(workload, "ours", run, memory, results, passes, to_bf16=to_bf16)


def _torch_hand_back(workload: DeviceWorkload, *, to_bf16: bool) -> Case:
    gpu, torch, memory = workload.gpu, torch_of(workload.gpu), _Restored(workload)
    totals = gpu.tensors(memory.arrays)
    results, passes = memory.arrays, 2.0
    destinations: list[Any] = []
    if to_bf16:
        results = gpu.empty(workload.shapes, np.uint16, odd=workload.odd)
        destinations, passes = gpu.tensors(results), 3.5

    def run() -> None:
        torch._foreach_mul_(totals, _FACTOR)
        if destinations:
            torch._foreach_copy_(destinations, totals)

    return _hand_back_case(workload, "torch foreach", run, memory, results, passes, to_bf16=to_bf16)


def _hand_back_by_hand(workload: DeviceWorkload) -> Case:
    memory = _Restored(workload)
    totals = [workload.gpu.by_hand(array) for array in memory.arrays]

    def run() -> None:
        for total in totals:
            np.multiply(total, np.float32(_FACTOR), out=total)

    return _hand_back_case(workload, "cupy by hand", run, memory, memory.arrays, 2.0, to_bf16=False)
