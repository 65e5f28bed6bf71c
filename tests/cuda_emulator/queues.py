"""Work that streams have been given and have not done: nothing is done before the host waits for it.

That is the most that CUDA's asynchrony may do, so a launcher that reads, frees or reuses memory too early is seen.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from .errors import CUDARuntimeError
from .native import LOCK
from .settings import settings


@dataclass(frozen=True)
class Work:
    """One operation of the device; it may be done more than once, when it was captured.

    Attributes:
        name: Of the kernel, or what else it is.
        do: Does it.
        counts: False for bookkeeping, which takes no time on a device.
    """

    name: str
    do: Callable[[], None]
    counts: bool = True


@dataclass(eq=False)
class Ticket:
    """A work's place in a stream, and whether it is done; `after` is what it waits for in another stream."""

    queue: Queue
    work: Work
    after: Ticket | None = None
    done: bool = False

    def is_blocked(self) -> bool:
        """Whether what it waits for is not done."""
        return self.after is not None and not self.after.done


@dataclass(eq=False)
class Capture:
    """Works recorded for a graph, in the order they came, and which streams take part."""

    origin: Queue
    mode: int
    thread: int = field(default_factory=threading.get_ident)
    works: list[Work] = field(default_factory=list)
    invalid: bool = False
    unjoined: set[int] = field(default_factory=set)  # pointers of other streams whose work the origin does not wait for

    def add(self, queue: Queue, work: Work) -> None:
        """Record it."""
        if self.invalid:
            raise CUDARuntimeError(901)
        self.works.append(work)
        if queue is not self.origin:
            self.unjoined.add(queue.pointer)

    def refuse(self, status: int) -> None:
        """Something that cannot be captured was asked for: nothing comes of the capture."""
        self.invalid = True
        raise CUDARuntimeError(status)


@dataclass(eq=False)
class Queue:
    """A stream as the device sees it."""

    pointer: int
    non_blocking: bool = False
    tickets: deque[Ticket] = field(default_factory=deque)
    capture: Capture | None = None
    destroyed: bool = False


NULL = Queue(0)
_queues = {0: NULL}
_pointers = itertools.count(0x5EA0_0000_0000, 0x100)


def new_queue(non_blocking: bool) -> Queue:
    """For a new stream."""
    with LOCK:
        queue = Queue(next(_pointers), non_blocking)
        _queues[queue.pointer] = queue
        return queue


def _all() -> list[Queue]:
    """The queues now: a collection, which comes at any line, may end a stream."""
    return [*_queues.values()]


def queue_at(pointer: int) -> Queue:
    """The stream with that pointer; 1 and 2 are CUDA's other names of the default stream."""
    queue = _queues.get(0 if pointer in (1, 2) else pointer)
    if queue is None or queue.destroyed:
        raise CUDARuntimeError(400)
    return queue


def destroy(queue: Queue) -> None:
    """No more work comes; what is there is still done."""
    queue.destroyed = True
    if not queue.tickets:
        _queues.pop(queue.pointer, None)


def add(queue: Queue, work: Work) -> None:
    """Give a stream something to do, or to record."""
    with LOCK:
        if queue.capture is not None:
            queue.capture.add(queue, work)
            return
        _refuse_implicit_capture(queue)
        ticket = _append(queue, work)
        if not settings().asynchronous or sum(len(q.tickets) for q in _all()) > settings().most_queued:
            finish(ticket)


def add_bookkeeping(queue: Queue, do: Callable[[], None]) -> None:
    """Something of the emulator's own, after all that the stream has now; it is never captured."""
    with LOCK:
        if queue.capture is not None:
            finish_queue(queue, also_capturing=True)
        if queue.tickets or _queues_it_waits_for(queue):
            _append(queue, Work("bookkeeping", do, counts=False))
        else:
            do()


def mark(queue: Queue) -> Ticket:
    """A ticket that is done when all is done that the stream has now."""
    with LOCK:
        _refuse_implicit_capture(queue)
        return _append(queue, Work("event", _nothing, counts=False))


def wait_for(queue: Queue, ticket: Ticket) -> None:
    """What comes to the stream from now on is done after the ticket."""
    with LOCK:
        if not ticket.done:
            _append(queue, Work("wait", _nothing, counts=False), after=ticket)


def _append(queue: Queue, work: Work, after: Ticket | None = None) -> Ticket:
    for other in _queues_it_waits_for(queue):
        queue.tickets.append(Ticket(queue, Work("wait", _nothing, counts=False), after=other.tickets[-1]))
    ticket = Ticket(queue, work, after)
    queue.tickets.append(ticket)
    return ticket


def _queues_it_waits_for(queue: Queue) -> list[Queue]:
    """The default stream waits for all streams but the non-blocking, and they for it."""
    if queue is not NULL:
        return [NULL] if NULL.tickets and not queue.non_blocking else []
    return [other for other in _all() if other is not NULL and not other.non_blocking and other.tickets]


