"""A launch: the table of its operands, the addresses passed with it, and its grid.

A launch works on *entries*, one for each component. The device holds a row for each thread block (which entry, which
chunk of it) and a row for each entry; both are made once for each set of components and kept. Addresses of gradients
change, so they are passed by value, with no copy to be ordered and no memory that a captured graph could lose: 4 KB of
arguments on any driver, 32 KB if NVRTC and the driver are of CUDA 12.1 or later. If there are more than fit (4000,
for thousands of experts, or 480) one copy before the launch takes them, from pinned memory kept until it is done.

Grids are one thread block for each chunk of each component (`Table.rows`), so that the work of a launch is spread
evenly whatever the tensors' sizes are: 12,190 blocks for the 350M layout, 6 to 84 for a LoRA block.
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

_TABLES = 256  # remembered: a window has one for each block; destinations that take turns make more
_LARGEST_CHUNK = 32768  # elements: 256 threads x 16 units of 8, and the tail of the last wave of blocks stays short
_SMALLEST_CHUNK = 2048  # one unit for each of 256 threads
_WANTED_CHUNKS = 1024  # enough to fill a GPU of 132 multiprocessors with 8 blocks each
CAPACITIES = {"small": 480, "large": 4000}
THREADS = 256  # as the .cu files say; 512 for finalise
FINALISE_THREADS = 512
_FILES = {  # and the kernels in each: but for _SINGLE, in a variant for each way of addresses
    "accumulate": ("accumulate_1", "accumulate_4"),
    "measure": ("measure",),
    "finalise": ("finalise",),
    "tally": ("tally",),
    "judge": ("judge", "mask"),
    "hand_back": ("hand_back",),
}
_SINGLE = {"finalise", "tally", "judge"}  # which take no addresses by value


def chunk_for(size: int) -> int:
    """Elements of a chunk for `size` elements in all: a power of two that depends on the size alone."""
    chunk = _LARGEST_CHUNK
    while chunk > _SMALLEST_CHUNK and size < chunk * _WANTED_CHUNKS:
        chunk //= 2
    return chunk


def entries_of(addresses: Any, sizes: Sequence[int], first: Any = 0, groups: Any = 0) -> npt.NDArray[Any]:
    """The entries of a launch, one for each size.

    Args:
        addresses: Tagged addresses; 0 if each launch passes another.
        sizes: Elements.
        first: Indices of the first chunks' partial sums.
        groups: Which factors they are multiplied by.
    """
    entries = np.empty(len(sizes), _TARGET)
    entries["address"], entries["size"], entries["first"], entries["group"] = addresses, sizes, first, groups
    return entries


@dataclass(frozen=True)
class Table:
    """Entries and rows on the device."""

    entries: int
    blocks: int  # as many as there are rows: one thread block each
    chunk: int
    rows: Any
    targets: Any
    born: int  # handle of the stream that the memory came from
    uses: dict[int, Any]  # events after the work of other streams, by handle


def _rows_of(entries: npt.NDArray[Any], chunk: int) -> npt.NDArray[Any]:
    """A row for each chunk of each entry."""
    chunks = -(-entries["size"] // chunk)
    rows = np.empty(chunks.sum(), _ROW)
    rows["entry"] = np.repeat(np.arange(len(entries)), chunks)
    rows["chunk"] = np.arange(len(rows)) - np.repeat(np.cumsum(chunks) - chunks, chunks)
    return rows


def by_value(
    addresses: npt.NDArray[np.uint64], weights: Sequence[np.float32] = (), capacities: Mapping[str, int] = CAPACITIES
) -> tuple[str, Any] | None:
    """An argument that holds flat addresses (and weights), with the name of the kernel's variant that takes it.

    None if there are too many, which are then passed through memory.
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
    """The kernels of one device, compiled or from CuPy's cache, to be launched on its current stream."""

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
        """The table of these entries (see `entries_of`), copied to the device at the first call."""
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

        `function` is its name without the size of the argument with the addresses, `arguments` are those between the
        table and the addresses. `dropped` is memory of `drops_of`: the kernel then reads there which gradients remain.
        """
        if not table.blocks:  # CuPy makes a grid of one block out of an empty one
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
        """Launch a kernel by its whole name."""
        device = self._device
        if device.is_capturing():
            device.keep(*[one for one in arguments if isinstance(one, device.xp.ndarray)])
        with device.active():
            self._functions[function]((blocks,), (threads,), arguments)
