"""Device memory, handed out and taken back as by CuPy's pool, and pinned host memory.

A piece that is freed is given out again at once where it fits, on the stream that it was allocated on: on a GPU, too,
the next user's kernels come after the last user's there, and nowhere else. What is free holds NaN and is in no array.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .errors import OutOfMemoryError
from .native import LOCK, register, unregister
from .queues import Queue, add_bookkeeping, finish_all
from .record import note_allocation
from .settings import settings

POISON = 0xFF  # NaN in every float format
_UNIT = 512  # CuPy's pool rounds sizes to it
_RED_ZONE = 4096  # in no array: an access a little beyond the end is found

HOST, DEVICE = 1, 2  # CUDA's memory types


@dataclass(frozen=True)
class Block:
    """Memory taken from the operating system; it goes back when the last reference does."""

    memory: mmap.mmap
    address: int
    size: int


def _new_block(size: int) -> Block:
    memory = mmap.mmap(-1, size + 2 * _RED_ZONE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.memset(start, POISON, size + 2 * _RED_ZONE)
    return Block(memory, start + _RED_ZONE, size)


def _rounded(size: int) -> int:
    return (size + _UNIT - 1) // _UNIT * _UNIT


class Addresses:
    """Which memory an address belongs to, as the host sees it: from the allocation to the freeing."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._pieces: dict[int, tuple[int, int]] = {}  # start: size, memory type

    def add(self, start: int, size: int, kind: int) -> None:
        """Allocated."""
        bisect.insort(self._starts, start)
        self._pieces[start] = size, kind

    def remove(self, start: int) -> None:
        """Freed."""
        del self._starts[bisect.bisect_left(self._starts, start)]
        del self._pieces[start]

    def kind(self, address: int) -> int:
        """`HOST`, `DEVICE`, or 0 for memory that CUDA does not know."""
        with LOCK:
            place = bisect.bisect_right(self._starts, address) - 1
            if place < 0:
                return 0
            start = self._starts[place]
            size, kind = self._pieces[start]
            return kind if address < start + size else 0


ADDRESSES = Addresses()


class MemoryPool:
    """CuPy's pool, as far as its numbers go."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, int], list[Block]] = defaultdict(list)  # by stream and size
        self._used = self._total = self._limit = 0

    def used_bytes(self) -> int:
        """Bytes in use."""
        return self._used

    def free_bytes(self) -> int:
        """Bytes that are kept for the next who asks."""
        return self._total - self._used

    def total_bytes(self) -> int:
        """Both."""
        return self._total

    def get_limit(self) -> int:
        """The most it takes, or 0."""
        return self._limit

    def set_limit(self, size: int | None = None, fraction: float | None = None) -> None:
        """The most it takes from now on; 0 for all there is."""
        self._limit = int(settings().device_memory * fraction) if fraction is not None else size or 0

    def free_all_blocks(self, stream: object = None) -> None:
        """Give back what is free; as CUDA's own freeing, it waits for the device."""
        with LOCK:
            finish_all()
            # Taken first: memory that the garbage collector gives back meanwhile is none of these.
            free, self._free = self._free, defaultdict(list)
            self._total -= sum(block.size for blocks in free.values() for block in blocks)

    def malloc(self, size: int, queue: Queue) -> tuple[Block, Callable[[], None]]:
        """A block, and what gives it back."""
        rounded = _rounded(size)
        free = self._free[queue.pointer, rounded]
        if free:
            block = free.pop()
            add_bookkeeping(queue, lambda: register(block.address, size))
        else:
            block = self._take(rounded)
            register(block.address, size)
        self._used += rounded
        ADDRESSES.add(block.address, size, DEVICE)

        def give_back() -> None:
            with LOCK:
                ADDRESSES.remove(block.address)
                self._used -= rounded
                self._free[queue.pointer, rounded].append(block)
                add_bookkeeping(queue, lambda: _make_void(block.address, size))

        return block, give_back

    def _take(self, size: int) -> Block:
        room = min(self._limit or settings().device_memory, settings().device_memory)
        if self._total + size > room and self.free_bytes():
            self.free_all_blocks()
        if self._total + size > room:
            raise OutOfMemoryError(size, self._total, self._limit)
        self._total += size
        return _new_block(size)


