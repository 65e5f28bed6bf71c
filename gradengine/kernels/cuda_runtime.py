"""CuPy on one device, with memory, events, copies and queries of the driver."""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from gradengine.arrays.buffer import Buffer
from gradengine.errors import BufferRefused, CallerError, DeviceFailed, OutOfDeviceMemory
from gradengine.kernels.device import Answer, Device, Graph
from gradengine.kernels.events import Entered, Events, Kept

_UNREGISTERED_MEMORY, _PINNED_MEMORY = 0, 1  # cudaMemoryType
_PER_THREAD = 2  # cudaStreamPerThread, one handle for a separate stream in each thread
_OUT_OF_MEMORY, _INVALID_HANDLE = 2, 400  # cudaErrorMemoryAllocation, cudaErrorInvalidResourceHandle
_POOLED = 1 << 20  # most bytes of pinned memory from CuPy's pool, which rounds up to a power of two


class CudaRuntime(Device):
    """Memory, events and copies of one device. Its current stream is CuPy's in the calling thread."""

    def __init__(self, xp: Any, ordinal: int) -> None:
        self.xp, self.ordinal, self.name, self.array_type = xp, ordinal, f"cuda:{ordinal}", xp.ndarray
        self.events = Events(xp, ordinal)
        with self.active():
            self._uploads = xp.cuda.Stream(non_blocking=True)
        self.recorded: Graph | None = None  # the graph that is being recorded
        self._foreign: dict[Any, Any] = {}  # memory that other libraries' graphs read, by id or content
        self.kept = Kept(self.events)  # memory that was dropped while work on it may run
        # This event is never recorded, so it is done. Any other status means that the device has failed.
        self._unused = self.event()

    def active(self) -> AbstractContextManager[None]:
        """Return a context in which this is the current device, so that launches do not go to a different one.

        All driver calls are made in one. It raises `DeviceFailed` for an error that means that the device has failed.
        """
        try:
            if self.xp.cuda.runtime.getDevice() == self.ordinal:
                return self.events
        except Exception as fault:
            self.events.raise_if_lost(fault)
            raise
        return Entered(self.events, self.xp.cuda.Device(self.ordinal))

    def refuse_failed(self, *, asks: bool = False) -> None:
        """See `Device.refuse_failed`."""
        self.events.refuse_failed()
        if asks:
            self.events.is_done(self._unused)

    def relaxed(self, call: Callable[..., Answer], *arguments: Any) -> Answer:
        """See `Device.relaxed`."""
        return self.events.relaxed(call, *arguments)

    def is_capturing(self) -> bool:
        return self.captures(self.current_stream())

    def captures(self, stream: Any) -> bool:
        """Return whether a stream records a graph."""
        try:
            return bool(stream.is_capturing())
        except Exception as fault:
            self.events.raise_if_lost(fault)
            raise

    def keep(self, *memory: Any) -> None:
        """Keep memory alive for the graph that the current stream records."""
        if self.recorded is not None:
            self.recorded.kept += memory
        else:  # The lifetime of another library's graph is unknown.
            owners = [one.data.mem if isinstance(one, self.xp.ndarray) else one for one in memory]
            self._foreign.update(zip(map(id, owners), owners, strict=True))

    def drop(self, *memory: Any) -> None:
        """Free memory that only the current stream's work uses, after that work is done."""
        if self.is_capturing():
            self.keep(*memory)
        else:
            self.kept.until((self.record(),), memory)

    def let_go(self) -> None:
        """Free dropped memory whose work is done. Does nothing while a graph is recorded."""
        if self.kept and not self.is_capturing():
            self.kept.let_go()

    def allocate(self, size: int, *, is_shared: bool = False) -> Buffer:
        """See `Device.allocate`. Takes memory from CuPy's pool, or from one that the caller has set."""
        with self.active():
            memory = self._empty((size,), np.dtype(np.float32))
        return Buffer(int(memory.data.ptr), size, "float32", (size,), True, memory, self.name)

    def array(self, buffer: Buffer, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> Any:
        """See `Device.array`. Returns a CuPy array of this dtype."""
        memory = self.xp.cuda.UnownedMemory(buffer.pointer, buffer.nbytes, buffer.owner, self.ordinal)
        return self.xp.ndarray(shape, dtype, self.xp.cuda.MemoryPointer(memory, 0))

    def current_stream(self) -> Any:
        """Return the calling thread's current stream. Raises `CallerError` for a per-thread default stream."""
        stream = self.xp.cuda.get_current_stream(self.ordinal)
        if stream.ptr == _PER_THREAD:
            raise CallerError(
                "the current stream is a per-thread default stream",
                got="cudaStreamPerThread",
                do="make a cupy.cuda.Stream() current, or unset CUPY_CUDA_PER_THREAD_DEFAULT_STREAM",
            )
        return stream

    def giving_stream(self) -> Any:
        """Return the stream on which memory is allocated now. During a capture this is not the current one."""
        return self._uploads if self.is_capturing() else self.current_stream()

    def event(self) -> Any:
        """Return an event without timing."""
        with self.active():
            return self.xp.cuda.Event(disable_timing=True)

    def pinned(self, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Return pinned host memory as a NumPy array. The driver allocates a large one, CuPy's pool a small one."""
        nbytes, cuda = count * np.dtype(dtype).itemsize, self.xp.cuda
        with self.active():
            if nbytes <= _POOLED:
                return np.frombuffer(self.relaxed(cuda.alloc_pinned_memory, nbytes), dtype, count)
            pointer = self.relaxed(cuda.runtime.hostAlloc, nbytes, cuda.runtime.hostAllocPortable)
        memory = (ctypes.c_uint8 * nbytes).from_address(pointer)
        weakref.finalize(memory, self._free_pinned, pointer).atexit = False
        return np.frombuffer(memoryview(memory), dtype, count)

    def _free_pinned(self, pointer: int) -> None:
        with suppress(DeviceFailed):  # Each call raises it. A finaliser could only print it.
            self.relaxed(self.xp.cuda.runtime.freeHost, pointer)

    def copy_to(self, there: Any, here: npt.NDArray[Any]) -> None:
        """Queue a copy from pinned memory, which must not change until the copy is done."""
        self._copy(there.data.ptr, here.ctypes.data, here.nbytes, self.xp.cuda.runtime.memcpyHostToDevice)

    def copy_from(self, there: Any, here: npt.NDArray[Any]) -> None:
        """Queue a copy to pinned memory, which must not be read until the copy is done."""
        self._copy(here.ctypes.data, there.data.ptr, here.nbytes, self.xp.cuda.runtime.memcpyDeviceToHost)

    def copy_within(self, there: Any, here: Any) -> None:
        """Queue a copy between two arrays of the device."""
        self._copy(there.data.ptr, here.data.ptr, here.nbytes, self.xp.cuda.runtime.memcpyDeviceToDevice)

    def copied(self, array: Any) -> Any:
        """Return a copy of an array in the current stream's memory, made without a kernel."""
        with self.active():
            copy = self._empty(array.shape, array.dtype)
            self.copy_within(copy, array)
        return copy

    def _copy(self, target: int, source: int, nbytes: int, kind: int) -> None:
        with self.active():
            self.xp.cuda.runtime.memcpyAsync(target, source, nbytes, kind, self.current_stream().ptr)

    def sent(self, values: npt.NDArray[Any]) -> Any:
        """Copy values to the device for the next launch on the current stream. The memory may be dropped right after.

        In a capture each replay copies them again, and the graph keeps the memory with the arguments of its launch. In
        another library's capture the same values are copied once, outside of the graph.
        """
        if self.recorded is None and self.is_capturing():
            key = values.tobytes()
            if key not in self._foreign:
                self._foreign[key] = self.upload(values)
            return self._foreign[key]
        with self.active(), self.giving_stream():
            there = self._empty(values.shape, values.dtype)
        self.copied_into(there, values)
        return there

    def copied_into(self, there: Any, values: npt.NDArray[Any]) -> None:
        """Queue a copy of values of the same dtype. The values may change after the call."""
        here = self.pinned(values.size, values.dtype)
        here[:] = values
        self.copy_to(there, here)
        self.drop(here)

    def write(self, buffer: Buffer, values: npt.NDArray[np.float32]) -> None:
        """See `Device.write`. Copies through pinned memory."""
        if values.size:
            self.copied_into(self.array(buffer, (buffer.size,)), values)

    def clear(self, pointer: int, nbytes: int) -> None:
        """Queue a write of zeros."""
        if nbytes:
            with self.active():
                self.xp.cuda.runtime.memsetAsync(pointer, 0, nbytes, self.current_stream().ptr)

    def upload(self, array: npt.NDArray[Any]) -> Any:
        """Return a copy on the device, made on a separate stream. A graph that is recorded does not contain the copy.

        The memory is allocated on the current stream, so after it is dropped it is reused only after the work that uses
        it. Earlier work may still use the memory now, so this waits for that work.
        """
        return self.relaxed(self._uploaded, array)

    def _uploaded(self, array: npt.NDArray[Any]) -> Any:
        with self.active():
            current = self.giving_stream()
            with current:
                memory = self._empty(array.shape, array.dtype)
            self._uploads.wait_event(current.record())
            with self._uploads:
                memory.set(array)
            self._uploads.synchronize()
        return memory

    def read(self, array: Any, behind: Any) -> npt.NDArray[Any]:
        """Return a host copy of an array after an event, for any current stream. Waits for the copy."""
        on_host = np.empty(array.shape, array.dtype)  # Without it, CUPY_ENABLE_UMP=1 gives a view and does not wait.
        with self.active():
            self._uploads.wait_event(behind)
            self.relaxed(lambda: array.get(stream=self._uploads, out=on_host))
        return on_host

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        self.let_go()
        try:
            return self.relaxed(self.xp.empty, shape, dtype)
        except (MemoryError, self.xp.cuda.runtime.CUDARuntimeError) as fault:
            # A pool raises MemoryError. Without a pool, the driver raises its own error.
            if getattr(fault, "status", _OUT_OF_MEMORY) != _OUT_OF_MEMORY:
                raise
        if self.kept and not self.is_capturing():
            self.kept.wait()
            return self._empty(shape, dtype)
        # This is not checked earlier, since a pool may have free memory when the device has none.
        free, total = self.relaxed(self.xp.cuda.runtime.memGetInfo)
        raise OutOfDeviceMemory(
            f"{self.name} or its memory pool has too little memory",
            got=f"{free} bytes free of {total}",
            expected=f"{dtype.itemsize * math.prod(shape)} bytes",
            do="free memory (torch.cuda.empty_cache()), or split the layout over more devices",
        )

    def behind(self, handle: int) -> Any:
        """Return an event after all work queued on another library's stream, whose device is looked up."""
        stream = self.stream_of(handle)
        try:
            return stream.record(self.event())
        except self.xp.cuda.runtime.CUDARuntimeError as fault:
            if fault.status != _INVALID_HANDLE:
                raise
        with self.xp.cuda.Device(self._ordinal_of(handle)):
            return stream.record(self.xp.cuda.Event(disable_timing=True))

    def _ordinal_of(self, handle: int) -> int:
        """Return the device of a stream from its context. CuPy has no other way to find it."""
        driver = self.xp.cuda.driver
        context = driver.ctxGetCurrent()
        try:
            driver.ctxSetCurrent(driver.streamGetCtx(handle))
            return int(driver.ctxGetDevice())
        finally:
            driver.ctxSetCurrent(context)

    def records(self, handle: int) -> bool:
        """Return whether another library's stream records a graph. Raises `CallerError` for an invalid handle."""
        try:
            return self.captures(self.stream_of(handle))
        except self.xp.cuda.runtime.CUDARuntimeError as fault:
            if fault.status != _INVALID_HANDLE:
                raise
            raise CallerError(
                f"the stream of a gradient is not a stream of {self.name} or of any other device",
                got=f"handle {handle:#x}",
                expected="a stream that lives until the step is over",
            ) from None

    def record(self) -> Any:
        """Return an event after all work queued on the current stream."""
        with self.active():
            return self.current_stream().record(self.event())

    def used(self, uses: dict[int, Any], born: int) -> None:
        """Record in `uses` that the current stream reads this memory, unless it was allocated on that stream."""
        stream = self.current_stream()
        if stream.ptr != born and not self.captures(stream):
            with self.active():
                uses[stream.ptr] = stream.record(uses.get(stream.ptr) or self.event())

    def stream_of(self, handle: int, owner: object = None) -> Any:
        """Return another library's stream as a CuPy stream, which keeps `owner` alive. 0 is the default stream."""
        external = SimpleNamespace(__cuda_stream__=lambda: (0, handle), owner=owner)
        with self.active():
            return self.xp.cuda.Stream.from_external(external) if handle else self.xp.cuda.Stream.null

    def refuse_foreign(self, buffer: Buffer, component: str) -> None:
        """Raise `BufferRefused` unless the driver finds a raw pointer's first and last byte on this device."""
        for address in (buffer.pointer, buffer.pointer + buffer.nbytes - 1) if buffer.size else ():
            found = self.xp.cuda.runtime.pointerGetAttributes(address)
            if found.type in {_UNREGISTERED_MEMORY, _PINNED_MEMORY} or found.device != self.ordinal:
                kind = "host memory, or memory that was freed" if found.type < 2 else f"memory of cuda:{found.device}"
                raise BufferRefused(
                    f"component '{component}' is not entirely on {self.name}",
                    got=f"{kind} at {address:#x}",
                    expected=f"{buffer.nbytes} bytes from {buffer.pointer:#x} on",
                )
