"""The interface of a link: it begins transfers between ranks, says which are over, and never waits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy.typing as npt

from gradengine.errors import PeerLost, ProtocolError
from gradengine.threads import Bell

VANISHED_SECONDS = 20.0  # until a rank that waits looks, and after which a machine that answers nothing is given up
Memory: TypeAlias = npt.NDArray[Any]  # contiguous, of any dtype
SEND, RECEIVE, RELEASE, DAMAGED = "send", "receive", "release", "damaged"


class Transfer(NamedTuple):
    """A transfer to begin: `SEND`, `RECEIVE`, or `RELEASE` of memory that was borrowed."""

    kind: str
    peer: int
    tag: int
    memory: Any = None  # to be sent or filled; None to receive: the memory of the rank that sends is borrowed


class Completion(NamedTuple):
    """A transfer that is over."""

    # SEND: the memory may be overwritten; the other rank may not have received it yet. RECEIVE: the memory holds what
    # was sent. DAMAGED: it holds something else, because a bit was flipped on the way.
    kind: str
    peer: int
    tag: int


class Link(ABC):
    """One rank's transfers to and from the other ranks of its group.

    A send and a receive are matched by rank and tag, and must be of the same size. For each rank, direction and tag one
    transfer is open at a time; messages arrive in the order in which they were sent. One thread at a time uses a link,
    but any may close it, except while memory is borrowed.

    Attributes:
        name: The link's kind: "tcp", "unix", "shared_memory", "threads", "mpi" or "collectives".
        rank: This rank, 0..world_size - 1.
        world_size: Ranks in the group.
        bell: Wakes the thread that uses this link; rung, from any thread, when `poll` may have something new.
        has_limit: Whether a poll waits until all ranks poll, and fails after a time limit of its own.
        is_polled: Whether the bell is not rung for that, so that the link must be polled.
        reads_in_place: Whether this link has `borrow`.
        hub: The number of the server, the world size, if all is sent through it: this rank is then linked to no other,
            and the server's own `rank` is that number. None if each rank is linked to each other.
        moved_bytes: Bytes that were sent and received, also of messages that are not complete; 0 if that is not known.
        lost: The rank that this one has lost, or no longer waits for; the others are told when the link closes.
        has_failed: Whether this, or another error, was raised to a caller, and not in the background only. MPI then
            ends all processes of the job when this one ends.
        way_on: What a caller can do once a rank is lost, for errors.
        is_closed: Whether this link was closed.
        unwritten: Once the link is closed: open receives that had certainly not begun to write to their memory.
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
    _borrowed: Mapping[tuple[int, int], Memory] = {}  # by rank and tag
    unwritten: Sequence[Completion] = ()

    @abstractmethod
    def send(self, peer: int, tag: int, memory: Memory) -> None:
        """Begin to send memory, which must not change before the send is over; returns at once."""

    @abstractmethod
    def receive(self, peer: int, tag: int, memory: Memory) -> None:
        """Begin to fill memory with a rank's message with this tag; returns at once."""

    def borrow(self, peer: int, tag: int) -> None:
        """Begin to receive a rank's message with this tag, of any size, without a copy; returns at once.

        Once it is received, `borrowed` returns the sender's own memory. The sender's transfer is over after `release`.
        Between processes this works only for memory that the sender `lends`.
        """
        raise NotImplementedError

    def borrowed(self, peer: int, tag: int) -> Memory | None:
        """The memory that was borrowed from a rank with this tag, to be read until `release`; None if none was."""
        return self._borrowed.get((peer, tag))

    def release(self, peer: int, tag: int) -> None:
        """End the reading of memory that was borrowed from a rank with this tag.

        Raises:
            PeerLost: The rank has closed its link meanwhile without waiting: what was read may not be what was sent.
        """
        raise NotImplementedError

    def lends(self, memory: Memory | None) -> bool:
        """Whether the receiver may borrow what is sent from this memory; with None, whether from any memory."""
        return self.reads_in_place

    def held(self) -> dict[int, int]:
        """By rank the tag of a message that has arrived and is not received yet: later messages of that rank wait."""
        return {}

    @abstractmethod
    def poll(self) -> list[Completion]:
        """The transfers that are over since the last call; never waits.

        Raises:
            PeerLost: A rank with which a transfer is open is gone (it is named), or this link is closed. Transfers that
                were over before are returned first.
            ProtocolError: A rank's message has another size than the memory to receive it.
        """

    @abstractmethod
    def close(self) -> None:
        """End all transfers, after which nothing writes to this rank's memory. The other ranks lose this rank.

        Memory that this rank has borrowed is released: it may not be read any more. This does not wait for ranks that
        have borrowed memory from this one: their `release` fails. May be called twice.
        """

    def refuse_vanished(self) -> None:  # noqa: B027  (most links have nothing to ask)
        """Raise `PeerLost` for a rank whose machine answers nothing any more, where that can be seen."""

    def named(self, peer: int) -> str:
        """The name of a rank or the server, for errors."""
        return "the server" if peer == self.hub else f"rank {peer}"

    def damaged(self, peer: int, sent: str) -> ProtocolError:
        """The error for a rank's message that was damaged: the memory does not hold what was sent."""
        what = f"what {self.named(peer)} sent {self.named(self.rank)} was damaged on the way: {sent}"
        return ProtocolError(what, do=f"{self.way_on}; test the memory and the network of both hosts")

    def other_size(self, peer: int, tag: int, size: int, expected: int) -> ProtocolError:
        """The error for a rank's message that does not fit the memory to receive it."""
        what = f"{self.named(peer)} sent {self.named(self.rank)} another size with tag {tag}"
        return ProtocolError(what, got=f"{size} bytes", expected=f"{expected} bytes")

    def refuse_closed(self) -> None:
        """Raise `PeerLost` if this link is closed."""
        if self.is_closed:
            raise PeerLost(f"the link of rank {self.rank} is closed")

    def lost_by(self, peer: int, lost: int) -> PeerLost:
        """The error for a transfer with a rank that has closed its link, because it lost the rank `lost`, or itself."""
        if lost == peer:
            self.lost, what = peer, f"{self.named(peer)} is gone: it has closed its link"
        elif lost == self.rank:
            self.lost, what = peer, f"{self.named(peer)} has closed its link: this rank ({lost}) was lost or late"
        else:
            self.lost, what = lost, f"rank {lost} is gone or late: {self.named(peer)} has closed its link for that"
        return PeerLost(what, do=self.way_on)
