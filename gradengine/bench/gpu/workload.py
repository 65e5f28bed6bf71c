"""The gradients of the 350M model on the device, and what must come out of them, in fp64 on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from gradengine.bench.case import relative_error
from gradengine.bench.gpu.device import Array, Gpu, Tensor, raw
from gradengine.bench.workload import Workload, widened
from gradengine.kernels.host import available_cpus
from gradengine.layout import GradientLayout

__all__ = ["DeviceWorkload", "model_layout", "spread"]

_SHIFTS = 1 << 20  # places in the pool of random numbers where a component may begin
_STRIDE = 4801  # between the beginnings of one component and the next: odd, so that all places come

Result = TypeVar("Result")


def model_layout(blocks: int, hidden: int, *, odd: bool = False) -> GradientLayout:
    """Blocks, LM head and final norm in the proportions of the 350M model, whose embedding is tied.

    Args:
        blocks: 24 is the model's.
        hidden: 1024 is the model's.
        odd: Each component flat and 3 elements shorter: no size is a multiple of 8.

    Example:
        >>> layout = model_layout(24, 1024)
        >>> len(layout.slots), layout.nbytes
        (218, 1594036224)
        >>> model_layout(1, 8, odd=True).slots[0].shape
        (61,)
    """
    whole = GradientLayout.transformer(blocks, hidden, hidden // 4, 4 * hidden, 32 * hidden, embedding=False)
    return GradientLayout.of({slot.name: (slot.size - 3,) for slot in whole.slots}) if odd else whole


@dataclass(frozen=True)
class DeviceWorkload:
    """The micro-batches of one step in the device's memory.

    Attributes:
        gpu: Where they lie.
        host: The same values on the host.
        batches: Each micro-batch's gradients in layout order, in memory of their own; bf16 as its bits.
        odd: Whether they lie at odd elements.
    """

    gpu: Gpu
    host: Workload
    batches: Sequence[Sequence[Array]]
    odd: bool

    @staticmethod
    def drawn(gpu: Gpu, layout: GradientLayout, micro_batches: int, dtype: str, *, odd: bool) -> DeviceWorkload:
        """Normally distributed gradients; each is a stretch of one pool, so that drawing them takes no time."""
        pool = _pool(max(slot.size for slot in layout.slots) + _SHIFTS, dtype)
        components = len(layout.slots)
        host = Workload(
            layout,
            dtype,
            tuple(
                tuple(_stretch(pool, k * components + i, slot.shape) for i, slot in enumerate(layout.slots))
                for k in range(micro_batches)
            ),
        )
        return DeviceWorkload(gpu, host, [gpu.placed(batch, odd=odd) for batch in host.micro_batches], odd)

    @property
    def layout(self) -> GradientLayout:
        """Where each component lies in an arena."""
        return self.host.layout

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of each component."""
        return [slot.shape for slot in self.layout.slots]

    def first(self, count: int) -> DeviceWorkload:
        """Its first micro-batches, in the same memory."""
        host = replace(self.host, micro_batches=self.host.micro_batches[:count])
        return replace(self, host=host, batches=self.batches[:count])

    def for_engine(self) -> list[list[object]]:
        """The micro-batches as ours takes them: arrays, or raw buffers of bf16."""
        is_short = self.host.dtype == "bfloat16"
        return [[raw(array) if is_short else array for array in batch] for batch in self.batches]

    def for_torch(self) -> list[list[Tensor]]:
        """The micro-batches as tensors, over the same memory."""
        return [self.gpu.tensors(batch) for batch in self.batches]

    def for_hand(self) -> list[list[Any]]:
        """The micro-batches for NumPy's functions, over the same memory."""
        return [[self.gpu.by_hand(array) for array in batch] for batch in self.batches]

    @cached_property
    def totals(self) -> list[npt.NDArray[np.float64]]:
        """The sum of each component over the micro-batches, in fp64, flat."""
        return spread(self.host.total, len(self.layout.slots))

    @cached_property
    def norm(self) -> float:
        """Global norm of the averaged gradient, in fp64."""
        totals = self.totals
        squares = spread(lambda i: float(np.vdot(totals[i], totals[i])), len(totals))
        return float(np.sqrt(sum(squares))) / self.host.count

    @property
    def max_norm(self) -> float:
        """A bound that halves the averaged gradient."""
        return self.norm / 2

    def error(self, results: Sequence[npt.NDArray[Any]], times: float) -> float:
        """How far results are from the sum in fp64 multiplied by `times`; bf16 comes as its bits."""
        totals = self.totals  # made here, once, and not by each thread
        return relative_error([widened(result) for result in results], lambda i: totals[i] * times)

    def error_of_step(self, results: Sequence[npt.NDArray[Any]], times: float = 1.0) -> float:
        """How far averaged and halved gradients, multiplied by `times`, are from fp64's."""
        return self.error(results, times * 0.5 / self.host.count)

    def error_of_norm(self, norm: float) -> float:
        """How far a norm of the averaged gradient is from fp64's."""
        return abs(norm - self.norm) / self.norm


def spread(work: Callable[[int], Result], count: int) -> list[Result]:
    """The results for 0..count - 1, in order, made on all CPUs."""
    with ThreadPoolExecutor(available_cpus()) as pool:
        return list(pool.map(work, range(count)))


def _pool(size: int, dtype: str) -> npt.NDArray[Any]:
    numbers = np.random.default_rng(0).standard_normal(size, np.float32)
    return numbers if dtype == "float32" else (numbers.view(np.uint32) >> 16).astype(np.uint16)


def _stretch(pool: npt.NDArray[Any], number: int, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    start = number * _STRIDE % _SHIFTS
    return pool[start : start + int(np.prod(shape))].reshape(shape)
