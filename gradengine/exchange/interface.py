"""The sum over workers, as one interface: bind a layout, start spans, wait for their sums, gather small facts.

The sum is elementwise in fp32, started from rank 0's value and taken in rank order, so that its bits depend neither on
the transport, nor on the bucket size, nor on who arrives first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, NoReturn, ParamSpec, Protocol, SupportsIndex, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from gradengine.arguments import as_float, out_of_range, refuse_other_kind, whole_number
from gradengine.errors import CallerError, GradientError, HandshakeRefused, WindowError, not_copied
from gradengine.exchange.wire import MAX_SMALL_PAYLOAD
from gradengine.kernels.host import first_non_finite, squared_sum
from gradengine.layout import GradientLayout, Span

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "DEFAULT_BUCKET_BYTES",
    "GROUP_BYTES",
    "Arena",
    "Bucket",
    "Exchange",
    "Membership",
    "NonFiniteValue",
    "OnReduced",
    "Outbox",
    "Progress",
    "again_if_interrupted",
    "buckets_of",
    "closing_if_interrupted",
]

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
Arena: TypeAlias = npt.NDArray[np.float32]
GROUP_BYTES = 16  # of a group's random name
MAX_WORLD_SIZE = 1 << 16
DEFAULT_BUCKET_BYTES = 1 << 21  # at 1 MB threads hand over twice as often: 15 % slower on loopback; 4 MB gains nothing


@dataclass(frozen=True)
class NonFiniteValue:
    """A NaN or Inf in one rank's contribution, at an index of the arena."""

    rank: int
    index: int
    value: float


@dataclass(frozen=True)
class Membership:
    """As whom a worker takes part in a step: a step that is half summed goes on with the same ranks of the same group.

    Attributes:
        group: The group's random name, dealt when it opened with nothing summed; empty before the first group.
        rank: This worker in it.
        world_size: Workers in it.
    """

    group: bytes = b""
    rank: int = 0
    world_size: int = 0

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size} in group {self.group[:4].hex()}" if self.group else "nobody"


@dataclass
class Progress:
    """How far the exchange of one step has come on this worker; kept by the engine, so that a new exchange goes on.

    Attributes:
        step: Counted from 0.
        summed: Leading buckets of the backward order that hold the sum of all ranks; the others are still local.
        partially_written: The next bucket is half overwritten by its sum, which the coordinator still has.
        contributed: Leading buckets to which this worker has contributed: at least those that are summed.
        bad: What the sums so far had to take that was not finite.
        bucket_bytes: The size of the buckets that `summed` counts; 0 before the first group.
        membership: As whom this worker takes part in the step.
    """

    step: int = 0
    summed: int = 0
    partially_written: bool = False
    bad: list[NonFiniteValue] = field(default_factory=list)
    bucket_bytes: int = 0
    contributed: int = 0
    membership: Membership = Membership()

    @property
    def is_half_summed(self) -> bool:
        """Whether contributions of this step have been overwritten by sums: it cannot begin anew."""
        return self.summed > 0 or self.partially_written

    def next_step(self) -> None:
        """The step is over on all ranks."""
        self.restart()
        self.step += 1

    def restart(self) -> None:
        """The step begins anew: the arena holds nothing of it."""
        self.summed, self.contributed, self.partially_written, self.bad = 0, 0, False, []


@dataclass(frozen=True)
class Bucket:
    """A piece of a span that travels as one message; `start` and `stop` index the arena."""

    span: Span
    start: int
    stop: int


OnReduced: TypeAlias = Callable[[Span, int], None]  # up to this arena index the span is summed


class _Closing(Protocol):
    def close(self) -> None: ...


ClosingT = TypeVar("ClosingT", bound=_Closing)


def closing_if_interrupted(
    method: Callable[Concatenate[ClosingT, Arguments], Answer],
) -> Callable[Concatenate[ClosingT, Arguments], Answer]:
    """The method, but half done, by Ctrl-C or another error than ours, it closes what it is a method of.

    Of a message or a sum that is half handed over nobody could say what the other ranks have of it: they are told that
    this one has left. What the method returns is the caller's, or the exchange is closed: a `with` could not promise
    that, as an interrupt may come in its `__exit__`.
    """

    @wraps(method)
    def whole(self: ClosingT, /, *arguments: Arguments.args, **named: Arguments.kwargs) -> Answer:
        try:
            return method(self, *arguments, **named)
        except GradientError:
            raise
        except BaseException:
            self.close()
            raise

    return whole


