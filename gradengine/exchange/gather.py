"""All-gather of small data over a link: what the ranks tell each other besides their gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from gradengine.errors import DeadlineExceeded, ExchangeError, ProtocolError
from gradengine.exchange.interface import refuse_long_part
from gradengine.exchange.links.link import Completed, Completion, Idle, Link, Memory
from gradengine.exchange.wire import MAX_SMALL_PAYLOAD

_LENGTHS, _DATA = (1 << 21) - 2, (1 << 21) - 1  # tags above an all-reduce's, whose last is 6 * 2**18 - 1
_LONGEST_REST = 0.1  # seconds until the clock is looked at again


def gather(link: Link, data: bytes, timeout: float, *, clock: Callable[[], float] = time.monotonic) -> list[bytes]:
    """Every rank's `data`, in rank order, on every rank; at most 16 MiB each.

    Nothing else may use the link meanwhile. After an error the link is to be closed: transfers are still open.

    Args:
        link: To the other ranks, which all call this too.
        data: This rank's.
        timeout: Seconds in which all have to come.
        clock: What seconds are counted by.

    Raises:
        CallerError: More than 16 MiB.
        DeadlineExceeded: A rank was late; names it.
        PeerLost: A rank is gone; names it.
        ProtocolError: A rank announces more than 16 MiB; names it.
    """
    refuse_long_part(data)
    try:
        return _gathered(link, data, clock() + timeout, clock)
    except ExchangeError:
        link.has_failed = True
        raise


def _gathered(link: Link, data: bytes, deadline: float, clock: Callable[[], float]) -> list[bytes]:
    others = [rank for rank in range(link.world_size) if rank != link.rank]
    lengths = {rank: np.zeros(1, "<i8") for rank in others}
    _exchange(link, _LENGTHS, np.array([len(data)], "<i8"), lengths, deadline, clock)
    for rank, length in lengths.items():
        if not 0 <= length[0] <= MAX_SMALL_PAYLOAD:
            got, most = f"{length[0]} bytes", f"at most {MAX_SMALL_PAYLOAD}"
            raise ProtocolError(f"rank {rank} announces too much to gather", got=got, expected=most)
    parts = {rank: np.empty(length[0], np.uint8) for rank, length in lengths.items()}
    _exchange(link, _DATA, np.frombuffer(data, np.uint8), parts, deadline, clock)
    return [data if rank == link.rank else parts[rank].tobytes() for rank in range(link.world_size)]


def _exchange(
    link: Link,
    tag: int,
    mine: Memory,
    theirs: Mapping[int, Memory],
    deadline: float,
    clock: Callable[[], float],
) -> None:
    """Send each other rank the same, and receive of each; returns when all of it is over."""
    idle = Idle(link)
    for rank, memory in theirs.items():
        link.receive(rank, tag, memory)
        link.send(rank, tag, mine)
    is_open = {Completion(kind, rank, tag) for rank in theirs for kind in Completed}
    while is_open:
        over = link.poll()
        is_open.difference_update(over)
        if over:
            idle.moved()
        elif is_open and clock() > deadline:
            late = sorted({peer for _, peer, _ in is_open})
            link.lost = late[0]
            raise _late(link.rank, late)
        else:
            idle.rest(_LONGEST_REST)


def _late(rank: int, late: Sequence[int]) -> DeadlineExceeded:
    who = f"rank {late[0]} is" if len(late) == 1 else f"ranks {list(late)} are"
    return DeadlineExceeded(f"{who} late for a gather, and rank {rank} waits", do="see what those ranks do")
