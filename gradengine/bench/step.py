"""`bench step`: the whole step of one worker, from the first micro-batch to the gradient handed back.

Bytes counted, of A the sum in fp32: accumulating as in `bench accumulate`; the norm reads A, but nothing where it is
taken in the last micro-batch's pass (ours); handing back reads and writes A, and so does each pass that averages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from gradengine.bench import by_hand
from gradengine.bench.accumulate import bytes_accumulated, bytes_by_passes
from gradengine.bench.case import Absent, Case
from gradengine.bench.memory import peak_growth
from gradengine.bench.torch_peers import TorchGradients, as_tensors, warm_up, without_torch
from gradengine.bench.workload import Workload
from gradengine.engine import GradientEngine

__all__ = ["step_cases"]

NAME = "step"


def step_cases(workload: Workload, hold: int) -> list[Case | Absent]:
    """Ours without holding and with it, NumPy by hand, and torch in two ways.

    Torch is given the average for nothing (as where the loss was divided by K), and once more with a pass for it.

    Args:
        workload: The micro-batches, each in memory of its own.
        hold: Micro-batches that the second of ours folds in one pass; 1 leaves that variant out.
    """
    bound = workload.max_norm  # taken here, because it is the benchmark's own work and memory
    ours = [_with_memory(workload, partial(_ours, workload, bound, held)) for held in dict.fromkeys((1, hold))]
    return [*ours, _with_memory(workload, partial(_by_hand, workload, bound)), *_torch_cases(workload, bound)]


def _torch_cases(workload: Workload, bound: float) -> list[Case | Absent]:
    kind = "foreach" if workload.dtype == "float32" else "add_"
    variants = {f"torch {kind}, sum": False, f"torch {kind}, mean": True}
    absent = without_torch(*variants)
    if absent:
        return [*absent]
    warm_up()
    return [
        _with_memory(workload, partial(_torch, workload, bound, variant, averages=averages))
        for variant, averages in variants.items()
    ]


def _with_memory(workload: Workload, build: Callable[[], Case]) -> Case:
    """The case, and what it took from its first allocation to the end of its first step."""

    def build_and_run() -> Case:
        case = build()
        case.run()
        return case

    case, grown = peak_growth(build_and_run)
    return case if grown is None else replace(case, arenas=grown / workload.total_bytes)


def _ours(workload: Workload, bound: float, hold: int) -> Case:
    engine = GradientEngine(workload.layout, max_norm=bound, micro_batches=workload.count, hold=hold)
    micro_batches = workload.for_engine()

    def run() -> None:
        for gradients in micro_batches:
            engine.add(gradients)
        engine.step()

    return Case(
        NAME,
        f"ours hold={hold}",
        bytes_accumulated(workload, hold) + 2 * workload.total_bytes,
        run,
        error=lambda: workload.error_of_step(list(engine.accumulator.views().values())),
        ours=True,
    )


def _by_hand(workload: Workload, bound: float) -> Case:
    totals = by_hand.zeros_like(workload.micro_batches[0])

    def run() -> None:
        by_hand.zero(totals)
        for gradients in workload.micro_batches:
            by_hand.add(totals, gradients)
        by_hand.clip(totals, bound, divisor=workload.count)

    return Case(
        NAME,
        "numpy by hand",
        bytes_by_passes(workload) + 3 * workload.total_bytes,
        run,
        error=lambda: workload.error_of_step(totals),
    )


def _torch(workload: Workload, bound: float, variant: str, *, averages: bool) -> Case:
    totals = TorchGradients.empty_like(workload.micro_batches[0])
    micro_batches = [as_tensors(gradients) for gradients in workload.micro_batches]
    # A sum clipped to K max_norm is K times the average clipped to max_norm: no pass is charged for the average.
    times = 1 if averages else workload.count

    def run() -> None:
        totals.zero()
        for gradients in micro_batches:
            totals.add(gradients)
        if averages:
            totals.divide(workload.count)
        totals.clip(bound * times)

    return Case(
        NAME,
        variant,
        bytes_by_passes(workload) + (5 if averages else 3) * workload.total_bytes,
        run,
        error=lambda: workload.error_of_step(totals.arrays(), times),
    )
