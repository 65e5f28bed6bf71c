"""The interface of a link, which begins transfers between ranks and reports the transfers that are over."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy.typing as npt

from gradengine.errors import PeerLost, ProtocolError
from gradengine.threads import Bell

# A rank that waits this long looks for machines that have vanished. A machine has vanished after as long a silence.
VANISHED_SECONDS = 20.0
Memory: TypeAlias = npt.NDArray[Any]  # contiguous, of any dtype
SEND, RECEIVE, RELEASE, DAMAGED = "send", "receive", "release", "damaged"


class Transfer(NamedTuple):
    """A transfer to begin, of the kind `SEND`, `RECEIVE`, or `RELEASE` for memory that was borrowed."""

    kind: str
    peer: int
    tag: int
    memory: Any = None  # the memory to send or to fill; a RECEIVE with None borrows the sender's memory


class Completion(NamedTuple):
    """A transfer that is over."""

    # After SEND the memory may be overwritten, although the other rank may not have received it yet. After RECEIVE the
    # memory holds the sent data. After DAMAGED it holds different data, because a bit was flipped on the way.
    kind: str
    peer: int
    tag: int


class Link(ABC):
    """One rank's transfers to and from the other ranks of its group.

    A send and a receive are matched by rank and tag, and must have the same size. For each rank, direction and tag one
    transfer is open at a time. Messages arrive in the order in which they were sent. One thread at a time uses a link,
    but any thread may close it, except while memory is borrowed.

    Attributes:
        name: The link's kind: "tcp", "unix", "shared_memory", "threads", "mpi" or "collectives".
        rank: This rank, 0..world_size - 1.
        world_size: Ranks in the group.
        bell: Wakes the thread that uses this link. Any thread rings it when `poll` may have something new.
        has_limit: Whether a poll waits until all ranks poll, and fails after the link's time limit.
        is_polled: Whether the link must be polled because transfers do not ring the bell.
        reads_in_place: Whether this link has `borrow`.
        hub: The number of the server (the world size) if all messages go through a server. This rank is then linked to
            the server only, and the server's own `rank` is this number. None if each rank is linked to each other rank.
        moved_bytes: Bytes that were sent and received, including those of incomplete messages. 0 if unknown.
        lost: The rank that this one has lost or no longer waits for. The other ranks receive it when the link closes.
        has_failed: Whether an error was raised to a caller, and not only in the background. MPI then ends all processes
            of the job when this one ends.
        way_on: The advice of errors for a lost rank.
        is_closed: Whether this link was closed.
        unwritten: After the link was closed, the receives that had certainly not begun to write to their memory.
    """

    name: str
    rank: int
    world_size: int
    bell: Bell
    is_polled: bool = False
    has_limit: bool = False
    reads_in_place: bool = False
    hub: int | None = None
    moved_bytes: int = 0
    lost: int | None = None
    has_failed: bool = False
    way_on: str = "reconnect on all ranks"
    is_closed: bool = False
    _borrowed: Mapping[tuple[int, int], Memory] = {}  # keyed by (rank, tag)
    unwritten: Sequence[Completion] = ()

    @abstractmethod
    def send(self, peer: int, tag: int, memory: Memory) -> None:
        """Begin to send memory and return immediately. The memory must not change before the send is over."""

    @abstractmethod
    def receive(self, peer: int, tag: int, memory: Memory) -> None:
        """Begin to fill memory with a rank's message with this tag, and return immediately."""

    def borrow(self, peer: int, tag: int) -> None:
        """Begin to receive a rank's message with this tag, of any size, without a copy, and return immediately.

        After the receive, `borrowed` returns the sender's own memory. The sender's transfer is over after `release`.
        Between processes this works only for memory that the sender `lends`.
        """
        raise NotImplementedError

    def borrowed(self, peer: int, tag: int) -> Memory | None:
        """Return the memory borrowed from a rank with this tag, or None. It may be read until `release`."""
        return self._borrowed.get((peer, tag))

    def release(self, peer: int, tag: int) -> None:
        """End the reading of memory that was borrowed from a rank with this tag.

        Raises:
            PeerLost: The rank has closed its link in the meantime, so the data that was read may not be the sent data.
        """
        raise NotImplementedError

    def lends(self, memory: Memory | None) -> bool:
        """Return whether the receiver may borrow messages sent from this memory, or with None from any memory."""
        return self.reads_in_place

    def held(self) -> dict[int, int]:
        """Return, for each rank, the tag of an arrived message without a receive. The rank's later messages wait."""
        return {}

    @abstractmethod
    def poll(self) -> list[Completion]:
        """Return the transfers that have ended since the last call. Waits for other ranks only if `has_limit`.

        Raises:
            PeerLost: A rank with an open transfer is gone (the error names it), or this link is closed. Transfers that
                were over before are returned first.
            ProtocolError: A rank's message has a different size from the memory to receive it.
        """

    @abstractmethod
    def close(self) -> None:
        """End all transfers. Afterwards nothing writes to this rank's memory, and the other ranks lose this rank.

        Memory that this rank has borrowed is released and may not be read any more. This does not wait for ranks that
        have borrowed memory from this one. Their `release` fails. May be called twice.
        """

    def refuse_vanished(self) -> None:  # noqa: B027  (most links cannot detect it)
        """Raise `PeerLost` for a rank whose machine no longer answers, if the link can detect that."""

    def named(self, peer: int) -> str:
        """Return the name of a rank or the server for errors."""
        return "the server" if peer == self.hub else f"rank {peer}"

    def damaged(self, peer: int, sent: str) -> ProtocolError:
        """Return the error for a rank's message that was damaged, so that the memory does not hold the sent data."""
        what = f"the message from {self.named(peer)} to {self.named(self.rank)} was damaged on the way: {sent}"
        return ProtocolError(what, do=f"{self.way_on}; test the memory and the network of both hosts")

    def other_size(self, peer: int, tag: int, size: int, expected: int) -> ProtocolError:
        """Return the error for a rank's message that does not fit the memory to receive it."""
        what = f"{self.named(peer)} sent {self.named(self.rank)} a message of the wrong size with tag {tag}"
        return ProtocolError(what, got=f"{size} bytes", expected=f"{expected} bytes")

    def refuse_closed(self) -> None:
        """Raise `PeerLost` if this link is closed."""
        if self.is_closed:
            raise PeerLost(f"the link of rank {self.rank} is closed")

    def lost_by(self, peer: int, lost: int) -> PeerLost:
        """Return the error for a transfer with a closed rank, which had lost the rank `lost` (or closed by itself)."""
        if lost == peer:
            self.lost, what = peer, f"{self.named(peer)} is gone: it has closed its link"
        elif lost == self.rank:
            self.lost, what = peer, f"{self.named(peer)} has closed its link: this rank ({lost}) was lost or late"
        else:
            self.lost, what = lost, f"rank {lost} is gone or late: {self.named(peer)} has closed its link for that"
        return PeerLost(what, do=self.way_on)
