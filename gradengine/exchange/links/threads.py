"""A link between threads of one process. The receiver copies once from the sender's memory, or reads it in place.

A rank that closes does not wait for ranks that still read its memory. They notice the close, and discard the data that
they have read.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import final

import numpy as np

from gradengine.arguments import checked_rank
from gradengine.exchange.links.link import RECEIVE, SEND, Completion, Link, Memory
from gradengine.threads import Bell


def thread_links(world_size: int) -> list[ThreadLink]:
    """Make one link for each of `world_size` threads of this process, and return the links in rank order.

    Raises:
        CallerError: The world size is not in 1..65536.

    Example:
        >>> first, second = thread_links(2)
        >>> memory = np.zeros(2)
        >>> first.send(1, 7, np.array([1.0, 2.0]))
        >>> second.receive(0, 7, memory)
        >>> second.poll(), memory
        ([Completion(kind='receive', peer=0, tag=7)], array([1., 2.]))
    """
    _, world_size = checked_rank(0, world_size)
    lock = threading.RLock()
    links: list[ThreadLink] = []
    links += [ThreadLink(links, rank, world_size, lock) for rank in range(world_size)]
    return [*links]


@final
class ThreadLink(Link):
    """One of `thread_links`. Each `poll` copies one transfer at most, whose data is then still in the cache.

    Args:
        links: The links of all ranks. The list is filled after the links are made.
        rank: This rank.
        world_size: Ranks in the group.
        lock: The group's lock, which is not held during copies.
    """

    name = "threads"
    reads_in_place = True

    def __init__(self, links: list[ThreadLink], rank: int, world_size: int, lock: threading.RLock) -> None:
        self._links, self.rank, self.world_size, self._lock = links, rank, world_size, lock
        self.bell, self._poll_lock = Bell(), threading.RLock()  # the lock is held during writes to this rank's memory
        self._open: dict[Completion, Memory | None] = {}  # None for memory to be borrowed
        self._matched: deque[tuple[int, int]] = deque()  # (rank, tag) of receives whose sends are open too
        self._borrowed: dict[tuple[int, int], Memory] = {}
        self._over: list[Completion] = []

    def send(self, peer: int, tag: int, memory: Memory) -> None:
        self._begin(Completion(SEND, peer, tag), memory)

    def receive(self, peer: int, tag: int, memory: Memory) -> None:
        self._begin(Completion(RECEIVE, peer, tag), memory)

    def borrow(self, peer: int, tag: int) -> None:
        self._begin(Completion(RECEIVE, peer, tag), None)

    def release(self, peer: int, tag: int) -> None:
        with self._lock:
            self.refuse_closed()
            del self._borrowed[peer, tag]
            self._refuse_lost(peer)
            del self._open[Completion(RECEIVE, peer, tag)]
            self._links[peer]._end(Completion(SEND, self.rank, tag))

    def poll(self) -> list[Completion]:
        with self._poll_lock:
            with self._lock:
                self.refuse_closed()
                copy = self._next()
            if copy is not None:
                self._copy(*copy)
        with self._lock:
            over, self._over = self._over, []
            if not over:
                for _, peer, _ in self._open:
                    self._refuse_lost(peer)
                # A rank that closed because of a different rank ends the group, even if no message from it is missing.
                for link in self._links if self._open else ():
                    if link.lost not in {None, link.rank}:
                        self._refuse_lost(link.rank)
            return over

    def close(self) -> None:
        with self._lock:
            self.is_closed = True
            self._open, self._matched, self._borrowed, self._over = {}, deque(), {}, []
            for link in self._links:
                link.bell.ring()
        with self._poll_lock:  # waits for a copy in progress
            pass

    def _begin(self, transfer: Completion, memory: Memory | None) -> None:
        kind, peer, tag = transfer
        other = self._links[peer]
        with self._lock:
            self.refuse_closed()
            self._open[transfer] = memory
            if other.is_closed:
                self.bell.ring()
            elif kind == RECEIVE and Completion(SEND, self.rank, tag) in other._open:
                self._match(peer, tag)
            elif kind == SEND and Completion(RECEIVE, self.rank, tag) in other._open:
                other._match(self.rank, tag)

    def _match(self, sender: int, tag: int) -> None:
        self._matched.append((sender, tag))
        self.bell.ring()

    def _next(self) -> tuple[int, int, Memory, Memory] | None:
        """Return the rank, tag, source and sink of the next copy, or None. A borrow needs no copy and is completed."""
        if not self._matched:
            return None
        peer, tag = self._matched.popleft()
        transfer = Completion(RECEIVE, peer, tag)
        source, sink = self._links[peer]._open.get(Completion(SEND, self.rank, tag)), self._open[transfer]
        if source is not None and sink is not None:
            return peer, tag, source, sink
        if source is not None:  # None if its rank has closed
            # The receive stays open until the release, so that a sender that closes before counts as lost.
            self._borrowed[peer, tag] = source
            self._over.append(transfer)
        return None

    def _copy(self, peer: int, tag: int, source: Memory, sink: Memory) -> None:
        if source.nbytes != sink.nbytes:
            raise self.other_size(peer, tag, source.nbytes, sink.nbytes)
        np.copyto(sink.reshape(-1).view(np.uint8), source.reshape(-1).view(np.uint8))
        with self._lock:
            if not self._links[peer].is_closed:  # a closed rank may have overwritten the source
                self._end(Completion(RECEIVE, peer, tag))
                self._links[peer]._end(Completion(SEND, self.rank, tag))

    def _end(self, transfer: Completion) -> None:
        if not self.is_closed:
            self._over.append(transfer)
            del self._open[transfer]  # last, so that after an interrupt the other rank sees this one close
            self.bell.ring()

    def _refuse_lost(self, peer: int) -> None:
        """Raise `PeerLost` if a rank has closed its link."""
        other = self._links[peer]
        if other.is_closed:
            raise self.lost_by(peer, peer if other.lost is None else other.lost)
