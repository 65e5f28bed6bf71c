"""A launch, with the table of its operands, the addresses passed with it, and its grid.

A launch works on *entries*, one for each component. The device has a row for each thread block (its entry and chunk)
and a row for each entry. Both are made once for each set of components and kept. Addresses of gradients change, so they
are passed by value. This needs no copy that must be ordered, and no memory that a captured graph could lose. A launch
takes 480 addresses in 4 KB of arguments on any driver. It takes 4000 (thousands of experts) in 32 KB if NVRTC and the
driver are of CUDA 12.1 or later. More addresses are copied before the launch, from pinned memory kept until the copy is
done.

The grid has one thread block for each chunk of each component (`Table.rows`), so the work is spread evenly over tensors
of all sizes. The 350M layout has 12,190 blocks, and a LoRA block has 6 to 84.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

from gradengine.kernels.cuda_runtime import CudaRuntime
from gradengine.kernels.kept import ADDRESSES_AT
from gradengine.kernels.toolchain import compiled, takes_large_arguments

_TARGET = np.dtype([("address", "<u8"), ("size", "<i8"), ("first", "<u4"), ("group", "<u4")])
_ROW = np.dtype([("entry", "<u4"), ("chunk", "<u4")])

Addresses: TypeAlias = npt.NDArray[np.uint64]

_TABLES = 256  # tables that are kept, one for each block of a window and more for alternating destinations
_LARGEST_CHUNK = 32768  # elements, 256 threads x 16 units of 8, which keeps the last wave of blocks short
_SMALLEST_CHUNK = 2048  # elements, one unit of 8 for each of 256 threads
_WANTED_CHUNKS = 1024  # number that fills a GPU of 132 multiprocessors with 8 blocks each
CAPACITIES = {"small": 480, "large": 4000}  # addresses
THREADS = 256  # threads of a block, as in the .cu files
FINALISE_THREADS = 512
# The kernels in each file. All except those in `_SINGLE` have a variant for each way to pass addresses.
_FILES = {
    "accumulate": ("accumulate_1", "accumulate_4"),
    "measure": ("measure",),
    "finalise": ("finalise",),
    "tally": ("tally",),
    "judge": ("judge", "mask"),
    "hand_back": ("hand_back",),
}
_SINGLE = {"finalise", "tally", "judge"}  # kernels that take no addresses by value


def chunk_for(size: int) -> int:
    """Return the elements of a chunk for `size` elements in total, a power of two that depends on the size alone."""
    chunk = _LARGEST_CHUNK
    while chunk > _SMALLEST_CHUNK and size < chunk * _WANTED_CHUNKS:
        chunk //= 2
    return chunk


def entries_of(addresses: Any, sizes: Sequence[int], first: Any = 0, groups: Any = 0) -> npt.NDArray[Any]:
    """Return the entries of a launch, one for each size.

    Args:
        addresses: Tagged addresses, or 0 if each launch passes its addresses.
        sizes: Numbers of elements.
        first: Indices of the first chunks' partial sums.
        groups: Indices of the factors that the entries are multiplied by.
    """
    entries = np.empty(len(sizes), _TARGET)
    entries["address"], entries["size"], entries["first"], entries["group"] = addresses, sizes, first, groups
    return entries


@dataclass(frozen=True)
class Table:
    """Entries and rows on the device."""

    entries: int
    blocks: int  # number of rows, which is the number of thread blocks
    chunk: int
    rows: Any
    targets: Any
    born: int  # handle of the stream that the memory was allocated on
    uses: dict[int, Any]  # events after the work of other streams, by handle


def _rows_of(entries: npt.NDArray[Any], chunk: int) -> npt.NDArray[Any]:
    """Return a row for each chunk of each entry."""
    chunks = -(-entries["size"] // chunk)
    rows = np.empty(chunks.sum(), _ROW)
    rows["entry"] = np.repeat(np.arange(len(entries)), chunks)
    rows["chunk"] = np.arange(len(rows)) - np.repeat(np.cumsum(chunks) - chunks, chunks)
    return rows


def by_value(
    addresses: npt.NDArray[np.uint64], weights: Sequence[np.float32] = (), capacities: Mapping[str, int] = CAPACITIES
) -> tuple[str, Any] | None:
    """Return the name of a kernel's variant, and an argument for it with flat addresses (and weights).

    Return None if there are too many addresses, which are then passed through memory.
    """
    for size, capacity in capacities.items():
        if addresses.size <= capacity:
            words = np.zeros(capacity + -(-len(weights) // 2), np.uint64)
            words[: addresses.size] = addresses
            words[capacity:].view(np.float32)[: len(weights)] = weights
            return size, words.view(f"V{words.nbytes}")
    return None


def _argument(weights: Sequence[np.float32]) -> npt.NDArray[Any]:
    return np.array(weights, np.float32).view(f"V{4 * len(weights)}")


@final
class Launches:
    """The kernels of one device, compiled or from CuPy's cache, which are launched on its current stream."""

    def __init__(self, device: CudaRuntime) -> None:
        self._device = device
        takes_32_kb = takes_large_arguments(device.xp)
        self._capacities = capacities = CAPACITIES if takes_32_kb else {"small": CAPACITIES["small"]}
        with device.active():
            modules = {file: compiled(device.xp, file, large_arguments=takes_32_kb) for file in _FILES}
        sizes = [f"_{size}" for size in (*capacities, "table")]
        self._functions = {
            name + size: modules[file].get_function(name + size)
            for file, names in _FILES.items()
            for name in names
            for size in ([""] if name in _SINGLE else sizes)
        }
        self._table_of = functools.lru_cache(_TABLES)(self._made)

    def table(self, entries: npt.NDArray[Any], chunk: int) -> Table:
        """Return the table of these entries (see `entries_of`). The first call copies it to the device."""
        return self._table_of(entries.tobytes(), chunk)

    def _made(self, entries: bytes, chunk: int) -> Table:
        device, targets = self._device, np.frombuffer(entries, _TARGET)
        rows = _rows_of(targets, chunk)
        memory = device.upload(np.concatenate([rows.view(np.uint8), targets.view(np.uint8)]))
        there = memory[: rows.nbytes], memory[rows.nbytes :]
        table = Table(len(targets), len(rows), chunk, *there, device.giving_stream().ptr, {})
        weakref.finalize(table, device.kept.until, table.uses.values(), memory).atexit = False
        return table

    def over(
        self,
        table: Table,
        function: str,
        arguments: tuple[Any, ...],
        addresses: Addresses,
        weights: Sequence[np.float32] = (),
        *,
        dropped: Any = None,
    ) -> None:
        """Launch a kernel over a table's rows.

        `function` is its name without the suffix for the way to pass addresses. `arguments` are those between the table
        and the addresses. `dropped` is memory of `drops_of`, in which the kernel then reads which gradients remain.
        """
        if not table.blocks:  # CuPy would launch one block for an empty grid.
            return
        size, *rest = by_value(addresses, weights, self._capacities) or self._by_memory(addresses, weights)
        if dropped is not None:
            self.run(f"mask_{size}", 1, THREADS, (dropped, np.uint32(addresses.size), *rest))
            size, rest = "table", [_argument(weights), dropped[ADDRESSES_AT:]]
        self.run(f"{function}_{size}", table.blocks, THREADS, (table.rows, table.targets, *arguments, *rest))
        self._device.used(table.uses, table.born)

    def _by_memory(self, addresses: Addresses, weights: Sequence[np.float32]) -> tuple[Any, ...]:
        return "table", *([_argument(weights)] if weights else []), self._device.sent(addresses)

    def run(self, function: str, blocks: int, threads: int, arguments: tuple[Any, ...]) -> None:
        """Launch a kernel by its full name."""
        device = self._device
        if device.is_capturing():
            device.keep(*[one for one in arguments if isinstance(one, device.xp.ndarray)])
        with device.active():
            self._functions[function]((blocks,), (threads,), arguments)
