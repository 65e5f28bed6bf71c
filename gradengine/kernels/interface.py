"""What a device can do to gradients, as one interface: K1 accumulate, K2 finalise, K3 hand back.

The accumulator, the clip and the engine are written once over `Kernels`; `host.py` fulfils it in NumPy. All lists are
parallel: position i in one is position i in every other.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from gradengine.buffer import Buffer

__all__ = ["CHUNK", "Chunk", "ClipPlan", "Decision", "Float64", "Fold", "Kernels", "SquaredSums"]

Float64: TypeAlias = npt.NDArray[np.float64]
Chunk: TypeAlias = tuple[int, int, int, int]  # position of a buffer, index of its partial, start, stop

CHUNK = 262144  # elements, 1 MB of fp32: at half of it threads that meet at the GIL cost up to 10 % of a step


@dataclass(frozen=True)
class Fold:
    """What K1 does to one target in one pass: `target = [target +] w0*s0 + w1*s1 + ...`, rounded after each operation.

    Attributes:
        position: Which target.
        overwrite: True for the window's first contribution: the target is written without being read.
        sources: The micro-batches' gradients, in the order they came.
        weights: One fp32 weight for each; exactly 1 multiplies nothing.
    """

    position: int
    overwrite: bool
    sources: tuple[Buffer, ...]
    weights: tuple[np.float32, ...]


def chunks_of(size: int, first: int = 0) -> list[tuple[int, int, int]]:
    """(index counted from `first`, start, stop) of each chunk of `size` elements.

    >>> chunks_of(CHUNK + 1, 7)
    [(7, 0, 262144), (8, 262144, 262145)]
    """
    return [(first + k, start, min(size, start + CHUNK)) for k, start in enumerate(range(0, size, CHUNK))]


class SquaredSums:
    """The squared sum of each chunk of each target, at fixed places: the norm's partials, allocated once.

    Args:
        sizes: Elements of each target.

    Example:
        >>> sums = SquaredSums([CHUNK + 1, 0, 3])
        >>> list(sums.chunks(0)), list(sums.chunks(2))
        ([(0, 0, 262144), (1, 262144, 262145)], [(2, 0, 3)])
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        counts = [-(-size // CHUNK) for size in sizes]
        self.sizes = tuple(sizes)
        self.first = list(itertools.accumulate(counts, initial=0))[:-1]
        self.counts = counts
        self.values: Float64 = np.full(sum(counts), np.nan)  # NaN until measured: an unmeasured chunk can never pass

    def chunks(self, position: int) -> Sequence[tuple[int, int, int]]:
        """Of one target: (index into `values`, start, stop) of each chunk, in elements."""
        return chunks_of(self.sizes[position], self.first[position])

    def completed(self, position: int, start: int, stop: int) -> list[Chunk]:
        """The chunks of one target whose last element lies in start..stop - 1 of it.

        >>> SquaredSums([10, CHUNK + 5]).completed(1, 7, CHUNK + 5)
        [(1, 1, 0, 262144), (1, 2, 262144, 262149)]
        """
        first = max(start, 0) // CHUNK
        last = self.counts[position] if stop >= self.sizes[position] else max(stop, 0) // CHUNK
        return [(position, *chunk) for chunk in self.chunks(position)[first:last]]


@dataclass(frozen=True)
class ClipPlan:
    """Which targets share a norm, and its bound.

    Attributes:
        groups: The group's number of each target.
        max_norms: Each group's bound; infinity clips nothing.
    """

    groups: tuple[int, ...]
    max_norms: tuple[float, ...]


@dataclass(frozen=True)
class Decision:
    """What K2 found: norms of the averaged gradient and the one factor each group is multiplied by.

    Attributes:
        norm: Global norm over all targets.
        group_norms: Each group's norm.
        scales: Each group's clip scale, in 0..1.
        factors: Each group's fp32 factor: clip scale / divisor.
        bad: Positions of the targets that hold NaN or Inf.
    """

    norm: float
    group_norms: tuple[float, ...]
    scales: tuple[float, ...]
    factors: tuple[np.float32, ...]
    bad: tuple[int, ...]


class Kernels(ABC):
    """The operations of one device. Every method is deterministic: same input, same bits, whatever the thread order."""

    @abstractmethod
    def view(self, source: object, component: str) -> Buffer:
        """A flat view of a gradient on this device; raises `BufferRefused`."""

    @abstractmethod
    def writable_view(self, destination: object, component: str) -> Buffer:
        """A flat view of memory that will be written; raises `BufferRefused`."""

    @abstractmethod
    def allocate(self, size: int) -> Buffer:
        """An fp32 buffer of `size` elements, 128-byte aligned, its contents undefined."""

    @abstractmethod
    def accumulate(self, targets: Sequence[Buffer], folds: Sequence[Fold], sums: SquaredSums | None = None) -> None:
        """K1: fold gradients into fp32 targets; with `sums`, measure what was folded in the same pass."""

    @abstractmethod
    def measure(self, buffers: Sequence[Buffer], sums: SquaredSums, chunks: Sequence[Chunk]) -> None:
        """Squared sums of chunks of buffers that are already complete."""

    @abstractmethod
    def totals(self, sums: SquaredSums) -> Float64:
        """K2, first half: each target's squared sum, chunks added in order."""

    @abstractmethod
    def decide(self, totals: Float64, plan: ClipPlan, divisor: float) -> Decision:
        """K2, second half: norms, scales, factors, and who is not finite."""

    @abstractmethod
    def hand_back(
        self, sources: Sequence[Buffer], factors: Sequence[np.float32], destinations: Sequence[Buffer]
    ) -> None:
        """K3: destination = source x factor, one fp32 multiplication, then one rounding to the destination's dtype.

        A destination that is its source and has factor 1 is not touched.
        """

    @abstractmethod
    def fill_zero(self, buffers: Sequence[Buffer]) -> None:
        """Write zeros."""

    @abstractmethod
    def first_non_finite(self, buffer: Buffer) -> tuple[int, float] | None:
        """Index and value of the first NaN or Inf, or None."""
