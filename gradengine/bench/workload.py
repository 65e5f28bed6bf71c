"""The gradients of the benchmarks, which are those of a Llama of 350M parameters, of smaller ones, or equal tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from gradengine.bench.device import Array, Device, Tensor, on_all_cpus
from gradengine.bench.harness import relative_error
from gradengine.errors import CallerError
from gradengine.layout import GradientLayout

_SHIFTS = 1 << 20  # number of places in the pool of random numbers at which a component may begin
_STRIDE = 4801  # distance of the places of two components in a row, odd so that every place is used


def model_layout(blocks: int, hidden: int, *, head: bool = True) -> GradientLayout:
    """Return the layout of a Llama in the proportions of the 350M model, which has 24 blocks of hidden size 1024.

    Keys and values have a quarter of the hidden size, the feed-forward has 4 times the hidden size.

    Args:
        blocks: Transformer blocks.
        hidden: Hidden size, a multiple of 4.
        head: Whether LM head and final norm are included. The embedding is left out.

    Example:
        >>> model_layout(24, 1024).nbytes, model_layout(6, 1024, head=False).nbytes
        (1594036224, 364953600)
    """
    if blocks < 1 or hidden < 4 or hidden % 4:
        raise CallerError(
            "there is no such model", got=f"{blocks} blocks of {hidden}", expected="1 block or more of a multiple of 4"
        )
    whole = GradientLayout.transformer(blocks, hidden, hidden // 4, 4 * hidden, 32 * hidden, embedding=False)
    return GradientLayout.of({slot.name: slot.shape for slot in whole.slots if head or slot.block is not None})


@dataclass(frozen=True)
class Workload:
    """The micro-batches of one step on a device, and their expected results."""

    device: Device
    layout: GradientLayout
    dtype: str  # "float32", or "bfloat16" with values as bits in uint16
    values: Sequence[Sequence[npt.NDArray[Any]]]  # gradients of each micro-batch in layout order, on the host
    batches: Sequence[Sequence[Array]]  # the same gradients in the device's memory

    @staticmethod
    def drawn(device: Device, layout: GradientLayout, micro_batches: int, dtype: str = "float32") -> Workload:
        """Return a workload of normally distributed gradients, each cut from one pool, so that drawing is fast."""
        slots = list(layout.slots) * micro_batches
        size = max(slot.size for slot in slots) + _SHIFTS
        pool: npt.NDArray[Any] = np.random.default_rng(0).standard_normal(size, np.float32)
        if dtype == "bfloat16":
            pool = (pool.view(np.uint32) >> 16).astype(np.uint16)
        stretches = (
            pool[number * _STRIDE % _SHIFTS :][: slot.size].reshape(slot.shape) for number, slot in enumerate(slots)
        )
        values = [[next(stretches) for _ in layout.slots] for _ in range(micro_batches)]
        return Workload(device, layout, dtype, values, [device.placed(batch) for batch in values])

    def first(self, count: int) -> Workload:
        """Return a workload of the first micro-batches, in the same memory."""
        return replace(self, values=self.values[:count], batches=self.batches[:count])

    @property
    def count(self) -> int:
        """The number of micro-batches."""
        return len(self.values)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each component."""
        return [slot.shape for slot in self.layout.slots]

    @property
    def gradient_bytes(self) -> int:
        """The bytes of one micro-batch's gradients, G in the counts of bytes."""
        return sum(gradient.nbytes for gradient in self.values[0])

    @property
    def sum_bytes(self) -> int:
        """The bytes of one set in fp32 without padding, A in the counts of bytes."""
        return 4 * self.layout.num_elements

    def as_taken(self, arrays: Sequence[Array]) -> list[object]:
        """Return arrays as gradengine takes them. bfloat16 becomes raw buffers, as NumPy and CuPy lack this dtype."""
        return [array if self.dtype == "float32" else self.device.raw(array) for array in arrays]

    def for_ours(self) -> list[list[object]]:
        """Return the micro-batches as gradengine takes them."""
        return [self.as_taken(batch) for batch in self.batches]

    @cached_property
    def sums(self) -> list[npt.NDArray[np.float64]]:
        """The sum of each component over the micro-batches, in fp64, flat."""

        def total(position: int) -> npt.NDArray[np.float64]:
            found = np.zeros(self.layout.slots[position].size)
            for batch in self.values:
                found += widened(batch[position]).reshape(-1)
            return found

        return on_all_cpus(total, range(len(self.layout.slots)))

    @cached_property
    def norm(self) -> float:
        """The global norm of the averaged gradient, in fp64."""
        return norm_of(self.sums) / self.count

    @property
    def max_norm(self) -> float:
        """A bound that halves the averaged gradient, so that clipping has work to do."""
        return self.norm / 2

    def error(self, results: Sequence[Array | Tensor], factor: Callable[[int], float] | float = 1.0) -> float:
        """Return the error of results against the fp64 sums times a factor, or times a factor for each position."""
        sums = self.sums  # computed here once, and not by each thread
        found = [widened(self.device.read(result)) for result in results]
        return relative_error(found, lambda i: sums[i] * (factor(i) if callable(factor) else factor))

    def error_of_step(self, results: Sequence[Array | Tensor], times: float = 1.0) -> float:
        """Return the error of averaged and halved gradients, multiplied by `times`, against fp64's."""
        return self.error(results, times * 0.5 / self.count)

    def error_of_norm(self, norm: float) -> float:
        """Return the error of a norm of the averaged gradient against fp64's."""
        return abs(norm - self.norm) / self.norm


def norm_of(components: Sequence[npt.NDArray[np.float64]]) -> float:
    """Return the global norm."""
    squares = on_all_cpus(lambda i: float(np.vdot(components[i], components[i])), range(len(components)))
    return float(np.sqrt(sum(squares)))


def widened(gradient: Any) -> Any:
    """Return a gradient in fp32. Bits of bfloat16 become the values that they encode."""
    if gradient.dtype == np.float32:
        return gradient
    return (gradient.astype(np.uint32) << 16).view(np.float32)
