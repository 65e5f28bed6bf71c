"""The gradients that the benchmarks work on: blocks of a Llama of 350M parameters, or smaller ones of its shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from gradengine.arrays.buffer import RawBuffer
from gradengine.bench.case import relative_error
from gradengine.errors import CallerError
from gradengine.layout import GradientLayout

__all__ = ["Workload", "as_taken", "block_layout", "widened"]


def block_layout(blocks: int, hidden: int) -> GradientLayout:
    """Transformer blocks alone, in the proportions of the 350M model: kv = hidden / 4, intermediate = 4 hidden.

    Args:
        blocks: How many.
        hidden: Hidden size; 1024 is the 350M model's, 15.2 million elements a block.

    Raises:
        CallerError: There is no block, or the hidden size is no multiple of 4.

    Example:
        >>> block_layout(6, 1024).nbytes
        364953600
    """
    if blocks < 1 or hidden < 4 or hidden % 4:
        raise CallerError(
            "no such model", got=f"{blocks} blocks of {hidden}", expected="at least 1 block of a multiple of 4"
        )
    whole = GradientLayout.transformer(blocks, hidden, hidden // 4, 4 * hidden, vocab_size=1)
    return GradientLayout.of({slot.name: slot.shape for slot in whole.slots if slot.block is not None})


@dataclass(frozen=True)
class Workload:
    """The micro-batches of one step and what must come out of it.

    Attributes:
        layout: Where each component lies.
        dtype: "float32" or "bfloat16"; bfloat16 is held as its bits, in uint16.
        micro_batches: Each micro-batch's gradients in layout order, in memory of their own.
    """

    layout: GradientLayout
    dtype: str
    micro_batches: tuple[tuple[npt.NDArray[Any], ...], ...]

    @staticmethod
    def random(layout: GradientLayout, micro_batches: int, dtype: str = "float32", seed: int = 0) -> Workload:
        """Normally distributed gradients, the same for a seed.

        Raises:
            CallerError: Another dtype, or no micro-batch.

        Example:
            >>> workload = Workload.random(block_layout(1, 4), micro_batches=2)
            >>> len(workload.micro_batches), workload.micro_batches[0][0].shape
            (2, (4, 4))
        """
        if dtype not in {"float32", "bfloat16"}:
            raise CallerError("no benchmark for this dtype", got=repr(dtype), expected="'float32' or 'bfloat16'")
        if micro_batches < 1:
            raise CallerError("too few micro-batches", got=micro_batches, expected="at least 1")
        generator = np.random.default_rng(seed)
        return Workload(layout, dtype, tuple(_micro_batch(generator, layout, dtype) for _ in range(micro_batches)))

    @property
    def count(self) -> int:
        """Micro-batches."""
        return len(self.micro_batches)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one micro-batch's gradients."""
        return sum(gradient.nbytes for gradient in self.micro_batches[0])

    @property
    def total_bytes(self) -> int:
        """Bytes of one set in fp32, padding not counted."""
        return 4 * self.layout.num_elements

    def for_engine(self) -> list[Sequence[object]]:
        """The micro-batches as an engine takes them: arrays, or raw buffers where NumPy has no such dtype."""
        return [[as_taken(gradient) for gradient in batch] for batch in self.micro_batches]

    def total(self, position: int) -> npt.NDArray[np.float64]:
        """The sum of one component over the micro-batches, in fp64, flat."""
        first, *others = (widened(batch[position]).reshape(-1) for batch in self.micro_batches)
        total = first.astype(np.float64)
        for other in others:
            total += other
        return total

    @cached_property
    def norm(self) -> float:
        """Global norm of the averaged gradient, in fp64."""
        totals = (self.total(position) for position in range(len(self.layout.slots)))
        return float(np.sqrt(sum(float(np.vdot(total, total)) for total in totals))) / self.count

    @property
    def max_norm(self) -> float:
        """A bound that halves the averaged gradient, so that clipping has work to do."""
        return self.norm / 2

    def error_of_sum(self, results: Sequence[npt.NDArray[np.float32]]) -> float:
        """How far accumulated gradients are from the sum in fp64."""
        return relative_error(results, self.total)

    def error_of_step(self, results: Sequence[npt.NDArray[np.float32]], times: float = 1.0) -> float:
        """How far averaged and clipped gradients, multiplied by `times`, are from fp64's."""
        return relative_error(results, lambda position: self.total(position) * (times * 0.5 / self.count))


def widened(gradient: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """A gradient in fp32; bfloat16's bits become the values that they stand for.

    >>> widened(np.array([0x3F80], np.uint16))
    array([1.], dtype=float32)
    """
    if gradient.dtype == np.float32:
        return gradient
    return (gradient.astype(np.uint32) << 16).view(np.float32)


def as_taken(gradient: npt.NDArray[Any]) -> npt.NDArray[Any] | RawBuffer:
    """A gradient as the package takes it: bfloat16's bits as a raw buffer, since NumPy has no such dtype."""
    if gradient.dtype == np.float32:
        return gradient
    return RawBuffer(gradient.ctypes.data, gradient.size, "bfloat16", owner=gradient)


def _micro_batch(generator: np.random.Generator, layout: GradientLayout, dtype: str) -> tuple[npt.NDArray[Any], ...]:
    gradients = [generator.standard_normal(slot.shape, np.float32) for slot in layout.slots]
    if dtype == "float32":
        return tuple(gradients)
    return tuple((gradient.view(np.uint32) >> 16).astype(np.uint16) for gradient in gradients)
