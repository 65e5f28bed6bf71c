"""All-gather of small data over a link, which carries all data that ranks exchange except their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import msgpack
import numpy as np

from gradengine.arguments import refuse_other_kind, said
from gradengine.errors import CallerError, ExchangeError, ProtocolError
from gradengine.exchange.links.link import RECEIVE, SEND, Completion, Memory, Transfer
from gradengine.exchange.wire import MAX_SMALL_PAYLOAD, unpacked

_HEAD_TAG, _REST_TAG = (1 << 21) - 2, (1 << 21) - 1  # greater than all tags of an all-reduce, at most 6 * 2**18 - 1
_LENGTH = 8  # bytes of a part's length, which is sent before the part
_BIN_HEAD = 8  # most bytes per part that a hub's message has in addition to the part
_ROOM = 4096 - _LENGTH  # bytes of data that are sent together with their length, enough for most gathers


@final
class Gather:
    """One rank's side of an all-gather: its transfers and the received parts; no I/O, threads or clock.

    The hub is the server of the group. With a hub, each rank sends its part to it and receives all parts from it as a
    msgpack array of bin. The server's own part is the last.

    Args:
        rank: This rank, or the hub.
        world_size: Ranks in the group.
        data: This rank's part, at most 1 MiB (see `refuse_long_part`).
        hub: The number of the server that relays all parts, which is the world size. None without a server.

    Example:
        >>> Gather(0, 1, b"mine").parts
        [b'mine']
    """

    def __init__(self, rank: int, world_size: int, data: bytes, hub: int | None = None) -> None:
        self._rank, self._hub, self._count = rank, hub, world_size + (hub is not None)
        self._parts = {rank: data}
        self._received: dict[int, Memory] = {}  # memory for the length of each rank's part, and then the part
        self._outbox: list[Transfer] = []
        self._open: set[Completion] = set()
        is_by_hub = hub is not None and rank != hub
        self._others = [world_size] if is_by_hub else [other for other in range(world_size) if other != rank]
        self._most = self._count * (MAX_SMALL_PAYLOAD + _BIN_HEAD) if is_by_hub else MAX_SMALL_PAYLOAD
        for other in self._others:
            self._received[other] = np.empty(_LENGTH + _ROOM, np.uint8)
            self._begin(RECEIVE, other, _HEAD_TAG, self._received[other])
        if rank != hub:
            self._send(data)

    @property
    def is_done(self) -> bool:
        """Whether all parts were received, and this rank's own part was sent to all others."""
        return not self._open

    @property
    def parts(self) -> list[bytes]:
        """The data of every rank, in rank order, and then the server's if there is one. Valid once `is_done`."""
        return [self._parts[rank] for rank in sorted(self._parts)]

    @property
    def awaited(self) -> list[int]:
        """The ranks whose part is missing. If none is, the ranks that have not received this rank's part."""
        receives = {peer for kind, peer, _ in self._open if kind == RECEIVE}
        return sorted(receives or {peer for _, peer, _ in self._open})

    def transfers(self) -> list[Transfer]:
        """Return the transfers to make now, each of them once."""
        given, self._outbox = self._outbox, []
        return given

    def over(self, completion: Completion) -> None:
        """Record that a transfer is over. Raises `ProtocolError` for a rank that announces more than 1 MiB."""
        kind, peer, tag = completion
        if kind == RECEIVE:
            self._read(peer, tag)
        self._open.remove(completion)  # This comes last, so that a gather with a refused part is never done.

    def _read(self, peer: int, tag: int) -> None:
        """Read the head or the rest of a rank's message."""
        received = self._received[peer]
        length = int(received[:_LENGTH].view("<i8")[0])
        if not 0 <= length <= self._most:
            who = "the server" if peer == self._hub else f"rank {peer}"
            got, most = f"{length} bytes", f"at most {self._most}"
            raise ProtocolError(f"{who} announces too much to gather", got=got, expected=most)
        if tag == _HEAD_TAG and length > _ROOM:
            self._received[peer] = np.concatenate([received, np.empty(length - _ROOM, np.uint8)])
            self._begin(RECEIVE, peer, _REST_TAG, self._received[peer][received.size :])
        else:
            self._take(peer, received[_LENGTH:][:length].tobytes())

    def _send(self, data: bytes) -> None:
        message = np.zeros(_LENGTH + max(_ROOM, len(data)), np.uint8)
        message[:_LENGTH].view("<i8")[0] = len(data)
        message[_LENGTH:][: len(data)] = np.frombuffer(data, np.uint8)
        for other in self._others:
            self._begin(SEND, other, _HEAD_TAG, message[: _LENGTH + _ROOM])
            if len(data) > _ROOM:
                self._begin(SEND, other, _REST_TAG, message[_LENGTH + _ROOM :])

    def _take(self, peer: int, data: bytes) -> None:
        """Store the part of a rank, or all parts from the server."""
        if peer == self._hub:
            parts = unpacked(data, "the server's list of parts")
            if not isinstance(parts, list) or [*map(type, parts)] != [bytes] * self._count:
                got, expected = f"{len(parts)} parts" if isinstance(parts, list) else parts, f"{self._count} of bytes"
                raise ProtocolError("the server did not send one part for each rank", got=got, expected=expected)
            self._parts = dict(enumerate(parts))
            return
        self._parts[peer] = data
        if self._rank == self._hub and len(self._parts) == self._count:
            self._send(msgpack.packb(self.parts))

    def _begin(self, kind: str, peer: int, tag: int, memory: Memory) -> None:
        self._open.add(Completion(kind, peer, tag))
        self._outbox.append(Transfer(kind, peer, tag, memory))


