"""The whole step of a window of K micro-batches, on the device: added, checked, clipped, averaged, handed back.

Bytes counted, of G a micro-batch's gradients and A the sum in fp32; for each element at K = 4 in fp32 (bf16):

| variant | reads and writes | bytes an element |
|---|---|---|
| ours hold=1 | 4 G; A written by the first, read and written by the others; hand back 2 A | 16 + 28 + 8 = 52 (44) |
| ours hold=4 | 4 G; A written once; hand back 2 A | 16 + 4 + 8 = 28 (20) |
| torch foreach, sum | zero A; 4 x (G + 2 A); norm A; multiply 2 A | 4 + 48 + 4 + 8 = 64 (56) |
| torch foreach, mean | the same, and 2 A for the average, which ours always takes | 72 (64) |
| torch foreach, sum, graph | as sum | 64 (56) |
| torch.compile, by micro-batch | 4 G; A as ours hold=1; norm A; multiply 2 A: the fewest that it can move | 56 (48) |
| torch.compile, whole window | 4 G; A written once; norm A; multiply 2 A: the fewest | 32 (24) |
| cupy by hand | as torch sum (and what its temporaries take, which is not counted) | 64 (56) |

Launches for n = 218 tensors: ours K + 2 (hold=1) and 3 (hold=4), replayed 1 launch of the host's; torch foreach 1 for
each list that its kernel arguments hold: about ceil(6190 chunks of 65536 / 320), or / 2240 in builds for CUDA 13, for
each of the 2 + K passes, plus the norm's second stage, and n for each micro-batch of bf16; by hand n for each pass, n
waits for the norm. `bench gpu launches` counts them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from gradengine.bench import by_hand
from gradengine.bench.case import Case
from gradengine.bench.gpu.device import Gpu
from gradengine.bench.gpu.report import Entry
from gradengine.bench.gpu.torch_peers import CompiledStep, arrays_of, empty_totals, foreach_add, limited, torch_of
from gradengine.bench.gpu.workload import DeviceWorkload
from gradengine.engine import GradientEngine
from gradengine.result import StepResult

__all__ = ["compiled_entries", "our_entries", "step_entries"]

_OURS = 1e-6  # gradients and norm


def step_entries(workload: DeviceWorkload) -> list[Entry]:
    """Ours, eager and captured, without holding and with it; torch in three ways; CuPy by hand."""
    return [
        *our_entries(workload),
        Entry("torch foreach, sum", partial(_torch, workload, "torch foreach, sum")),
        Entry("torch foreach, mean", partial(_torch, workload, "torch foreach, mean", averages=True)),
        Entry("torch foreach, sum, graph", partial(_torch_graph, workload)),
        Entry("cupy by hand", partial(_by_hand, workload)),
    ]


def compiled_entries(workload: DeviceWorkload, limit: float) -> list[Entry]:
    """Ours beside `torch.compile` of the same; each of its two ways may take `limit` seconds to compile."""
    return [
        *our_entries(workload),
        Entry("torch.compile, by micro-batch", partial(_compiled, workload, limit, whole=False)),
        Entry("torch.compile, whole window", partial(_compiled, workload, limit, whole=True)),
    ]


def our_entries(workload: DeviceWorkload) -> list[Entry]:
    """Ours with hold=1 and hold=K, eager and captured."""
    entries = []
    for hold in dict.fromkeys((1, workload.host.count)):
        for is_captured in (False, True):
            variant = f"ours hold={hold}" + (", captured" if is_captured else "")
            build = partial(_ours, workload, variant, hold, is_captured=is_captured)
            entries.append(Entry(variant, build, ours=True))
    return entries


def _bytes(workload: DeviceWorkload, sets: int) -> int:
    """Of K micro-batches' gradients, and `sets` passes over the sum in fp32."""
    return workload.host.count * workload.host.gradient_bytes + sets * workload.host.total_bytes


def _ours(workload: DeviceWorkload, variant: str, hold: int, *, is_captured: bool) -> Case:
    count, kernels = workload.host.count, workload.gpu.kernels
    engine = GradientEngine(workload.layout, kernels, max_norm=workload.max_norm, micro_batches=count, hold=hold)
    workload.gpu.poison(engine.accumulator.targets)
    micro_batches = workload.for_engine()

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
        found = workload.error_of_step([view.get() for view in engine.accumulator.views().values()])
        return float(np.max([found, workload.error_of_norm(norm)]))  # NaN stays NaN

    passes = -(-count // hold)
    nbytes = _bytes(workload, 2 * passes - 1 + 2)
    return Case("step", variant, nbytes, run, error=error, ours=True, tolerance=_OURS)


def _torch(workload: DeviceWorkload, variant: str, *, averages: bool = False) -> Case:
    gpu, totals = workload.gpu, empty_totals(workload.gpu, workload.shapes)
    micro_batches = workload.for_torch()
    count = workload.host.count
    # A sum clipped to K max_norm is K times the average clipped to max_norm: no pass is charged for the average.
    times = 1 if averages else count
    bound = workload.max_norm * times

    def run() -> None:
        totals.zero()
        for gradients in micro_batches:
            foreach_add(gpu, totals, gradients)
        if averages:
            totals.divide(count)
        totals.clip(bound, error_if_nonfinite=False)  # with it torch waits for the device

    nbytes = _bytes(workload, 1 + 2 * count + 3 + (2 if averages else 0))
    error = partial(_error_of_tensors, workload, totals.gradients, times)
    return Case("step", variant, nbytes, run, error=error)


def _torch_graph(workload: DeviceWorkload) -> Case:
    torch_of(workload.gpu)
    variant = "torch foreach, sum, graph"
    eager = _torch(workload, variant)
    return Case("step", variant, eager.bytes, workload.gpu.recorded(eager.run), error=eager.error)


def _by_hand(workload: DeviceWorkload) -> Case:
    arrays = workload.gpu.empty(workload.shapes, np.float32, odd=False)
    totals = [workload.gpu.by_hand(array) for array in arrays]
    micro_batches, bound, count = workload.for_hand(), workload.max_norm, workload.host.count

    def run() -> None:
        by_hand.zero(totals)
        for gradients in micro_batches:
            by_hand.add(totals, gradients)
        by_hand.clip(totals, bound, divisor=count)

    nbytes = _bytes(workload, 1 + 2 * count + 3)
    return Case("step", "cupy by hand", nbytes, run, error=lambda: workload.error_of_step([a.get() for a in arrays]))


def _compiled(workload: DeviceWorkload, limit: float, *, whole: bool) -> Case:
    gpu: Gpu = workload.gpu
    count = workload.host.count
    step = CompiledStep(gpu, workload.shapes, workload.max_norm * count)
    micro_batches = workload.for_torch()
    variant = "torch.compile, whole window" if whole else "torch.compile, by micro-batch"

    def run() -> None:
        (step.whole if whole else step.by_micro_batch)(micro_batches)

    with limited(limit):  # compiled here, so that it is no part of any time
        run()
        run()
    nbytes = _bytes(workload, (1 if whole else 2 * count - 1) + 3)
    return Case("step", variant, nbytes, run, error=partial(_error_of_tensors, workload, step.totals, count))


def _error_of_tensors(workload: DeviceWorkload, tensors: list[object], times: float) -> float:
    return workload.error_of_step(arrays_of(tensors), times)
