"""Run an all-reduce and gathers over a link: make their transfers, and report the finished ones to them.

A thread that waits for a result does this while it waits. For spans sent in the background a thread of the pump does
it. To start and wake that thread takes longer than the rest of a small model's step.
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
LOOK_SECONDS = 0.1  # seconds until a waiting rank looks at the clock again
_WARN_SECONDS = 10.0  # seconds until the first warning; later warnings follow after 20, 40, ... seconds
_PAUSE_SECONDS = 1.0  # seconds between two looks that count as a pause of the process, ten times LOOK_SECONDS
# A rank that waits for the rank at fault itself fails first, and the others receive the name before they fail. An owner
# waits for parts, other ranks wait for its sums, and ranks that have all sums wait for the others in a gather. Each of
# these waits is longer by this and a tenth of the timeout, because ranks seldom begin to wait at the same moment.
_GRACE_SECONDS = 1.0
# Seconds for which a source without a bell is polled without a pause, and the longest pause in seconds after that.
_SPIN_SECONDS, _LONGEST_SECONDS = 0.002, 0.005


class Late(NamedTuple):
    """The ranks that this rank, or others, wait for."""

    ranks: Sequence[int]
    where: str  # the step, or the call in which they are
    error: str  # text of an error about it
    depth: int = 0  # number of ranks that wait for each other from this one to the one at fault


class Patience:
    """Counts the seconds in which no bytes have moved.

    Args:
        clock: The clock of all seconds here.

    Example:
        >>> now = [0.0]
        >>> patience = Patience(lambda: now[0])
        >>> now[0] = 1e6  # A scheduler has suspended all processes of the job.
        >>> patience.waited()
        0.0
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._was_paused = clock, False
        self._since = self._looked_at = clock()
        self._warns_at = _WARN_SECONDS

    def waited(self, moved_at: float = 0.0) -> float:
        """Return the seconds since `moved_at` or the beginning, whichever is later. They restart after a pause.

        Call it often, because more than a second between two calls counts as a pause of this process.
        """
        now = self._clock()
        is_paused = now - self._looked_at > _PAUSE_SECONDS
        # Two pauses in a row mean that the machine is slow, so the time counts.
        if is_paused and not self._was_paused:
            self._since = now
        self._looked_at, self._was_paused = now, is_paused
        waited = now - max(self._since, moved_at)
        if waited < _WARN_SECONDS:
            self._warns_at = _WARN_SECONDS
        return waited

    def look(self, waited: float, link: Link, late: Callable[[], Late]) -> None:
        """Log the ranks that this end of a link waits for, when due. Raises `PeerLost` for a vanished machine."""
        if waited > VANISHED_SECONDS:
            link.refuse_vanished()
        if waited >= self._warns_at:
            self._warns_at *= 2
            ranks, where, *_ = late()
            names = ", ".join(map(link.named, ranks))
            logger.warning("%s has waited %.0f s for %s (%s)", link.named(link.rank), waited, names, where)


