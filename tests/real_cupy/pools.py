"""CuPy's pools, in which memory is NaN: at once if it is pinned, else when the stream it was taken on comes to it.

A pool gives memory to the next who asks on the same stream, so that whoever still reads it on another stream, or had
the host write it, would find it right most of the time.
"""

from __future__ import annotations

import ctypes
from typing import Any

from cuda_emulator.record import note_allocation

from .loaded import DRIVER

_NAN = 0xFF  # of every float format, in each byte


class _Piece:
    """A pool's piece of device memory, as long as somebody refers to it."""

    def __init__(self, memory: Any, size: int, stream: int | None, device: int) -> None:
        self._memory, self._size, self._stream, self._device = memory, size, stream, device
        DRIVER.gpuless_take(memory.ptr, size, stream, device)

    def __del__(self) -> None:
        DRIVER.gpuless_void(self._memory.ptr, self._size, self._stream, self._device)


class _PinnedPiece:
    """A pool's piece of pinned memory, likewise; `ptr` and `size` in bytes."""

    def __init__(self, memory: Any) -> None:
        self._memory, self.ptr, self.size = memory, memory.ptr, memory.size()

    def __del__(self) -> None:
        ctypes.memset(self.ptr, _NAN, self.size)


def give_back_unused() -> None:
    """What nobody refers to goes back to the driver: what a stream or thread took that is gone, no other ever takes."""
    import cupy

    for number in range(cupy.cuda.runtime.getDeviceCount()):
        with cupy.cuda.Device(number):
            cupy.get_default_memory_pool().free_all_blocks()


def install() -> None:
    """Put them in place of CuPy's own."""
    import cupy  # type: ignore[import-not-found]

    cuda, device_pool, pinned_pool = cupy.cuda, cupy.get_default_memory_pool(), cupy.get_default_pinned_memory_pool()

    def allocate(size: int) -> Any:
        note_allocation(size)
        memory = device_pool.malloc(size)
        if not size:
            return memory
        device = cuda.runtime.getDevice()
        piece = _Piece(memory, size, cuda.get_current_stream().ptr, device)
        return cuda.MemoryPointer(cuda.UnownedMemory(memory.ptr, size, piece, device), 0)

    def allocate_pinned(size: int) -> Any:
        note_allocation(size, pinned=True)
        memory = pinned_pool.malloc(size)
        return cuda.PinnedMemoryPointer(_PinnedPiece(memory), 0) if size else memory

    cuda.set_allocator(allocate)
    cuda.set_pinned_memory_allocator(allocate_pinned)
