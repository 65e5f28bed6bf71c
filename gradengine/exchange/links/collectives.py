"""A link over the collectives of torch or MPI, which carry the data over the cluster's own network.

The ranks take part in rounds. In a round each rank sends each other rank all messages that it has for that rank. A
round is one all-to-all of sizes and one of bytes. A poll makes a round, unless it can return completions that it
already has. So a poll waits until all ranks poll. This suits an all-reduce. A rank polls as long as it misses a
message, and all ranks receive the last message of a step in the same round.

A rank that does not poll, or has closed its link, is detected by the time limit of the collectives. The error does not
name that rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

from gradengine.exchange.links.link import RECEIVE, SEND, Completion, Link, Memory
from gradengine.exchange.links.mpi import MpiLink, finish, own_communicator
from gradengine.threads import Bell

Bytes: TypeAlias = npt.NDArray[np.uint8]
AllToAll: TypeAlias = Callable[[Sequence[Bytes]], Sequence[Bytes]]  # bytes for each rank -> bytes from each rank

COLLECTIVES = "collectives"  # the value of `link` in `connect`
_HEAD = np.dtype([("tag", "<i8"), ("size", "<i8")])


@final
class CollectiveLink(Link):
    """One rank's transfers over an all-to-all of its group.

    Args:
        rank: This rank.
        world_size: Ranks in the group.
        all_to_all: Takes the bytes for each rank, and returns the bytes from each rank, in rank order. All ranks call
            it together. It raises `PeerLost` if not all ranks call it in time.
        way_on: As for `Link`.
    """

    name = COLLECTIVES
    is_polled = has_limit = True

    def __init__(self, rank: int, world_size: int, all_to_all: AllToAll, way_on: str = Link.way_on) -> None:
        self.rank, self.world_size, self.way_on = rank, world_size, way_on
        self._all_to_all, self.bell = all_to_all, Bell()
        self._outgoing: list[list[tuple[int, Memory]]] = [[] for _ in range(world_size)]
        self._open: dict[tuple[int, int], Memory] = {}  # open receives, keyed by (rank, tag)
        self._arrived: dict[tuple[int, int], Bytes] = {}  # messages without an open receive
        self._over: list[Completion] = []

    def send(self, peer: int, tag: int, memory: Memory) -> None:
        self.refuse_closed()
        self._outgoing[peer].append((tag, memory))

    def receive(self, peer: int, tag: int, memory: Memory) -> None:
        self.refuse_closed()
        self._open[peer, tag] = memory
        if (peer, tag) in self._arrived:
            self._take(peer, tag, self._arrived.pop((peer, tag)))

    def poll(self) -> list[Completion]:
        self.refuse_closed()
        if not self._over and (self._open or any(self._outgoing)):
            self._make_round()
        over, self._over = self._over, []
        return over

    def held(self) -> dict[int, int]:
        return dict(self._arrived.keys())

    def close(self) -> None:
        self.is_closed = True

    # ---- inside ----

    def _make_round(self) -> None:
        """Exchange all queued messages with all ranks."""
        outgoing, self._outgoing = self._outgoing, [[] for _ in range(self.world_size)]
        sent = [_frames(messages) for messages in outgoing]
        received = self._all_to_all(sent)
        self._over += [Completion(SEND, peer, tag) for peer, each in enumerate(outgoing) for tag, _ in each]
        self.moved_bytes += sum(each.size for each in [*sent, *received])
        for peer, data in enumerate(received):
            at = 0
            while at < data.size:
                tag, size = data[at : at + _HEAD.itemsize].view(_HEAD)[0].tolist()
                at += _HEAD.itemsize + size
                self._take(peer, tag, data[at - size : at])

    def _take(self, peer: int, tag: int, message: Bytes) -> None:
        memory = self._open.pop((peer, tag), None)
        if memory is None:
            self._arrived[peer, tag] = message
            return
        if memory.nbytes != message.size:
            raise self.other_size(peer, tag, message.size, memory.nbytes)
        _bytes(memory)[:] = message
        self._over.append(Completion(RECEIVE, peer, tag))


def link_over_mpi(communicator: Any, timeout: float) -> CollectiveLink:
    """Make this rank's link over MPI's all-to-all. All ranks of the communicator call this together.

    Args:
        communicator: An mpi4py communicator, which the link duplicates. None means all ranks of the job.
        timeout: Seconds within which all ranks must call this, and take part in each round.

    Raises:
        DeviceUnavailable, CallerError, PeerLost: As `MpiLink`.
    """
    mpi, ours = own_communicator(communicator, timeout)
    late = f"not all ranks take part in a round with rank {ours.rank}"

    def all_to_all(sent: Sequence[Bytes]) -> Sequence[Bytes]:
        sizes, counts = np.array([each.size for each in sent], np.int64), np.empty(ours.size, np.int64)
        finish(ours.Ialltoall(sizes, counts), timeout, late)
        data, received = np.concatenate(sent), np.empty(int(counts.sum()), np.uint8)
        given = [data, sizes.tolist(), mpi.BYTE], [received, counts.tolist(), mpi.BYTE]
        finish(ours.Ialltoallv(*given), timeout, late)
        return np.split(received, np.cumsum(counts)[:-1])

    return CollectiveLink(ours.rank, ours.size, all_to_all, MpiLink.way_on)


def _frames(messages: Sequence[tuple[int, Memory]]) -> Bytes:
    """Return the bytes of all messages, each after a head with its tag and size."""
    pieces = [np.empty(0, np.uint8)]
    for tag, memory in messages:
        pieces += [np.array([(tag, memory.nbytes)], _HEAD).view(np.uint8), _bytes(memory)]
    return np.concatenate(pieces)


def _bytes(memory: Memory) -> Bytes:
    return memory.reshape(-1).view(np.uint8)
