"""An exchange: its ranks check that they fit together, then each owner sums its shares for all, over a link.

The sum is elementwise in fp32 and taken in rank order from rank 0's value on, so that its bits depend neither on the
link, nor on the bucket size, nor on the order of arrival.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar, final

import msgpack

from gradengine.arguments import whole_number
from gradengine.errors import (
    CallerError,
    DeadlineExceeded,
    ExchangeError,
    Fixed,
    NotCopied,
    PeerLost,
    WindowError,
    refuses_renamed,
)
from gradengine.exchange.addresses import Address
from gradengine.exchange.comparison import (
    Hello,
    Membership,
    answers_of,
    behind_of,
    brought_up,
    group_to_resume,
    hellos_of,
    packed,
    refuse_differing,
    refuse_lost_sums,
    refuse_other_cut,
    server_hello_of,
)
from gradengine.exchange.device_calls import DeviceCalls
from gradengine.exchange.environment import job_or_launchers
from gradengine.exchange.interface import (
    DEFAULT_JOIN_TIMEOUT,
    DEFAULT_TIMEOUT,
    GROUP_BYTES,
    Float32,
    NonFiniteValue,
    checked_seconds,
    refuse_bad_arena,
    refuse_long_part,
)
from gradengine.exchange.links.link import Link
from gradengine.exchange.links.threads import thread_links
from gradengine.exchange.mesh import Meeting
from gradengine.exchange.ordered_all_reduce import OrderedAllReduce
from gradengine.exchange.pump import Pump
from gradengine.exchange.rendezvous import MPI_URL
from gradengine.exchange.shares import refuse_started, shares_of
from gradengine.exchange.tls import certificates_of
from gradengine.exchange.wire import MAX_SMALL_PAYLOAD
from gradengine.kernels import HostKernels
from gradengine.kernels.cuda_device import DeviceArena
from gradengine.kernels.decision import Float64
from gradengine.layout import GradientLayout, Span

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

DEFAULT_SHARE_BYTES = 1 << 22  # 2 MB: between threads a step takes 1.3 times as long
_GRACE_SECONDS = 5.0  # a rank waits so much longer than its server, which knows which rank is late


class Seconds(NamedTuple):
    """How long a step's sums took.

    Attributes:
        total: From the start of the first span until the last sum was received.
        waited: How long the step waited for the sums.
    """

    total: float = 0.0
    waited: float = 0.0


class Kept(NamedTuple):
    """What all ranks told each other in a step, for a rank that has lost it."""

    step: int
    answers: Mapping[str, Sequence[bytes]]


@dataclass
class Progress:
    """Progress of one step's all-reduce on this worker; kept by the engine, so that a new exchange can resume it."""

    step: int = 0
    bad: list[NonFiniteValue] = field(default_factory=list)
    bucket_bytes: int = 0  # by which the step is cut into shares; 0 before the first group
    membership: Membership = field(default_factory=Membership)
    carrier: Exchange | None = None  # the exchange that has, or had, spans of this step
    squares: Float64 | None = None  # of each chunk of the partial sums, once the exchange has measured the sums
    took: Seconds = field(default_factory=Seconds)
    has_told: bool = False  # the others something about this step, after all its sums
    kept: Kept = field(default_factory=lambda: Kept(-1, {}))
    answers: dict[str, list[bytes]] | None = None  # to what it told, if the others have gone on to the next step
    may_sum_by_calls: bool = False  # of a process group, on the ranks' GPUs; which is done where all ranks may
    calls: DeviceCalls | None = None  # by which they do

    def kept_of_before(self) -> bytes:
        """What all ranks told each other in the step before, as bytes; empty if it is unknown, or too long to send."""
        if self.kept.step != self.step - 1:
            return b""
        data: bytes = msgpack.packb(self.kept.answers)
        return data if len(data) <= MAX_SMALL_PAYLOAD else b""

    def next_step(self) -> None:
        """Begin the next step: this one is over on all ranks."""
        self.restart()
        self.step += 1

    def restart(self) -> None:
        """Start the step over: the arena holds nothing of it."""
        self.bad, self.carrier, self.squares, self.took = [], None, None, Seconds()
        self.has_told, self.answers = False, None


