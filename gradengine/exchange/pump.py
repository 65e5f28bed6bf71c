"""The thread that runs an ordered all-reduce over a link: it makes the transfers and reports those that are over."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import final

from gradengine.arguments import refuse_other_kind
from gradengine.errors import DeadlineExceeded, ExchangeError, NotCopied, PeerLost, WindowError
from gradengine.exchange.interface import checked_seconds
from gradengine.exchange.links.link import Completed, Idle, Link
from gradengine.exchange.ordered_all_reduce import Borrow, OrderedAllReduce, Receive, Send
from gradengine.layout import Span

_LOOK_SECONDS = 0.1  # until a rank that waits looks at the clock again


@final
class Pump(NotCopied, instead="make one for each link"):
    """Runs one rank's all-reduce over a link, on a thread of its own, until it is closed or fails.

    One thread starts spans and waits. After an error, or to resume the step: `close`, `resume` the all-reduce with the
    frontiers of all ranks, and make another pump over a new link.

    Args:
        link: To the ranks of the all-reduce; closed with the pump, and when the pump fails.
        all_reduce: Nothing else may call it before `close` returns, but for its results after `wait`.
        clock: What the seconds of `wait` are counted by.

    Example:
        >>> import numpy as np
        >>> from gradengine.exchange.links.threads import thread_links
        >>> from gradengine.kernels import HostKernels
        >>> from gradengine.layout import GradientLayout
        >>> from gradengine.exchange.shares import shares_of
        >>> layout, arena = GradientLayout.of({"w": (3,)}), np.zeros(32, np.float32)
        >>> all_reduce = OrderedAllReduce(0, 1, layout, shares_of(layout, 1, 1 << 22), arena, HostKernels())
        >>> pump = Pump(*thread_links(1), all_reduce)
        >>> pump.start(layout.spans[0])
        >>> pump.wait(60.0)
        >>> pump.close()
    """

    def __init__(
        self, link: Link, all_reduce: OrderedAllReduce, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._link, self._all_reduce, self._clock = link, all_reduce, clock
        self._handed: set[int | str] = set()  # keys of the spans of this step, those of `_spans` among them
        self._spans: deque[Span] = deque()  # that the thread is to start
        self._changed = threading.Condition()  # also the lock under which the all-reduce is called
        self._failure: BaseException | None = None
        self._is_closing, self._moved_at = False, clock()
        self._idle = Idle(link)
        self._thread = threading.Thread(target=self._run, name=f"gradengine-pump-{link.rank}", daemon=True)
        self._thread.start()

    def start(self, span: Span) -> None:
        """Send a span, which holds all that this rank contributes; returns at once.

        If the pump ends before its thread comes to the span, `OrderedAllReduce.is_started` says no: start it again.

        Raises:
            WindowError: It was started before.
            ExchangeError: As `wait`; the span is not started.
        """
        refuse_other_kind("span", span, Span)
        if span.key in self._handed or self._all_reduce.is_started(span):
            raise WindowError(f"{span.called} has been started already", do="start each span once in a step")
        self._refuse_failed()
        self._handed.add(span.key)
        self._spans.append(span)
        self._idle.wake()

    def wait(self, timeout: float) -> None:
        """Return when the step is done on this rank: the arena holds the sums and may be overwritten.

        Args:
            timeout: Seconds without a transfer that is over, or a span that is started, after which this fails.

        Raises:
            PeerLost: A rank is gone; names it.
            DeadlineExceeded: Nothing moved for so long; names the rank that this one waits for longest, and for what.
            ProtocolError: A rank sent what it should not.
            ExchangeError: The thread failed otherwise, for lack of memory perhaps: the error's cause.
        """
        seconds = checked_seconds("timeout", timeout)
        with self._changed:
            since = self._clock()
            while not self._all_reduce.is_done:
                self._refuse_failed()
                if self._clock() - max(since, self._moved_at) > seconds:
                    raise self._late(seconds)
                self._changed.wait(min(seconds, _LOOK_SECONDS))
            self._link.has_failed, self._link.lost = False, None

    def next_step(self) -> None:
        """Begin the next step, when all ranks have said that they are done; see `OrderedAllReduce.next_step`."""
        self._start_handed()
        with self._changed:
            self._refuse_failed()
            self._all_reduce.next_step()
            self._handed.clear()
        self._idle.wake()

    def close(self) -> None:
        """End the thread and close the link: nothing writes into the arena any more. May be called twice."""
        self._is_closing = True
        self._idle.wake()
        self._thread.join()  # it may be reading what the link has borrowed
        self._link.close()

    # ---- the pump's thread ----

    def _run(self) -> None:
        try:
            while not self._is_closing:
                if self._turn():
                    self._idle.moved()
                else:
                    self._idle.rest()
        except BaseException as fault:  # noqa: BLE001  (raised where somebody waits, on another thread)
            self._fail(fault)

    def _turn(self) -> bool:
        """Report what is over, start what is handed over, and begin what follows; whether there was anything."""
        over = self._link.poll()
        for kind, peer, tag in over:
            with self._changed:
                self._moved_at = self._clock()
                if kind is Completed.SENT:
                    self._all_reduce.sent(peer, tag)
                else:
                    self._all_reduce.received(peer, tag, self._link.borrowed(peer, tag))
            self._begin()
        self._start_handed()
        return self._begin() or bool(over)

    def _start_handed(self) -> None:
        """Start the spans that were handed over."""
        with self._changed:
            while self._spans:
                self._moved_at = self._clock()
                self._all_reduce.start(self._spans.popleft())

    def _begin(self) -> bool:
        """Begin the transfers that are to be made now; whether there were any."""
        with self._changed:
            transfers = self._all_reduce.transfers()
            if self._all_reduce.is_done:  # else whoever waits would take the GIL from the sums for nothing
                self._changed.notify_all()
        for transfer in transfers:
            if isinstance(transfer, Send):
                self._link.send(*transfer)
            elif isinstance(transfer, Receive):
                self._link.receive(*transfer)
            elif isinstance(transfer, Borrow):
                self._link.borrow(*transfer)
            else:
                self._link.release(*transfer)
        return bool(transfers)

    def _fail(self, fault: BaseException) -> None:
        with self._changed:
            self._failure = fault
            self._changed.notify_all()
        self._link.close()  # the other ranks wait for this one in vain

    # ---- errors ----

    def _refuse_failed(self) -> None:
        if self._is_closing:
            raise PeerLost(f"rank {self._link.rank} has closed its pump", do="reconnect on all ranks")
        if self._failure is not None:
            self._link.has_failed = True
            if isinstance(self._failure, ExchangeError):
                raise self._failure
            what = f"the all-reduce of rank {self._link.rank} failed in step {self._all_reduce.step}"
            raise ExchangeError(what, got=repr(self._failure)) from self._failure

    def _late(self, seconds: float) -> DeadlineExceeded:
        rank, step, late = self._link.rank, self._all_reduce.step, self._all_reduce.awaited
        self._link.has_failed, self._link.lost = True, late[0] if late else rank
        if late is None:
            what = f"rank {rank} waits for step {step} and has not started all of its spans"
        else:
            peer, missing = late
            what = f"rank {peer} is late: rank {rank} waits for {missing} in step {step}"
        return DeadlineExceeded(what, got=f"nothing for {seconds:g} s", do="see what that rank does")
