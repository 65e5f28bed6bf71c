"""CuPy's streams, events and graphs."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

from . import queues
from .errors import CUDARuntimeError
from .native import LOCK
from .queues import Capture, Ticket, Work
from .record import note_graph, note_wait

_of_thread = threading.local()


def get_current_stream(device_id: int = -1) -> _BaseStream:
    """Where this thread's kernels go."""
    current: _BaseStream = getattr(_of_thread, "current", Stream.null)
    return current


class _BaseStream:
    """A stream: `ptr` is its handle."""

    def __init__(self, ptr: int, device_id: int) -> None:
        self.ptr = ptr
        self.device_id = device_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BaseStream) and self.ptr == other.ptr

    def __hash__(self) -> int:
        return self.ptr

    def __enter__(self) -> _BaseStream:  # noqa: PYI034  (typing.Self is of Python 3.11)
        self._stack().append(self)
        return self.use()

    def __exit__(self, *_: object) -> None:
        self._stack().pop()
        self._stack()[-1].use()

    def _stack(self) -> list[_BaseStream]:
        if not hasattr(_of_thread, "stack"):
            _of_thread.stack = [Stream.null]
        stack: list[_BaseStream] = _of_thread.stack
        return stack

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.ptr

    @property
    def _queue(self) -> queues.Queue:
        return queues.queue_at(self.ptr)

    def use(self) -> _BaseStream:
        """Make it this thread's current stream; not for a `with` that ends: that goes back to the `with` around it."""
        _of_thread.current = self
        return self

    @property
    def done(self) -> bool:
        """Whether all its work is done. To ask voids a capture, and CuPy does not say so: it answers no."""
        queue = self._queue
        with LOCK:
            if queue.capture is not None:
                queue.capture.invalid = True
                return False
            return not queue.tickets or queues.query(queue.tickets[-1])

    def synchronize(self) -> None:
        """Wait until all its work is done."""
        note_wait("stream")
        queues.finish_queue(self._queue)

    def record(self, event: Event | None = None) -> Event:
        """Record an event, a new one if none is given."""
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """What comes to this stream from now on is done after the event."""
        event._make_wait(self._queue)

    def begin_capture(self, mode: int | None = None) -> None:
        """Record work from now on; CuPy's mode is relaxed where none is given."""
        if self.ptr in (0, 1):
            raise RuntimeError("cannot capture on the default (legacy) stream")
        queues.begin_capture(self._queue, queues.RELAXED if mode is None else mode)

    def end_capture(self) -> Graph:
        """What was recorded."""
        return Graph(queues.end_capture(self._queue))

    def is_capturing(self) -> bool:
        """Whether its work is recorded instead of done."""
        return queues.is_capturing(self._queue)

    @property
    def is_non_blocking(self) -> bool:
        """Whether it goes on without the default stream."""
        return self._queue.non_blocking


class Stream(_BaseStream):
    """A new stream, or with `null` (and here with `ptds`) the default one."""

    null: Stream
    ptds: Stream

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: int | None = None
    ) -> None:
        self._owned = None if null or ptds else queues.new_queue(non_blocking)
        super().__init__(self._owned.pointer if self._owned else 0, 0 if self._owned else -1)

    def __del__(self) -> None:
        if getattr(self, "_owned", None):
            with LOCK:
                queues.destroy(self._owned)  # type: ignore[arg-type]

    @classmethod
    def from_external(cls, obj: Any) -> Stream:
        """The stream of another framework's stream object, which is kept alive."""
        version, pointer = obj.__cuda_stream__()
        if version != 0:
            raise ValueError(f"__cuda_stream__() returned unsupported version {version}, only version 0 is supported")
        stream = cls.__new__(cls)
        _BaseStream.__init__(stream, pointer, 0)
        stream._foreign = obj  # type: ignore[attr-defined]
        return stream


Stream.null = Stream(null=True)
Stream.ptds = Stream(ptds=True)


class ExternalStream(_BaseStream):
    """The stream with that handle; CuPy 14 warns of it."""

    def __init__(self, ptr: int, device_id: int = -1) -> None:
        warnings.warn(
            "ExternalStream is deprecated. Use Stream.from_external() instead to interoperate with external streams "
            "that implement the CUDA stream protocol.",
            DeprecationWarning,
            stacklevel=2,
        )
        super().__init__(ptr, device_id)


class Event:
    """A place in a stream's work."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        if interprocess and not disable_timing:
            raise ValueError("Timing must be disabled for interprocess events")
        self.ptr = id(self)
        _events[self.ptr] = self
        self._ticket: Ticket | None = None
        self._capture: tuple[Capture, int] | None = None  # and the stream it was recorded on

    def record(self, stream: _BaseStream | None = None) -> None:
        """It is the end of what the stream has now."""
        queue = (stream or get_current_stream())._queue
        with LOCK:
            if queue.capture is not None:
                self._ticket, self._capture = None, (queue.capture, queue.pointer)
            else:
                self._ticket, self._capture = queues.mark(queue), None

    def synchronize(self) -> None:
        """Wait until that is done."""
        note_wait("event")
        queues.refuse_unsafe_call()
        ticket = self._recorded()
        if ticket is not None:
            queues.finish(ticket)

    @property
    def done(self) -> bool:
        """Whether that is done; if not, the device goes on a little, so polling ends. In a capture, as a stream's."""
        return self.query() == 0

    def query(self) -> int:
        """CUDA's answer to whether it is done."""
        try:
            ticket = self._recorded()
            queues.refuse_unsafe_call()
        except CUDARuntimeError as refused:
            return refused.status
        return 0 if ticket is None or queues.query(ticket) else 600

    def _recorded(self) -> Ticket | None:
        if self._capture is not None:
            self._capture[0].refuse(907)
        return self._ticket

    def _make_wait(self, queue: queues.Queue) -> None:
        if self._capture is not None:
            queues.join_capture(queue, *self._capture)
        elif self._ticket is not None:
            if queue.capture is not None:
                queue.capture.refuse(905)
            queues.wait_for(queue, self._ticket)


_events: weakref.WeakValueDictionary[int, Event] = weakref.WeakValueDictionary()  # by handle


def event_at(handle: int) -> Event:
    """The event with that handle."""
    if handle not in _events:
        raise CUDARuntimeError(400)
    return _events[handle]


class Graph:
    """What a stream recorded.

    Attributes:
        operations: The names of its kernels, copies and fills, in order (CuPy's has nothing of the kind).
    """

    def __init__(self, works: Iterable[Work]) -> None:
        self._works = tuple(works)

    @property
    def operations(self) -> list[str]:
        return [work.name for work in self._works]

    def launch(self, stream: _BaseStream | None = None) -> None:
        """Do it all on a stream."""
        note_graph()
        queue = (stream or get_current_stream())._queue
        with LOCK:
            for work in self._works:
                queues.add(queue, work)

    def upload(self, stream: _BaseStream | None = None) -> None:
        """Nothing to do."""


def current_queue() -> queues.Queue:
    """Of this thread's current stream."""
    return get_current_stream()._queue


def forget_current_stream() -> None:
    """This thread is on the default stream again."""
    _of_thread.stack = [Stream.null]
