"""One GPU through CuPy: its memory, its streams, and what may be asked of its driver."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt

from gradengine.buffer import Buffer, stream_handle
from gradengine.errors import BufferRefused, CallerError, OutOfDeviceMemory
from gradengine.kernels.interface import Recorded
from gradengine.kernels.toolkit import refuse_to_exceed

__all__ = ["CudaDevice", "StreamOrder"]

_NOTHING: AbstractContextManager[object] = nullcontext()
_UNREGISTERED_MEMORY, _PINNED_MEMORY = 0, 1  # cudaMemoryType


@final
class CudaDevice:
    """A device, its current stream being CuPy's of the calling thread.

    Args:
        xp: CuPy, or what has its surface.
        ordinal: Which device.
    """

    def __init__(self, xp: Any, ordinal: int) -> None:
        self.xp, self.ordinal, self.name = xp, ordinal, f"cuda:{ordinal}"
        with xp.cuda.Device(ordinal):
            self._uploads = xp.cuda.Stream(non_blocking=True)
        self._recorded: Recorded | None = None  # what is being recorded
        self._kept: list[Any] = []

    def on(self, stream: object) -> AbstractContextManager[object]:
        """Within it, work is queued on a stream: CuPy's, one with `__cuda_stream__` or `cuda_stream`, or a handle."""
        if stream is None:
            return nullcontext()
        if isinstance(stream, self.xp.cuda.Stream):
            return self._on(stream)
        with self.active():
            return self._on(self.xp.cuda.Stream.from_external(_ForeignStream(stream)))

    @contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        with self.active(), stream:  # a stream is made current for the current device
            yield

    def active(self) -> AbstractContextManager[object]:
        """Within it, this is the current device: where a caller works on another one, launches would go there."""
        if self.xp.cuda.runtime.getDevice() == self.ordinal:
            return _NOTHING
        return self.xp.cuda.Device(self.ordinal)  # type: ignore[no-any-return]

    def is_capturing(self) -> bool:
        """Whether the current stream records a graph instead of working."""
        return bool(self.current_stream().is_capturing())

    @contextmanager
    def recording(self) -> Iterator[Recorded]:
        """Within it, work is recorded; on a stream of its own, ordered behind the current one."""
        if self._recorded is not None:
            raise CallerError(
                "another window is being captured on this device", do="one at a time, in one thread; capture it then"
            )
        with self.active():
            stream = self.xp.cuda.Stream(non_blocking=True)
            stream.wait_event(self.current_stream().record())
        recorded = Recorded()
        with self.active(), stream:
            stream.begin_capture()
            self._recorded = recorded
            try:
                yield recorded
            except BaseException:
                with suppress(Exception):  # it may say that the capture is void; why it is, the caller is told
                    stream.end_capture()
                raise
            finally:
                self._recorded = None
            recorded.graph = stream.end_capture()

    def keep(self, *memory: Any) -> None:
        """What a graph that is being recorded reads stays alive with it."""
        if self._recorded is not None:
            self._recorded.kept += memory
        elif self.is_capturing():  # somebody else's graph: how long it lives is not known here
            self._kept += memory

    def allocate(self, size: int) -> Buffer:
        """An fp32 buffer from CuPy's pool; raises `OutOfDeviceMemory`."""
        self.refuse_to_exceed(4 * size, f"an fp32 buffer of {size} elements")
        with self.active():
            memory = self._empty((size,), np.dtype(np.float32))
        return Buffer(int(memory.data.ptr), size, "float32", (size,), True, memory, self.name)

    def refuse_to_exceed(self, nbytes: int, what: str) -> None:
        """Raise `OutOfDeviceMemory` where so many bytes do not fit."""
        with self.active():
            refuse_to_exceed(self.xp, nbytes, what)

    def array(self, buffer: Buffer, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Any:
        """A buffer as a CuPy array of that shape and dtype; no copy, and its owner stays alive with it."""
        memory = self.xp.cuda.UnownedMemory(buffer.pointer, buffer.nbytes, buffer.owner, self.ordinal)
        return self.xp.ndarray(shape, dtype, self.xp.cuda.MemoryPointer(memory, 0))

    def current_stream(self) -> Any:
        """The calling thread's current stream on this device."""
        return self.xp.cuda.get_current_stream(self.ordinal)

    def event(self) -> Any:
        """An event without a clock."""
        with self.active():
            return self.xp.cuda.Event(disable_timing=True)

    def pinned(self, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Pinned host memory as a NumPy array."""
        memory = self.xp.cuda.alloc_pinned_memory(count * np.dtype(dtype).itemsize)
        return np.frombuffer(memory, dtype, count)

    def copy_to(self, there: Any, here: npt.NDArray[Any]) -> None:
        """Queue a copy from pinned memory, which must stay as it is until it is done."""
        runtime, stream = self.xp.cuda.runtime, self.current_stream()
        with self.active():
            runtime.memcpyAsync(there.data.ptr, here.ctypes.data, here.nbytes, runtime.memcpyHostToDevice, stream.ptr)

    def sent_in_graph(self, values: npt.NDArray[Any]) -> Any:
        """Values on the device, whereto each replay of the graph that is recorded copies them; the graph keeps both."""
        here = self.pinned(values.size, values.dtype)
        here[:] = values
        there = self.upload(np.zeros_like(values))
        self.copy_to(there, here)
        self.keep(here, there)
        return there

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
            current = self._uploads if self.is_capturing() else self.current_stream()
            with current:
                memory = self._empty(array.shape, array.dtype)
            self._uploads.wait_event(current.record())
            with self._uploads:
                memory.set(array)
            self._uploads.synchronize()
        return memory

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        try:
            return self.xp.empty(shape, dtype)
        except self.xp.cuda.memory.OutOfMemoryError as fault:  # the pool may have a limit below what the device has
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
            self.current_stream().wait_event(self.stream_of(handle).record(self.event()))

    def let_wait(self, handle: int, event: Any) -> None:
        """Have another library's stream wait for an event."""
        with self.active():
            self.stream_of(handle).wait_event(event)

    def record(self) -> Any:
        """An event behind what the current stream has to do."""
        with self.active():
            return self.current_stream().record(self.event())

    def launch(self, graph: Any) -> None:
        """Queue a recorded graph."""
        with self.active():
            graph.launch()

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


class StreamOrder:
    """The order of work on some memory, whichever streams it is queued on: each stream waits for the one before.

    Args:
        device: Where the memory is, given out on the stream that is current now.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._born = self._last = device.current_stream()

    def follow(self, device: CudaDevice) -> None:
        """Work is about to be queued on the current stream. A recorded graph is ordered as a whole, when it runs."""
        stream = device.current_stream()
        if stream.ptr != self._last.ptr and not stream.is_capturing():
            with device.active():
                stream.wait_event(self._last.record())
            self._last = stream

    def end(self, device: CudaDevice) -> None:
        """The memory is dropped: whoever gets it next, on the stream it came from, is behind what was done with it."""
        if self._last.ptr != self._born.ptr:
            with device.active():
                self._born.wait_event(self._last.record())


class _ForeignStream:
    """Another library's stream, in the way that CuPy takes one; kept alive by it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._handle = stream_handle(stream)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


@dataclass(frozen=True)
class _Handle:
    """A bare stream handle, in the way that CuPy takes one."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle
