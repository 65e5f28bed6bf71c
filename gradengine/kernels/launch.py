"""A launch: the table of its operands, the addresses passed with it, and its grid.

A launch works on *entries*, one for each component. The device holds a row for each thread block (which entry, which
chunk of it) and a row for each entry; both are made once for each set of components and kept. Addresses of gradients
change, so they are passed by value, with no copy to be ordered and no memory that a captured graph could lose: 4 KB of
arguments on any driver, 32 KB where NVRTC and the driver are of CUDA 12.1 or later. If there are more than fit (4000,
for thousands of experts, or 480) one copy before the launch takes them, from pinned memory kept until it is done.

Grids are one thread block for each chunk of each component (`Table.rows`), so that the work of a launch is spread
evenly whatever the tensors' sizes are: 12,190 blocks for the 350M layout, 6 to 84 for a LoRA block.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

from gradengine.kernels.cuda_runtime import CudaRuntime
from gradengine.kernels.toolchain import compiled, takes_large_arguments

_TARGET = np.dtype([("address", "<u8"), ("size", "<i8"), ("first", "<u4"), ("group", "<u4")])
_ROW = np.dtype([("entry", "<u4"), ("chunk", "<u4")])

Addresses: TypeAlias = npt.NDArray[np.uint64]

_TABLES = 256  # remembered: an accumulator needs one for each block; destinations that move make new ones
_LARGEST_CHUNK = 32768  # elements: 256 threads x 16 units of 8, and the tail of the last wave of blocks stays short
_SMALLEST_CHUNK = 2048  # one unit for each of 256 threads
_WANTED_CHUNKS = 1024  # enough to fill a GPU of 132 multiprocessors with 8 blocks each
CAPACITIES = {"small": 480, "large": 4000}
_THREADS = 256  # as the .cu files say; 512 for finalise
FINALISE_THREADS = 512
_FILES = {  # and the kernels in each: but for those of _SINGLE, in a variant for each way of addresses
    "accumulate": ("accumulate_1", "accumulate_4"),
    "measure": ("measure",),
    "finalise": ("finalise",),
    "tally": ("tally",),
    "hand_back": ("hand_back",),
}
_SINGLE = {"finalise", "tally"}  # which take no addresses by value


def chunk_for(size: int) -> int:
    """Elements of a chunk for `size` elements in all: a power of two that depends on the size alone."""
    chunk = _LARGEST_CHUNK
    while chunk > _SMALLEST_CHUNK and size < chunk * _WANTED_CHUNKS:
        chunk //= 2
    return chunk


@dataclass(frozen=True)
class Entry:
    """One component of a launch; `address` is tagged, or 0 if each launch passes another."""

    address: int
    size: int
    first: int = 0  # index of its first chunk's partial
    group: int = 0  # which factor it is multiplied by


@dataclass(frozen=True)
class Table:
    """Entries and rows on the device."""

    entries: int
    blocks: int  # as many as there are rows: one thread block each
    chunk: int
    rows: Any
    targets: Any
    born: int  # handle of the stream that the memory came from
    uses: dict[int, Any]  # events behind the work of other streams, by handle


class Tables:
    """The tables made so far, by content; `dropped` is called with their memory and events after its readers."""

    def __init__(self, upload: Callable[[npt.NDArray[Any]], Any], dropped: Callable[[Any, Any], None]) -> None:
        self._upload, self._dropped = upload, dropped
        self._made: dict[tuple[int, tuple[Entry, ...]], Table] = {}
        self._lock = threading.Lock()

    def of(self, sets: Sequence[Sequence[Entry]], chunk: int, stream: int = 0) -> list[Table]:
        """Make or find the tables of several sets of entries, in memory of the stream with that handle.

        Those that are new go to the device together.
        """
        keys = [(chunk, tuple(entries)) for entries in sets]
        with self._lock:  # engines in several threads share one device's tables
            found = {key: self._made[key] for key in keys if key in self._made}
            new = [key for key in dict.fromkeys(keys) if key not in found]
            for key, table in zip(new, self._make([key[1] for key in new], chunk, stream), strict=True):
                while len(self._made) >= _TABLES:
                    self._made.pop(next(iter(self._made)))
                found[key] = self._made[key] = table
        return [found[key] for key in keys]

    def _make(self, sets: Sequence[tuple[Entry, ...]], chunk: int, stream: int) -> list[Table]:
        if not sets:
            return []
        targets = [np.array([(e.address, e.size, e.first, e.group) for e in entries], _TARGET) for entries in sets]
        rows = [_rows_of(entries, chunk) for entries in sets]
        made = [
            Table(len(there), len(row), chunk, row_bytes, target_bytes, stream, {})
            for there, row, row_bytes, target_bytes in zip(
                targets, rows, self._uploaded(rows), self._uploaded(targets), strict=True
            )
        ]
        for table in made:
            weakref.finalize(table, self._dropped, table.uses.values(), (table.rows, table.targets)).atexit = False
        return made

    def _uploaded(self, arrays: Sequence[npt.NDArray[Any]]) -> list[Any]:
        """The bytes of each array on the device, in one copy; None for an empty one."""
        whole = np.concatenate(arrays).view(np.uint8)
        there: Any = self._upload(whole) if whole.size else None
        stops = list(itertools.accumulate([array.nbytes for array in arrays]))
        return [there[stop - a.nbytes : stop] if a.size else None for a, stop in zip(arrays, stops, strict=True)]


def _rows_of(entries: Sequence[Entry], chunk: int) -> npt.NDArray[Any]:
    chunks = [-(-entry.size // chunk) for entry in entries]
    rows = np.empty(sum(chunks), _ROW)
    rows["entry"] = np.repeat(np.arange(len(entries)), chunks)
    rows["chunk"] = np.concatenate([np.arange(count) for count in chunks]) if chunks else 0
    return rows


def by_value(
    addresses: npt.NDArray[np.uint64], weights: Sequence[np.float32] = (), capacities: Mapping[str, int] = CAPACITIES
) -> tuple[str, Any] | None:
    """An argument that holds flat addresses (and weights), with the name of the kernel's variant that takes it.

    None if there are too many, which are then passed through memory.
    """
    for size, capacity in capacities.items():
        if addresses.size <= capacity:
            argument = np.zeros(1, _argument_type(capacity, len(weights)))
            argument["address"][0, : addresses.size] = addresses
            if weights:
                argument["weight"][0, :] = weights
            return size, argument
    return None


@functools.cache
def _argument_type(capacity: int, weights: int) -> np.dtype[Any]:
    fields: list[Any] = [("address", "<u8", (capacity,))]
    if weights:
        fields.append(("weight", "<f4", (weights,)))
    return np.dtype(fields, align=True)


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
            for size in ([""] if file in _SINGLE else sizes)
        }
        self._tables = Tables(device.upload, device.kept.until)

    def table(self, entries: Sequence[Entry], chunk: int) -> Table:
        """The table of these entries, made at the first call."""
        return self.tables([entries], chunk)[0]

    def tables(self, sets: Sequence[Sequence[Entry]], chunk: int) -> list[Table]:
        """The tables of several sets of entries; those that are new go to the device in one copy."""
        return self._tables.of(sets, chunk, self._device.giving_stream().ptr)

    def over(
        self,
        table: Table,
        function: str,
        arguments: tuple[Any, ...],
        addresses: Addresses,
        weights: Sequence[np.float32] = (),
    ) -> None:
        """Launch a kernel over a table's rows.

        `function` is its name without the size of the argument with the addresses, `arguments` are those between the
        table and the addresses.
        """
        if not table.blocks:  # CuPy makes a grid of one block out of an empty one
            return
        carried = by_value(addresses, weights, self._capacities)
        size, *rest = carried or self._by_memory(addresses, weights)
        self.run(f"{function}_{size}", table.blocks, _THREADS, (table.rows, table.targets, *arguments, *rest))
        self._device.used(table.uses, table.born)

    def _by_memory(self, addresses: Addresses, weights: Sequence[np.float32]) -> tuple[Any, ...]:
        carried = [np.array([(weights,)], [("weight", "<f4", (len(weights),))])] if weights else []
        return "table", *carried, self._device.sent(addresses)

    def run(self, function: str, blocks: int, threads: int, arguments: tuple[Any, ...]) -> None:
        """Launch a kernel by its whole name."""
        device = self._device
        if device.is_capturing():
            device.keep(*[one for one in arguments if isinstance(one, device.xp.ndarray)])
        with device.active():
            self._functions[function]((blocks,), (threads,), arguments)
