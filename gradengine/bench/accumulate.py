"""`bench accumulate`: a window of micro-batches becomes one fp32 sum.

Bytes counted, of G a micro-batch's gradients and A the sum in fp32. Ours: read G for each micro-batch; for each pass of
`hold` micro-batches write A and, but for the first pass, read A. By hand and torch: write A to zero it; for each
micro-batch read G, read A and write A.
"""

from __future__ import annotations

from gradengine.accumulate import PerBlockGradientAccumulator
from gradengine.bench import by_hand
from gradengine.bench.case import Absent, Case
from gradengine.bench.torch_peers import TorchGradients, as_tensors, without_torch
from gradengine.bench.workload import Workload

__all__ = ["accumulate_cases", "bytes_accumulated", "bytes_by_passes"]

NAME = "accumulate"


def accumulate_cases(workload: Workload, hold: int) -> list[Case | Absent]:
    """Ours without holding and with it, NumPy by hand, and torch.

    Args:
        workload: The micro-batches.
        hold: Micro-batches that the second of ours folds in one pass; 1 leaves that variant out.
    """
    ours = [_ours(workload, held) for held in dict.fromkeys((1, hold))]
    torch = "torch foreach" if workload.dtype == "float32" else "torch add_"
    absent = without_torch(torch)
    cases = [*ours, _by_hand(workload)]
    return [*cases, *absent] if absent else [*cases, _torch(workload, torch)]


def bytes_accumulated(workload: Workload, hold: int) -> int:
    """Traffic of accumulating in passes of `hold` micro-batches, the first of which overwrites."""
    passes = -(-workload.count // hold)
    return workload.count * workload.gradient_bytes + (2 * passes - 1) * workload.total_bytes


def bytes_by_passes(workload: Workload) -> int:
    """Traffic of zeroing, then adding each micro-batch in a pass of its own."""
    return workload.count * (workload.gradient_bytes + 2 * workload.total_bytes) + workload.total_bytes


def _ours(workload: Workload, hold: int) -> Case:
    accumulator = PerBlockGradientAccumulator(workload.layout, hold=hold)
    micro_batches = workload.for_engine()

    def run() -> None:
        accumulator.zero_all()
        for gradients in micro_batches:
            accumulator.add(gradients)
        accumulator.close()

    return Case(
        NAME,
        f"ours hold={hold}",
        bytes_accumulated(workload, hold),
        run,
        error=lambda: workload.error_of_sum(list(accumulator.views().values())),
        ours=True,
    )


def _by_hand(workload: Workload) -> Case:
    totals = by_hand.zeros_like(workload.micro_batches[0])

    def run() -> None:
        by_hand.zero(totals)
        for gradients in workload.micro_batches:
            by_hand.add(totals, gradients)

    return Case(NAME, "numpy by hand", bytes_by_passes(workload), run, error=lambda: workload.error_of_sum(totals))


def _torch(workload: Workload, variant: str) -> Case:
    totals = TorchGradients.empty_like(workload.micro_batches[0])
    micro_batches = [as_tensors(gradients) for gradients in workload.micro_batches]

    def run() -> None:
        totals.zero()
        for gradients in micro_batches:
            totals.add(gradients)

    return Case(NAME, variant, bytes_by_passes(workload), run, error=lambda: workload.error_of_sum(totals.arrays()))
