"""A link over connected stream sockets (TCP, TLS or Unix). It sends from and receives into memory without a thread.

A message is one frame of docs/specs/wire.md. Nothing after its head is read until a receive for the message is open.
So the socket holds back messages that are not received yet, and this process's memory does not grow by them.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import socket
import struct
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, final

import numpy as np

from gradengine.errors import PeerLost, ProtocolError
from gradengine.exchange.links.link import DAMAGED, RECEIVE, SEND, VANISHED_SECONDS, Completion, Link, Memory
from gradengine.exchange.tls import reason_of
from gradengine.exchange.wire import HEAD_BYTES, checksum, head, head_of
from gradengine.threads import Bell

# The tag of a link's last message, above all other tags. Its checksum is the lost rank plus 1, or 0 if none is lost.
_FAREWELL = 1 << 21
_TCP_INFO = struct.Struct("=24xI28xI")  # Linux: packets without an acknowledgement, and ms since the last one
# Keepalive detects a vanished machine 20 s after the last byte from it, if no data is in flight to it. Otherwise a link
# must call `has_vanished`. macOS has TCP_KEEPALIVE instead of TCP_KEEPIDLE.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPALIVE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
_UNIX_SEND_BYTES = 1 << 20  # Linux's default of 208 KB causes four times as many wakeups
# Bytes that a close reads and drops at most. A close with unread bytes is a reset, which discards data in flight.
_DISCARDED_BYTES = 1 << 22
EMPTY = memoryview(bytearray())


class SocketLink(Link):
    """One rank's transfers over connected sockets, whose other ends have proved which ranks they are.

    Transfers to one rank are made in the order in which they were begun. A forked child closes all connections. A
    message has less than 4 GiB.

    Args:
        rank: This rank.
        connections: The connection with each other rank. The link closes them.
        hub: See `Link`. With a hub a rank is connected with the server only, and the server with all ranks.
    """

    bell: _SocketBell
    _tags = range(_FAREWELL + 1)

    def __init__(self, rank: int, connections: Mapping[int, socket.socket], *, hub: int | None = None) -> None:
        self.rank, self.hub, self.world_size = rank, hub, len(connections) + 1 if hub is None else hub
        families = {each.family for each in connections.values()}
        self.name = "unix" if families == {socket.AF_UNIX} else "tcp"
        own = self.named(rank)
        self._connections = {
            peer: Connection(peer, each, f"{self.named(peer)} sent {own}") for peer, each in connections.items()
        }
        self._open: dict[Completion, memoryview] = {}
        self._over: list[Completion] = []
        # The reason why transfers with a rank will never be over. It is an error, or the rank named in the rank's
        # farewell as lost, or the rank itself.
        self._faults: dict[int, int | PeerLost | ProtocolError] = {}
        self._lock = threading.Lock()  # held while sockets and memory are used
        self.bell = _SocketBell(self._lock, self._connections.values())
        _links.add(self)

    def send(self, peer: int, tag: int, memory: Memory) -> None:
        with self._lock:
            self._queue(Completion(SEND, peer, tag), memory)

    def receive(self, peer: int, tag: int, memory: Memory) -> None:
        with self._lock:
            self._begin(Completion(RECEIVE, peer, tag), memory)
            connection = self._connections[peer]
            if connection.held is not None or peer in self._faults:
                connection.held = None
                self.bell.due.append(connection)

    def poll(self) -> list[Completion]:
        with self._lock:
            self.refuse_closed()
            # Stop when a transfer is over, because its data is still in the cache, or when nothing can be moved.
            while not self._over and (ready := self.bell.ready()):
                for connection in ready:
                    self._move(connection)
            over, self._over = self._over, []
            if self._faults and not over:
                self._refuse_lost()
            return over

    def held(self) -> dict[int, int]:
        return {peer: each.held for peer, each in self._connections.items() if each.held is not None}

    def refuse_vanished(self) -> None:
        with contextlib.suppress(OSError):  # another thread may close the link
            for peer, connection in [*self._connections.items()]:
                if has_vanished(connection.socket):
                    self.lost = peer
                    raise self._gone(peer, f"its machine has answered nothing for {VANISHED_SECONDS:g} s")

    def gone(self) -> list[int]:
        """Return the ranks that have closed their links, or whose connections are lost."""
        return [peer for peer, each in self._connections.items() if each.has_ended]

    def traffic(self) -> list[tuple[int, str, int, int]]:
        """Return each rank's number, its address, and the bytes that were received from it and sent to it."""
        ordered = sorted(self._connections.items())
        return [(peer, origin(each.socket), each.received, each.sent) for peer, each in ordered]

    def refuse_unsaid(self, missed: Collection[int] = ()) -> None:
        """Raise for a lost rank that is in `missed`, sent no farewell, or closed because of a different rank."""
        said = self._said()
        if gone := [peer for peer in self._faults if peer in missed or said.get(peer) != peer]:
            # Prefer a rank that names a different lost rank. Otherwise take the rank that was lost first, because other
            # ranks may have closed for that reason in the middle of a message.
            peer = min(gone, key=lambda peer: said.get(peer, peer) == peer)
            if isinstance(fault := self._faults[peer], int):
                raise self.lost_by(peer, fault)
            self.lost = peer
            raise fault

    def close(self) -> None:
        self.is_closed = True
        self.bell.end()  # a thread that waits for the bell holds the lock
        with self._lock:
            for connection in self._connections.values():
                self._leave(connection)
            begun = [each.receiving for each in self._connections.values()]
            receives = [each for each in self._open if each.kind == RECEIVE]
            self.unwritten = [*self.unwritten, *(each for each in receives if each not in begun)]
            self._open.clear()
            self._connections = {}
            self.bell.close()

    # ---- inside ----

    def _begin(self, transfer: Completion, memory: Memory) -> None:
        self.refuse_closed()
        self._open[transfer] = memory.reshape(-1).view(np.uint8).data if memory.nbytes else EMPTY

    def _queue(self, transfer: Completion, memory: Memory, *, at_once: bool = False) -> None:
        self._begin(transfer, memory)
        connection = self._connections[transfer.peer]
        if transfer.peer not in self._faults:
            connection.outgoing.append(transfer)
        (self._push if at_once else self.bell.due.append)(connection)

    def _end(self, transfer: Completion, *, is_damaged: bool = False) -> None:
        del self._open[transfer]
        self._over.append(transfer._replace(kind=DAMAGED) if is_damaged else transfer)

    def _refuse_lost(self) -> None:
        """Raise an error for a rank whose transfers will never be over, after all of its messages were received."""
        missed = {transfer.peer for transfer in self._open} & self._faults.keys()
        # A rank that closed because of a different rank ends the group, even if no message from it is missing.
        if missed or (self._open and any(fault != peer for peer, fault in self._said().items())):
            self.refuse_unsaid(missed)

    def _said(self) -> dict[int, int]:
        """Return, for each rank that sent a farewell, the rank that it named as lost, or the rank itself."""
        return {peer: fault for peer, fault in self._faults.items() if isinstance(fault, int)}

    def _move(self, connection: Connection) -> None:
        """Receive and send without waiting, until one receive is over or nothing more can be done."""
        try:
            if connection.held is None and not connection.has_ended:
                self._read(connection)
        except BlockingIOError:
            pass
        except (OSError, PeerLost, ProtocolError) as fault:
            self._fail(connection, fault)
            connection.has_ended = True
        self._push(connection)
        if connection.held is None and not connection.has_ended and connection.pending():
            self.bell.due.append(connection)  # TLS has already received more

    def _push(self, connection: Connection) -> None:
        """Send until the socket is full, and let the bell ring when there is more to do."""
        try:
            while connection.outgoing:
                self._write(connection)
        except BlockingIOError:
            pass
        except OSError as fault:  # earlier messages of the rank can still be received
            self._fail(connection, fault)
        self.bell.watch(connection)

    def _read(self, connection: Connection) -> None:
        """Receive until no data is left, a payload is complete, or no receive is open for the next message."""
        while True:
            while connection.missing:
                count = self._fill(connection)
                if not count:
                    raise self._gone(connection.peer)
                connection.missing = connection.missing[count:]
                self.moved_bytes += count
                connection.received += count
            if (transfer := connection.receiving) is not None:
                found = checksum(transfer.tag, self._open[transfer])
                self._end(transfer, is_damaged=found != connection.checksum)
                connection.receiving, connection.missing = None, memoryview(connection.head)
                return
            self._place(connection)
            if connection.held is not None:
                return

    def _fill(self, connection: Connection) -> int:
        """Receive some of the missing bytes, and return their number."""
        return connection.socket.recv_into(connection.missing)

    def _place(self, connection: Connection) -> None:
        """Find the memory for the payload that a head announces."""
        peer = connection.peer
        tag, connection.checksum, size = head_of(connection.head, connection.says, self._tags)
        if tag == _FAREWELL:
            lost = connection.checksum - 1
            self._faults[peer] = lost if 0 <= lost < self.world_size else peer
            raise self._gone(peer)
        transfer = Completion(RECEIVE, peer, tag)
        payload = self._open.get(transfer)
        if payload is None:
            connection.held = tag
        elif size != payload.nbytes:
            raise self.other_size(peer, tag, size, payload.nbytes)
        else:
            connection.receiving, connection.missing = transfer, payload

    def _write(self, connection: Connection) -> None:
        """Send a piece of the first message."""
        transfer, parts = connection.outgoing[0], connection.parts
        if not parts:
            payload = self._open[transfer]
            check = checksum(transfer.tag, payload)
            parts += [memoryview(head(transfer.tag, check, payload.nbytes)), payload]
            connection.attached = self._attached(transfer)
        sent = connection.socket.sendmsg(parts, connection.attached)
        connection.attached = ()
        self.moved_bytes += sent
        connection.sent += sent
        while parts and sent >= parts[0].nbytes:
            sent -= parts.pop(0).nbytes
        if parts:
            parts[0] = parts[0][sent:]
        else:
            connection.outgoing.popleft()
            self._end(transfer)

    def _attached(self, transfer: Completion) -> Sequence[tuple[int, int, Any]]:
        """Return the ancillary data of a message for `sendmsg`."""
        return ()

    def _fail(self, connection: Connection, fault: OSError | PeerLost | ProtocolError) -> None:
        """Stop sending to a rank, and keep its first fault to be raised."""
        if isinstance(fault, OSError):
            fault = self._gone(connection.peer, f"the connection with it is lost ({reason_of(fault)})")
        self._faults.setdefault(connection.peer, fault)
        connection.outgoing.clear()

    def _gone(self, peer: int, why: str = "its connection has ended") -> PeerLost:
        return PeerLost(f"{self.named(peer)} is gone: {why}", do=self.way_on)

    def _leave(self, connection: Connection) -> None:
        """Close a connection, after a farewell if it is not in the middle of a message."""
        with contextlib.suppress(OSError):
            if not connection.parts:
                connection.socket.send(head(_FAREWELL, 0 if self.lost is None else self.lost + 1, 0))
        with contextlib.suppress(OSError):
            connection.socket.shutdown(socket.SHUT_WR)
            left = _DISCARDED_BYTES
            while left > 0 and (data := connection.socket.recv(1 << 16)):
                left -= len(data)
        connection.socket.close()


