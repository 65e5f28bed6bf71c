"""A link between threads of one process: the receiver copies from the sender's memory, once, or reads it there."""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple, final

import numpy as np

from gradengine.arguments import checked_rank
from gradengine.exchange.links.link import Completed, Completion, Link, Memory
from gradengine.threads import Bell

_LOOK_SECONDS = 0.1  # until a rank that closes looks again whether its memory is used


def thread_links(world_size: int) -> list[ThreadLink]:
    """Make one link for each of `world_size` threads of this process; returns them in rank order.

    Raises:
        CallerError: The world size is not in 1..65536.

    Example:
        >>> first, second = thread_links(2)
        >>> memory = np.zeros(2)
        >>> first.send(1, 7, np.array([1.0, 2.0]))
        >>> second.receive(0, 7, memory)
        >>> second.poll(), memory
        ([Completion(kind=<Completed.RECEIVED: 'received'>, peer=0, tag=7)], array([1., 2.]))
    """
    _, world_size = checked_rank(0, world_size)
    group = _Group(world_size)
    return [ThreadLink(group, rank) for rank in range(world_size)]


@final
class ThreadLink(Link):
    """One of `thread_links`. Each `poll` copies one transfer at most, which is then still in the cache."""

    name = "threads"
    reads_in_place = True

    def __init__(self, group: _Group, rank: int) -> None:
        self._group, self.rank, self.world_size = group, rank, len(group.ranks)
        self.bell = group.ranks[rank].bell

    def send(self, peer: int, tag: int, memory: Memory) -> None:
        self._begin(Completion(Completed.SENT, peer, tag), memory)

    def receive(self, peer: int, tag: int, memory: Memory) -> None:
        self._begin(Completion(Completed.RECEIVED, peer, tag), memory)

    def borrow(self, peer: int, tag: int) -> None:
        self._begin(Completion(Completed.RECEIVED, peer, tag), None)

    def borrowed(self, peer: int, tag: int) -> Memory | None:
        return self._group.ranks[self.rank].borrowed.get((peer, tag))

    def release(self, peer: int, tag: int) -> None:
        group, mine = self._group, self._group.ranks[self.rank]
        with group.lock:
            self.refuse_closed()
            del mine.borrowed[peer, tag], mine.open[Completion(Completed.RECEIVED, peer, tag)]
            self._end(peer, Completion(Completed.SENT, self.rank, tag))
            group.ranks[peer].left.ring()

    def poll(self) -> list[Completion]:
        group, mine = self._group, self._group.ranks[self.rank]
        with group.lock:
            self.refuse_closed()
            match = mine.matched.popleft() if mine.matched else None
            if match is None and not mine.over:
                self._refuse_lost()
            if match is not None and match.sink is None:
                # It stays open until the release: the lender is lost if it closes before.
                mine.borrowed[match.peer, match.tag] = match.source
                mine.over.append(Completion(Completed.RECEIVED, match.peer, match.tag))
            elif match is not None:
                mine.copying, mine.copier = match, threading.get_ident()
        if match is not None and match.sink is not None:
            self._copy(match.peer, match.tag, match.source, match.sink)
        with group.lock:
            over, mine.over = mine.over, []
        return over

    def close(self) -> None:
        group, mine = self._group, self._group.ranks[self.rank]
        with group.lock:
            if mine.copier == threading.get_ident():  # this thread's poll was interrupted
                mine.copying = None
            if not mine.is_closed:
                mine.is_closed, mine.lost = True, self.lost
            self.is_closed = True
            mine.open, mine.matched, mine.borrowed, mine.over = {}, deque(), {}, []
            for rank in group.ranks:
                rank.matched = deque(match for match in rank.matched if match.peer != self.rank)
                rank.bell.ring()
                rank.left.ring()
        while group.is_used(self.rank):
            mine.left.wait(_LOOK_SECONDS)

    def _begin(self, transfer: Completion, memory: Memory | None) -> None:
        group, mine = self._group, self._group.ranks[self.rank]
        kind, peer, tag = transfer
        other = Completed.RECEIVED if kind is Completed.SENT else Completed.SENT
        with group.lock:
            self.refuse_closed()
            mine.open[transfer] = memory
            # Of another rank the memory is known while its transfer is open: it waits for this one.
            counterpart, others = Completion(other, self.rank, tag), group.ranks[peer].open
            if counterpart not in others:
                if group.ranks[peer].is_closed:
                    mine.bell.ring()
                return
            source, sink = memory, others[counterpart]
            if kind is Completed.RECEIVED:
                source, sink = sink, source
            assert source is not None  # noqa: S101  (a send has memory)
            receiver, sender = (peer, self.rank) if kind is Completed.SENT else (self.rank, peer)
            group.ranks[receiver].matched.append(_Match(sender, tag, source, sink))
            group.ranks[receiver].bell.ring()

    def _copy(self, peer: int, tag: int, source: Memory, sink: Memory) -> None:
        group, is_copied = self._group, False
        try:
            if source.nbytes != sink.nbytes:
                raise self.other_size(peer, tag, source.nbytes, sink)
            np.copyto(sink.reshape(-1).view(np.uint8), source.reshape(-1).view(np.uint8))
            is_copied = True
        finally:
            with group.lock:
                group.ranks[self.rank].copying = None
                for rank in (self.rank, peer):
                    group.ranks[rank].left.ring()
                if is_copied:
                    self._end(self.rank, Completion(Completed.RECEIVED, peer, tag))
                    self._end(peer, Completion(Completed.SENT, self.rank, tag))

    def _end(self, number: int, transfer: Completion) -> None:
        rank = self._group.ranks[number]
        if not rank.is_closed:
            rank.over.append(transfer)
            del rank.open[transfer]  # last: if this is interrupted, the other rank is to see that this one closes
            if number != self.rank:
                rank.bell.ring()

    def _refuse_lost(self) -> None:
        ranks = self._group.ranks
        for _, peer, _ in ranks[self.rank].open:
            if ranks[peer].is_closed:
                raise self.lost_by(peer, ranks[peer].lost)


class _Match(NamedTuple):
    """A matching send and receive, to be carried out by the receiver."""

    peer: int  # the sender
    tag: int
    source: Memory
    sink: Memory | None  # None where the source is borrowed


@final
class _Rank:
    """The shared data of one rank."""

    def __init__(self) -> None:
        self.is_closed = False
        self.lost: int | None = None  # whom it had lost when it closed
        self.open: dict[Completion, Memory | None] = {}  # its transfers that are not over
        self.matched: deque[_Match] = deque()  # the receives among them that it can make
        self.borrowed: dict[tuple[int, int], Memory] = {}  # what it reads of other ranks, by rank and tag
        self.copying: _Match | None = None  # what it copies of another rank now
        self.copier = 0  # the number of the thread that does, or did last
        self.over: list[Completion] = []
        self.bell, self.left = Bell(), Bell()  # the second one is rung when its memory is used no more

    def reads(self) -> set[int]:
        """The ranks whose memory this one reads now."""
        lenders = {peer for peer, _ in self.borrowed}
        return lenders if self.copying is None else {*lenders, self.copying.peer}


@final
class _Group:
    """The ranks, under one lock that is not held while anything is copied."""

    def __init__(self, world_size: int) -> None:
        self.lock = threading.RLock()
        self.ranks = [_Rank() for _ in range(world_size)]

    def is_used(self, number: int) -> bool:
        """Whether a rank's memory is read or written now."""
        with self.lock:
            is_written = self.ranks[number].copying is not None
            read = [rank.reads() for rank in self.ranks]
        return is_written or any(number in each for each in read)
