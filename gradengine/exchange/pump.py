"""Runs an all-reduce and gathers over a link: makes the transfers that they ask for, and reports those that are over.

A thread that waits for a result does this while it waits. For spans sent in the background a thread of the pump does
it: to start and wake that thread costs more than the rest of a small model's step.
"""

from __future__ import annotations

import _thread
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from gradengine.errors import DeadlineExceeded, ExchangeError, GradientError, PeerLost
from gradengine.exchange.gather import Gather, is_of_gather
from gradengine.exchange.links.link import DAMAGED, RELEASE, SEND, VANISHED_SECONDS, Completion, Link, Transfer
from gradengine.exchange.ordered_all_reduce import OrderedAllReduce
from gradengine.kernels.cuda_device import DeviceArena
from gradengine.threads import Bell

logger = logging.getLogger("gradengine.exchange")

DEFAULT_TIMEOUT = 300.0  # seconds
DEFAULT_JOIN_TIMEOUT = 60.0  # seconds
LOOK_SECONDS = 0.1  # until a rank that waits looks at the clock again
_WARN_SECONDS = 10.0  # until the first warning; the next ones come after 20, 40, ...
_PAUSE_SECONDS = 1.0  # a rank that waits looks ten times as often
# Whoever waits for the rank at fault itself names it first, and the others hear that name before they give up: an owner
# waits for parts, other ranks for its sums, and ranks that have all sums for those in a gather. Each of these waits is
# longer by this and a tenth of the timeout, since ranks seldom begin to wait at one moment.
_GRACE_SECONDS = 1.0
# What rings no bell is looked at without a pause first, then each 5 ms.
_SPIN_SECONDS, _LONGEST_SECONDS = 0.002, 0.005


class Late(NamedTuple):
    """Whom this rank, or others, wait for."""

    ranks: Sequence[int]
    where: str  # the step, or what else they do
    error: str  # what an error says about it
    depth: int = 0  # how many ranks wait for each other from here to the one at fault