def origin(connection: socket.socket) -> str:
    """Return the host at the other end of a connection, for display."""
    if connection.family == socket.AF_UNIX:
        return "this host"
    try:
        return str(connection.getpeername()[0]).removeprefix("::ffff:")  # IPv4 at a socket that listens for both
    except OSError:
        return "gone"


def has_vanished(connection: socket.socket) -> bool:
    """Return whether the machine at the other end no longer answers. The machine of a stopped process still answers.

    Keepalive detects this only if no data is in flight to the machine.
    """
    if sys.platform != "linux" or connection.family == socket.AF_UNIX:
        return False
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    missing, silent_ms = _TCP_INFO.unpack(info)
    return bool(missing) and silent_ms > 1000 * VANISHED_SECONDS


def set_options(connection: socket.socket) -> None:
    """Set the options that make a socket fast, and that detect a machine that vanishes."""
    if connection.family == socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_SEND_BYTES)
        return
    with contextlib.suppress(OSError):  # raised by macOS if the other end is gone, which the next read reports
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@final
class Connection:
    """A socket, and the messages that are being sent and received over it."""

    def __init__(self, peer: int, connection: socket.socket, says: str) -> None:
        self.peer, self.socket, self.says = peer, connection, says  # `says` begins errors about its messages
        self.pending: Callable[[], int] = getattr(connection, "pending", int)  # bytes that TLS has deciphered
        self.outgoing: deque[Completion] = deque()
        self.parts: list[memoryview] = []  # the rest of the first outgoing message, while it is sent
        self.head = bytearray(HEAD_BYTES)
        self.attached: Sequence[tuple[int, int, Any]] = ()  # ancillary data for the first byte of `parts`
        self.missing = memoryview(self.head)  # the missing rest of a head or payload
        self.receiving: Completion | None = None  # the receive whose payload is being read
        self.checksum = 0  # the checksum in the head of the message being read
        self.held: int | None = None  # the tag of a head without an open receive
        self.has_ended = False  # whether no more is received
        self.received = self.sent = 0  # bytes
        self.events = 0  # the selector's events that ring the bell
        connection.setblocking(False)
        set_options(connection)
        close_in_children(connection)