class Exchange(Fixed, NotCopied, instead="make one in each process, with connect()"):
    """One rank's all-reduce and all-gather in a process group, over a link to each other rank, or to a server.

    An opaque handle: users make one by `connect` or `local_group`, give it to an engine, close it, and do not subclass
    it. A new transport is a link (`links/`) and its URL in `connect`.

    Args:
        link: This rank's link, closed with the exchange; or the meeting that makes it in `bind`.
        url: The attribute `url`.
        timeout: Seconds without any progress after which a waiting rank fails.
        join_timeout: Seconds for which `bind` waits for the other ranks.
        bucket_bytes: Bytes of a share, which one rank sums for all; rank 0's value, or the server's, is used.
        clock: The clock of all seconds here.
        device_calls: The calls of a process group whose ranks may sum on their GPUs.

    Attributes:
        rank: This worker's rank, 0..world_size - 1.
        world_size: Workers in the group.
        url: Rank 0's address, or a server's, with the actual port if port 0 was requested; "mpi://" over MPI; None for
            threads of one process.
        shares_memory: Whether the link may be over shared memory: then an engine built with this exchange has its
            arena there.

    Raises:
        CallerError: A time or size is out of range.
    """

    def __init__(
        self,
        link: Link | Meeting,
        *,
        url: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        join_timeout: float = DEFAULT_JOIN_TIMEOUT,
        bucket_bytes: int = DEFAULT_SHARE_BYTES,
        clock: Callable[[], float] = time.monotonic,
        device_calls: DeviceCalls | None = None,
    ) -> None:
        self._timeout = checked_seconds("timeout", timeout)
        self._join_timeout = checked_seconds("join_timeout", join_timeout)
        self._bucket_bytes, self._clock = whole_number("bucket_bytes", bucket_bytes, 4), clock
        self._link, self.rank, self.world_size = link, link.rank, link.world_size
        self.url = link.url if isinstance(link, Meeting) else url
        self.shares_memory = isinstance(link, Meeting) and link.shares_memory
        self._calls = device_calls
        self._pump: Pump | None = None
        self._all_reduce: OrderedAllReduce | None = None
        self._arena: DeviceArena | None = None  # where it is not the host's
        self._progress = Progress()
        self._started: set[int | str] = set()  # keys of the spans of this step
        self._began = 0.0  # when the first of them was started
        self._failure: BaseException | None = None  # what is raised from now on
        self._process = os.getpid()

    @property
    def link(self) -> str | None:
        """The link, "threads", "tcp", "unix", "shared_memory", "mpi" or "nccl"; over sockets None before `bind`."""
        if isinstance(self._link, Meeting):
            return None
        if self._progress.calls is not None:
            return "nccl"
        is_read_in_place = self._all_reduce is None or self._all_reduce.reads_in_place
        return "unix" if self._link.name == "shared_memory" and not is_read_in_place else self._link.name

    def bind(self, layout: GradientLayout, arena: Float32 | DeviceArena, progress: Progress) -> None:
        """Join the group with a layout and an arena; returns when all ranks have joined.

        Args:
            layout: The layout, the same on all ranks.
            arena: Flat fp32 memory of `layout.arena_size`, which is reduced in place; or a device's arena, a few
                shares of which are copied at a time, each after the work that was queued on the current stream at its
                span's `start`.
            progress: A new one, or that of an exchange that failed, to resume its step. If it has `calls` then, this
                exchange does not sum: it only gathers.

        Raises:
            HandshakeRefused: The ranks differ in layout (the rows are shown), world size, step or secret.
            PeerLost: The server or a worker did not join in time.
        """
        if not isinstance(arena, DeviceArena):
            refuse_bad_arena(layout, arena)
        self._refuse_forked()
        if self._pump is not None:
            raise CallerError(f"rank {self.rank} is bound already", do="make a new group for another engine")
        self._refuse_failed()
        if progress.carrier is not None:
            progress.carrier.close()  # nothing else may touch the sums that it has
        self._calls, progress.calls = self._calls if progress.may_sum_by_calls else None, None
        self._to_the_end(lambda: self._join(layout, arena, progress))
        self._progress = progress
        self._arena = arena if isinstance(arena, DeviceArena) else None

    def start(self, *spans: Span, in_background: bool = True) -> None:
        """Start the all-reduce of spans whose local gradients are complete; returns at once.

        Args:
            spans: Spans that were not started in this step.
            in_background: Let a thread send them from now on; else `wait` sends them, or a thread started for others.

        Raises:
            WindowError: A span was started in this step already, or the exchange is not bound; no span was started.
        """
        pump, all_reduce = self._bound()
        refuse_started(spans, lambda span: span.key in self._started)
        if not spans:
            return  # the step is begun by none
        self._began = self._began if self._started else self._clock()
        self._started.update(span.key for span in spans)
        with contextlib.suppress(ExchangeError):  # `wait` raises it
            self._refuse_failed()
            self._follow(pump, all_reduce)
            self._progress.carrier = self
            new = [span for span in spans if not all_reduce.is_started(span)]  # others over an exchange that was lost
            if self._arena is not None:
                for span in new:
                    self._arena.note(span.key)
            self._to_the_end(lambda: pump.start(*new, in_background=in_background))

    def wait(self) -> tuple[NonFiniteValue, ...]:
        """Wait until the whole arena is reduced; then `progress.squares` are the squared sums of its chunks.

        Returns:
            Non-finite contributions, the same on all ranks: the first of each rank, by rank.

        Raises:
            WindowError: The exchange is not bound.
            PeerLost, ProtocolError, DeadlineExceeded: The exchange failed for good; `progress` has what is done.
        """
        pump, all_reduce = self._bound()
        self._refuse_failed()
        if not self._started:
            what = f"rank {self.rank} waits for sums and has started nothing"
            raise WindowError(what, do="start() every span of the step first")
        waits = self._clock()
        self._to_the_end(lambda: pump.wait(self._timeout))
        self._started = set()
        self._progress.squares = all_reduce.squares
        self._progress.took = Seconds(max(0.0, pump.moved_at - self._began), self._clock() - waits)
        return tuple(all_reduce.bad)

    def all_gather(self, data: bytes) -> list[bytes]:
        """All-gather: every rank's `data`, in rank order, on every rank; at most 16 MiB each.

        Raises:
            CallerError: The data are longer than 16 MiB, or the exchange is not bound.
            PeerLost, ProtocolError, DeadlineExceeded: As `wait`.
        """
        pump, all_reduce = self._bound()
        refuse_long_part(data)
        self._refuse_failed()
        self._follow(pump, all_reduce)  # shares of a new step that another rank has sent precede its part here
        return self._to_the_end(lambda: pump.gather(data, self._timeout))[: self.world_size]

    def barrier(self) -> None:
        """Wait until all ranks have called this.

        Raises:
            PeerLost, ProtocolError, DeadlineExceeded: As `wait`.
        """
        self.all_gather(b"")

    def close(self) -> None:
        """Leave the group; other ranks that still wait for this one fail. May be called twice, also if interrupted."""
        if os.getpid() != self._process:  # the group is the parent's
            return
        way_on = (Link if isinstance(self._link, Meeting) else self._link).way_on
        what, do = f"rank {self.rank} left the group", f"the window is kept: {way_on}, or discard() it"
        self._failure = self._failure or PeerLost(what, do=do)
        (self._pump or self._link).close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- inside ----

    def _bound(self) -> tuple[Pump, OrderedAllReduce]:
        self._refuse_forked()
        if self._pump is None or self._all_reduce is None:
            self._refuse_failed()
            what = f"rank {self.rank}'s exchange is not bound to a layout"
            raise WindowError(what, do="call bind() first; GradientEngine does")
        return self._pump, self._all_reduce

    def _refuse_forked(self) -> None:
        if os.getpid() != self._process:
            what = f"the exchange of rank {self.rank} is of the process that this one was forked from"
            raise CallerError(what, do="connect in the process that steps, after the fork")

    def _refuse_failed(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _follow(self, pump: Pump, all_reduce: OrderedAllReduce) -> None:
        """Begin the next step if the engine has begun it; its number is the engine's, which may be a loaded one."""
        if self._progress.carrier is not self and all_reduce.is_begun:
            self._to_the_end(pump.next_step)
        all_reduce.step = self._progress.step

    def _to_the_end(self, call: Callable[[], T]) -> T:
        """Make a call and return its value; if it is interrupted close the exchange, as its ranks would drift apart."""
        try:
            return call()
        except WindowError:
            raise
        except ExchangeError as fault:
            self._failure = self._failure or fault
            self.close()
            raise self._failure from None
        except BaseException:
            self.close()
            raise

    def _join(self, layout: GradientLayout, arena: Float32 | DeviceArena, progress: Progress) -> None:
        if isinstance(self._link, Meeting):
            self._link = self._link.link(self._join_timeout, self._clock)
        link, self._pump = self._link, Pump(self._link, clock=self._clock)
        hellos, bucket_bytes, answers = self._meet(self._pump, layout, arena, progress, link)
        reads_in_place = all(hello.lends for hello in hellos)
        progress.calls = self._calls if all(hello.sums_by_calls for hello in hellos) else None
        group = group_to_resume(hellos)
        if link.hub is not None:
            self._timeout += _GRACE_SECONDS
            refuse_lost_sums(hellos)
        elif group:
            refuse_other_cut(hellos, bucket_bytes)
        carrier = progress.carrier if answers is None else None
        all_reduce = carrier._all_reduce if group and carrier is not None else None
        if all_reduce is None:
            # A server's share is a whole bucket; of each bucket of a mesh every rank has one.
            size = bucket_bytes * (self.world_size if link.hub is None else 1)
            shares = () if progress.calls else shares_of(layout, self.world_size, size, owner=link.hub)
            all_reduce = OrderedAllReduce(
                self.rank, self.world_size, layout, shares, arena, HostKernels(),
                step=hellos[0].step, reads_in_place=reads_in_place,
            )  # fmt: skip
        if group:
            all_reduce.resume([hello.frontier for hello in hellos], reads_in_place=reads_in_place)
        progress.membership = Membership(group or hellos[0].nonce, self.rank, self.world_size)
        progress.bucket_bytes = bucket_bytes
        progress.answers = answers
        if answers is None:  # else the arena still holds the step that the old carrier knows
            progress.carrier = self if group else None
        self._all_reduce = all_reduce
        self._pump.run(all_reduce, arena if isinstance(arena, DeviceArena) else None)

    def _meet(
        self, pump: Pump, layout: GradientLayout, arena: Float32 | DeviceArena, progress: Progress, link: Link
    ) -> tuple[list[Hello], int, dict[str, list[bytes]] | None]:
        """Every rank's hello, the bytes of a share, and what a rank that is behind misses; else None.

        Raises an error if the ranks do not fit together.
        """
        answers = None
        try:
            told = pump.gather(packed(self._hello(layout, arena, progress, link)), self._join_timeout, "joining")
            hellos, bucket_bytes = hellos_of(told[: self.world_size])
            if link.hub is not None:
                bucket_bytes = server_hello_of(told[-1], layout).bucket_bytes
            behind, keeper = behind_of(hellos)
            if behind:
                kept = progress.kept_of_before() if self.rank == keeper else b""
                data = pump.gather(kept, self._join_timeout, "joining")[keeper]
                answers = answers_of(keeper, data, self.world_size) if self.rank in behind else None
                hellos = brought_up(hellos, behind)
            differ = any(hello.layout != hellos[0].layout for hello in hellos)
            tables: list[bytes] = []
            if differ or link.hub is not None:  # a server cuts by rank 0's table
                table = layout.table() if differ or self.rank == 0 else b""
                tables = pump.gather(table, self._join_timeout, "joining")
        except DeadlineExceeded as late:
            raise PeerLost(late.what, got=late.got, do="start all ranks") from None
        refuse_differing(hellos, tables[: self.world_size], can_rejoin=self.url != MPI_URL)
        return hellos, bucket_bytes, answers

    def _hello(self, layout: GradientLayout, arena: Float32 | DeviceArena, progress: Progress, link: Link) -> Hello:
        membership = progress.membership
        all_reduce = None if progress.carrier is None else progress.carrier._all_reduce
        is_other = all_reduce is not None and all_reduce.is_served != (link.hub is not None)
        return Hello(
            layout=layout.fingerprint,
            bucket_bytes=self._bucket_bytes,
            step=progress.step,
            lends=link.lends(None if isinstance(arena, DeviceArena) else arena),
            sums_by_calls=self._calls is not None,
            is_over_another_kind=is_other,
            nonce=secrets.token_bytes(GROUP_BYTES),
            group=membership.group,
            group_rank=membership.rank,
            group_size=membership.world_size,
            cut=progress.bucket_bytes,
            may_hold_sums=all_reduce is not None and all_reduce.may_hold_sums,
            has_told=progress.has_told,
            has_answers=bool(progress.kept_of_before()),
            frontier=b"" if all_reduce is None else all_reduce.frontier(),
        )


@final
class WorkerClient(Exchange):
    """The exchange of a worker whose group has a `GradientServer`.

    Args:
        address: The server's address: (host, port), or the path of a Unix socket.
        rank: This worker's rank, 0..world_size - 1.
        world_size: Workers in the group.
        secret: The group's secret.
        job: As for `connect`, like timeout, join_timeout and tls.

    Raises:
        CallerError: The rank is out of range, the job's name is too long or not printable, or a file of TLS cannot be
            used.
    """

    @refuses_renamed
    def __init__(
        self,
        address: Address,
        rank: int,
        world_size: int,
        *,
        secret: str | None = None,
        job: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        join_timeout: float = DEFAULT_JOIN_TIMEOUT,
        tls: str | os.PathLike[str] | None = None,
    ) -> None:
        job, certificates = job_or_launchers(job), certificates_of(tls)
        meeting = Meeting(address, rank, world_size, secret=secret, job=job, is_served=True, tls=certificates)
        super().__init__(meeting, timeout=timeout, join_timeout=join_timeout)


def local_group(
    world_size: int,
    *,
    timeout: float = DEFAULT_TIMEOUT,
    join_timeout: float = DEFAULT_JOIN_TIMEOUT,
    bucket_bytes: int = DEFAULT_SHARE_BYTES,
) -> list[Exchange]:
    """Make one exchange for each of `world_size` threads of this process; returns them in rank order.

    Args:
        world_size: Number of threads; each uses its own exchange.
        timeout: Seconds without any progress after which waiting ranks fail.
        join_timeout: Seconds for which the first rank to bind waits for the others.
        bucket_bytes: Bytes that a rank sums at a time; changes no bit of the result.

    Raises:
        CallerError: The world size is not in 1..65536, or a time or size is out of range.

    Example:
        >>> [exchange.rank for exchange in local_group(3)]
        [0, 1, 2]
    """
    return [
        Exchange(link, timeout=timeout, join_timeout=join_timeout, bucket_bytes=bucket_bytes)
        for link in thread_links(world_size)
    ]
