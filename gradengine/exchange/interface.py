"""The interface of an exchange: bind a layout, start the all-reduce of spans, wait for it, all-gather small data.

The sum is elementwise in fp32 and taken in rank order from rank 0's value on, so that its bits depend neither on the
transport, nor on the bucket size, nor on the order of arrival.

An `Exchange` is an opaque handle: users make one by `connect` or `local_group`, give it to an engine, close it, and do
not subclass it. A new transport is a link (`links/`) and its URL in `connect`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from gradengine.arguments import as_float, out_of_range, refuse_other_kind, whole_number
from gradengine.errors import CallerError, HandshakeRefused, NotCopied, ProtocolError, WindowError
from gradengine.exchange.wire import MAX_SMALL_PAYLOAD, Gradient, Sum
from gradengine.kernels.decision import Float64
from gradengine.kernels.host import first_non_finite
from gradengine.kernels.host_sums import squared_sum
from gradengine.layout import GradientLayout, Span

if TYPE_CHECKING:
    from typing_extensions import Self

Float32: TypeAlias = npt.NDArray[np.float32]
GROUP_BYTES = 16  # of a group's random identifier
DEFAULT_BUCKET_BYTES = 1 << 21  # 1 MB: twice the switches between threads, 15 % slower on loopback; 4 MB gains nothing
DEFAULT_TIMEOUT = 300.0  # seconds
DEFAULT_JOIN_TIMEOUT = 60.0


@dataclass(frozen=True)
class NonFiniteValue:
    """A NaN or Inf in one rank's contribution, at an index of the arena."""

    rank: int
    index: int
    value: float


@dataclass(frozen=True)
class Membership:
    """A worker's identity in a step: a half-summed step can only be resumed by the same ranks of the same group.

    `group` is a random identifier, drawn when a step begins; empty before the first group.
    """

    group: bytes = b""
    rank: int = 0
    world_size: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size} in group {self.group[:4].hex()}" if self.group else "nobody"


@dataclass
class Progress:
    """Progress of one step's all-reduce on this worker; kept by the engine, so that a new exchange can resume it."""

    step: int = 0
    summed: int = 0  # leading buckets in backward order that hold the sum over all ranks; the others are still local
    partially_written: bool = False  # whether the next bucket is, by its sum, which the coordinator still has
    bad: list[NonFiniteValue] = field(default_factory=list)
    bucket_bytes: int = 0  # of the buckets that `summed` counts; 0 before the first group
    contributed: int = 0  # leading buckets that this worker contributed to: at least those that are summed
    membership: Membership = Membership()
    carrier: Exchange | None = None  # over links: the exchange that has, or had, spans of this step
    squares: Float64 | None = None  # of each chunk of the partial sums, where the exchange has measured the sums

    @property
    def is_half_summed(self) -> bool:
        """Whether sums have overwritten contributions of this step: it cannot start over."""
        return self.summed > 0 or self.partially_written

    def next_step(self) -> None:
        """The step is over on all ranks."""
        self.restart()
        self.step += 1

    def restart(self) -> None:
        """The step starts over: the arena holds nothing of it."""
        self.summed, self.contributed, self.partially_written, self.bad = 0, 0, False, []
        self.carrier = self.squares = None


@dataclass(frozen=True)
class Bucket:
    """A part of a span that is sent as one message; `start` and `stop` index the arena."""

    span: Span
    start: int
    stop: int


OnReduced: TypeAlias = Callable[[Span, int], None]  # the span is summed up to this arena index


