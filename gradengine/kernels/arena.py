"""The memory that gradients are summed in, with the squared sums of its chunks and the order of work on it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

from gradengine.arrays.buffer import Buffer
from gradengine.kernels.decision import Float64, sum_in_order
from gradengine.kernels.device import Order
from gradengine.kernels.host_sums import ChunkSums
from gradengine.kernels.operands import Destinations
from gradengine.layout.slots import Span

Chunk: TypeAlias = tuple[int, int, int, int]  # position of a target, index of its partial sum, start, stop

# With half of this size, threads that contend for the GIL cost up to 10 % of a step.
CHUNK = 262144  # elements, 1 MB of fp32


def chunks_of(size: int, first: int = 0, chunk: int = CHUNK) -> list[tuple[int, int, int]]:
    """Return (index counted from `first`, start, stop) of each chunk of `size` elements.

    >>> chunks_of(CHUNK + 1, 7)
    [(7, 0, 262144), (8, 262144, 262145)]
    """
    return [(first + k, start, min(size, start + chunk)) for k, start in enumerate(range(0, size, chunk))]


def pieces_of(chunks: Sequence[Chunk], chunk: int = CHUNK) -> list[list[Chunk]]:
    """Return the chunks in runs of at most `chunk` elements. A thread takes one run at a time.

    >>> pieces_of([(0, 0, 0, 5), (1, 1, 0, 3), (2, 2, 0, 8)], chunk=8)
    [[(0, 0, 0, 5), (1, 1, 0, 3)], [(2, 2, 0, 8)]]
    """
    pieces: list[list[Chunk]] = []
    room = 0
    for part in chunks:
        size = part[3] - part[2]
        if size > room or not pieces:
            pieces.append([])
            room = chunk
        pieces[-1].append(part)
        room -= size
    return pieces


class PartialSums:
    """The partial sums of the norm. Each chunk of each target has its squared sum at a fixed place, allocated once.

    A chunk is the range that one thread or one thread block sums at a time. `order` orders the work on these sums and
    on the targets.
    """

    def __init__(self, sizes: Sequence[int], order: Order, chunk: int = CHUNK) -> None:
        self.sizes, self.order, self.chunk = tuple(sizes), order, chunk
        self.counts = [-(-size // chunk) for size in sizes]
        self.first = list(itertools.accumulate(self.counts, initial=0))[:-1]
        self._single = [position for position, count in enumerate(self.counts) if count == 1]
        self._first_of_single = [self.first[position] for position in self._single]
        self._multiple = [position for position, count in enumerate(self.counts) if count > 1]
        self.values: Any = np.full(sum(self.counts), np.nan)  # A chunk that was not measured is NaN and never passes.
        self.non_finite: Any = None  # number of non-finite elements of each chunk, on a GPU
        self.prepared: dict[Any, Any] = {}  # decisions by plan, a table and copied sums of a GPU's kernels

    def chunks(self, positions: Sequence[int]) -> list[Chunk]:
        """Return every chunk of these targets."""
        sizes, first = self.sizes, self.first
        return [(p, *chunk) for p in positions for chunk in chunks_of(sizes[p], first[p], self.chunk)]

    @cached_property
    def all_chunks(self) -> list[Chunk]:
        """Every chunk of every target, by its index."""
        return self.chunks(range(len(self.sizes)))

    @cached_property
    def pieces(self) -> list[list[Chunk]]:
        """Every chunk, in the pieces of `pieces_of`."""
        return pieces_of(self.all_chunks)

    @cached_property
    def sums(self) -> ChunkSums:
        """The object that computes the chunks' squared sums on the host."""
        return ChunkSums([stop - start for _, _, start, stop in self.all_chunks])

    def totals_of(self, values: Float64) -> Float64:
        """Return each target's squared sum from the partial sums on the host. Adds the chunks in order."""
        if len(self._single) == len(self.sizes):
            return np.array(values)
        totals = np.zeros(len(self.sizes))
        totals[self._single] = values[self._first_of_single]
        for position in self._multiple:
            first = self.first[position]
            totals[position] = sum_in_order(values[first : first + self.counts[position]])
        return totals


@final
@dataclass(frozen=True, eq=False)
class Arena:
    """The targets that kernels work on, with their partial sums and the order of work on them."""

    targets: tuple[Buffer, ...]  # fp32 buffers to sum into, or a caller's buffers of any dtype to clip
    partials: PartialSums
    memory: Buffer | None = None  # the memory that contains all targets, with zeros as padding, if there is one
    prepared: dict[Span, Any] = field(default_factory=dict)  # operands that a device's kernels prepared

    @cached_property
    def whole(self) -> Span:
        """The set of all targets."""
        return Span.at(range(len(self.targets)))

    @cached_property
    def in_place(self) -> Destinations:
        """Each target as its own destination."""
        return Destinations(enumerate(self.targets))

    def in_order(self) -> AbstractContextManager[None]:
        """Return a context that orders work after earlier and before later work on this memory, on any stream.

        All code that reads or writes the memory must be in one. Kernels that take the arena enter it themselves.
        """
        return self.partials.order.use()

    def read(self, array: Any) -> npt.NDArray[np.float32]:
        """Return a host copy of an array in this memory, after the work queued on it. Waits for that work only."""
        return self.partials.order.read(array)

    def follow(self) -> None:
        """Make the current streams, of any device, wait for all work queued on this memory."""
        self.partials.order.follow()
