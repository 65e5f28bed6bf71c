"""The order of work on our memory over several streams, kept by events: the host never waits."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, final

import numpy.typing as npt

from gradengine.kernels.cuda_runtime import CudaRuntime
from gradengine.kernels.device import Order

_PER_THREAD = 2  # cudaStreamPerThread: one handle, and a stream for each thread

# No context manager here is a generator: one that an interrupt leaves suspended ends with its traceback, steps later.


@final
class CurrentStream(AbstractContextManager[None]):
    """A context in which a device and a stream are current."""

    def __init__(self, runtime: CudaRuntime, stream: Any) -> None:
        self._runtime, self._stream = runtime, stream
        self._before: int | None = None  # the device that was current
        self._is_pushed = False

    def __enter__(self) -> None:
        driver, asked = self._runtime.xp.cuda.runtime, self._runtime.events.asked
        self._before = asked(driver.getDevice)
        try:
            asked(driver.setDevice, self._runtime.ordinal)
            self._is_pushed = True
            self._stream.__enter__()  # a stream is made current for the current device
        except BaseException:
            self.__exit__()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        fault: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        events = self._runtime.events
        if self._is_pushed and self._runtime.current_stream() is self._stream:  # else an interrupt came first
            self._stream.__exit__()
        self._is_pushed = False
        if self._before is not None:
            events.asked(self._runtime.xp.cuda.runtime.setDevice, self._before)
            self._before = None
        if fault is not None:
            events.raise_if_lost(fault)


@final
class StreamOrder(Order):
    """The order of work on some memory, on whichever streams it is queued: each use waits for the one before.

    An event after each use is kept; the stream itself is not asked later, since it may be gone and its handle reused.
    `memory`, allocated on the stream that is current now, is kept alive until the work on it is done.
    """

    def __init__(self, runtime: CudaRuntime, *memory: Any) -> None:
        self.runtime, self._memory = runtime, memory
        self._born = self._last = runtime.current_stream()
        self._done = runtime.event()  # recorded by the first use: `upload` has waited for all that was queued before
        self._open: Any = None  # the stream of a use that is not over

    def keep(self, *memory: Any) -> None:
        """Add memory whose work is in this order, and which is kept alive likewise."""
        self._memory += memory
        if self.runtime.current_stream() is not self._born:
            self._born = None  # of several streams

    def use(self) -> AbstractContextManager[None]:
        """A context in which work waits for all earlier work; a graph's work as a whole does, when it runs."""
        return _Use(self)

    def begin(self, stream: Any) -> bool:
        """Make a stream wait for the previous use; returns whether this is the outermost use on the stream."""
        is_outermost = self._open is not stream
        if is_outermost:
            self._end_open()
        if stream is not self._last or stream.ptr == _PER_THREAD:
            stream.wait_event(self._done)
            self._last = stream
        self._open = stream
        return is_outermost

    def done(self, stream: Any, *, is_outermost: bool) -> None:
        """Note that all work of a use on that stream was queued."""
        stream.record(self._done)
        if is_outermost:
            self._open = None

    def _end_open(self) -> None:
        """End a use that an interrupt left open: what it queued still counts."""
        if self._open is not None:
            self._open.record(self._done)

    def follow(self) -> None:
        """Make the current streams, of any device, wait for all work queued on the memory.

        CuPy queues a read on the current stream of the current device, whatever the array's device is. A user's kernel
        is on the current stream of the memory's device.
        """
        streams = {self.runtime.xp.cuda.get_current_stream(), self.runtime.current_stream()}
        with self.runtime.active():
            self._end_open()
            for stream in streams:
                if (stream is not self._last or stream.ptr == _PER_THREAD) and not stream.is_capturing():
                    stream.wait_event(self._done)

    def read(self, array: Any) -> npt.NDArray[Any]:
        """A copy of an array on the host; waits for the queued work."""
        with self.runtime.active():
            self._end_open()
        return self.runtime.read(array, self._done)

    def end(self) -> None:
        """Free the memory, which has no other owner, so that its next user waits for the work that was done with it.

        CuPy's pool reuses memory on the stream that it was allocated on: after work there it need not be kept.
        """
        memory, self._memory = self._memory, ()  # which may refer to this order
        if self._last is not self._born or self._last.ptr == _PER_THREAD:
            self.runtime.kept.until((self._done,), memory)


@final
class _Use(AbstractContextManager[None]):
    """The context of one use of memory in order, in which its device is the current one."""

    def __init__(self, order: StreamOrder) -> None:
        self._order = order

    def __enter__(self) -> None:
        self._stream = self._order.runtime.current_stream()
        self._is_ordered = not self._order.runtime.captures(self._stream)
        if self._is_ordered:
            self._active = self._order.runtime.active()
            self._active.__enter__()
            try:
                self._is_outermost = self._order.begin(self._stream)
            except BaseException as fault:
                self._active.__exit__(type(fault), fault, None)
                raise

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_ordered:
            try:
                self._order.done(self._stream, is_outermost=self._is_outermost)
            except BaseException as other:
                self._active.__exit__(type(other), other, None)
                raise
            self._active.__exit__(kind, fault, trace)
