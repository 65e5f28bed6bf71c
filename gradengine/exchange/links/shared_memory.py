"""A link between processes of one host: a rank reads what another sends in that rank's own memory.

Memory in a shared mapping is lent: a message over a Unix socket says at which offset, and the first such message
carries the descriptor of the memory, which the receiver maps for reading. When the receiver has copied it, or has read
what it borrowed, an empty message says so, and only then the send is over. All else is sent over the socket.

All messages have checksums. Lent memory is not sent, and has none: a checksum would cost both ranks one more pass over
memory.

A rank that closes does not wait for ranks that read what it has lent, since they may be stopped; its user may then
overwrite that memory. But its connections have ended before that, and a rank that has read checks this: if they have
ended, it discards what it has read.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np

from gradengine.arrays.shared import SharedMemory, mapped, place_of
from gradengine.errors import ExchangeError, ProtocolError
from gradengine.exchange.links.link import DAMAGED, RECEIVE, SEND, Completion, Memory
from gradengine.exchange.links.sockets import EMPTY, Connection, SocketLink

_LENT, _RELEASED = 1 << 22, 1 << 23  # in tags: where what is sent lies (offset, size); that it has been read (nothing)
_PLACE = struct.Struct("<QQ")
_NOTHING: Memory = np.empty(0, np.uint8)


@final
class SharedMemoryLink(SocketLink):
    """One rank's transfers with other processes of its host; see `SocketLink`. Borrowed memory is fp32.

    Args:
        rank: This rank.
        connections: For each other rank one connected Unix socket; closed with the link.
    """

    reads_in_place = True
    _tags = range(1 << 24)

    def __init__(self, rank: int, connections: Mapping[int, socket.socket], *, hub: int | None = None) -> None:
        self._lent: dict[tuple[int, int], tuple[Memory, SharedMemory]] = {}  # by rank and tag, until it is released
        self._borrowed: dict[tuple[int, int], Memory] = {}
        self._copied: set[Completion] = set()  # what says so, until it is sent
        self._shown: dict[int, SharedMemory] = {}  # what each rank has mapped of this one
        self._mapped: dict[int, Memory] = {}  # of each rank
        self._left: set[int] = set()  # ranks that were gone when their memory had been read
        self._ends = {peer: select.poll() for peer in connections}
        for peer, connection in connections.items():
            self._ends[peer].register(connection, select.POLLRDHUP)
        super().__init__(rank, connections, hub=hub)
        self.name = "shared_memory"

    def lends(self, memory: Memory | None) -> bool:
        return memory is not None and place_of(memory) is not None

    def held(self) -> dict[int, int]:
        return {peer: tag % _LENT for peer, tag in super().held().items()}

    def send(self, peer: int, tag: int, memory: Memory) -> None:
        place = place_of(memory)
        if place is None:
            super().send(peer, tag, memory)
            return
        whole, start = place
        with self._lock:
            self._lent[peer, tag] = memory, whole
            where = np.frombuffer(_PLACE.pack(start, memory.nbytes), np.uint8)
            self._queue(Completion(SEND, peer, tag | _LENT), where, at_once=True)

    def receive(self, peer: int, tag: int, memory: Memory) -> None:
        super().receive(peer, tag, memory)
        self.borrow(peer, tag)  # or so: whichever comes

    def borrow(self, peer: int, tag: int) -> None:
        super().receive(peer, tag | _LENT, np.empty(_PLACE.size, np.uint8))

    def release(self, peer: int, tag: int) -> None:
        with self._lock:
            self.refuse_closed()
            del self._borrowed[peer, tag]
            if self._has_left(peer):
                connection = self._connections[peer]
                connection.held = None
                while not connection.has_ended:  # its last message says why it left
                    self._move(connection)
                self._refuse_lost()
            self._queue(Completion(SEND, peer, tag | _RELEASED), _NOTHING, at_once=True)

    def close(self) -> None:
        super().close()
        for held in (self._lent, self._borrowed, self._shown, self._mapped):
            held.clear()

    # ---- inside ----

    def _end(self, transfer: Completion, *, is_damaged: bool = False) -> None:
        kind, peer, tag = transfer
        own, memory = tag % _LENT, self._open.pop(transfer)
        if is_damaged or tag == own:
            if kind == RECEIVE:  # in one of the two ways
                self._open.pop(transfer._replace(tag=tag ^ _LENT), None)
            self._over.append(Completion(DAMAGED if is_damaged else kind, peer, own))
        elif tag & _LENT and kind == SEND:
            self._open[Completion(RECEIVE, peer, own | _RELEASED)] = EMPTY
        elif tag & _LENT:
            self._take(peer, own, *_PLACE.unpack(memory))
        elif kind == RECEIVE:
            del self._lent[peer, own]
            self._over.append(Completion(SEND, peer, own))
        elif transfer in self._copied:
            self._copied.remove(transfer)
            self._over.append(Completion(RECEIVE, peer, own))

    def _take(self, peer: int, tag: int, start: int, size: int) -> None:
        """Copy what a rank lends, or let it be borrowed."""
        receipt, whole = Completion(SEND, peer, tag | _RELEASED), self._mapped.get(peer, _NOTHING)
        self._open[receipt] = EMPTY  # also where it is never sent: then the rank is missed
        source, sink = whole[start : start + size], self._open.pop(Completion(RECEIVE, peer, tag), None)
        if source.size != size or (sink is None and (start % 4 or size % 4)):
            what = f"rank {peer} lends rank {self.rank} a range that cannot be, with tag {tag}"
            expected = f"within {whole.size}, and of fp32 to be borrowed"
            raise ProtocolError(what, got=f"{size} bytes from {start}", expected=expected)
        if sink is None:
            self._borrowed[peer, tag] = source.view(np.float32)
            self._over.append(Completion(RECEIVE, peer, tag))
            return
        if size != sink.nbytes:
            raise self.other_size(peer, tag, size, sink.nbytes)
        np.copyto(np.frombuffer(sink, np.uint8), source)
        if not self._has_left(peer):
            self._copied.add(receipt)
            self._queue(receipt, _NOTHING, at_once=True)

    def _has_left(self, peer: int) -> bool:
        """Whether a rank has ended its connection, so that what was read of its memory since may be overwritten."""
        if self._ends[peer].poll(0):
            self._left.add(peer)
        return peer in self._left

    def _place(self, connection: Connection) -> None:
        super()._place(connection)
        if connection.held is None:
            return
        peer, tag = connection.peer, connection.held
        if peer in self._left:  # else it would be missed only after what is held
            raise self._gone(peer)
        if tag & _RELEASED or Completion(RECEIVE, peer, tag | _LENT) in self._open:
            what = f"rank {peer} sent rank {self.rank} what it should lend, or has read what was not lent"
            raise ProtocolError(what, got=f"tag {tag}", do="use shared memory on all ranks")

    def _fill(self, connection: Connection) -> int:
        if connection.receiving is not None:
            return super()._fill(connection)
        peer, room = connection.peer, socket.CMSG_LEN(array.array("i").itemsize)  # for one descriptor
        count, brought, flags, _ = connection.socket.recvmsg_into([connection.missing], room, socket.MSG_CMSG_CLOEXEC)
        for _, _, descriptors in brought:
            (descriptor,) = array.array("i", descriptors)
            self._map(peer, descriptor)
        if flags & socket.MSG_CTRUNC:
            what, do = f"the descriptor that rank {peer} sent rank {self.rank} was not received", "raise ulimit -n"
            raise ProtocolError(what, expected="one, and room for one more in this process", do=do)
        return count

    def _map(self, peer: int, descriptor: int) -> None:
        """Map another rank's memory, instead of what it had before."""
        try:
            self._mapped[peer] = mapped(descriptor)
        except (OSError, ValueError) as fault:  # of a limit of this process, or it is no shared memory
            what = f"rank {self.rank} cannot map the memory of rank {peer} ({fault})"
            raise ExchangeError(what, do='raise ulimit -v and -n, or pass link="unix" on all ranks') from None
        finally:
            os.close(descriptor)

    def _attached(self, transfer: Completion) -> Sequence[tuple[int, int, Any]]:
        _, peer, tag = transfer
        _, whole = self._lent[peer, tag % _LENT] if tag & _LENT else (None, None)
        if whole is None or self._shown.get(peer) is whole:
            return ()
        self._shown[peer] = whole
        return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [whole.descriptor]))]
