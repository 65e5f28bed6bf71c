"""The host's time on a GPU: until the call that takes a micro-batch, or replays a window, comes back.

What it is given is checked tensor by tensor each time, so that the tensors' number and what they come as count.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, final

from gradengine.accumulate import PerBlockGradientAccumulator
from gradengine.bench.case import Case, Variant
from gradengine.bench.device import Array, Gpu
from gradengine.bench.peers import Torch
from gradengine.bench.workload import Workload
from gradengine.engine import GradientEngine

__all__ = ["Lent", "calls"]

_BASE = "cupy arrays"  # with which the others are compared


@final
class Lent:
    """An array of which DLPack alone is to be seen: what ours gets of a framework that it does not know."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def __dlpack__(self, **arguments: Any) -> object:
        return self._array.__dlpack__(**arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self._array.__dlpack_device__()
        return device


def calls(workload: Workload) -> list[Variant]:
    """The call that takes one micro-batch of fp32, by what the gradients come as; and a whole window replayed."""
    gpu, count = workload.device, workload.count
    assert isinstance(gpu, Gpu)

    def from_torch(array: Array) -> object:
        return gpu.torch and gpu.torch_tensor(array)

    kinds: dict[str, Callable[[Array], object]] = {
        _BASE: lambda array: array,
        "torch tensors": from_torch,
        "arrays by DLPack": Lent,
        "raw buffers": partial(gpu.raw, dtype="float32"),
    }
    one, gradients, sums = workload.first(1), workload.gradient_bytes, workload.sum_bytes
    window = count * gradients + (2 * count + 1) * sums
    replay = partial(_replay, workload, workload.max_norm)
    return [
        *(
            Variant(f"ours add, {name}", gradients + sums, partial(_add, one, kind), name == _BASE, required=True)
            for name, kind in kinds.items()
        ),
        Variant("ours replay of a window", window, partial(replay, is_checked=True), required=True),
        Variant("ours replay, unchecked", window, partial(replay, is_checked=False), required=True),
        Variant("torch foreach_add_", gradients + 2 * sums, partial(_torch_add, one)),
    ]


def _add(workload: Workload, kind: Callable[[Array], object]) -> Case:
    accumulator = PerBlockGradientAccumulator(workload.layout, workload.device.kernels)
    given = [kind(array) for array in workload.batches[0]]
    return Case(
        lambda: accumulator.add(given),
        error=lambda: workload.error(list(accumulator.views().values())),
        prepare=accumulator.zero_all,
    )


def _replay(workload: Workload, bound: float, *, is_checked: bool) -> Case:
    engine = GradientEngine(workload.layout, workload.device.kernels, max_norm=bound, micro_batches=workload.count)
    with engine.capture() as graph:
        for gradients in workload.for_ours():
            engine.add(gradients)
        engine.step()
    return Case(
        lambda: graph.replay(check=is_checked),
        error=lambda: workload.error_of_step(list(engine.accumulator.views().values())),
    )


def _torch_add(workload: Workload) -> Case:
    sums = Torch.sums_for(workload)
    gradients = workload.device.tensors(workload.batches[0])
    return Case(lambda: sums.add(gradients), error=lambda: workload.error(sums.gradients), prepare=sums.zero)