class Exchange(NotCopied, ABC, instead="make one in each process, with connect()"):
    """One rank's all-reduce and all-gather in a process group.

    Attributes:
        rank: This worker's rank, 0..world_size - 1.
        world_size: Workers in the group.
        url: Rank 0's address, or a server's, with the actual port if port 0 was requested; "mpi://" over MPI; None for
            threads of one process, and for a process group of torch.
        copies_shares: Whether `bind` also takes a device's arena, and copies a few shares of it at a time.
    """

    rank: int
    world_size: int
    url: str | None
    copies_shares: bool = False

    @abstractmethod
    def bind(self, layout: GradientLayout, arena: Float32, progress: Progress, on_reduced: OnReduced) -> None:
        """Join the group with a layout and an arena; returns when all ranks have joined.

        Args:
            layout: Must be the same on all ranks.
            arena: Flat fp32 memory of `layout.arena_size`, which is reduced in place. Where `copies_shares`, a
                `DeviceArena` too: what leaves then comes behind what the current stream has to do at its `start`.
            progress: A new one, or that of an exchange that failed, to resume its step.
            on_reduced: Called from any thread after each bucket is reduced, span by span, from each span's start on. An
                exchange that measures the sums itself never calls it, and sets `progress.squares`.

        Raises:
            HandshakeRefused: Another layout (the differing rows are shown), world size, step or token.
            PeerLost: The coordinator or a worker did not join in time.
        """

    @abstractmethod
    def start(self, span: Span) -> None:
        """Start the all-reduce of a span whose local gradients are complete; returns at once.

        Raises:
            WindowError: The span has been started in this step already, or the exchange is not bound.
        """

    @abstractmethod
    def wait(self) -> tuple[NonFiniteValue, ...]:
        """Wait until the whole arena is reduced.

        Returns:
            Non-finite contributions, the same on all ranks: the first of each bucket and rank, at most 64.

        Raises:
            WindowError: The exchange is not bound.
            PeerLost, ProtocolError, DeadlineExceeded: The exchange failed for good; `progress` says how far it came.
        """

    @abstractmethod
    def gather(self, data: bytes) -> list[bytes]:
        """All-gather: every rank's `data`, in rank order, on every rank; at most 16 MiB each.

        Raises:
            CallerError: More than that, or the exchange is not bound.
            PeerLost, ProtocolError, DeadlineExceeded: As `wait`.
        """

    def barrier(self) -> None:
        """Wait until all ranks have called this.

        Raises:
            PeerLost, ProtocolError, DeadlineExceeded: As `wait`.
        """
        self.gather(b"")

    @abstractmethod
    def close(self) -> None:
        """Leave the group; other ranks that still wait for this one fail. May be called twice, also if interrupted."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Outbox:
    """Order of sending: buckets of started spans become ready in backward order, the same on all ranks.

    `buckets` are all of the layout, in backward order; the first `sent` of them need not be sent any more.
    """

    def __init__(self, buckets: Sequence[Bucket], sent: int) -> None:
        self._buckets, self._sent = buckets, sent
        self._started: set[int | str] = set()

    @property
    def is_untouched(self) -> bool:
        """Whether no span has been started."""
        return not self._started

    def start(self, span: Span) -> range:
        """Mark a span as complete: indices of the buckets that can be sent now."""
        refuse_other_kind("span", span, Span)
        if span.key in self._started:
            raise WindowError(f"{span.called} has been started already", do="start each span once in a step")
        self._started.add(span.key)
        first = self._sent
        # All ranks send the same sequence, whatever the order in which spans are started.
        while self._sent < len(self._buckets) and self._buckets[self._sent].span.key in self._started:
            self._sent += 1
        return range(first, self._sent)


def buckets_of(layout: GradientLayout, bucket_bytes: int) -> list[Bucket]:
    """The layout's spans in backward order, split into buckets of at most `bucket_bytes`."""
    size = whole_number("bucket_bytes", bucket_bytes, 4) // 4
    # No bucket crosses spans: a span is sent while backward computes the next one.
    return [
        Bucket(span, start, min(span.stop, start + size))
        for span in layout.spans
        for start in range(span.start, span.stop, size)
    ]