def _refuse_implicit_capture(queue: Queue) -> None:
    """The default stream would have to wait for what a stream only records."""
    for other in _all() if queue is NULL else ():
        if other.capture is not None and not other.non_blocking:
            other.capture.refuse(906)


def _nothing() -> None:
    pass


# ---- doing it ----


def advance(ticket: Ticket) -> None:
    """Do one thing that the ticket, which is not done, waits for, or the ticket itself."""
    with LOCK:
        head = ticket.queue.tickets[0]
        while head.is_blocked():
            assert head.after is not None
            head = head.after.queue.tickets[0]
        head.queue.tickets.popleft()
        head.done = True
        try:
            head.work.do()
        except BaseException:
            forget_all()
            raise


def finish(ticket: Ticket) -> None:
    """Do all that comes before the ticket, and the ticket."""
    with LOCK:
        while not ticket.done:
            advance(ticket)


def finish_queue(queue: Queue, also_capturing: bool = False) -> None:
    """The host waits for a stream."""
    with LOCK:
        if queue.capture is not None and not also_capturing:
            queue.capture.refuse(900)
        if queue is NULL:
            for other in _queues_it_waits_for(queue):
                finish(other.tickets[-1])
        if queue.tickets:
            finish(queue.tickets[-1])


def finish_all() -> None:
    """The host waits for the device; independent streams are taken in the order of the settings."""
    with LOCK:
        for queue in _all():
            if queue.capture is not None:
                queue.capture.refuse(900)
        chance = random.Random(settings().seed)
        while pending := [queue for queue in _all() if queue.tickets]:
            if settings().order == "random":
                advance(chance.choice(pending).tickets[0])
            else:
                finish(pending[-1 if settings().order == "reverse" else 0].tickets[-1])
        for queue in [queue for queue in _all() if queue.destroyed]:
            destroy(queue)


def query(ticket: Ticket) -> bool:
    """Whether it is done; if not, the device goes on by one piece of work, so asking again and again ends."""
    with LOCK:
        tickets = ticket.queue.tickets
        while tickets and not tickets[0].work.counts and not tickets[0].is_blocked():
            advance(tickets[0])
        if ticket.done:
            return True
        advance(ticket)
        return False


def forget_all() -> None:
    """Nothing that waits is done any more: an error ends it."""
    with LOCK:
        for queue in _all():
            _forget(queue.tickets)
            if queue.destroyed:
                destroy(queue)


def _forget(tickets: deque[Ticket]) -> None:
    while tickets:
        ticket = tickets.popleft()
        ticket.done = True
        if ticket.work.name == "bookkeeping":
            ticket.work.do()


# ---- capturing ----

GLOBAL, THREAD_LOCAL, RELAXED = range(3)  # modes of a capture, and of a thread
_of_thread = threading.local()


def forget_captures() -> None:
    """No stream records any more, and the thread's mode is CUDA's default."""
    _of_thread.mode = GLOBAL
    with LOCK:
        for queue in _all():
            queue.capture = None


def exchange_mode(mode: Any) -> None:
    """What captures may forbid this thread: those in global mode of any thread, its own alone, or none.

    `mode` is the reference to a C int that CUDA's function takes; it holds what was before.
    """
    before, _of_thread.mode = getattr(_of_thread, "mode", GLOBAL), mode._obj.value
    mode._obj.value = before


def refuse_unsafe_call() -> None:
    """Something that might wait for what is only being recorded was asked for: such a capture is void."""
    mine = getattr(_of_thread, "mode", GLOBAL)
    for capture in [queue.capture for queue in _all() if queue.capture is not None]:
        is_own = capture.thread == threading.get_ident() and capture.mode != RELAXED
        if mine != RELAXED and (is_own or capture.mode == mine == GLOBAL):
            capture.refuse(900)


def begin_capture(queue: Queue, mode: int = RELAXED) -> None:
    """Record from now on."""
    with LOCK:
        if queue.capture is not None:
            queue.capture.refuse(900)
        queue.capture = Capture(queue, mode)


def is_capturing(queue: Queue) -> bool:
    """Whether what comes to the stream is recorded."""
    if queue.capture is not None and queue.capture.invalid:
        raise RuntimeError("the stream was capturing, but an error has invalidated the capture sequence")
    return queue.capture is not None


def join_capture(queue: Queue, capture: Capture, recorded_on: int) -> None:
    """A stream waits for an event that was captured: it takes part from now on."""
    with LOCK:
        if queue.capture is None:
            queue.capture = capture
        elif queue.capture is not capture:
            queue.capture.refuse(905)
        capture.unjoined.discard(recorded_on)
        if queue is not capture.origin:
            capture.unjoined.add(queue.pointer)


def end_capture(queue: Queue) -> Iterable[Work]:
    """What was recorded, in order."""
    with LOCK:
        capture = queue.capture
        if capture is None or capture.origin is not queue:
            raise CUDARuntimeError(1)
        for other in _all():
            if other.capture is capture:
                other.capture = None
        if capture.invalid:
            raise CUDARuntimeError(901)
        if capture.unjoined:
            raise CUDARuntimeError(904)
        return capture.works
