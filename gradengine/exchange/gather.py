"""All-gather of small data over a link: what the ranks tell each other besides their gradients."""

from __future__ import annotations

import struct
from typing import final

import numpy as np

from gradengine.errors import ProtocolError
from gradengine.exchange.interface import refuse_long_part
from gradengine.exchange.links.link import Completed, Completion, Memory
from gradengine.exchange.transfers import Receive, Send, Transfer
from gradengine.exchange.wire import MAX_SMALL_PAYLOAD

_HEAD_TAG, _REST_TAG = (1 << 21) - 2, (1 << 21) - 1  # above an all-reduce's, whose last is 6 * 2**18 - 1
_LENGTH = struct.Struct("<q")
_ROOM = 4096 - _LENGTH.size  # bytes of data that go with their length, which is most of what is told in a step


@final
class Gather:
    """One rank's side of an all-gather: which transfers to make, and what came; no I/O, no threads, no clock.

    Args:
        rank: This rank.
        world_size: Ranks in the group.
        data: This rank's part, at most 16 MiB.

    Raises:
        CallerError: More than that.

    Example:
        >>> Gather(0, 1, b"mine").parts
        [b'mine']
    """

    def __init__(self, rank: int, world_size: int, data: bytes) -> None:
        refuse_long_part(data)
        head = np.zeros(_LENGTH.size + _ROOM, np.uint8)
        head[: _LENGTH.size + len(data)] = np.frombuffer(_LENGTH.pack(len(data)) + data[:_ROOM], np.uint8)
        rest = np.frombuffer(data, np.uint8, offset=min(_ROOM, len(data)))
        self._parts = {rank: data}
        self._heads: dict[int, Memory] = {}
        self._rests: dict[int, Memory] = {}
        self._outbox: list[Transfer] = []
        self._open: set[Completion] = set()
        for other in range(world_size):
            if other != rank:
                self._heads[other] = np.empty_like(head)
                self._begin(Receive(other, _HEAD_TAG, self._heads[other]))
                self._begin(Send(other, _HEAD_TAG, head))
                if rest.size:
                    self._begin(Send(other, _REST_TAG, rest))

    @property
    def is_done(self) -> bool:
        """Whether all parts are here, and this rank's own is sent to all others."""
        return not self._open

    @property
    def parts(self) -> list[bytes]:
        """Every rank's data, in rank order; once `is_done`."""
        return [self._parts[rank] for rank in sorted(self._parts)]

    @property
    def awaited(self) -> list[int]:
        """The ranks whose part is not here, or who have not taken this rank's own."""
        receives = {peer for kind, peer, _ in self._open if kind is Completed.RECEIVED}
        return sorted(receives or {peer for _, peer, _ in self._open})

    def transfers(self) -> list[Transfer]:
        """The transfers to make now: each is given once."""
        given, self._outbox = self._outbox, []
        return given

    def over(self, completion: Completion) -> None:
        """Report a transfer that is over; raises `ProtocolError` for a rank that announces more than 16 MiB."""
        kind, peer, tag = completion
        if kind is Completed.RECEIVED and tag == _HEAD_TAG:
            self._read(peer, self._heads[peer].tobytes())
        elif kind is Completed.RECEIVED:
            self._parts[peer] += self._rests[peer].tobytes()
        self._open.remove(completion)

    def _read(self, peer: int, head: bytes) -> None:
        (length,) = _LENGTH.unpack_from(head)
        if not 0 <= length <= MAX_SMALL_PAYLOAD:
            got, most = f"{length} bytes", f"at most {MAX_SMALL_PAYLOAD}"
            raise ProtocolError(f"rank {peer} announces too much to gather", got=got, expected=most)
        self._parts[peer] = head[_LENGTH.size :][:length]
        if length > _ROOM:
            self._rests[peer] = np.empty(length - _ROOM, np.uint8)
            self._begin(Receive(peer, _REST_TAG, self._rests[peer]))

    def _begin(self, transfer: Transfer) -> None:
        kind = Completed.SENT if isinstance(transfer, Send) else Completed.RECEIVED
        self._open.add(Completion(kind, transfer.peer, transfer.tag))
        self._outbox.append(transfer)


def is_of_gather(tag: int) -> bool:
    """Whether a transfer with this tag is of a gather, and not of an all-reduce."""
    return tag >= _HEAD_TAG
