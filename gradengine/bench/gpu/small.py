"""Where launches and Python are what counts: clipping LoRA gradients, and the host's time for a micro-batch.

LoRA: four blocks, each clipped by its own norm over six buffers of 4 to 98 KB (H = 1536, KV = 256, rank 16). From an
idle GPU, by the host's clock, until all is done. Launches: ours 3 a block, replayed 1 in all; torch's foreach about 8 a
block, of which 4 have the list. Bytes: read, read and written, as for every clip.

Host: until the call comes back; n = 218 tensors, which ours checks one by one each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt

from gradengine.accumulate import PerBlockGradientAccumulator
from gradengine.bench.case import Case, relative_error
from gradengine.bench.gpu.device import Array, Gpu, Lent, Replay, raw
from gradengine.bench.gpu.report import Entry
from gradengine.bench.gpu.torch_peers import arrays_of, empty_totals, foreach_add, torch_of
from gradengine.bench.gpu.workload import DeviceWorkload
from gradengine.bench.torch_peers import TorchGradients
from gradengine.capture import CapturedWindow
from gradengine.clip import clip_lora_gradients_fused, init_lora_fused_clip
from gradengine.engine import GradientEngine
from gradengine.layout import LORA_COMPONENTS, GradientLayout

__all__ = ["host_entries", "lora_entries"]

_BOUND = 1.0
_BLOCKS = 4
_BASE = "ours add, cupy arrays"  # with which the host's other times are compared


class _LoraBlocks:
    """Four blocks' gradients in one allocation, which one copy puts back.

    Attributes:
        blocks: Each block's six arrays by name.
        nbytes: Of all, padding not counted.
    """

    def __init__(self, gpu: Gpu, hidden: int) -> None:
        slots = GradientLayout.lora(_BLOCKS, hidden, max(1, hidden // 6), min(16, hidden)).slots
        random = np.random.default_rng(0)
        self._gpu = gpu
        self._values = [random.standard_normal(slot.shape, np.float32) for slot in slots]
        self._originals = gpu.placed(self._values)
        self._arrays = gpu.placed(self._values)
        count = len(LORA_COMPONENTS)
        self.blocks = [
            dict(zip(LORA_COMPONENTS, self._arrays[count * block : count * (block + 1)], strict=True))
            for block in range(_BLOCKS)
        ]
        self.nbytes = sum(value.nbytes for value in self._values)

    def put_back(self) -> None:
        """Queue the copy of the whole allocation."""
        first, last = self._originals[0], self._originals[-1]
        extent = last.data.ptr + last.nbytes - first.data.ptr
        self._gpu.copy(self._arrays[0].data.ptr, first.data.ptr, extent)

    def error(self) -> float:
        """How far the clipped gradients are from fp64's."""
        return relative_error([array.get() for array in self._arrays], self._expected)

    def _expected(self, position: int) -> npt.NDArray[np.float64]:
        count = len(LORA_COMPONENTS)
        block = [value.astype(np.float64) for value in self._values[position // count * count :][:count]]
        norm = math.sqrt(sum(float(np.vdot(value, value)) for value in block))
        return block[position % count] * min(1.0, _BOUND / norm)


def lora_entries(gpu: Gpu, hidden: int) -> list[Entry]:
    """Ours replayed and eager; torch eager and as a CUDA graph."""
    return [
        Entry("ours replayed", partial(_our_lora, gpu, hidden, is_captured=True), ours=True),
        Entry("ours eager", partial(_our_lora, gpu, hidden, is_captured=False), ours=True),
        Entry("torch foreach", partial(_torch_lora, gpu, hidden, is_captured=False)),
        Entry("torch foreach, graph", partial(_torch_lora, gpu, hidden, is_captured=True)),
    ]


def _lora_case(variant: str, blocks: _LoraBlocks, run: Callable[[], object], *, ours: bool) -> Case:
    nbytes = 3 * blocks.nbytes
    tolerance = 1e-6 if ours else None
    return Case("lora", variant, nbytes, run, blocks.error, blocks.put_back, ours, tolerance=tolerance)


def _our_lora(gpu: Gpu, hidden: int, *, is_captured: bool) -> Case:
    blocks = _LoraBlocks(gpu, hidden)
    states = [init_lora_fused_clip(block, gpu.kernels) for block in blocks.blocks]

    def run() -> None:
        for block, state in zip(blocks.blocks, states, strict=True):
            clip_lora_gradients_fused(block, _BOUND, state)

    if not is_captured:
        return _lora_case("ours eager", blocks, run, ours=True)
    run()  # what is made at the first call is no part of the graph
    with gpu.kernels.recording() as recorded:
        run()
    return _lora_case("ours replayed", blocks, Replay(recorded.graph.launch, kept=states), ours=True)


def _torch_lora(gpu: Gpu, hidden: int, *, is_captured: bool) -> Case:
    torch_of(gpu)
    blocks = _LoraBlocks(gpu, hidden)
    gradients = [TorchGradients(gpu.tensors(list(block.values()))) for block in blocks.blocks]

    def run() -> None:
        for block in gradients:
            block.clip(_BOUND, error_if_nonfinite=False)

    if not is_captured:
        return _lora_case("torch foreach", blocks, run, ours=False)
    return _lora_case("torch foreach, graph", blocks, gpu.recorded(run), ours=False)


# ---- the host's time ----


def host_entries(workload: DeviceWorkload) -> list[Entry]:
    """The call that takes one micro-batch, by what the gradients come as; and a whole window replayed.

    Args:
        workload: Micro-batches of fp32.
    """
    kinds: dict[str, Callable[[Array], object]] = {
        _BASE: lambda array: array,
        "ours add, torch tensors": partial(_as_torch_gives_it, workload.gpu),
        "ours add, arrays by DLPack": Lent,
        "ours add, raw buffers": partial(raw, dtype="float32"),
    }
    one = workload.first(1)
    return [
        *(Entry(name, partial(_our_add, one, name, kind), ours=True) for name, kind in kinds.items()),
        Entry("ours replay of a window", partial(_our_replay, workload, checked=True), ours=True),
        Entry("ours replay, unchecked", partial(_our_replay, workload, checked=False), ours=True),
        Entry("torch foreach_add_", partial(_torch_add, one)),
    ]


def _as_torch_gives_it(gpu: Gpu, array: Array) -> object:
    torch_of(gpu)
    return gpu.torch_tensor(array)


def _our_add(workload: DeviceWorkload, variant: str, kind: Callable[[Array], object]) -> Case:
    accumulator = PerBlockGradientAccumulator(workload.layout, workload.gpu.kernels)
    given = [kind(array) for array in workload.batches[0]]
    return Case(
        "host",
        variant,
        workload.host.gradient_bytes + workload.host.total_bytes,
        lambda: accumulator.add(given),
        error=lambda: workload.error([view.get() for view in accumulator.views().values()], 1),
        prepare=accumulator.zero_all,
        ours=variant == _BASE,
    )


def _our_replay(workload: DeviceWorkload, *, checked: bool) -> Case:
    count = workload.host.count
    engine = GradientEngine(workload.layout, workload.gpu.kernels, max_norm=workload.max_norm, micro_batches=count)
    with engine.capture() as graph:
        for gradients in workload.for_engine():
            engine.add(gradients)
        engine.step()
    window: CapturedWindow = graph
    return Case(
        "host",
        "ours replay of a window" if checked else "ours replay, unchecked",
        count * workload.host.gradient_bytes + (2 * count + 1) * workload.host.total_bytes,
        lambda: window.replay(check=checked),
        error=lambda: workload.error_of_step([view.get() for view in engine.accumulator.views().values()]),
    )


def _torch_add(workload: DeviceWorkload) -> Case:
    gpu, totals = workload.gpu, empty_totals(workload.gpu, workload.shapes)
    gradients = gpu.tensors(workload.batches[0])
    return Case(
        "host",
        "torch foreach_add_",
        workload.host.gradient_bytes + 2 * workload.host.total_bytes,
        lambda: foreach_add(gpu, totals, gradients),
        error=lambda: workload.error(arrays_of(totals.gradients), 1),
        prepare=totals.zero,
    )