def is_of_gather(tag: int) -> bool:
    """Return whether a transfer with this tag belongs to a gather, and not to an all-reduce."""
    return tag >= _HEAD_TAG


def packed(what: str, facts: object) -> bytes:
    """Return one rank's facts for a gather, with their name `what`. Raises `CallerError` if they cannot be sent."""
    refuse_other_kind("the name of the facts", what, str)
    try:
        data: bytes = msgpack.packb([what, facts])
        unpacked(data, "the packed facts")  # msgpack also packs values that other ranks would refuse.
    except (TypeError, ValueError, OverflowError, ProtocolError) as fault:
        expected = "None, bool, int of 64 bits, float, str or bytes, in lists and in dicts with str keys"
        do = "convert scalars by float(x) and arrays by x.tolist()"
        raise CallerError("the facts cannot be sent", got=said(fault), expected=expected, do=do) from None
    refuse_long_part(data)
    return data


def gathered(parts: Sequence[bytes]) -> list[Any]:
    """Return every rank's facts, in rank order. Raises `ExchangeError` if their name differs from rank 0's."""
    told: list[Any] = []
    for rank, part in enumerate(parts):
        found = unpacked(part, f"the message of rank {rank}")
        if not isinstance(found, list) or len(found) != 2 or not isinstance(found[0], str):
            raise ProtocolError(f"the message of rank {rank} has no name", got=found, expected="[text, facts]")
        told.append(found)
        if found[0] != told[0][0]:
            what, expected = f"rank {rank} is out of sync with rank 0", said(told[0][0])
            do = "make the same calls on all ranks; if a window ended on some only, restart all from one checkpoint"
            raise ExchangeError(what, got=said(found[0]), expected=expected, do=do)
    return [facts for _, facts in told]


def refuse_long_part(data: bytes) -> None:
    """Raise `CallerError` unless a part of a gather is bytes, of at most 1 MiB."""
    refuse_other_kind("a part of a gather", data, bytes)
    if len(data) > MAX_SMALL_PAYLOAD:
        raise CallerError("too much to gather", got=f"{len(data)} bytes", expected=f"at most {MAX_SMALL_PAYLOAD}")
