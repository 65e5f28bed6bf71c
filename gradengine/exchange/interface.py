"""The interface of an exchange: bind a layout, start the all-reduce of spans, wait for it, all-gather small data.

The sum is elementwise in fp32 and taken in rank order from rank 0's value on, so that its bits depend neither on the
transport, nor on the bucket size, nor on the order of arrival.

An `Exchange` is an opaque handle: users make one by `connect` or `local_group`, give it to an engine, close it, and do
not subclass it. A new transport is a link (`links/`) and its URL in `connect`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from gradengine.arguments import as_float, out_of_range, refuse_other_kind
from gradengine.errors import CallerError, NotCopied, WindowError
from gradengine.exchange.wire import MAX_SMALL_PAYLOAD
from gradengine.kernels.decision import Float64
from gradengine.kernels.device import DeviceArena
from gradengine.layout import GradientLayout, Span

if TYPE_CHECKING:
    from typing_extensions import Self

Float32: TypeAlias = npt.NDArray[np.float32]
GROUP_BYTES = 16  # of a group's random identifier
DEFAULT_BUCKET_BYTES = 1 << 21  # of what a server sums at a time: four of them are in flight
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
    bad: list[NonFiniteValue] = field(default_factory=list)
    bucket_bytes: int = 0  # by which the step is cut into shares; 0 before the first group
    membership: Membership = Membership()
    carrier: Exchange | None = None  # the exchange that has, or had, spans of this step
    squares: Float64 | None = None  # of each chunk of the partial sums, once the exchange has measured the sums

    def next_step(self) -> None:
        """The step is over on all ranks."""
        self.restart()
        self.step += 1

    def restart(self) -> None:
        """The step starts over: the arena holds nothing of it."""
        self.bad, self.carrier, self.squares = [], None, None


class Exchange(NotCopied, ABC, instead="make one in each process, with connect()"):
    """One rank's all-reduce and all-gather in a process group.

    Attributes:
        rank: This worker's rank, 0..world_size - 1.
        world_size: Workers in the group.
        url: Rank 0's address, or a server's, with the actual port if port 0 was requested; "mpi://" over MPI; None for
            threads of one process, and for a process group of torch.
    """

    rank: int
    world_size: int
    url: str | None

    @abstractmethod
    def bind(self, layout: GradientLayout, arena: Float32 | DeviceArena, progress: Progress) -> None:
        """Join the group with a layout and an arena; returns when all ranks have joined.

        Args:
            layout: Must be the same on all ranks.
            arena: Flat fp32 memory of `layout.arena_size`, which is reduced in place; or a device's, of which a few
                shares are copied at a time: what leaves then comes behind what the current stream has to do at its
                `start`.
            progress: A new one, or that of an exchange that failed, to resume its step.

        Raises:
            HandshakeRefused: Another layout (the differing rows are shown), world size, step or token.
            PeerLost: The server or a worker did not join in time.
        """

    @abstractmethod
    def start(self, span: Span) -> None:
        """Start the all-reduce of a span whose local gradients are complete; returns at once.

        Raises:
            WindowError: The span has been started in this step already, or the exchange is not bound.
        """

    @abstractmethod
    def wait(self) -> tuple[NonFiniteValue, ...]:
        """Wait until the whole arena is reduced; then `progress.squares` are those of the sums.

        Returns:
            Non-finite contributions, the same on all ranks: the first of each rank, by rank.

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


def checked_seconds(name: str, seconds: float) -> float:
    """As a float; `CallerError` unless it is a timeout above 0, of at most 1e9 seconds."""
    number = as_float(seconds)
    if not 0 < number <= 1e9:  # also true of NaN
        raise out_of_range(name, seconds, "seconds above 0, at most 1e9")
    return number


def nothing_started(rank: int) -> WindowError:
    """The error for `wait` in a step of which this rank has started no span."""
    return WindowError(f"rank {rank} waits for sums and has started nothing", do="start() every span of the step first")


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