@final
class _SocketBell(Bell):
    """A bell that connections also ring while they can be read or written. A thread waits for it under the lock."""

    def __init__(self, lock: threading.Lock, connections: Iterable[Connection]) -> None:
        self._lock, self._rope_lock = lock, threading.Lock()
        # Connections to move although nothing rings for them. At first these are all, because TLS may have read more.
        self.due = [*connections]
        self._selector = selectors.DefaultSelector()
        self._bell, self._rope = socket.socketpair()
        for end in (self._bell, self._rope):
            end.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)

    def ring(self) -> None:
        with contextlib.suppress(OSError), self._rope_lock:  # the rope is full of rings, or closed
            self._rope.send(b"\0")

    def wait(self, seconds: float | None = None) -> bool:
        with self._lock:
            is_rung = bool(self.due) or self._rope.fileno() < 0 or bool(self._selector.select(seconds))
            with contextlib.suppress(OSError):
                self._bell.recv(1 << 12)
            return is_rung

    def watch(self, connection: Connection) -> None:
        """Let a connection ring the bell when it can be read or written, if it has data to read or write."""
        reads = connection.held is None and not connection.has_ended
        events = selectors.EVENT_READ * reads | selectors.EVENT_WRITE * bool(connection.outgoing)
        if events == connection.events:
            return
        if not events:
            self._selector.unregister(connection.socket)
        elif not connection.events:
            self._selector.register(connection.socket, events, connection)
        else:
            self._selector.modify(connection.socket, events, connection)
        connection.events = events

    def ready(self) -> list[Connection]:
        """Return the connections that are due. If there are none, return those that can be read or written now."""
        if self.due:
            due, self.due = [*dict.fromkeys(self.due)], []
            return due
        return [key.data for key, _ in self._selector.select(0) if key.data is not None]

    def end(self) -> None:
        """End the current wait and all later ones."""
        # Without the lock a different thread might write to a new file with the same descriptor.
        with self._rope_lock:
            self._rope.close()

    def close(self) -> None:
        """Close the selector and the bell's own sockets. Call it after `end` and under the lock."""
        self._bell.close()
        self._selector.close()


_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_links: weakref.WeakSet[SocketLink] = weakref.WeakSet()


def close_in_children(connection: socket.socket) -> None:
    """Make forked children close their copies of a socket."""
    _sockets.add(connection)


def _close_all() -> None:
    _links.clear()
    for each in _sockets:
        each.close()


@atexit.register
def _leave_all() -> None:
    """Send farewells when the process ends with an open exchange. Otherwise the process would look killed."""
    for link in list(_links):
        link.close()


if hasattr(os, "register_at_fork"):
    # A forked child that kept the sockets open would hide the end of this process from the other ranks.
    os.register_at_fork(after_in_child=_close_all)
