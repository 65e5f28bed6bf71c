"""CuPy on one device: memory, streams, events and copies, and what may be asked of the driver."""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt

from gradengine.arrays.buffer import Buffer
from gradengine.errors import BufferRefused, CallerError, OutOfDeviceMemory
from gradengine.kernels.device import Recorded
from gradengine.kernels.toolchain import refuse_to_exceed

_NOTHING: AbstractContextManager[object] = nullcontext()
_UNREGISTERED_MEMORY, _PINNED_MEMORY = 0, 1  # cudaMemoryType
_PER_THREAD = 2  # cudaStreamPerThread: one handle, and a stream for each thread
_INVALID_HANDLE = 400  # cudaErrorInvalidResourceHandle
_POOLED = 1 << 20  # bytes: CuPy's pool of pinned memory rounds up to a power of two


@final
class Kept:
    """Memory that work may still read or write: kept until events behind that work are done."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Collection[Any], object]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def until(self, events: Collection[Any], memory: object) -> None:
        """Keep memory until these events are done."""
        self._waiting.append((events, memory))

    def dropped(self, events: Collection[Any], memory: object) -> None:
        """Keep memory that nobody else keeps any more, unless these events are done."""
        if not all(event.done for event in events):
            self.until(events, memory)

    def let_go(self) -> None:
        """Of what work is done with. Threads share these, so each entry is one's own while it is looked at."""
        for _ in range(len(self._waiting)):
            try:
                events, memory = self._waiting.popleft()
            except IndexError:  # another thread looks at the rest
                return
            if not all(event.done for event in events):
                self._waiting.append((events, memory))

    def wait(self) -> None:
        """Wait for the work, and let all of it go."""
        while self._waiting:
            with suppress(IndexError):  # another thread took it
                events, _ = self._waiting.popleft()
                for event in events:
                    event.synchronize()