class Pump:
    """Runs one rank's gathers and all-reduce over a link, until it is closed or fails.

    It has a thread from the first span that is sent in the background to the end of the step. Only one thread calls the
    pump, but any thread may close it.

    Args:
        link: The link to the other ranks. It is closed with the pump, and when the pump fails.
        clock: The clock of the seconds of `wait` and `gather`.

    Attributes:
        lock: A lock that is held around each call of the all-reduce and of a gather.
        moved_at: The clock's time at which bytes last moved or work last began.

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
        self._arena: DeviceArena | None = None  # device arena of the shares, None for a host's
        self._gather: Gather | None = None  # gather in progress
        self.lock = threading.RLock()
        # Ctrl-C in the Python code of Condition or Thread would leave a lock locked or a thread unstarted.
        self._news = Bell()  # rings when a gather or step may be over
        self._failure: BaseException | None = None  # error that ended this pump, or PeerLost after `close`
        self.moved_at, self._moved_bytes = clock(), 0
        self._active_at = time.monotonic()  # time of the last finished transfer, as more may follow soon
        self._turner = 0  # number of the thread that turns the pump; 0 while none does, -1 while one starts

    def run(self, all_reduce: OrderedAllReduce, arena: DeviceArena | None = None) -> None:
        """Run this all-reduce from now on. Until `close` returns, other code may only read its results.

        `arena` is the device's arena that is summed, or None for a host's.
        """
        self._all_reduce, self._arena = all_reduce, arena

    def wake(self, *, in_background: bool) -> None:
        """Begin new work, in the background or in the next `wait` or `gather`. Call it with `lock` held.

        Raises:
            ExchangeError: As `wait`.
        """
        self.refuse_failed()
        self.moved_at = self._clock()
        if self._turner:
            self._link.bell.ring()
        elif in_background and self._has_work:
            with contextlib.suppress(RuntimeError):  # If no more threads can start, `wait` moves all bytes.
                _thread.start_new_thread(self._run, ())
                self._turner = -1

    def wait(self, timeout: float) -> None:
        """Return when the step is done on this rank. Then the arena holds the sums and may be overwritten.

        Args:
            timeout: Seconds in which no byte moves and no span starts, after which this fails.

        Raises:
            PeerLost: A rank is gone. The error names it.
            DeadlineExceeded: There was no progress for `timeout`. The error names the rank that this one waited for
                longest, and the missing message.
            ProtocolError: A rank sent an invalid message, or one that was damaged on the way.
            ExchangeError: The thread failed otherwise, for example for lack of memory. See the error's cause.
        """
        self._wait_until(self._sums, timeout, self._late_for_sums)

    def gather(self, data: bytes, timeout: float, what: str = "a gather (end of step or barrier)") -> list[bytes]:
        """Return every rank's `data` in rank order, and then the server's if there is one.

        Spans may be sent at the same time.

        Args:
            data: This rank's data, at most 1 MiB (see `refuse_long_part`).
            timeout: Seconds in which no byte moves, after which this fails.
            what: The name of this gather in errors.

        Raises:
            DeadlineExceeded: Some ranks were late. The error names them.
            PeerLost, ProtocolError, ExchangeError: As `wait`, or a rank announces more than 1 MiB.
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
        while self._turner not in {0, _thread.get_ident()}:  # That thread may be reading borrowed memory.
            self._news.wait(LOOK_SECONDS)
        self._turner = 0  # A call of this thread may have been interrupted.
        self._end()

    # ---- in the thread that turns the pump ----

    def _run(self) -> None:
        with self.lock:
            self._turner = _thread.get_ident()
        try:
            while self._goes_on():
                self._turn_or_rest()
        except BaseException as fault:  # noqa: BLE001  (raised in `wait` or `gather`, on another thread)
            self._fail(fault)

    def _goes_on(self) -> bool:
        """Return whether this thread is still needed. If it is not, wake waiting threads."""
        with self.lock:
            if self._has_work and self._failure is None:
                return True
            self._turner = 0
            self._news.ring()
            return False

    def _move_or_wait(self, seconds: float) -> None:
        """Make a turn in this waiting thread. If another thread makes turns, wait for it for up to `seconds`."""
        with self.lock:
            is_moved = self._turner
            if not is_moved:
                self._turner = _thread.get_ident()
        if is_moved:
            self._news.wait(seconds)
            return
        try:
            self._turn_or_rest(seconds)
        except (GradientError, MemoryError) as fault:  # Other exceptions pass, as Ctrl-C does.
            self._fail(fault)
        finally:
            self._turner = 0
            if self._failure is not None:  # A thread in `close` waits for this.
                self._news.ring()

    def _turn_or_rest(self, longest: float | None = None) -> None:
        """Make a turn. If it did nothing, wait for the link's bell, or a moment for sources without a bell."""
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
        """Handle finished transfers, and begin the next ones. Return whether there were any."""
        over = self._link.poll()
        if self._link.moved_bytes != self._moved_bytes:  # On a slow network no rank is late.
            self.moved_at, self._moved_bytes = self._clock(), self._link.moved_bytes
        copies = [] if self._arena is None else self._arena.poll()
        with self.lock:  # Report all copies first, so that the all-reduce matches the arena after any failure.
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
                assert self._gather is not None  # noqa: S101  (only it begins its transfers)
                self._gather.over(completion)
            elif kind == SEND:
                self._sums.sent(peer, tag)
            else:
                self._sums.received(peer, tag, self._link.borrowed(peer, tag))
        except ExchangeError:
            self._link.lost = peer  # The link sends the others the rank at fault.
            raise

    def _begin(self) -> bool:
        """Begin the transfers that are due. Return whether there were any."""
        with self.lock:
            gather, sums = self._gather, self._all_reduce
            transfers = [] if gather is None else gather.transfers()
            # Begin no transfers of a step that has not begun. Otherwise a rank in a gather would report one that leaves
            # as lost. But if another rank has begun the step, its next gather only arrives after its parts.
            if sums is not None and (sums.started or not all(map(is_of_gather, self._link.held().values()))):
                transfers += sums.transfers()
            work = gather or sums
            if work is not None and work.is_done:
                self._news.ring()  # An earlier ring would only take the GIL from the sums.
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
        """Close the link, and report to the all-reduce the state of its arena.

        Sums that had not begun to arrive have overwritten no part. A copy that has begun to overwrite one must finish.
        """
        self._link.close()
        with self.lock:
            if self._all_reduce is not None:
                self._all_reduce.end(self._link.unwritten)
            for completion in [] if self._arena is None else self._arena.poll(waits=True):
                self._report(completion)

    def _fail(self, fault: BaseException) -> None:
        self._failure = self._failure or fault  # A second failure only reports that the link is closed.
        try:
            self._end()  # Closing ends the waits of the other ranks, and the rows may be freed.
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
                # A link with its own time limit fails first, because the pump cannot see which rank does not poll.
                grace = _GRACE_SECONDS + seconds / 10
                is_late = waited > seconds and waited > seconds + (late().depth + self._link.has_limit) * grace
                if was_late and is_late:
                    raise self._too_late(late(), seconds)
            # Make one more turn before failing, as data may have arrived.
            self._move_or_wait(0.0 if is_late else min(seconds, LOOK_SECONDS))

    def _refuse_another_call(self, work: OrderedAllReduce | Gather) -> None:
        """Raise an error if the missing message cannot arrive any more."""
        late = work.awaited if isinstance(work, OrderedAllReduce) else None
        # All that a rank sent before its gather has been received.
        if late is not None and is_of_gather(self._link.held().get(late[0], 0)):
            peer, missing, _ = late
            what = f"{self._link.named(peer)} is in a gather, and rank {self._link.rank} in the all-reduce"
            expected = f"{missing} in step {self._sums.step}"
            self._link.lost = peer
            raise ExchangeError(what, expected=expected, do="make the same calls in the same order on all ranks")

    def _too_late(self, late: Late, seconds: float) -> DeadlineExceeded:
        self._link.lost, self._link.has_failed = late.ranks[0], True
        return DeadlineExceeded(late.error, got=f"nothing for {seconds:g} s", do="check whether the late ranks run")

    def refuse_failed(self) -> None:
        """Raise the error that has ended this pump, if there is one."""
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