def wire_key(bucket: Bucket) -> tuple[int | str, int, str]:
    """A bucket in message headers: the span's key, the offset in it in elements, and the dtype on the wire."""
    return bucket.span.key, bucket.start - bucket.span.start, "<f4"


def refuse_other_bucket(peer: str, message: Gradient | Sum, payload_bytes: int, step: int, bucket: Bucket) -> None:
    """Raise `ProtocolError` unless the message is of that bucket, and its payload of the bucket's size."""
    expected = (type(message)(step, *wire_key(bucket)), 4 * (bucket.stop - bucket.start))
    if (message, payload_bytes) != expected:
        raise ProtocolError(f"{peer} sent another {message.kind}", got=(message, payload_bytes), expected=expected)


def find_non_finite(rank: int, contribution: Float32, start: int) -> list[NonFiniteValue]:
    """The first NaN or Inf of a contribution that starts at arena index `start`; an empty list without one."""
    # A finite squared sum proves all finite at 0.05 ns an element, half the cost of isfinite().all().
    if np.isfinite(squared_sum(contribution)):
        return []
    index, value = first_non_finite(contribution) or (0, np.nan)
    return [NonFiniteValue(rank, start + index, value)]


def checked_seconds(name: str, seconds: float) -> float:
    """As a float; `CallerError` unless it is a timeout above 0, of at most 1e9 seconds."""
    number = as_float(seconds)
    if not 0 < number <= 1e9:  # also true of NaN
        raise out_of_range(name, seconds, "seconds above 0, at most 1e9")
    return number


def nothing_started(rank: int) -> WindowError:
    """The error for `wait` in a step of which this rank has started no span."""
    return WindowError(f"rank {rank} waits for sums and has started nothing", do="start() every span of the step first")


def set_bucket_bytes(bucket_bytes: int, progress: Progress, rank: int) -> None:
    """Set the bucket size of `progress`; `HandshakeRefused` in the middle of a step with another one."""
    if progress.is_half_summed and progress.bucket_bytes not in {0, bucket_bytes}:
        raise HandshakeRefused(
            f"rank {rank} is in the middle of a step cut into other buckets",
            got=f"bucket_bytes={bucket_bytes}",
            expected=f"bucket_bytes={progress.bucket_bytes}",
            do="reconnect with the same bucket_bytes, or discard() the window on every rank",
        )
    if progress.carrier is not None:
        raise other_way(rank)
    progress.bucket_bytes = bucket_bytes


def other_way(rank: int) -> HandshakeRefused:
    """The error for a step that was begun over a link of another kind."""
    return HandshakeRefused(
        f"rank {rank} is in the middle of a step that was begun over another kind of exchange",
        do="reconnect with the same kind, or discard() the window on every rank",
    )


def refuse_bad_arena(layout: GradientLayout, arena: Float32) -> None:
    """Raise `CallerError` unless the arena is flat contiguous fp32 memory of the layout's size."""
    refuse_other_kind("layout", layout, GradientLayout)
    refuse_other_kind("arena", arena, np.ndarray)
    if arena.shape != (layout.arena_size,) or arena.dtype != np.float32 or not arena.flags.c_contiguous:
        raise CallerError(
            "arena does not fit the layout",
            got=f"{arena.dtype} {arena.shape}",
            expected=f"contiguous float32 ({layout.arena_size},)",
        )


def refuse_long_part(data: bytes) -> None:
    """Raise `CallerError` unless a part of a gather is bytes, and at most 16 MiB."""
    refuse_other_kind("a part of a gather", data, bytes)
    if len(data) > MAX_SMALL_PAYLOAD:
        raise CallerError("too much to gather", got=f"{len(data)} bytes", expected=f"at most {MAX_SMALL_PAYLOAD}")


def not_bound(exchange: str) -> WindowError:
    """The error for a call before `bind`."""
    return WindowError(f"{exchange} is not bound to a layout", do="call bind() first; GradientEngine does")
