"""An exchange: its ranks check that they fit together, then each owner sums its shares for all, over a link.

The sum is elementwise in fp32, in rank order from rank 0's value on. So its bits do not depend on the link, the bucket
size or the order of arrival.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple, TypeAlias, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from gradengine.arguments import checked_seconds, whole_number
from gradengine.errors import CallerError, ExchangeError, PeerLost, WindowError, not_copied
from gradengine.exchange.gather import gathered, packed, refuse_long_part
from gradengine.exchange.hello import Hello, hellos_of, packed_hello, refuse_differing, refuse_large
from gradengine.exchange.links.link import Link
from gradengine.exchange.links.threads import thread_links
from gradengine.exchange.mesh import GRACE_SECONDS, Meeting
from gradengine.exchange.ordered_all_reduce import Find, Float32, OrderedAllReduce
from gradengine.exchange.pump import DEFAULT_JOIN_TIMEOUT, DEFAULT_TIMEOUT, Pump
from gradengine.exchange.shares import MOST_BUCKET_BYTES, shares_of
from gradengine.exchange.torch_group import DeviceCalls
from gradengine.exchange.wire import MAX_SMALL_PAYLOAD
from gradengine.kernels import HostKernels
from gradengine.kernels.cuda_device import DeviceArena
from gradengine.kernels.decision import Float64
from gradengine.layout import GradientLayout, Span

Bytes: TypeAlias = NDArray[np.uint8]
T = TypeVar("T")

DEFAULT_SHARE_BYTES = 1 << 22  # With 2 MB a step between threads takes 1.3 times as long.


class Sums(NamedTuple):
    """The result of a step's sums, except those in the arena. Only the seconds differ between ranks.

    Attributes:
        squares: The squared sum of each chunk of the layout, in the order of its partial sums.
        bad: The first NaN or Inf of each rank's own part, by rank.
        total: Seconds from the start of the first span until the last sum was received.
        waited: Seconds that the step waited for the sums.
    """

    squares: Float64
    bad: list[Find]
    total: float
    waited: float


@final
class Exchange(AbstractContextManager["Exchange"]):
    """One rank's all-reduce and all-gather in a process group, over a link to each other rank, or to a server.

    It is an opaque handle. Users make one by `connect` or `local_group`, pass it to an engine and close it. They do not
    subclass it. A new transport is a link (`links/`) and its URL in `connect`.

    Args:
        link: This rank's link, closed with the exchange, or the meeting that makes it in `bind`.
        url: The attribute `url`.
        timeout: Seconds without any progress after which a waiting rank fails.
        join_timeout: Seconds that `bind` waits for the other ranks.
        bucket_bytes: Bytes of a share, which one rank sums for all. The value of rank 0, or of the server, is used.
        clock: The clock of all seconds here.
        device_calls: The calls of a process group whose ranks may sum on their GPUs.

    Attributes:
        rank: The number of this rank, 0..world_size - 1.
        world_size: Number of ranks in the group.
        url: The address of rank 0 or of the server, with the actual port if port 0 was requested. It is "mpi://" over
            MPI, and None for threads of one process.
        shares_memory: Whether the link may use shared memory. An engine built with this exchange then has its arena
            there.

    Raises:
        CallerError: A time or size is out of range.
    """

    __reduce_ex__ = not_copied("make one in each process, by connect()")

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
        self._bucket_bytes, self._clock = whole_number("bucket_bytes", bucket_bytes, 4, MOST_BUCKET_BYTES), clock
        self._link, self.rank, self.world_size = link, link.rank, link.world_size
        self.url = link.url if isinstance(link, Meeting) else url
        self.shares_memory = isinstance(link, Meeting) and link.shares_memory
        self._calls, self._process = device_calls, os.getpid()
        self._pump: Pump | None = None
        self._all_reduce: OrderedAllReduce | None = None
        self._arena: DeviceArena | None = None  # None for an arena of the host
        self._sums: Sums | None = None  # result of this step's `wait`
        # The answers of this step's `tell`, by `what`. The other ranks do not repeat a gather.
        self._told: dict[str, list[bytes]] = {}
        self._began = 0.0  # time at which the first span was started
        self._failure: ExchangeError | None = None  # error that calls raise from now on

    @property
    def bucket_bytes(self) -> int:
        """The bytes of a share. After `bind` this is the value that the group uses."""
        return self._bucket_bytes

    @property
    def device_calls(self) -> DeviceCalls | None:
        """The calls by which the ranks' GPUs sum, valid after `bind`. None if the exchange sums."""
        return self._calls

    @property
    def link(self) -> str | None:
        """The link, one of "threads", "tcp", "unix", "shared_memory", "mpi", "collectives" and "nccl".

        Over sockets it is None before `bind`.
        """
        if isinstance(self._link, Meeting):
            return None
        if self._all_reduce is not None and self._calls is not None:
            return "nccl"
        is_read_in_place = self._all_reduce is None or self._all_reduce.reads_in_place
        return "unix" if self._link.name == "shared_memory" and not is_read_in_place else self._link.name

    def bind(
        self,
        layout: GradientLayout,
        arena: Float32 | DeviceArena,
        *,
        step: int = 0,
        settings: Mapping[str, str] | None = None,
        replaces: Exchange | None = None,
        sums_by_calls: bool = False,
    ) -> None:
        """Join the group with a layout and an arena, and return when all ranks have joined.

        Args:
            layout: The layout, the same on all ranks.
            arena: Flat fp32 memory of `layout.arena_size` elements, which is reduced in place. Or a device's arena, of
                which a few shares are copied at a time. Each copy runs after the work that was queued on the current
                stream at the `start` of the share's span.
            step: The number of the step that begins, the same on all ranks.
            settings: The engine's settings by name, the same on all ranks.
            replaces: The exchange that reduced this arena before. It is closed. If it holds sums of the open step on
                any rank, that step's window is lost.
            sums_by_calls: Whether this rank's GPU can sum by `device_calls`. If this holds for all ranks, the exchange
                only gathers.

        Raises:
            HandshakeRefused: The ranks differ in layout (the rows are shown), settings, world size, step or secret, or
                the window is lost.
            PeerLost, DeadlineExceeded: The server or a rank did not join in time.
        """
        self._refuse_ended()
        if self._pump is not None:
            raise CallerError(f"rank {self.rank} is bound already", do="make a new group for each engine")
        if replaces is not None:
            replaces.close()  # nothing else may touch the sums that it has
        hello = Hello(layout.fingerprint, self._bucket_bytes, step, settings={**(settings or {})})._replace(
            sums_by_calls=sums_by_calls and self._calls is not None,
            holds_sums=replaces is not None and replaces.holds_sums,
        )
        self._to_the_end(self._join, layout, arena, hello)

    @property
    def holds_sums(self) -> bool:
        """Whether the arena may hold sums of the open step, whole or in part, instead of this rank's own part."""
        return self._all_reduce is not None and self._all_reduce.holds_sums

    @property
    def started(self) -> set[int | str]:
        """The keys of the spans that were started in this step."""
        return set() if self._all_reduce is None else self._all_reduce.started

    def start(self, *spans: Span, in_background: bool = True) -> None:
        """Start the all-reduce of spans whose local gradients are complete, without waiting for it.

        Args:
            spans: Spans that were not started in this step.
            in_background: Whether a thread sends them from now on. Otherwise `wait` does, or a thread that was started
                for earlier spans.

        Raises:
            WindowError: A span was started in this step already, or the exchange is not bound. No span was started.
        """
        with suppress(ExchangeError):  # `wait` raises this error.
            pump, all_reduce = self._bound()
            if spans:
                self._to_the_end(self._send, pump, all_reduce, spans, in_background)

    def wait(self) -> Sums:
        """Wait until the whole arena is reduced, and return the result. Further calls in a step return the same object.

        Raises:
            WindowError: The exchange is not bound, or no span was started.
            PeerLost, ProtocolError, DeadlineExceeded: The exchange failed and cannot be used again.
        """
        if self._sums is not None:
            return self._sums
        pump, all_reduce = self._bound()
        if not all_reduce.started:
            what = f"rank {self.rank} waits for sums and has started nothing"
            raise WindowError(what, do="start() every span of the step first")
        waits = self._clock()
        self._to_the_end(pump.wait, self._timeout)
        total, waited = max(0.0, pump.moved_at - self._began), self._clock() - waits
        self._sums = Sums(all_reduce.squares, all_reduce.bad, total, waited)
        return self._sums

    def begin(self, step: int) -> None:
        """Begin a step with this number. The last step is over on all ranks, or this rank drops its part of it."""
        self._sums, self._told = None, {}
        if (all_reduce := self._all_reduce) is None or (pump := self._pump) is None:
            return
        if self._failure is not None:
            all_reduce.drop()
        elif all_reduce.started:
            with pump.lock:
                all_reduce.next_step()
        all_reduce.step = step

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return every rank's `data`, in rank order, on every rank. Each rank passes at most 1 MiB.

        Raises:
            CallerError: The data are longer than 1 MiB, or the exchange is not bound.
            PeerLost, ProtocolError, DeadlineExceeded: As `wait`.
        """
        pump, _ = self._bound()
        refuse_long_part(data)
        return self._to_the_end(pump.gather, data, self._timeout)[: self.world_size]

    def broadcast(self, arrays: Iterable[Bytes]) -> None:
        """Copy rank 0's bytes into the other ranks' arrays, in pieces of 1 MiB that small arrays share.

        Args:
            arrays: Flat arrays of bytes, of the same number and sizes on all ranks. Rank 0's arrays are read. On the
                other ranks an array is filled before the iterator is advanced, so it can be used and freed there.

        Raises:
            PeerLost, ProtocolError, DeadlineExceeded: As `wait`. Some arrays are filled, and the exchange is closed.
        """
        self._to_the_end(self._send_pieces if self.rank == 0 else self._receive_pieces, arrays)

    def tell(self, what: str, facts: object) -> list[Any]:
        """Return every rank's facts, in rank order. A second call in a step with the same `what` repeats the answer.

        Raises:
            CallerError: The facts have a type that cannot be sent, or are too long. Nothing was sent.
            ExchangeError: A rank's `what` differs from rank 0's.
            PeerLost, ProtocolError, DeadlineExceeded: As `wait`.
        """
        mine = packed(what, facts)
        if what not in self._told:
            self._told[what] = self.all_gather(mine)
        return gathered(self._told[what])

    def barrier(self) -> None:
        """Wait until all ranks have called this.

        Raises:
            ExchangeError: A rank is in a different call.
            PeerLost, ProtocolError, DeadlineExceeded: As `wait`.
        """
        gathered(self.all_gather(packed("barrier", None)))

    def close(self) -> None:
        """Leave the group. Ranks that still wait for this one fail. May be called again, also after an interrupt."""
        if os.getpid() != self._process:  # The parent process owns the group.
            return
        way_on = (Link if isinstance(self._link, Meeting) else self._link).way_on
        what, do = f"rank {self.rank} left the group", f"the window is kept: {way_on}, or discard() it"
        self._failure = self._failure or PeerLost(what, do=do)
        (self._pump or self._link).close()

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- inside ----

    def _bound(self) -> tuple[Pump, OrderedAllReduce]:
        self._refuse_ended()
        if self._pump is None or self._all_reduce is None:
            what = f"rank {self.rank}'s exchange is not bound to a layout"
            raise WindowError(what, do="call bind() first; GradientEngine does")
        return self._pump, self._all_reduce

    def _refuse_ended(self) -> None:
        if os.getpid() != self._process:
            what = f"the exchange of rank {self.rank} belongs to the parent of this forked process"
            raise CallerError(what, do="connect in the process that steps, after the fork")
        if self._failure is not None:
            raise self._failure

    def _send(self, pump: Pump, all_reduce: OrderedAllReduce, spans: Sequence[Span], in_background: bool) -> None:
        if not all_reduce.started:
            self._began = self._clock()
        with pump.lock:
            all_reduce.start(*spans)
            if self._arena is not None:
                for span in spans:
                    self._arena.note(span.key)
            pump.wake(in_background=in_background)

    def _send_pieces(self, arrays: Iterable[Bytes]) -> None:
        piece = bytearray()
        for array in arrays:
            sent = 0
            while sent < array.size:
                part = array[sent : sent + MAX_SMALL_PAYLOAD - len(piece)]
                piece += part.data
                sent += part.size
                if len(piece) == MAX_SMALL_PAYLOAD:
                    self.all_gather(bytes(piece))
                    piece.clear()
        if piece:
            self.all_gather(bytes(piece))

    def _receive_pieces(self, arrays: Iterable[Bytes]) -> None:
        piece = np.empty(0, np.uint8)
        for array in arrays:
            filled = 0
            while filled < array.size:
                if not piece.size:
                    piece = np.frombuffer(self.all_gather(b"")[0], np.uint8)
                part, piece = np.split(piece, [array.size - filled])
                array[filled : filled + part.size] = part
                filled += part.size

    def _to_the_end(self, call: Callable[..., T], *given: object) -> T:
        """Make a call and return its value. If it fails or is interrupted, close the exchange, as ranks would drift."""
        try:
            return call(*given)
        except WindowError:
            raise
        except BaseException as fault:
            if isinstance(fault, ExchangeError):
                self._failure = self._failure or fault
            self.close()
            raise

    def _join(self, layout: GradientLayout, arena: Float32 | DeviceArena, hello: Hello) -> None:
        if isinstance(self._link, Meeting):
            self._link = self._link.link(self._join_timeout, self._clock)
        link, self._pump = self._link, Pump(self._link, clock=self._clock)
        self._arena = arena if isinstance(arena, DeviceArena) else None
        lends = link.lends(None if isinstance(arena, DeviceArena) else arena)
        hellos = self._meet(self._pump, layout, hello._replace(lends=lends), link.hub)
        self._calls = self._calls if all(each.sums_by_calls for each in hellos) else None
        # A server's share is a whole bucket. In a mesh each bucket is cut into one share for every rank.
        size = self._bucket_bytes * (self.world_size if link.hub is None else 1)
        shares = () if self._calls else shares_of(layout, self.world_size, size, owner=link.hub)
        self._all_reduce = OrderedAllReduce(
            self.rank, self.world_size, layout, shares, arena, HostKernels(),
            step=hello.step, reads_in_place=all(each.lends for each in hellos),
        )  # fmt: skip
        self._pump.run(self._all_reduce, self._arena)

    def _meet(self, pump: Pump, layout: GradientLayout, hello: Hello, hub: int | None) -> list[Hello]:
        """Return every rank's hello. Raises an error if the ranks do not fit together."""
        hellos = hellos_of(pump.gather(packed_hello(hello), self._join_timeout, "joining"), hub)
        self._bucket_bytes = hellos[hub or 0].bucket_bytes
        tables: list[bytes] = []
        if hub is not None:
            refuse_large(layout, hellos.pop().most_bytes)
            self._timeout += GRACE_SECONDS
        differ = any(each.layout != hellos[0].layout for each in hellos)
        if differ or hub is not None:  # A server cuts shares by rank 0's table.
            table = layout.table() if differ or self.rank == 0 else b""
            tables = pump.gather(table if len(table) <= MAX_SMALL_PAYLOAD else b"", self._join_timeout, "joining")
        refuse_differing(hellos, tables)
        return hellos


def local_group(
    world_size: int,
    *,
    timeout: float = DEFAULT_TIMEOUT,
    join_timeout: float = DEFAULT_JOIN_TIMEOUT,
    bucket_bytes: int = DEFAULT_SHARE_BYTES,
) -> list[Exchange]:
    """Return one exchange for each of `world_size` threads of this process, in rank order.

    Args:
        world_size: Number of threads. Each uses its own exchange.
        timeout: Seconds without any progress after which waiting ranks fail.
        join_timeout: Seconds that the first rank to bind waits for the others.
        bucket_bytes: Bytes that a rank sums at a time. It changes no bit of the result.

    Raises:
        CallerError: The world size is not in 1..65536, or a time or size is out of range.

    Example:
        >>> [exchange.rank for exchange in local_group(3)]
        [0, 1, 2]
    """
    links = thread_links(world_size)
    return [Exchange(link, timeout=timeout, join_timeout=join_timeout, bucket_bytes=bucket_bytes) for link in links]
