"""A link between processes of one host. A receiver copies from the sender's memory, or reads it in place.

A sender lends memory in a shared mapping. It sends the memory's offset and size in a message over a Unix socket. The
first such message carries the descriptor of the mapping, which the receiver maps for reading. After the receiver has
copied or read the memory, it sends an empty message. Only then the send is over. Memory outside of shared mappings is
sent over the socket.

All messages have checksums. Lent memory has none, because a checksum would cost both ranks one more pass over memory.

A rank that closes does not wait for ranks that still read its memory, because they may be stopped. Its user may then
overwrite that memory. But its connections have ended before that. A rank checks the connection after each read, and
discards the data if the connection has ended.
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

# Bits of tags. A message with `_LENT` holds the offset and size of lent memory. One with `_RELEASED` is empty, and
# reports that the receiver has read the memory.
_LENT, _RELEASED = 1 << 22, 1 << 23
_PLACE = struct.Struct("<QQ")
_NOTHING: Memory = np.empty(0, np.uint8)


@final
class SharedMemoryLink(SocketLink):
    """One rank's transfers with other processes of its host (see `SocketLink`). Borrowed memory is fp32.

    Args:
        rank: This rank.
        connections: A connected Unix socket for each other rank. The link closes them.
    """

    reads_in_place = True
    _tags = range(1 << 24)

    def __init__(self, rank: int, connections: Mapping[int, socket.socket], *, hub: int | None = None) -> None:
        self._lent: dict[tuple[int, int], tuple[Memory, SharedMemory]] = {}  # keyed by (rank, tag)
        self._borrowed: dict[tuple[int, int], Memory] = {}
        self._copied: set[Completion] = set()  # releases of copied messages, until they are sent
        self._shown: dict[int, SharedMemory] = {}  # this rank's memory that each rank has mapped
        self._mapped: dict[int, Memory] = {}  # each rank's memory, as mapped by this rank
        self._left: set[int] = set()  # ranks that were gone after their memory had been read
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
        self.borrow(peer, tag)  # the sender may send the message in either way

    def borrow(self, peer: int, tag: int) -> None:
        super().receive(peer, tag | _LENT, np.empty(_PLACE.size, np.uint8))

    def release(self, peer: int, tag: int) -> None:
        with self._lock:
            self.refuse_closed()
            del self._borrowed[peer, tag]
            if self._has_left(peer):
                connection = self._connections[peer]
                connection.held = None
                while not connection.has_ended:  # its last message holds the reason
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
            if kind == RECEIVE:  # the other way to receive this message is not needed
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
        """Copy memory that a rank lends, or borrow it."""
        receipt, whole = Completion(SEND, peer, tag | _RELEASED), self._mapped.get(peer, _NOTHING)
        self._open[receipt] = EMPTY  # stays open if it is never sent, so that the loss of the rank is reported
        source, sink = whole[start : start + size], self._open.pop(Completion(RECEIVE, peer, tag), None)
        if source.size != size or (sink is None and (start % 4 or size % 4)):
            what = f"rank {peer} lends rank {self.rank} an invalid range of memory with tag {tag}"
            expected = f"a range within {whole.size} bytes, of whole fp32 values if it is borrowed"
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
        """Return whether a rank has ended its connection, so that memory read from it may have been overwritten."""
        if self._ends[peer].poll(0):
            self._left.add(peer)
        return peer in self._left

    def _place(self, connection: Connection) -> None:
        super()._place(connection)
        if connection.held is None:
            return
        peer, tag = connection.peer, connection.held
        if peer in self._left:  # the held message may never be received, and would hide the loss
            raise self._gone(peer)
        if tag & _RELEASED or Completion(RECEIVE, peer, tag | _LENT) in self._open:
            what = f"rank {peer} sent rank {self.rank} data that it should lend, or released what was not lent"
            raise ProtocolError(what, got=f"tag {tag}", do="use shared memory on all ranks")

    def _fill(self, connection: Connection) -> int:
        if connection.receiving is not None:
            return super()._fill(connection)
        peer, room = connection.peer, socket.CMSG_LEN(array.array("i").itemsize)  # bytes for one descriptor
        count, brought, flags, _ = connection.socket.recvmsg_into([connection.missing], room, socket.MSG_CMSG_CLOEXEC)
        for _, _, descriptors in brought:
            (descriptor,) = array.array("i", descriptors)
            self._map(peer, descriptor)
        if flags & socket.MSG_CTRUNC:
            what, do = f"the descriptor that rank {peer} sent rank {self.rank} was not received", "raise ulimit -n"
            raise ProtocolError(what, expected="one descriptor, within this process's limit of open files", do=do)
        return count

    def _map(self, peer: int, descriptor: int) -> None:
        """Map a rank's memory in place of the mapping that it had before."""
        try:
            self._mapped[peer] = mapped(descriptor)
        except (OSError, ValueError) as fault:  # a limit of this process, or no shared memory
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
