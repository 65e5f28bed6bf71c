"""What the kernels are told: tables that lie on the device, built once; addresses travel with each launch.

A launch works on *entries*, one for each component. The device holds a row for each thread block (which entry, which
chunk of it) and a row for each entry; both are made once for each set of components and kept. Addresses of gradients
change, so they travel by value: there is no copy to order, and nothing that a captured graph could lose.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt

from gradengine.arrays.buffer import Buffer
from gradengine.kernels.arena import PartialSums
from gradengine.kernels.operands import tagged

__all__ = ["OVERWRITE", "CudaPartialSums", "Entry", "Table", "Tables", "chunk_for", "handed_back"]

_TARGET = np.dtype([("address", "<u8"), ("size", "<i8"), ("first", "<u4"), ("group", "<u4")])
_ROW = np.dtype([("entry", "<u4"), ("chunk", "<u4")])
OVERWRITE = 1 << 60

_TABLES = 256  # remembered: an accumulator needs one for each block; destinations that move make new ones
_LARGEST_CHUNK = 32768  # elements: 256 threads x 16 units of 8, and the tail of the last wave of blocks stays short
_SMALLEST_CHUNK = 2048  # one unit for each of 256 threads
_WANTED_CHUNKS = 1024  # enough to fill a GPU of 132 multiprocessors with 8 blocks each


def chunk_for(size: int) -> int:
    """Elements of a chunk for `size` elements in all: a power of two that depends on the size alone.

    >>> chunk_for(400_000_000), chunk_for(10_000_000), chunk_for(10)
    (32768, 8192, 2048)
    """
    chunk = _LARGEST_CHUNK
    while chunk > _SMALLEST_CHUNK and size < chunk * _WANTED_CHUNKS:
        chunk //= 2
    return chunk


@final
class CudaPartialSums(PartialSums):
    """The partial sums on the device: a squared sum and a count of non-finite elements for each chunk.

    Attributes:
        non_finite: How many elements of each chunk are not finite.
        decisions: What K2 writes to, by clip plan.
        of_all: The table for measuring all of them, wherever they lie.
    """

    order: Any

    def __init__(self, sizes: Sequence[int], upload: Callable[[npt.NDArray[Any]], Any], order: Any) -> None:
        super().__init__(sizes, order, chunk_for(sum(sizes)))
        self.values = upload(self.values)
        self.non_finite = upload(np.zeros(sum(self.counts), np.uint32))
        self.decisions: dict[Any, Any] = {}
        self.of_all: Table | None = None
        order.keep(self.values, self.non_finite, self.decisions)


@dataclass(frozen=True)
class Entry:
    """One component of a launch.

    Attributes:
        address: Where it lies, tagged; 0 where each launch says so.
        size: Elements.
        first: Index of its first chunk's partial.
        group: Which factor it is multiplied by.
    """

    address: int
    size: int
    first: int = 0
    group: int = 0


def handed_back(source: Buffer, destination: Buffer, group: int) -> Entry:
    """The entry of K3 that brings a source to its destination; in place the address goes with the launch alone."""
    in_place = source.pointer == destination.pointer and source.dtype == destination.dtype
    return Entry(0 if in_place else tagged(source), source.size, 0, group)


@dataclass(frozen=True)
class Table:
    """Entries and rows on the device.

    Attributes:
        entries: How many components.
        blocks: How many rows: one thread block each.
        chunk: Elements of a chunk.
        rows: (entry, chunk) of each thread block.
        targets: What each entry is.
        born: Handle of the stream that the memory came from.
        uses: Events behind the work of other streams, by handle and thread.
    """

    entries: int
    blocks: int
    chunk: int
    rows: Any
    targets: Any
    born: int
    uses: dict[tuple[int, int], Any]


class Tables:
    """The tables made so far, by what is in them.

    Args:
        upload: Copies a NumPy array to the device, and returns when it is there.
        dropped: Takes a table's memory when nobody keeps the table any more, and the events behind work that reads it.
    """

    def __init__(self, upload: Callable[[npt.NDArray[Any]], Any], dropped: Callable[[Any, Any], None]) -> None:
        self._upload, self._dropped = upload, dropped
        self._made: dict[tuple[int, tuple[Entry, ...]], Table] = {}
        self._lock = threading.Lock()

    def of(self, entries: Sequence[Entry], chunk: int, stream: int = 0) -> Table:
        """The table of these entries, made at the first call, in memory of the stream with that handle."""
        key = (chunk, tuple(entries))
        with self._lock:  # engines in several threads share one device's tables
            if key not in self._made:
                while len(self._made) >= _TABLES:
                    self._made.pop(next(iter(self._made)))
                self._made[key] = self._make(entries, chunk, stream)
            return self._made[key]

    def _make(self, entries: Sequence[Entry], chunk: int, stream: int) -> Table:
        targets = np.array([(e.address, e.size, e.first, e.group) for e in entries], _TARGET)
        chunks = [-(-e.size // chunk) for e in entries]
        rows = np.empty(sum(chunks), _ROW)
        rows["entry"] = np.repeat(np.arange(len(entries)), chunks)
        rows["chunk"] = np.concatenate([np.arange(count) for count in chunks]) if chunks else 0
        table = Table(len(entries), len(rows), chunk, self._bytes(rows), self._bytes(targets), stream, {})
        weakref.finalize(table, self._dropped, table.uses.values(), (table.rows, table.targets)).atexit = False
        return table

    def _bytes(self, array: npt.NDArray[Any]) -> Any:
        return self._upload(array.view(np.uint8)) if array.size else None
