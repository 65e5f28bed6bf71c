"""A link between threads of one process: the receiver copies from the sender's memory, once."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple, final

import numpy as np

from gradengine.arguments import checked_rank
from gradengine.errors import PeerLost, ProtocolError
from gradengine.exchange.links.link import Completed, Completion, Link, Memory


def thread_links(world_size: int) -> list[ThreadLink]:
    """One link for each of `world_size` threads of this process, in rank order.

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
    """See `thread_links`. Each `poll` copies one transfer at most, which is then still in the cache."""

    def __init__(self, group: _Group, rank: int) -> None:
        self._group, self.rank, self.world_size = group, rank, len(group.ranks)

    def send(self, peer: int, tag: int, memory: Memory) -> None:
        self._begin(Completion(Completed.SENT, peer, tag), memory)

    def receive(self, peer: int, tag: int, memory: Memory) -> None:
        self._begin(Completion(Completed.RECEIVED, peer, tag), memory)

    def poll(self) -> list[Completion]:
        group, mine = self._group, self._group.ranks[self.rank]
        with group.changed:
            self._refuse_closed()
            copy = mine.matched.popleft() if mine.matched else None
            if copy is None and not mine.over:
                self._refuse_lost()
            if copy is not None:
                group.copying.update([self.rank, copy.peer])
        if copy is not None:
            self._copy(copy)
        with group.changed:
            over, mine.over = mine.over, []
        return over

    def close(self) -> None:
        group = self._group
        with group.changed:
            if not group.ranks[self.rank].is_closed:
                group.ranks[self.rank] = _Rank(is_closed=True, lost=self.lost)
                for rank in group.ranks:
                    rank.matched = deque(copy for copy in rank.matched if copy.peer != self.rank)
                    rank.wake()
            while group.copying[self.rank]:
                group.changed.wait()

    def wake_by(self, wake: Callable[[], None]) -> bool:
        self._group.ranks[self.rank].wake = wake
        return True

    def _begin(self, transfer: Completion, memory: Memory) -> None:
        group, mine = self._group, self._group.ranks[self.rank]
        kind, peer, tag = transfer
        other = Completed.RECEIVED if kind is Completed.SENT else Completed.SENT
        with group.changed:
            self._refuse_closed()
            mine.open[transfer] = memory
            # Of another rank the memory is known while its transfer is open: it waits for this one.
            theirs = group.ranks[peer].open.get(Completion(other, self.rank, tag))
            if theirs is None:
                if group.ranks[peer].is_closed:
                    mine.wake()
                return
            source, sink = (memory, theirs) if kind is Completed.SENT else (theirs, memory)
            receiver, sender = (peer, self.rank) if kind is Completed.SENT else (self.rank, peer)
            group.ranks[receiver].matched.append(_Copy(sender, tag, source, sink))
            group.ranks[receiver].wake()

    def _copy(self, copy: _Copy) -> None:
        group, is_copied = self._group, False
        try:
            if copy.source.nbytes != copy.sink.nbytes:
                what = f"rank {copy.peer} sent rank {self.rank} another size with tag {copy.tag}"
                raise ProtocolError(what, got=f"{copy.source.nbytes} bytes", expected=f"{copy.sink.nbytes} bytes")
            np.copyto(copy.sink.reshape(-1).view(np.uint8), copy.source.reshape(-1).view(np.uint8))
            is_copied = True
        finally:
            with group.changed:
                group.copying.subtract([self.rank, copy.peer])
                group.changed.notify_all()
                if is_copied:
                    self._end(self.rank, Completion(Completed.RECEIVED, copy.peer, copy.tag))
                    self._end(copy.peer, Completion(Completed.SENT, self.rank, copy.tag))
                    group.ranks[copy.peer].wake()

    def _end(self, number: int, transfer: Completion) -> None:
        rank = self._group.ranks[number]
        if not rank.is_closed:
            del rank.open[transfer]
            rank.over.append(transfer)

    def _refuse_closed(self) -> None:
        if self._group.ranks[self.rank].is_closed:
            raise PeerLost(f"the link of rank {self.rank} is closed")

    def _refuse_lost(self) -> None:
        ranks = self._group.ranks
        for _, peer, _ in ranks[self.rank].open:
            if ranks[peer].is_closed:
                raise self.lost_by(peer, ranks[peer].lost)


class _Copy(NamedTuple):
    """A send and a receive that have met, to be made by the receiver."""

    peer: int  # the sender
    tag: int
    source: Memory
    sink: Memory


@final
class _Rank:
    """What the threads know of one rank."""

    def __init__(self, *, is_closed: bool = False, lost: int | None = None) -> None:
        self.is_closed = is_closed
        self.lost = lost  # whom it had lost when it closed
        self.open: dict[Completion, Memory] = {}  # its transfers that are not over
        self.matched: deque[_Copy] = deque()  # the receives among them that it can make
        self.over: list[Completion] = []
        self.wake: Callable[[], None] = lambda: None


@final
class _Group:
    """The ranks, under one lock that is not held while anything is copied."""

    def __init__(self, world_size: int) -> None:
        self.changed = threading.Condition()
        self.ranks = [_Rank() for _ in range(world_size)]
        self.copying: Counter[int] = Counter()  # how many copies read or write each rank's memory now