@final
class CudaRuntime:
    """Memory, streams, events and copies of one device; its current stream is CuPy's of the calling thread.

    Args:
        xp: CuPy, or what has its surface.
        ordinal: Which device.

    Attributes:
        name: "cuda:0", ...
        kept: What was dropped while work on it may run.
    """

    def __init__(self, xp: Any, ordinal: int) -> None:
        self.xp, self.ordinal, self.name = xp, ordinal, f"cuda:{ordinal}"
        with xp.cuda.Device(ordinal):
            self._uploads = xp.cuda.Stream(non_blocking=True)
        self._recorded: Recorded | None = None  # what is being recorded
        self._foreign: list[Any] = []  # what graphs that others record read
        self.kept = Kept()

    def active(self) -> AbstractContextManager[object]:
        """Within it, this is the current device: where a caller works on another one, launches would go there."""
        if self.xp.cuda.runtime.getDevice() == self.ordinal:
            return _NOTHING
        return self.xp.cuda.Device(self.ordinal)  # type: ignore[no-any-return]

    def is_capturing(self) -> bool:
        """Whether the current stream records a graph instead of working."""
        return bool(self.current_stream().is_capturing())

    def begin_recording(self, recorded: Recorded) -> None:
        """What is queued from now on is recorded."""
        if self._recorded is not None:
            raise CallerError(
                "another window is being captured on this device", do="one at a time, in one thread; capture it then"
            )
        self._recorded = recorded

    def end_recording(self, recorded: Recorded) -> None:
        """It is not any more; nothing changes where another recording is under way."""
        if self._recorded is recorded:
            self._recorded = None

    def finish(self, recorded: Recorded) -> None:
        """Memory that a graph works on outlives its last run."""
        recorded.launched = self.event()
        memory = recorded.kept, recorded.graph
        weakref.finalize(recorded, self.kept.dropped, (recorded.launched,), memory).atexit = False

    def keep(self, *memory: Any) -> None:
        """What a graph that is being recorded reads stays alive with it."""
        if self._recorded is not None:
            self._recorded.kept += memory
        elif self.is_capturing():  # somebody else's graph: how long it lives is not known here
            self._foreign += memory

    def drop(self, *memory: Any) -> None:
        """Let memory go that only the current stream's work uses, once that is done."""
        if self.is_capturing():
            self.keep(*memory)
        else:
            self.kept.until((self.record(),), memory)

    def let_go(self) -> None:
        """Of memory that was dropped, what work is done with; not in a capture, where nothing may be asked."""
        if self.kept and not self.is_capturing():
            self.kept.let_go()

    def allocate(self, size: int) -> Buffer:
        """An fp32 buffer from CuPy's pool; raises `OutOfDeviceMemory`."""
        self.refuse_to_exceed(4 * size, f"an fp32 buffer of {size} elements")
        with self.active():
            memory = self._empty((size,), np.dtype(np.float32))
        return Buffer(int(memory.data.ptr), size, "float32", (size,), True, memory, self.name)

    def refuse_to_exceed(self, nbytes: int, what: str) -> None:
        """Raise `OutOfDeviceMemory` where so many bytes do not fit; waits where they may once work is done."""
        with self.active():
            try:
                refuse_to_exceed(self.xp, nbytes, what)
            except OutOfDeviceMemory:
                if not self.kept or self.is_capturing():
                    raise
                self.kept.wait()
                refuse_to_exceed(self.xp, nbytes, what)

    def array(self, buffer: Buffer, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """A buffer as a CuPy array of that shape and dtype; no copy, and its owner stays alive with it."""
        memory = self.xp.cuda.UnownedMemory(buffer.pointer, buffer.nbytes, buffer.owner, self.ordinal)
        return self.xp.ndarray(shape, dtype, self.xp.cuda.MemoryPointer(memory, 0))

    def current_stream(self) -> Any:
        """The calling thread's current stream on this device."""
        return self.xp.cuda.get_current_stream(self.ordinal)

    def giving_stream(self) -> Any:
        """The stream that memory is taken from now: in a capture not the current one."""
        return self._uploads if self.is_capturing() else self.current_stream()

    def event(self) -> Any:
        """An event without a clock."""
        with self.active():
            return self.xp.cuda.Event(disable_timing=True)

    def pinned(self, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Pinned host memory as a NumPy array; much of it is taken from the driver, to the byte, and given back."""
        nbytes = count * np.dtype(dtype).itemsize
        with self.active():
            memory = self._pinned_exactly(nbytes) if nbytes > _POOLED else self.xp.cuda.alloc_pinned_memory(nbytes)
        return np.frombuffer(memory, dtype, count)

    def _pinned_exactly(self, nbytes: int) -> Any:
        memory = self.xp.cuda.PinnedMemory(nbytes, self.xp.cuda.runtime.hostAllocPortable)
        return self.xp.cuda.PinnedMemoryPointer(memory, 0)

    def copy_to(self, there: Any, here: npt.NDArray[Any]) -> None:
        """Queue a copy from pinned memory, which must stay as it is until it is done."""
        runtime, stream = self.xp.cuda.runtime, self.current_stream()
        with self.active():
            runtime.memcpyAsync(there.data.ptr, here.ctypes.data, here.nbytes, runtime.memcpyHostToDevice, stream.ptr)

    def copy_from(self, there: Any, here: npt.NDArray[Any]) -> None:
        """Queue a copy into pinned memory, which is not to be looked at until it is done."""
        runtime, stream = self.xp.cuda.runtime, self.current_stream()
        with self.active():
            runtime.memcpyAsync(here.ctypes.data, there.data.ptr, here.nbytes, runtime.memcpyDeviceToHost, stream.ptr)

    def copied(self, array: Any) -> Any:
        """The same elements in the current stream's memory; a copy, and no kernel."""
        runtime, stream = self.xp.cuda.runtime, self.current_stream()
        with self.active():
            copy = self._empty(array.shape, array.dtype)
            kind = runtime.memcpyDeviceToDevice
            runtime.memcpyAsync(copy.data.ptr, array.data.ptr, array.nbytes, kind, stream.ptr)
        return copy

    def sent(self, values: npt.NDArray[Any]) -> Any:
        """Values in device memory, for the work that the current stream is given next: dropped, it is behind that.

        In a capture each replay copies them anew, and the graph keeps the memory.
        """
        with self.active(), self.giving_stream():
            there = self._empty(values.shape, values.dtype)
        self.copied_into(there, values)
        self.keep(there)
        return there

    def copied_into(self, there: Any, values: npt.NDArray[Any]) -> None:
        """Queue a copy of values of the same dtype, as they are now."""
        here = self.pinned(values.size, values.dtype)
        here[:] = values
        self.copy_to(there, here)
        self.drop(here)

    def clear(self, pointer: int, nbytes: int) -> None:
        """Queue zeros."""
        if nbytes:
            with self.active():
                self.xp.cuda.runtime.memsetAsync(pointer, 0, nbytes, self.current_stream().ptr)

    def upload(self, array: npt.NDArray[Any]) -> Any:
        """A copy on the device, on a stream of its own: allowed while a graph is recorded, and no part of that.

        The memory is the current stream's, so that once dropped it is given out again behind the work that still uses
        it; what it holds now may be such work's, which is waited for.
        """
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
        """A copy on the host of what an array holds behind an event, whatever stream is current; waits."""
        with self.active():
            self._uploads.wait_event(behind)
            on_host: npt.NDArray[Any] = array.get(stream=self._uploads)
        return on_host

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        self.let_go()
        try:
            return self.xp.empty(shape, dtype)
        except self.xp.cuda.memory.OutOfMemoryError as fault:  # the pool may have a limit below what the device has
            if self.kept and not self.is_capturing():
                self.kept.wait()
                return self._empty(shape, dtype)
            nbytes = dtype.itemsize * math.prod(shape)
            raise OutOfDeviceMemory(str(fault), expected=f"{nbytes} bytes") from None

    def stream_for_producers(self) -> int:
        """The current stream as DLPack counts them: 1 is the default one; -1, in a capture, asks for no ordering."""
        stream = self.current_stream()
        if stream.is_capturing():
            return -1
        return int(stream.ptr) or 1

    def wait_for(self, handle: int) -> None:
        """Have the current stream wait for what another library's has to do; 0 is the default stream."""
        with self.active():
            self.current_stream().wait_event(self._behind(handle))

    def _behind(self, handle: int) -> Any:
        """An event behind what another library's stream has to do; an event is of its stream's device, or refused."""
        stream = self.stream_of(handle)
        try:
            return stream.record(self.event())
        except self.xp.cuda.runtime.CUDARuntimeError as fault:
            if fault.status != _INVALID_HANDLE:
                raise
        with self.xp.cuda.Device(self._ordinal_of(handle)):
            return stream.record(self.xp.cuda.Event(disable_timing=True))

    def _ordinal_of(self, handle: int) -> int:
        """The device of a stream, by its context: CuPy has no other way to ask."""
        driver = self.xp.cuda.driver
        context = driver.ctxGetCurrent()
        try:
            driver.ctxSetCurrent(driver.streamGetCtx(handle))
            return int(driver.ctxGetDevice())
        finally:
            driver.ctxSetCurrent(context)

    def records(self, handle: int) -> bool:
        """Whether another library's stream, of whichever device, records a graph.

        Raises:
            CallerError: There is no such stream, as far as the driver can say.
        """
        try:
            return bool(self.stream_of(handle).is_capturing())
        except self.xp.cuda.runtime.CUDARuntimeError as fault:
            if fault.status != _INVALID_HANDLE:
                raise
            raise CallerError(
                f"a stream that gradients are lent on is none of {self.name}, nor of another device",
                got=f"handle {handle:#x}",
                expected="a stream that lives until the step is over",
            ) from None

    def let_wait(self, handle: int, event: Any) -> None:
        """Have another library's stream wait for an event."""
        with self.active():
            self.stream_of(handle).wait_event(event)

    def record(self) -> Any:
        """An event behind what the current stream has to do."""
        with self.active():
            return self.current_stream().record(self.event())

    def launch(self, recorded: Recorded) -> None:
        """Queue a recorded graph; what it reads stays alive until that is done."""
        with self.active():
            recorded.graph.launch()
            if self.is_capturing():
                self.keep(recorded)
            else:
                self.current_stream().record(recorded.launched)

    def used(self, uses: dict[tuple[int, int], Any], born: int) -> None:
        """Have `uses` hold an event behind what the current stream has to do, unless it is the one with that handle."""
        stream = self.current_stream()
        if stream.is_capturing() or (stream.ptr == born and born != _PER_THREAD):
            return
        key = stream.ptr, threading.get_ident()
        with self.active():
            uses[key] = stream.record(uses.get(key) or self.event())

    def readers(self) -> list[Any]:
        """The streams that CuPy reads this device's arrays on, now.

        A read is queued on the current stream of the current device, whatever device the array lies on; a kernel of the
        user's on that of this device.
        """
        return [*{self.xp.cuda.get_current_stream(), self.current_stream()}]

    def stream_of(self, handle: int) -> Any:
        """Another library's stream as one of CuPy's; 0 is the default stream."""
        with self.active():
            return self.xp.cuda.Stream.from_external(_Handle(handle)) if handle else self.xp.cuda.Stream.null

    def refuse_foreign(self, buffer: Buffer, component: str) -> None:
        """Ask the driver about a raw pointer: its first and its last byte must lie on this device."""
        for address in (buffer.pointer, buffer.pointer + buffer.nbytes - 1) if buffer.size else ():
            found = self.xp.cuda.runtime.pointerGetAttributes(address)
            if found.type in {_UNREGISTERED_MEMORY, _PINNED_MEMORY} or found.device != self.ordinal:
                kind = "host memory, or memory that was freed" if found.type < 2 else f"memory of cuda:{found.device}"
                raise BufferRefused(
                    f"component '{component}' does not lie on {self.name} as a whole",
                    got=f"{kind} at {address:#x}",
                    expected=f"{buffer.nbytes} bytes from {buffer.pointer:#x} on",
                )


@dataclass(frozen=True)
class _Handle:
    """A bare stream handle, in the way that CuPy takes one."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle
