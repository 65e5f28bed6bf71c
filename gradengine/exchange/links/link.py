"""What a link is: it begins transfers between ranks, says which are over, and never waits."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple, TypeAlias, final

import numpy.typing as npt

from gradengine.errors import NotCopied, PeerLost, ProtocolError
from gradengine.threads import Bell

Memory: TypeAlias = npt.NDArray[Any]  # contiguous, of any dtype

_SPIN_SECONDS, _LONGEST_SECONDS = 0.002, 0.005  # a link that wakes nobody: polled without a pause first, then each 5 ms


class Completed(Enum):
    """What is over."""

    SENT = "sent"  # the memory may be overwritten; the other rank need not have it yet
    RECEIVED = "received"  # the memory holds what was sent
    DAMAGED = "damaged"  # the memory holds something else: a bit was flipped on the way


class Completion(NamedTuple):
    """A transfer that is over."""

    kind: Completed
    peer: int
    tag: int


class Link(NotCopied, ABC, instead="make one on each rank"):
    """One rank's transfers to and from the other ranks of its group.

    A send and a receive meet by rank and tag, and must be of the same size. Of those of one rank, direction and tag one
    is open at a time; they arrive in the order in which they were sent. One thread at a time uses a link, but any may
    close it, except while memory is borrowed.

    Attributes:
        name: Of its kind: "tcp", "unix", "shared_memory", "threads" or "mpi".
        rank: This rank, 0..world_size - 1.
        world_size: Ranks in the group.
        bell: Wakes whoever uses this link; rung, from any thread, when `poll` may have something new.
        is_polled: Whether nobody rings it then.
        reads_in_place: Whether this link has `borrow`.
        hub: The number of the server through which all goes, the world size: this rank has a link to nobody else, and
            the server's own `rank` is that. None where each rank has one to each other.
        lost: The rank that this one has lost, or has given up to wait for; the others are told when the link closes.
        has_failed: Whether anybody here was told so, or of another error, and not in the background alone. A link that
            joins processes ends all of them then, when this one ends.
        unwritten: Once this is closed, open receives that had certainly not begun to write into their memory.
    """

    name: str
    rank: int
    world_size: int
    bell: Bell
    is_polled: bool = False
    reads_in_place: bool = False
    hub: int | None = None
    lost: int | None = None
    has_failed: bool = False
    unwritten: Sequence[Completion] = ()

    @abstractmethod
    def send(self, peer: int, tag: int, memory: Memory) -> None:
        """Begin to send memory, which must not change before this is over; returns at once."""

    @abstractmethod
    def receive(self, peer: int, tag: int, memory: Memory) -> None:
        """Begin to fill memory with what that rank sends with this tag; returns at once."""

    def borrow(self, peer: int, tag: int) -> None:
        """Begin to receive what that rank sends with this tag, of any size, without a copy; returns at once.

        Once that is received, the sender's own memory is `borrowed`. The sender's transfer is over after `release`.
        Between processes the sender must lend what it sends: see `lends`.
        """
        raise NotImplementedError

    def borrowed(self, peer: int, tag: int) -> Memory | None:
        """The memory that was borrowed of that rank with this tag, to be read until `release`; None if none was."""
        return None

    def release(self, peer: int, tag: int) -> None:
        """End the reading of memory that was borrowed of that rank with this tag.

        Raises:
            PeerLost: That rank has closed its link meanwhile, and did not wait: what was read is nothing.
        """
        raise NotImplementedError

    def lends(self, memory: Memory | None) -> bool:
        """Whether what is sent from this memory, or from any, may be borrowed."""
        return self.reads_in_place

    def held(self) -> list[int]:
        """The tags of messages that have come and that nobody receives yet: what their ranks sent after them waits."""
        return []

    @abstractmethod
    def poll(self) -> list[Completion]:
        """The transfers that are over since the last call; never waits.

        Raises:
            PeerLost: A rank with which a transfer is open is gone (it is named), or this link is closed. What was over
                before is returned first.
            ProtocolError: A rank sent another size than is received.
        """

    @abstractmethod
    def close(self) -> None:
        """End all transfers: nothing writes into this rank's memory any more. The others lose this rank.

        What this rank has borrowed is released by this: nobody here may read it any more. What the others have borrowed
        of this rank is waited for, or else their `release` fails. May be called twice.
        """

    def named(self, peer: int) -> str:
        """Who that is, for errors."""
        return "the server" if peer == self.hub else f"rank {peer}"

    def damaged(self, peer: int, sent: str) -> ProtocolError:
        """The error for a transfer of that rank whose memory does not hold what was sent."""
        what = f"what {self.named(peer)} sent {self.named(self.rank)} was damaged on the way: {sent}"
        return ProtocolError(what, do="reconnect on all ranks; test the memory and the network of both hosts")

    def lost_by(self, peer: int, lost: int | None) -> PeerLost:
        """The error for a transfer with a rank that has closed its link, after it lost that one or none."""
        if lost is None or lost == peer:
            self.lost, what = peer, f"{self.named(peer)} is gone: it has closed its link"
        elif lost == self.rank:
            self.lost, what = peer, f"{self.named(peer)} has closed its link: this rank ({lost}) was lost or late"
        else:
            self.lost, what = lost, f"rank {lost} is gone or late: {self.named(peer)} has closed its link for that"
        return PeerLost(what, do="reconnect on all ranks")


@final
class Idle:
    """Rests between the polls of a link: until its bell rings, or for a few milliseconds where nobody rings it."""

    def __init__(self, link: Link) -> None:
        self._link, self._moved_at = link, time.monotonic()

    def rest(self, longest: float | None = None, *, is_woken: bool = True) -> None:
        """Return when the link's bell rings, or after so many seconds; without a limit perhaps never.

        `is_woken` is false where something else is waited for besides, which wakes nobody either.
        """
        if self._link.is_polled or not is_woken:
            idle = time.monotonic() - self._moved_at
            most = 0.0 if idle < _SPIN_SECONDS else min(idle / 4, _LONGEST_SECONDS)
            longest = most if longest is None else min(longest, most)
        self._link.bell.wait(longest)

    def moved(self) -> None:
        """Note that something was over: there may be more soon."""
        self._moved_at = time.monotonic()
