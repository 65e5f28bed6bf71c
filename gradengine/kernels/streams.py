"""The order of work on gradengine's memory over several streams, kept by events. Only `read` waits for the device."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, final

import numpy.typing as npt

from gradengine.kernels.cuda_runtime import CudaRuntime
from gradengine.kernels.device import Order


@final
class StreamOrder(Order, AbstractContextManager[None]):
    """The order of work on some memory, on any streams. Each use waits for the use before it.

    An event is recorded after each use. The stream is not used later, since it may be gone and its handle reused.
    `memory`, allocated on the stream that is current now, is kept alive until the work on it is done.

    As a context it is one use of the memory. A new object for each use would cost the host more time.
    """

    def __init__(self, runtime: CudaRuntime, *memory: Any) -> None:
        self.runtime, self._memory = runtime, memory
        self._born = self._last = runtime.current_stream()
        self._done = runtime.event()  # The first use records it. `upload` has waited for all earlier work.
        self._uses: list[Any] = []  # stream of each open use, None if it records a graph

    def keep(self, *memory: Any) -> None:
        """Add memory whose work is in this order, and keep it alive until that work is done."""
        self._memory += memory
        if self.runtime.current_stream() is not self._born:
            self._born = None  # The memory belongs to several streams.

    def use(self) -> AbstractContextManager[None]:
        """Return a context in which work waits for all earlier work. A graph waits as a whole when it runs."""
        return self

    def __enter__(self) -> None:
        stream = self.runtime.current_stream()
        if self.runtime.captures(stream):
            stream = None
        elif stream is not self._last:
            with self.runtime.active():
                stream.wait_event(self._done)
            self._last = stream
        self._uses.append(stream)

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        stream = self._uses.pop()
        if stream is not None:
            with self.runtime.active():
                stream.record(self._done)

    def follow(self) -> None:
        """Make the current streams, of any device, wait for all work queued on the memory.

        CuPy queues a read on the current stream of the current device, for an array on any device. A user's kernel is
        on the current stream of the memory's device.
        """
        streams = {self.runtime.xp.cuda.get_current_stream(), self.runtime.current_stream()}
        with self.runtime.active():
            for stream in streams:
                if stream is not self._last and not stream.is_capturing():
                    stream.wait_event(self._done)

    def read(self, array: Any) -> npt.NDArray[Any]:
        """Return a copy of an array on the host. Waits for the queued work."""
        return self.runtime.read(array, self._done)

    def end(self) -> None:
        """Free the memory, which has no other owner, so that its next user waits for the work that was done with it.

        CuPy's pool reuses memory on the stream that it was allocated on, so after work there it need not be kept.
        """
        memory, self._memory = self._memory, ()  # The memory may refer to this order.
        if self._last is not self._born:
            self.runtime.kept.until((self._done,), memory)