class Patience:
    """Counts the seconds for which nothing has moved.

    Args:
        clock: The clock of all seconds here.

    Example:
        >>> now = [0.0]
        >>> patience = Patience(lambda: now[0])
        >>> now[0] = 1e6  # a scheduler has suspended all processes of the job
        >>> patience.waited()
        0.0
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._was_paused = clock, False
        self._since = self._looked_at = clock()
        self._warns_at = _WARN_SECONDS

    def waited(self, moved_at: float = 0.0) -> float:
        """Return the seconds since `moved_at`, or since the beginning; anew where this process itself stood still.

        To be asked often: the time from one look to the next is taken for a pause if it is over a second.
        """
        now = self._clock()
        is_paused = now - self._looked_at > _PAUSE_SECONDS
        # With one pause right after another the machine is slow, and the time passes.
        if is_paused and not self._was_paused:
            self._since = now
        self._looked_at, self._was_paused = now, is_paused
        waited = now - max(self._since, moved_at)
        if waited < _WARN_SECONDS:
            self._warns_at = _WARN_SECONDS
        return waited

    def look(self, waited: float, link: Link, late: Callable[[], Late]) -> None:
        """Log for whom this end of a link has waited, when it is time; `PeerLost` for a machine that vanished."""
        if waited > VANISHED_SECONDS:
            link.refuse_vanished()
        if waited >= self._warns_at:
            self._warns_at *= 2
            ranks, where, *_ = late()
            names = ", ".join(map(link.named, ranks))
            logger.warning("%s has waited %.0f s for %s (%s)", link.named(link.rank), waited, names, where)


class Pump:
    """Runs one rank's gathers and all-reduce over a link, until it is closed or fails.

    It has a thread from the first span that is sent in the background to the end of the step. One thread makes the
    calls; any may close the pump.

    Args:
        link: The link to the other ranks; closed with the pump, and when the pump fails.
        clock: The clock of the seconds of `wait` and `gather`.

    Attributes:
        lock: Is held around each call of the all-reduce and of a gather.
        moved_at: The clock's time at which bytes were moved, or work was begun, for the last time.

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
        self.lock = threading.RLock()
        # No Condition, and no Thread: Ctrl-C within their Python code would leave a lock locked, or a thread unstarted.
        self._news = Bell()  # something that is waited for may be over
        self._failure: BaseException | None = None  # what has ended this pump, its closing too
        self.moved_at, self._moved_bytes = clock(), 0
        self._active_at = time.monotonic()  # when a transfer was over: more may follow soon
        self._turner = 0  # the number of the thread that moves all this now; 0 while none does, -1 while one starts

    def run(self, all_reduce: OrderedAllReduce, arena: DeviceArena | None = None) -> None:
        """Run this all-reduce from now on: until `close` returns, other code may only read its results.

        `arena` is the device's arena that is summed, None for a host's.
        """
        self._all_reduce, self._arena = all_reduce, arena

    def wake(self, *, in_background: bool) -> None:
        """Go on with new work, in the background or in the next `wait` or `gather`; call it with `lock` held.

        Raises:
            ExchangeError: As `wait`.
        """
        self.refuse_failed()
        self.moved_at = self._clock()
        if self._turner:
            self._link.bell.ring()
        elif in_background and self._has_work:
            with contextlib.suppress(RuntimeError):  # the process can have no more: all is moved in `wait`
                _thread.start_new_thread(self._run, ())
                self._turner = -1

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
        self._wait_until(self._sums, timeout, self._late_for_sums)

    def gather(self, data: bytes, timeout: float, what: str = "a gather (end of step or barrier)") -> list[bytes]:
        """Every rank's `data`, in rank order, then the server's if there is one; spans may be sent at the same time.

        Args:
            data: This rank's data, at most 1 MiB; see `refuse_long_part`.
            timeout: Seconds without a byte that is moved, after which this fails.
            what: The name of this gather in errors.

        Raises:
            DeadlineExceeded: Some ranks were late; names them.
            PeerLost, ProtocolError, ExchangeError: As `wait`; a rank announces more than 1 MiB.
        """
        gather = Gather(self._link.rank, self._link.world_size, data, self._link.hub)
        with self.lock:
            self.wake(in_background=False)
            self._gather = gather
        self._wait_until(gather, timeout, lambda: self._late_for(gather, what))
        self._gather = None
        return gather.parts

    def close(self) -> None:
        """End the thread and close the link, after which nothing writes to the arena. May be called twice."""
        self._failure = self._failure or PeerLost(f"rank {self._link.rank} has closed its pump", do=self._link.way_on)
        self._link.bell.ring()
        while self._turner not in {0, _thread.get_ident()}:  # it may be reading what the link has borrowed
            self._news.wait(LOOK_SECONDS)
        self._turner = 0  # a call of this thread may have been interrupted
        self._end()

    # ---- in the thread that moves all this ----

    def _run(self) -> None:
        with self.lock:
            self._turner = _thread.get_ident()
        try:
            while self._goes_on():
                self._turn_or_rest()
        except BaseException as fault:  # noqa: BLE001  (raised where somebody waits, on another thread)
            self._fail(fault)

    def _goes_on(self) -> bool:
        """Whether this thread is still needed; if it is not, waiting threads are woken."""
        with self.lock:
            if self._has_work and self._failure is None:
                return True
            self._turner = 0
            self._news.ring()
            return False

    def _move_or_wait(self, seconds: float) -> None:
        """Make a turn in this waiting thread; or, if another thread makes turns, wait for it for so long."""
        with self.lock:
            is_moved = self._turner
            if not is_moved:
                self._turner = _thread.get_ident()
        if is_moved:
            self._news.wait(seconds)
            return
        try:
            self._turn_or_rest(seconds)
        except (GradientError, MemoryError) as fault:  # anything else passes as Ctrl-C does
            self._fail(fault)
        finally:
            self._turner = 0
            if self._failure is not None:  # who closes this waits
                self._news.ring()

    def _turn_or_rest(self, longest: float | None = None) -> None:
        """Make a turn; if nothing was to do wait for the link's bell, or a moment for what rings no bell."""
        if self._turn():
            self._active_at = time.monotonic()
            return
        if self._link.is_polled or (self._arena is not None and self._arena.is_copying):
            idle = time.monotonic() - self._active_at
            most = 0.0 if idle < _SPIN_SECONDS else min(idle / 4, _LONGEST_SECONDS)
            longest = most if longest is None else min(longest, most)
        self._link.bell.wait(longest)

    @property
    def _has_work(self) -> bool:
        gather, sums = self._gather, self._all_reduce
        is_summing = sums is not None and bool(sums.started) and not sums.is_done
        return is_summing or (gather is not None and not gather.is_done)

    def _turn(self) -> bool:
        """Handle finished transfers, and begin the next ones; returns whether there were any."""
        over = self._link.poll()
        if self._link.moved_bytes != self._moved_bytes:  # a slow network is no late rank
            self.moved_at, self._moved_bytes = self._clock(), self._link.moved_bytes
        copies = [] if self._arena is None else self._arena.poll()
        with self.lock:  # all at once: whatever fails later, the all-reduce knows what is in the arena
            for completion in copies:
                self.moved_at = self._clock()
                self._report(completion)
        if not over:
            return self._begin() or bool(copies)
        for completion in over:
            with self.lock:
                self.moved_at = self._clock()
                self._report(completion)
            self._begin()
        return True

    def _report(self, completion: Completion) -> None:
        kind, peer, tag = completion
        try:
            if kind == DAMAGED:
                what = "a gather" if is_of_gather(tag) else f"{self._sums.described(tag)} in step {self._sums.step}"
                raise self._link.damaged(peer, what)
            if is_of_gather(tag):
                assert self._gather is not None  # noqa: S101  (its transfers are begun by it alone)
                self._gather.over(completion)
            elif kind == SEND:
                self._sums.sent(peer, tag)
            else:
                self._sums.received(peer, tag, self._link.borrowed(peer, tag))
        except ExchangeError:
            self._link.lost = peer  # the others are told whose fault it is
            raise

    def _begin(self) -> bool:
        """Begin the transfers that are to be made now; returns whether there were any."""
        with self.lock:
            gather, sums = self._gather, self._all_reduce
            transfers = [] if gather is None else gather.transfers()
            # Nothing of a step that has not begun: a rank that leaves then would be missed by one still in a gather.
            # But if another rank has begun it, its gather waits after its parts.
            if sums is not None and (sums.started or not all(map(is_of_gather, self._link.held().values()))):
                transfers += sums.transfers()
            work = gather or sums
            if work is not None and work.is_done:
                self._news.ring()  # else whoever waits would take the GIL from the sums for nothing
        self._make(transfers)
        return bool(transfers)

    def _make(self, transfers: Iterable[Transfer]) -> None:
        for kind, peer, tag, memory in transfers:
            if self._arena is not None and peer == self._link.rank:
                start, behind = self._sums.place_of_copy(tag)
                over = Completion(kind, peer, tag)
                self._arena.copy(over, memory, start, is_to_arena=kind == SEND, behind=behind)
            elif kind == SEND:
                self._link.send(peer, tag, memory)
            elif kind == RELEASE:
                self._link.release(peer, tag)
            elif memory is None:
                self._link.borrow(peer, tag)
            else:
                self._link.receive(peer, tag, memory)

    def _end(self) -> None:
        """Close the link, and report to the all-reduce what its arena holds then.

        Sums that had not begun to arrive have overwritten no part, and a part that a copy has begun to overwrite must
        become the sum.
        """
        self._link.close()
        with self.lock:
            if self._all_reduce is not None:
                self._all_reduce.end(self._link.unwritten)
            for completion in [] if self._arena is None else self._arena.poll(waits=True):
                self._report(completion)

    def _fail(self, fault: BaseException) -> None:
        self._failure = self._failure or fault  # the second is that the link is closed
        try:
            self._end()  # the other ranks wait for this one in vain, and the rows may go
        finally:
            self._turner = 0
            self._news.ring()

    # ---- inside ----

    @property
    def _sums(self) -> OrderedAllReduce:
        assert self._all_reduce is not None, "run() comes first"  # noqa: S101
        return self._all_reduce

    def _wait_until(self, work: OrderedAllReduce | Gather, seconds: float, late: Callable[[], Late]) -> None:
        patience, is_late = Patience(self._clock), False
        while True:
            with self.lock:
                if work.is_done:
                    self._link.has_failed, self._link.lost = False, None
                    return
                self.refuse_failed()
                waited = patience.waited(self.moved_at)
                if waited > _PAUSE_SECONDS:
                    self._refuse_another_call(work)
                    patience.look(waited, self._link, late)
                was_late = is_late
                # A link with a time limit fails first: nobody can see here which rank does not poll.
                grace = _GRACE_SECONDS + seconds / 10
                is_late = waited > seconds and waited > seconds + (late().depth + self._link.has_limit) * grace
                if was_late and is_late:
                    raise self._too_late(late(), seconds)
            # Before it gives up it sees what has come meanwhile.
            self._move_or_wait(0.0 if is_late else min(seconds, LOOK_SECONDS))

    def _refuse_another_call(self, work: OrderedAllReduce | Gather) -> None:
        """Raise an error if what is missing cannot come any more."""
        late = work.awaited if isinstance(work, OrderedAllReduce) else None
        # What a rank had sent before its gather has been received.
        if late is not None and is_of_gather(self._link.held().get(late[0], 0)):
            peer, missing, _ = late
            what = f"{self._link.named(peer)} is in another call than rank {self._link.rank}: it tells something"
            expected = f"{missing} in step {self._sums.step}"
            self._link.lost = peer
            raise ExchangeError(what, expected=expected, do="make the same calls in the same order on all ranks")

    def _too_late(self, late: Late, seconds: float) -> DeadlineExceeded:
        self._link.lost, self._link.has_failed = late.ranks[0], True
        return DeadlineExceeded(late.error, got=f"nothing for {seconds:g} s", do="check whether the late ranks run")

    def refuse_failed(self) -> None:
        """Raise what has ended this pump, if anything has."""
        if self._failure is None:
            return
        self._link.has_failed = True
        if isinstance(self._failure, ExchangeError):
            raise self._failure
        what = f"the exchange of rank {self._link.rank} failed"
        raise ExchangeError(what, got=repr(self._failure)) from self._failure

    def _late_for_sums(self) -> Late:
        rank, late, where = self._link.rank, self._sums.awaited, f"step {self._sums.step}"
        if late is None:
            return Late([rank], where, f"rank {rank} waits for {where} and has not started all of its spans")
        peer, what, is_part = late
        error = f"{self._link.named(peer)} is late: rank {rank} waits for {what} in {where}"
        return Late([peer], where, error, int(not is_part))

    def _late_for(self, gather: Gather, what: str) -> Late:
        late, sums = gather.awaited, self._all_reduce
        who = f"{self._link.named(late[0])} is" if len(late) == 1 else f"ranks {', '.join(map(str, late))} are"
        where, depth = (what, 0) if sums is None else (f"step {sums.step}", 2)
        return Late(late, where, f"{who} late for {what}, rank {self._link.rank} waits", depth)
