"""Runs an all-reduce and gathers over a link: makes the transfers that they ask for, and reports those that are over.

A thread that waits for a result does this while it waits. For spans sent in the background a thread of the pump does
it: to start and wake that thread costs more than the rest of a small model's step.
"""

from __future__ import annotations

import _thread
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import final

from gradengine.errors import DeadlineExceeded, ExchangeError, GradientError, NotCopied, PeerLost, WindowError
from gradengine.exchange.gather import Gather, is_of_gather
from gradengine.exchange.interface import checked_seconds
from gradengine.exchange.links.link import Completed, Completion, Idle, Link, refuse_foreign
from gradengine.exchange.ordered_all_reduce import OrderedAllReduce
from gradengine.exchange.patience import Late, Patience
from gradengine.exchange.shares import refuse_started
from gradengine.exchange.transfers import Borrow, Copy, Receive, Send
from gradengine.kernels.cuda_device import DeviceArena
from gradengine.layout import Span
from gradengine.threads import Bell

_LOOK_SECONDS = 0.1  # until a rank that waits looks at the clock again


@final
class Pump(NotCopied, instead="make one for each link"):
    """Runs one rank's gathers and all-reduce over a link, until it is closed or fails.

    It has a thread from the first span that is sent in the background to the end of the step. One thread makes the
    calls; any may close the pump. After an error, or to resume a step: `close`, `resume` the all-reduce with the
    frontiers of all ranks, and make another pump over a new link.

    Args:
        link: The link to the other ranks; closed with the pump, and when the pump fails.
        clock: The clock of the seconds of `wait` and `gather`.

    Example:
        >>> from gradengine.exchange.links.threads import thread_links
        >>> pump = Pump(*thread_links(1))
        >>> pump.gather(b"mine", 60.0)
        [b'mine']
        >>> pump.close()
    """

    def __init__(self, link: Link, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._link, self._clock = link, clock
        self._all_reduce: OrderedAllReduce | None = None
        self._arena: DeviceArena | None = None  # where shares are copied from and to
        self._gather: Gather | None = None  # the one that is under way
        self._handed: set[int | str] = set()  # keys of the spans of this step, those of `_spans` among them
        self._spans: deque[Span] = deque()  # that the next turn is to start
        self._over: deque[Completion] = deque()  # transfers and copies that are over, and not reported yet
        self._lock = threading.RLock()  # under which all-reduce and gather are called
        # No Condition, and no Thread: Ctrl-C within their Python code would leave a lock locked, or a thread unstarted.
        self._news = Bell()  # something that is waited for may be over
        self._failure: BaseException | None = None
        self._is_closing, self._moved_at, self._moved_bytes = False, clock(), 0
        self._idle = Idle(link)
        self._is_starting = False  # a thread
        self._turner = 0  # the number of the thread that moves all this now; 0 while none does

    def run(self, all_reduce: OrderedAllReduce, arena: DeviceArena | None = None) -> None:
        """Run this all-reduce from now on: until `close` returns, other code may only read its results.

        `arena` is the device's arena that is summed, None for a host's.
        """
        with self._lock:
            self._all_reduce, self._arena = all_reduce, arena
            self._have_moved(in_background=True)

    def start(self, *spans: Span, in_background: bool = True) -> None:
        """Send spans, which hold all that this rank contributes; returns at once.

        If the pump ends before it has begun a span, `OrderedAllReduce.is_started` is False: start the span again.

        Args:
            spans: Spans that were not started in this step.
            in_background: Send them from now on; else in the next `wait` or `gather`, or with others in the background.

        Raises:
            WindowError: A span was started before; none of these is started now.
            ExchangeError: As `wait`; none of the spans is started.
        """
        refuse_started(spans, lambda span: span.key in self._handed or self._sums.is_started(span))
        with self._lock:
            self._refuse_failed()
            self._handed.update(span.key for span in spans)
            self._spans.extend(spans)
            self._have_moved(in_background=in_background)

    @property
    def moved_at(self) -> float:
        """The clock's time at which bytes were moved, or a span started, for the last time."""
        return self._moved_at

    def wait(self, timeout: float) -> None:
        """Return when the step is done on this rank: the arena holds the sums and may be overwritten.

        Args:
            timeout: Seconds without a byte that is moved or a span that is started, after which this fails.

        Raises:
            PeerLost: A rank is gone; names it.
            DeadlineExceeded: No progress for so long; names the rank that this one waited for longest, and for what.
            ProtocolError: A rank sent an invalid message, or one that was damaged on the way.
            ExchangeError: The thread failed otherwise, for lack of memory perhaps; see the error's cause.
        """
        all_reduce = self._sums
        self._wait_until(lambda: all_reduce.is_done, checked_seconds("timeout", timeout), self._late_for_sums)

    def gather(self, data: bytes, timeout: float, what: str = "a gather (end of step or barrier)") -> list[bytes]:
        """Every rank's `data`, in rank order, then the server's if there is one; spans may be sent at the same time.

        Args:
            data: This rank's data, at most 16 MiB.
            timeout: Seconds without a byte that is moved, after which this fails.
            what: The name of this gather in errors.

        Raises:
            CallerError: The data are longer than 16 MiB.
            DeadlineExceeded: Some ranks were late; names them.
            PeerLost, ProtocolError, ExchangeError: As `wait`; a rank announces more than 16 MiB.
        """
        link, seconds = self._link, checked_seconds("timeout", timeout)
        gather = Gather(link.rank, link.world_size, data, link.hub)
        with self._lock:
            self._refuse_failed()
            if self._gather is not None:
                what = "a gather is under way, or was interrupted"
                raise WindowError(what, do=f"call from one thread; or close the exchange, and {self._link.way_on}")
            self._gather = gather
            self._have_moved(in_background=False)
        self._wait_until(lambda: gather.is_done, seconds, lambda: self._late_for(gather, what))
        self._gather = None
        return gather.parts

    def next_step(self) -> None:
        """Begin the next step, when all ranks have said that they are done; see `OrderedAllReduce.next_step`."""
        self._start_handed()
        with self._lock:
            self._refuse_failed()
            self._sums.next_step()
            self._handed.clear()

    def close(self) -> None:
        """End the thread and close the link, after which nothing writes to the arena. May be called twice."""
        self._is_closing = True
        self._link.bell.ring()
        while self._turner not in {0, _thread.get_ident()}:  # it may be reading what the link has borrowed
            self._news.wait(_LOOK_SECONDS)
        self._turner = 0  # a call of this thread may have been interrupted
        try:
            self._end_copies()
        finally:
            self._link.close()
            self._keep_parts()

    # ---- in the thread that moves all this ----

    def _have_moved(self, *, in_background: bool) -> None:
        """Start or wake the thread if there is work for it; called under the lock."""
        if self._turner:
            self._link.bell.ring()
        elif in_background and not self._is_starting and self._has_work:
            with contextlib.suppress(RuntimeError):  # the process can have no more: all is moved in `wait`
                _thread.start_new_thread(self._run, ())
                self._is_starting = True

    def _run(self) -> None:
        with self._lock:
            if self._turner:  # a call that was interrupted in between has started this thread, the next one another
                return
            self._is_starting, self._turner = False, _thread.get_ident()
        try:
            while self._goes_on():
                self._turn_or_rest()
        except BaseException as fault:  # noqa: BLE001  (raised where somebody waits, on another thread)
            self._fail(fault)

    def _goes_on(self) -> bool:
        """Whether this thread is still needed; if it is not, waiting threads are woken."""
        with self._lock:
            if self._has_work and not self._is_closing and self._failure is None:
                return True
            self._turner = 0
            self._news.ring()
            return False

    def _move_or_wait(self, seconds: float) -> None:
        """Make a turn in this waiting thread; or, if another thread makes turns, wait for it for so long."""
        with self._lock:
            is_moved = self._turner or self._is_starting
            if not is_moved:
                self._turner = _thread.get_ident()
        if is_moved:
            self._news.wait(seconds)
            return
        try:
            self._turn_or_rest(seconds)
        # Anything else was raised by a signal handler, and passes as Ctrl-C does.
        except (GradientError, MemoryError, OSError) as fault:
            refuse_foreign(fault)
            self._fail(fault)
        finally:
            self._turner = 0
            if self._is_closing:  # who closes this waits
                self._news.ring()

    def _turn_or_rest(self, longest: float | None = None) -> None:
        if self._turn():
            self._idle.moved()
        else:
            self._idle.rest(longest, is_woken=self._arena is None or not self._arena.is_copying)

    @property
    def _has_work(self) -> bool:
        is_gathering = self._gather is not None and not self._gather.is_done
        is_summing = self._all_reduce is not None and self._all_reduce.is_begun and not self._all_reduce.is_done
        return is_gathering or is_summing or bool(self._spans)

    def _turn(self) -> bool:
        """Handle finished transfers, start handed-over spans, and begin transfers; returns whether there were any."""
        self._over.extend(self._link.poll())
        if self._link.moved_bytes != self._moved_bytes:  # a slow network is no late rank
            self._moved_at, self._moved_bytes = self._clock(), self._link.moved_bytes
        if self._arena is not None:
            self._over.extend(self._arena.poll())
        is_any_over = bool(self._over)
        while self._over:
            with self._lock:
                self._moved_at = self._clock()
                self._report(self._over.popleft())
            self._begin()
        self._start_handed()
        return self._begin() or is_any_over

    def _report(self, completion: Completion) -> None:
        kind, peer, tag = completion
        if kind is Completed.DAMAGED:
            if not is_of_gather(tag):
                self._sums.damaged(peer, tag)
            raise self._link.damaged(peer, self._described(tag))
        if is_of_gather(tag):
            assert self._gather is not None  # noqa: S101  (its transfers are begun by it alone)
            self._gather.over(completion)
        elif kind is Completed.SENT:
            self._sums.sent(peer, tag)
        elif peer == self._link.rank:
            self._sums.received(peer, tag)
        else:
            self._sums.received(peer, tag, self._link.borrowed(peer, tag))

    def _start_handed(self) -> None:
        """Start the spans that were handed over."""
        with self._lock:
            for _ in range(len(self._spans)):
                self._moved_at = self._clock()
                self._sums.start(self._spans.popleft())

    def _begin(self) -> bool:
        """Begin the transfers that are to be made now; returns whether there were any."""
        with self._lock:
            transfers = [] if self._gather is None else self._gather.transfers()
            # Nothing of a step that has not begun: a rank that leaves then would be missed by one still in a gather.
            # But where another rank has begun it, what that one tells waits behind the parts that it has sent.
            if self._all_reduce is not None and (self._all_reduce.is_begun or self._is_behind):
                transfers += self._all_reduce.transfers()
            if not self._has_work or (self._gather is not None and self._gather.is_done):
                self._news.ring()  # else whoever waits would take the GIL from the sums for nothing
        for transfer in transfers:
            if isinstance(transfer, Send):
                self._link.send(*transfer)
            elif isinstance(transfer, Receive):
                self._link.receive(*transfer)
            elif isinstance(transfer, Borrow):
                self._link.borrow(*transfer)
            elif isinstance(transfer, Copy):
                self._copy(transfer)
            else:
                self._link.release(*transfer)
        return bool(transfers)

    @property
    def _is_behind(self) -> bool:
        """Whether another rank has begun the step."""
        return not all(map(is_of_gather, self._link.held()))

    def _copy(self, copy: Copy) -> None:
        assert self._arena is not None, "run() names it"  # noqa: S101
        kind = Completed.SENT if copy.is_to_arena else Completed.RECEIVED
        over = Completion(kind, copy.peer, copy.tag)
        self._arena.copy(over, copy.memory, copy.start, is_to_arena=copy.is_to_arena, behind=copy.behind)

    def _end_copies(self) -> None:
        """Wait for the copies, and report them: a part that a sum has begun to overwrite must become the sum."""
        with self._lock:
            self._report_copies()

    def _report_copies(self) -> None:
        """Report the copies as they end, until all have; those first that were over when another's report failed."""
        copies = [each for each in self._over if each.peer == self._link.rank]
        self._over.clear()
        for completion in copies:
            self._report(completion)
        while self._arena is not None and self._arena.is_copying:
            for completion in self._arena.poll(waits=True):
                self._report(completion)

    def _keep_parts(self) -> None:
        """Tell the all-reduce which sums had not begun to arrive when the link was closed; only once."""
        unwritten, self._link.unwritten = self._link.unwritten, ()
        if self._all_reduce is not None:
            with self._lock:
                self._all_reduce.keep_parts(unwritten)

    def _fail(self, fault: BaseException) -> None:
        self._failure = self._failure or fault  # the second is that the link is closed
        try:
            self._link.close()  # the other ranks wait for this one in vain
            self._keep_parts()
            self._end_copies()  # nothing is told of them any more, and the rows may go
        finally:
            self._turner = 0
            self._news.ring()

    # ---- inside ----

    @property
    def _sums(self) -> OrderedAllReduce:
        assert self._all_reduce is not None, "run() comes first"  # noqa: S101
        return self._all_reduce

    def _wait_until(self, is_done: Callable[[], bool], seconds: float, late: Callable[[], Late]) -> None:
        patience, is_late = Patience(self._clock), False
        while True:
            with self._lock:
                if is_done():
                    self._link.has_failed, self._link.lost = False, None
                    return
                self._refuse_failed()
                waited = patience.waited(self._moved_at)
                patience.look(waited, self._link, late)
                was_late, is_late = is_late, waited > seconds
                if was_late and is_late:
                    (self._link.lost, *_), _, what = late()
                    self._link.has_failed = True
                    do = "check whether the late ranks still run"
                    raise DeadlineExceeded(what, got=f"nothing for {seconds:g} s", do=do)
            # Before it gives up it sees what has come meanwhile.
            self._move_or_wait(0.0 if is_late else min(seconds, _LOOK_SECONDS))

    def _refuse_failed(self) -> None:
        if self._is_closing:
            raise PeerLost(f"rank {self._link.rank} has closed its pump", do=self._link.way_on)
        if self._failure is not None:
            self._link.has_failed = True
            if isinstance(self._failure, ExchangeError):
                raise self._failure
            what = f"the exchange of rank {self._link.rank} failed"
            raise ExchangeError(what, got=repr(self._failure)) from self._failure

    def _described(self, tag: int) -> str:
        return "a gather" if is_of_gather(tag) else f"{self._sums.described(tag)} in step {self._sums.step}"

    def _late_for_sums(self) -> Late:
        rank, step, late = self._link.rank, self._sums.step, self._sums.awaited
        if late is None:
            what = f"rank {rank} waits for step {step} and has not started all of its spans"
            return Late([rank], f"step {step}", what)
        peer, missing = late
        what = f"{self._link.named(peer)} is late: rank {rank} waits for {missing} in step {step}"
        return Late([peer], f"step {step}", what)

    def _late_for(self, gather: Gather, what: str) -> Late:
        late = gather.awaited
        who = f"{self._link.named(late[0])} is" if len(late) == 1 else f"ranks {', '.join(map(str, late))} are"
        where = what if self._all_reduce is None else f"step {self._all_reduce.step}"
        return Late(late, where, f"{who} late for {what}, rank {self._link.rank} waits")