def again_if_interrupted(method: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """The method, but interrupted it is done again before the interrupt goes on: others wait for what it tells them."""

    @wraps(method)
    def whole(*arguments: Arguments.args, **named: Arguments.kwargs) -> None:
        try:
            method(*arguments, **named)
        except GradientError:
            raise
        except BaseException:
            method(*arguments, **named)
            raise

    return whole


class Exchange(ABC):
    """One worker's end of a group of `world_size` workers.

    Attributes:
        rank: This worker, 0..world_size - 1, as given by its user.
        world_size: Workers in the group.
        url: Where the group's coordinator is reached; None for threads of one process. With port 0 asked for, the
            port that was given is here.
    """

    rank: int
    world_size: int
    url: str | None

    @abstractmethod
    def bind(self, layout: GradientLayout, arena: Arena, progress: Progress, on_reduced: OnReduced) -> None:
        """Join the group with a layout and the arena that holds it; returns when all ranks have joined.

        Args:
            layout: Must be the same on all ranks.
            arena: Flat fp32 memory of `layout.arena_size`; sums land in it.
            progress: Where the step stands; a fresh one, or the one of an exchange that failed.
            on_reduced: Called from any thread as sums land, span by span and from each span's start to its end.

        Raises:
            HandshakeRefused: Another layout (the differing rows are shown), world size, step or token.
            PeerLost: The coordinator, or a worker, did not come in time.
        """

    @abstractmethod
    def start(self, span: Span) -> None:
        """This worker's contribution to `span` is complete and may travel; returns at once.

        Raises:
            WindowError: The span has been started in this step already, or the exchange is not bound.
        """

    @abstractmethod
    def wait(self) -> tuple[NonFiniteValue, ...]:
        """Wait until the whole arena holds sums. Interrupted, as by Ctrl-C, this and its kin close the exchange.

        Returns:
            What was not finite in the contributions, the same on all ranks: of each bucket and rank the first, 64 in
            all.

        Raises:
            WindowError: The exchange is not bound.
            PeerLost, ProtocolError, DeadlineExceeded: The exchange failed and is over; `progress` says how far it came.
        """

    @abstractmethod
    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's `data`, in rank order, on every rank; at most 16 MiB each.

        Raises:
            CallerError: More than that, or the exchange is not bound.
            PeerLost, ProtocolError, DeadlineExceeded: As `wait`.
        """

    def barrier(self) -> None:
        """Return when all ranks have come here.

        Raises:
            PeerLost, ProtocolError, DeadlineExceeded: As `wait`.
        """
        self.gather(b"")

    @abstractmethod
    def close(self) -> None:
        """Leave the group; the others fail if they still wait for this worker. May be called twice.

        Interrupted, as by Ctrl-C, it closes all the same before that goes on.
        """

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refused, for `copy` and `pickle` alike: it is one rank's place in its group.

        Raises:
            CallerError: Always.
        """
        raise not_copied(f"a {type(self).__name__}", "make one in each process, with connect()")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Outbox:
    """Which buckets may leave: those of started spans, but only in backward order, the same on all ranks.

    Args:
        buckets: All buckets of the layout, in order.
        sent: Leading buckets that need not leave any more.
    """

    def __init__(self, buckets: Sequence[Bucket], sent: int) -> None:
        self._buckets, self._sent = buckets, sent
        self._started: set[int | str] = set()

    @property
    def is_untouched(self) -> bool:
        """Whether no span has been started."""
        return not self._started

    def start(self, span: Span) -> range:
        """Mark a span complete.

        Returns:
            Indices of the buckets that may leave now.

        Raises:
            WindowError: It was started before.

        Example:
            >>> layout = GradientLayout.of({"a": (4,), "b": (4,)})
            >>> outbox = Outbox(buckets_of(layout, 8), 0)
            >>> outbox.start(layout.spans[1]), outbox.start(layout.spans[0])
            (range(0, 0), range(0, 32))
        """
        refuse_other_kind("span", span, Span)
        if span.key in self._started:
            raise WindowError(f"{span.called} is on its way already", do="start each span once in a step")
        self._started.add(span.key)
        first = self._sent
        while self._sent < len(self._buckets) and self._buckets[self._sent].span.key in self._started:
            self._sent += 1
        return range(first, self._sent)


def buckets_of(layout: GradientLayout, bucket_bytes: int) -> list[Bucket]:
    """The layout's spans in backward order, cut into pieces of at most `bucket_bytes`.

    Raises:
        CallerError: Less than one element would fit.

    Example:
        >>> layout = GradientLayout.of([(40,)])
        >>> [(bucket.start, bucket.stop) for bucket in buckets_of(layout, 128)]
        [(0, 32), (32, 64)]
    """
    size = checked_bucket(bucket_bytes) // 4
    return [
        Bucket(span, start, min(span.stop, start + size))
        for span in layout.spans
        for start in range(span.start, span.stop, size)
    ]


def place(bucket: Bucket) -> tuple[int | str, int, str]:
    """How messages name a bucket: the span's key, the offset in it in elements, and the dtype on the wire.

    >>> place(buckets_of(GradientLayout.of([(40,)]), 128)[1])
    ('0', 32, '<f4')
    """
    return bucket.span.key, bucket.start - bucket.span.start, "<f4"


def find_non_finite(rank: int, contribution: Arena, start: int) -> list[NonFiniteValue]:
    """The first NaN or Inf of a contribution that begins at arena index `start`, or nothing.

    Example:
        >>> find_non_finite(3, np.array([1, np.inf], np.float32), 100)
        [NonFiniteValue(rank=3, index=101, value=inf)]
    """
    # A finite squared sum proves all finite at 0.05 ns an element, half the cost of isfinite().all().
    if np.isfinite(squared_sum(contribution)):
        return []
    index, value = first_non_finite(contribution) or (0, np.nan)
    return [NonFiniteValue(rank, start + index, value)]


def checked_rank(rank: int, world_size: int) -> tuple[int, int]:
    """Both as plain integers; raises `CallerError` unless 0 <= rank < world_size.

    >>> checked_rank(2, 2)
    Traceback (most recent call last):
    gradengine.errors.CallerError: rank is out of range: got 2, expected a whole number in 0..1
    """
    size = whole_number("world_size", world_size, 1, MAX_WORLD_SIZE)
    return whole_number("rank", rank, 0, size - 1), size


def checked_bucket(bucket_bytes: int) -> int:
    """As a plain integer; raises `CallerError` unless at least one element fits into a bucket."""
    return whole_number("bucket_bytes", bucket_bytes, 4)


def checked_seconds(name: str, seconds: float) -> float:
    """As a float; raises `CallerError` unless it is a number of seconds that a wait can last.

    >>> checked_seconds("timeout", float("inf"))
    Traceback (most recent call last):
    gradengine.errors.CallerError: timeout is out of range: got inf, expected seconds above 0, at most 1e9
    """
    number = as_float(seconds)
    if not 0 < number <= 1e9:  # written so that NaN is refused
        raise out_of_range(name, seconds, "seconds above 0, at most 1e9")
    return number


def nothing_started(rank: int) -> WindowError:
    """The error for waiting for sums of a step to which this rank has started no span."""
    return WindowError(f"rank {rank} waits for sums and has started nothing", do="start() every span of the step first")


def count_in(bucket_bytes: int, progress: Progress, rank: int) -> None:
    """From here on `progress` counts buckets of this size.

    Raises:
        HandshakeRefused: It is in the middle of a step that was cut into others.
    """
    if progress.is_half_summed and progress.bucket_bytes not in {0, bucket_bytes}:
        raise HandshakeRefused(
            f"rank {rank} is in the middle of a step cut into other buckets",
            got=f"bucket_bytes={bucket_bytes}",
            expected=f"bucket_bytes={progress.bucket_bytes}",
            do="reconnect with the same bucket_bytes, or discard() the window on every rank",
        )
    progress.bucket_bytes = bucket_bytes


def refuse_bad_arena(layout: GradientLayout, arena: Arena) -> None:
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
    """Raise `CallerError` where a part of a gather is no bytes, or longer than any transport carries."""
    refuse_other_kind("a part of a gather", data, bytes)
    if len(data) > MAX_SMALL_PAYLOAD:
        raise CallerError("too much to gather", got=f"{len(data)} bytes", expected=f"at most {MAX_SMALL_PAYLOAD}")


def not_bound(exchange: str) -> WindowError:
    """The error for a call that needs a bound exchange."""
    return WindowError(f"{exchange} is not bound to a layout", do="call bind() first; GradientEngine does")