def _make_void(address: int, size: int) -> None:
    unregister(address)
    ctypes.memset(address, POISON, size)


POOL = MemoryPool()


class BaseMemory:
    """Memory on the device: `ptr`, `size` in bytes, `device_id`."""

    ptr: int
    size: int
    device_id: int

    def __int__(self) -> int:
        return self.ptr


class Memory(BaseMemory):
    """A piece of the pool's memory; the pool has it back when nobody refers to it."""

    def __init__(self, size: int, queue: Queue) -> None:
        self.size, self.ptr, self.device_id = size, 0, 0
        note_allocation(size)
        if size:
            with LOCK:
                block, give_back = POOL.malloc(size, queue)
                self.ptr = block.address
                weakref.finalize(self, give_back).atexit = False


class UnownedMemory(BaseMemory):
    """Memory that belongs to `owner`, which is kept alive."""

    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        if device_id < 0 and ptr == 0:
            raise RuntimeError("UnownedMemory requires explicit device ID for a null pointer.")
        self.ptr, self.size, self.device_id, self._owner = ptr, size, max(device_id, 0), owner


class MemoryPointer:
    """A place in a piece of memory, which is kept alive."""

    def __init__(self, mem: BaseMemory, offset: int) -> None:
        if mem.ptr == 0 and offset != 0:
            raise AssertionError("an offset from a null pointer")
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id

    def __int__(self) -> int:
        return self.ptr

    def __add__(self, offset: int) -> MemoryPointer:
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)

    def __sub__(self, offset: int) -> MemoryPointer:
        return self + -offset


# ---- pinned host memory ----


class PinnedMemory:
    """A piece of pinned host memory from the driver: `ptr` and `size` in bytes; given back when nobody refers to it."""

    def __init__(self, size: int, flags: int = 0) -> None:
        note_allocation(size, pinned=True)
        self.size = size
        with LOCK:
            self._block = _new_block(_rounded(max(size, 1)))
            self.ptr = _lent(self._block)
        weakref.finalize(self, _take_back, self._block).atexit = False

    def __int__(self) -> int:
        return self.ptr


def PinnedMemoryPointer(mem: PinnedMemory, offset: int) -> Any:
    """A place in it: an object with the buffer protocol, `ptr`, `mem` and `size()`."""
    return _pinned_view(mem._block, mem, offset)


_free_pinned: dict[int, list[Block]] = defaultdict(list)  # by size


@dataclass
class _PooledPinnedMemory:
    ptr: int
    size: int


def alloc_pinned_memory(size: int) -> Any:
    """Pinned host memory of the pool, which rounds up to powers of two: as `PinnedMemoryPointer`.

    It is given out again as soon as nobody refers to it, whatever copies still wait: as by CuPy's pool.
    """
    rounded = 1 << (_rounded(max(size, 1)) - 1).bit_length() if size else 0
    note_allocation(rounded, pinned=True)
    with LOCK:
        free = _free_pinned[rounded]
        block = free.pop() if free else _new_block(max(rounded, _UNIT))
        address = _lent(block)
    pinned = _pinned_view(block, _PooledPinnedMemory(address, rounded), 0)
    weakref.finalize(pinned, _free_pinned_block, block, rounded).atexit = False
    return pinned


def _lent(block: Block) -> int:
    register(block.address, block.size)
    ADDRESSES.add(block.address, block.size, HOST)
    return block.address


def _take_back(block: Block) -> None:
    with LOCK:
        ADDRESSES.remove(block.address)
        _make_void(block.address, block.size)


def _free_pinned_block(block: Block, size: int) -> None:
    with LOCK:
        _take_back(block)
        _free_pinned[size].append(block)


def _pinned_view(block: Block, memory: Any, offset: int) -> Any:
    pinned = _pinned_type(memory.size - offset).from_buffer(block.memory, _RED_ZONE + offset)
    pinned.mem, pinned.ptr = memory, memory.ptr + offset
    return pinned


def _pinned_type(size: int) -> Any:
    if size not in _pinned_types:
        base = ctypes.c_uint8 * size
        names = {"size": lambda pointer: pointer.mem.size, "__int__": lambda pointer: pointer.ptr}
        _pinned_types[size] = type("PinnedMemoryPointer", (base,), names)
    return _pinned_types[size]


_pinned_types: dict[int, Any] = {}
