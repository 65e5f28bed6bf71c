"""Streams: the current one, the order of work over several of ours, and over those of borrowed memory's producers.

All by events; the host never waits. A producer whose stream is known is told on that stream when our work is done, and
may free its memory at any time: who gets it next on that stream comes behind us. Of one whose stream nobody knows the
memory is kept until then.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import numpy.typing as npt

from gradengine.arrays.streams import ProducerStream, stream_handle
from gradengine.errors import CallerError
from gradengine.kernels.cuda_runtime import CudaRuntime
from gradengine.kernels.device import Order

_PER_THREAD = 2  # cudaStreamPerThread: one handle, and a stream for each thread

# No context manager here is a generator: one that an interrupt leaves suspended ends with its traceback, steps later.


def on_stream(runtime: CudaRuntime, stream: object) -> AbstractContextManager[object]:
    """Within it, work is queued on a stream: CuPy's, one with `__cuda_stream__` or `cuda_stream`, or a handle."""
    if stream is None:
        return nullcontext()
    if isinstance(stream, runtime.xp.cuda.Stream):
        return CurrentStream(runtime, stream)
    with runtime.active():
        return CurrentStream(runtime, runtime.xp.cuda.Stream.from_external(_ForeignStream(stream)))


@final
class CurrentStream(AbstractContextManager[None]):
    """A device and a stream that are current within it."""

    def __init__(self, runtime: CudaRuntime, stream: Any) -> None:
        self._runtime, self._stream = runtime, stream
        self._before: int | None = None  # the device that was current
        self._is_pushed = False

    def __enter__(self) -> None:
        driver = self._runtime.xp.cuda.runtime
        self._before = driver.getDevice()
        try:
            driver.setDevice(self._runtime.ordinal)
            self._is_pushed = True
            self._stream.__enter__()  # a stream is made current for the current device
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        if self._is_pushed and self._runtime.current_stream() is self._stream:  # else an interrupt came first
            self._stream.__exit__()
        self._is_pushed = False
        if self._before is not None:
            self._runtime.xp.cuda.runtime.setDevice(self._before)
            self._before = None


@final
class StreamOrder(Order):
    """The order of work on some memory, whichever streams it is queued on: each use waits for the one before.

    Behind each use an event is kept. A stream is never asked later: it may be gone then, and another have its handle.

    Args:
        runtime: Where the memory is, given out on the stream that is current now.
        memory: What is kept alive until the work on it is done, when all else that kept it is dropped.

    Attributes:
        runtime: Where the memory is.
    """

    def __init__(self, runtime: CudaRuntime, *memory: Any) -> None:
        self.runtime, self._memory = runtime, memory
        self._born = self._last = runtime.current_stream()
        self._done = runtime.event()
        self._open: Any = None  # the stream of a use that is not over
        if not runtime.is_capturing():
            with runtime.active():
                self._last.record(self._done)

    def keep(self, *memory: Any) -> None:
        """More memory of which this is the order of work."""
        self._memory += memory
        if self.runtime.current_stream() is not self._born:
            self._born = None  # of several streams

    def use(self) -> AbstractContextManager[None]:
        """Work that is queued in it comes behind all that was queued before; a graph's as a whole, when it runs."""
        return _Use(self)

    def begin(self, stream: Any) -> bool:
        """Have a stream wait for the use before; whether this is the outermost one on it."""
        is_outermost = self._open is not stream
        if is_outermost:
            self._end_open()
        if stream is not self._last or stream.ptr == _PER_THREAD:
            stream.wait_event(self._done)
            self._last = stream
        self._open = stream
        return is_outermost

    def done(self, stream: Any, *, is_outermost: bool) -> None:
        """The use on that stream is all queued."""
        stream.record(self._done)
        if is_outermost:
            self._open = None

    def _end_open(self) -> None:
        """Of a use that did not come to its end, interrupted, what was queued counts."""
        if self._open is not None:
            self._open.record(self._done)

    def follow(self) -> None:
        """Have whoever reads next come behind what was queued, whatever device and stream are current."""
        streams = self.runtime.readers()
        with self.runtime.active():
            self._end_open()
            for stream in streams:
                if (stream is not self._last or stream.ptr == _PER_THREAD) and not stream.is_capturing():
                    stream.wait_event(self._done)

    def read(self, array: Any) -> npt.NDArray[Any]:
        """A copy on the host; waits for what was queued."""
        with self.runtime.active():
            self._end_open()
        return self.runtime.read(array, self._done)

    def end(self) -> None:
        """Everybody else has dropped the memory: whoever gets it next comes behind what was done with it.

        CuPy's pool gives memory out again on the stream that it came from: behind work there nothing needs be kept.
        """
        memory, self._memory = self._memory, ()  # which may refer to this order
        if self._last is not self._born or self._last.ptr == _PER_THREAD:
            self.runtime.kept.dropped((self._done,), memory)


@final
class _Use(AbstractContextManager[None]):
    """One use of memory whose work has an order; its device is the current one meanwhile."""

    def __init__(self, order: StreamOrder) -> None:
        self._order = order

    def __enter__(self) -> None:
        self._stream = self._order.runtime.current_stream()
        self._is_ordered = not self._stream.is_capturing()
        if self._is_ordered:
            self._active = self._order.runtime.active()
            self._active.__enter__()
            try:
                self._is_outermost = self._order.begin(self._stream)
            except BaseException:
                self._active.__exit__(None, None, None)
                raise

    def __exit__(self, *_: object) -> None:
        if self._is_ordered:
            try:
                self._order.done(self._stream, is_outermost=self._is_outermost)
            finally:
                self._active.__exit__(None, None, None)


@final
class ForeignStreams:
    """The order of our work on borrowed memory and of the producers' own.

    Args:
        runtime: The device, whose current stream reads and writes what is lent.
    """

    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime

    def wait_for(self, producers: Iterable[ProducerStream]) -> None:
        """Have the current stream wait for the producers' own. A graph that is recorded is ordered when it runs."""
        self._runtime.let_go()
        handles = self._others(producer.stream() for producer in producers)
        self._refuse_recording(handles)
        for handle in handles:
            self._runtime.wait_for(handle)

    def give_back(self, producers: Iterable[ProducerStream], lent: object = None) -> None:
        """Have the producers' streams wait for what was queued so far; without one, keep what is `lent` until then."""
        self._runtime.let_go()
        streams = [producer.stream() for producer in producers]
        handles, is_kept = self._others(streams), lent is not None and None in streams
        if not (handles or is_kept) or self._runtime.is_capturing():
            return
        self._refuse_recording(handles)  # to wait would void the graph that is recorded there
        done = self._runtime.record()
        for handle in handles:
            self._runtime.let_wait(handle, done)
        if is_kept:
            self._runtime.kept.until((done,), lent)

    def _refuse_recording(self, handles: Iterable[int]) -> None:
        for handle in handles:
            if self._runtime.records(handle):
                raise CallerError(
                    "the framework that lends gradients records a graph on its stream",
                    got=f"stream {handle:#x}",
                    do="call the engine outside of that capture; engine.capture() records a graph of its own",
                )

    def _others(self, streams: Iterable[int | None]) -> set[int]:
        """Those that are not the current one; none where that records a graph."""
        handles = {handle for handle in streams if handle is not None} - {self._runtime.current_stream().ptr}
        return set() if not handles or self._runtime.is_capturing() else handles


class _ForeignStream:
    """Another library's stream, in the way that CuPy takes one; kept alive by it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._handle = stream_handle(stream)

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle
