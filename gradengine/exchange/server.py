"""The server of a group: one thread that waits for the group's ranks, sums for them, and then serves the next group."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import final

from gradengine.arguments import checked_rank, checked_seconds, whole_number
from gradengine.errors import PeerLost, ProtocolError, not_copied
from gradengine.exchange.addresses import RETRY_SECONDS, Address, Listener, url_of
from gradengine.exchange.gather import Gather, is_of_gather
from gradengine.exchange.handshake import refuse_bad_job
from gradengine.exchange.hello import Hello, hellos_of, layout_of, packed_hello, refuse_differing, refuse_large
from gradengine.exchange.links.link import Completion
from gradengine.exchange.links.sockets import SocketLink
from gradengine.exchange.mesh import Meeting
from gradengine.exchange.ordered_all_reduce import OrderedAllReduce
from gradengine.exchange.pump import DEFAULT_JOIN_TIMEOUT, DEFAULT_TIMEOUT, LOOK_SECONDS, Late, Patience, Pump
from gradengine.exchange.shares import MOST_BUCKET_BYTES, shares_of
from gradengine.exchange.tls import certificates_of
from gradengine.kernels import HostKernels
from gradengine.layout import Span

DEFAULT_BUCKET_BYTES = 1 << 21  # bytes that a server sums at a time; four buckets are in flight


@final
class GradientServer(AbstractContextManager["GradientServer"]):
    """Receives every rank's gradients, sums them in rank order and sends the sums back, without gradients itself.

    It has memory only for the few shares in flight, and serves one group after another until it is closed.

    Args:
        world_size: Number of ranks in a group.
        address: (host, port), where port 0 is any free one. Or the path of a Unix socket, for this user alone.
        secret: The group's secret, of at least 16 characters; required unless the address is loopback.
        job: The job's name. A rank of a different job is refused, without any effect on the group. None accepts in
            each group the job of the first rank that joins, because the server may not run in the job.
        timeout: Seconds without any progress after which a rank that others wait for counts as late.
        join_timeout: Seconds that the first rank waits for the others, and `serve` for the first rank.
        bucket_bytes: Bytes that are summed at a time. It changes no bit of the result.
        max_arena_bytes: The most bytes that the arena of the ranks' layout may have.
        tls: As for `connect`.

    Attributes:
        address: The address, with the actual port.

    Raises:
        CallerError: An argument is out of range, the address cannot be bound, or it is not loopback and there is no
            secret. Or a file of TLS cannot be used.

    Example:
        >>> with GradientServer(world_size=2) as server:
        ...     server.url.startswith("tcp://127.0.0.1:")
        True
    """

    __reduce_ex__ = not_copied("make one in the process that serves")

    def __init__(
        self,
        world_size: int,
        address: Address = ("127.0.0.1", 0),
        *,
        secret: str | None = None,
        job: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        join_timeout: float = DEFAULT_JOIN_TIMEOUT,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        max_arena_bytes: int = 1 << 36,
        tls: str | os.PathLike[str] | None = None,
    ) -> None:
        _, self._world_size = checked_rank(0, world_size)
        if job is not None:
            refuse_bad_job(job)
        self._secret, self._job, self._tls = secret, job, certificates_of(tls)
        self._timeout = checked_seconds("timeout", timeout)
        self._join_timeout = checked_seconds("join_timeout", join_timeout)
        self._bucket_bytes = whole_number("bucket_bytes", bucket_bytes, 4, MOST_BUCKET_BYTES)
        self._most_bytes = whole_number("max_arena_bytes", max_arena_bytes, 1)
        self._is_closing = False
        self._ended: deque[BaseException | None] = deque(maxlen=1)  # the last group's error, until `serve` raises it
        self._waits_since = math.inf  # time at which `serve` was called, infinite if it does not wait
        self._hub: Hub | None = None  # hub of the present group, None until its ranks have joined
        self._listener = Listener(address, secret)
        self.address = self._listener.address
        self._thread = threading.Thread(target=self._run, name="gradengine-server", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The URL for the ranks' `connect`."""
        return url_of(self.address)

    @property
    def step(self) -> int | None:
        """The number of the group's open step, or None before all ranks have joined."""
        return None if self._hub is None else self._hub.step

    @property
    def workers(self) -> list[tuple[int, str, int, int]]:
        """The number, host, and received and sent bytes of each rank. The list is empty before all have joined."""
        return [] if self._hub is None else self._hub.ranks.traffic()

    def serve(self) -> None:
        """Wait until all ranks of one group have joined and left.

        Raises:
            HandshakeRefused, PeerLost, ProtocolError, DeadlineExceeded: The group failed before all were done, or no
                rank joined for `join_timeout`. Any other error of the server's thread is raised as it is.
        """
        self._waits_since = time.monotonic()
        try:
            while not (self._ended or self._is_closing):
                time.sleep(LOOK_SECONDS)
        finally:
            self._waits_since = math.inf
        if self._is_closing:
            raise PeerLost("the server was closed", do="make a new one")
        fault = self._ended.popleft()
        if fault is not None:
            raise fault

    def close(self) -> None:
        """Stop the server. Ranks that still wait get an error. May be called twice."""
        self._is_closing = True
        self._thread.join()  # The thread checks several times a second whether it should end.
        self._listener.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- its thread ----

    def _run(self) -> None:
        """Serve one group after another, and keep the error of the last one for `serve`."""
        size, secret, tls = self._world_size, self._secret, self._tls
        while not self._is_closing:
            fault: BaseException | None = None
            try:
                meeting = Meeting(self._listener, size, size, secret=secret, job=self._job, is_served=True, tls=tls)
                link = meeting.link(self._join_timeout, gives_up=self._gives_up)
                self._hub = Hub(link, self._timeout, self._bucket_bytes, self._most_bytes, time.monotonic)
                self._hub.serve(lambda: self._is_closing)
            except BaseException as failure:  # noqa: BLE001  (raised in `serve`, on another thread)
                fault = failure
            self._hub = None
            self._ended.append(fault)
            if fault is not None:
                time.sleep(RETRY_SECONDS)  # The next group may also fail, for example for lack of descriptors.

    def _gives_up(self, since: float) -> bool:
        """Return whether `serve` waits and no rank joined for `join_timeout`. Raises `PeerLost` when closed."""
        if self._is_closing:
            raise PeerLost("the server was closed", do="reconnect on all ranks")
        return time.monotonic() - max(since, self._waits_since) > self._join_timeout


@final
class Hub(Pump):
    """A pump that serves one group over a link to all of its ranks. A rank begins each gather and each step.

    It has memory only for the shares in flight. Gathers also pass through it. In the first one the ranks are compared,
    as in every group. In the second one rank 0 sends its layout, which the server cuts into shares.

    Args:
        link: The server's link, which is closed at the end.
        timeout: Seconds without a finished transfer after which a rank that others wait for counts as late.
        bucket_bytes: Bytes of a share.
        most_bytes: The largest arena of a layout.
        clock: The clock of all seconds here.

    Attributes:
        ranks: The link.
    """

    def __init__(
        self, link: SocketLink, timeout: float, bucket_bytes: int, most_bytes: int, clock: Callable[[], float]
    ) -> None:
        super().__init__(link, clock=clock)
        self.ranks, self._timeout, self._patience = link, timeout, Patience(clock)
        self._bucket_bytes, self._most_bytes = bucket_bytes, most_bytes
        self._hellos: list[Hello] = []
        self._spans: Sequence[Span] = ()
        self._is_gathering = self._is_in_step = False  # whether a rank has begun the gather or the step
        self._next_gather(packed_hello(Hello(bucket_bytes=bucket_bytes, most_bytes=most_bytes)))

    def serve(self, is_closing: Callable[[], bool] = lambda: False) -> None:
        """Serve until all ranks have left between two steps, or until `is_closing` returns True. It is called often.

        Raises:
            PeerLost: A rank that others wait for has left. The error names it.
            DeadlineExceeded: A rank that others wait for was too late. The error names it.
            HandshakeRefused: The ranks differ in a setting that must be the same.
            ProtocolError: A rank sent an invalid message, or one that was damaged on the way.
        """
        try:
            while not (is_closing() or self._is_over()):
                if not self._turn():
                    self._refuse_late()
                    self.ranks.bell.wait(min(self._timeout, LOOK_SECONDS))
        finally:
            self.ranks.close()

    @property
    def step(self) -> int | None:
        """The number of the open step, or None before the ranks were compared."""
        return None if self._all_reduce is None else self._all_reduce.step

    # ---- inside ----

    def _report(self, completion: Completion) -> None:
        super()._report(completion)
        if self._gathered.is_done:
            parts = self._gathered.parts[:-1]
            self._next_gather(b"")
            if not self._hellos:
                self._hellos = hellos_of(parts)
            elif self._all_reduce is None:
                self._join(parts)
        if self._all_reduce is not None and self._all_reduce.is_done:
            self._all_reduce.next_step()
            self._all_reduce.start(*self._spans)
            self._is_in_step = False

    def _begin(self) -> bool:
        """Begin the transfers that are due. Return whether there were any.

        The server receives nothing for a gather or step that no rank has begun, so that a rank may leave before it.
        """
        held = [is_of_gather(tag) for tag in self.ranks.held().values()]
        self._is_gathering = self._is_gathering or True in held
        self._is_in_step = self._is_in_step or (False in held and self._all_reduce is not None)
        transfers = self._gathered.transfers() if self._is_gathering else []
        if self._is_in_step:
            transfers += self._sums.transfers()
        if transfers:
            self.moved_at = self._clock()
        self._make(transfers)
        return bool(transfers)

    def _next_gather(self, own: bytes) -> None:
        self._gather = self._gathered = Gather(self.ranks.rank, self.ranks.world_size, own, self.ranks.hub)
        self._is_gathering = False

    def _join(self, tables: Sequence[bytes]) -> None:
        """Compare the ranks by their first two gathers, as each of them does, and begin the first step."""
        refuse_differing(self._hellos, tables)
        layout, ranks, first = layout_of(0, tables[0]), self.ranks.world_size, self._hellos[0]
        if layout.fingerprint != first.layout:
            what = "rank 0 sent the table of a different layout"
            raise ProtocolError(what, got=layout.fingerprint, expected=first.layout)
        refuse_large(layout, self._most_bytes)
        shares = shares_of(layout, ranks, self._bucket_bytes, owner=ranks)
        self._all_reduce = OrderedAllReduce(ranks, ranks, layout, shares, None, HostKernels(), step=first.step)
        self._spans = layout.spans
        self._all_reduce.start(*self._spans)

    def _is_over(self) -> bool:
        """Return whether all ranks have left."""
        if len(self.ranks.gone()) < self.ranks.world_size:
            return False
        if self._all_reduce is None:
            raise PeerLost("all ranks left before they were compared", do="look at the ranks' own errors")
        if self._is_gathering or self._is_in_step:
            return False  # The next turn raises the error.
        self.ranks.refuse_unsaid()
        return True

    def _refuse_late(self) -> None:
        waited, late = self._patience.waited(self.moved_at), self._late()
        if late is not None and waited > self._timeout:
            raise self._too_late(late, self._timeout)
        if late is not None:
            self._patience.look(waited, self.ranks, lambda: late)

    def _late(self) -> Late | None:
        """Return the ranks that others wait for, or None if no rank waits."""
        if self._is_in_step and (late := self._sums.awaited) is not None:
            ranks, what = [late[0]], f"{late[1]} in step {self.step}"
        elif self._is_gathering:
            ranks, what = self._gathered.awaited, "a gather (end of step or barrier)"
        else:
            return None
        where = "joining" if self._all_reduce is None else f"step {self.step}"
        return Late(ranks, where, f"rank {ranks[0]} is late: others wait for {what}")
