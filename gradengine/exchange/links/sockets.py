"""A link over connected stream sockets, TCP, TLS or Unix: from the sender's memory to the receiver's, without a thread.

A message is one frame of docs/wire.md. Nothing after its head is read until a receive for its message is open: so the
socket holds back messages that are not received yet, and our memory does not grow by them.
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

_FAREWELL = 1 << 21  # the tag of a link's last message, above all others; checksum: the rank it has lost plus 1, or 0
_TCP_INFO = struct.Struct("=24xI28xI")  # Linux: packets without an acknowledgement, and ms since the last one
# A machine that vanishes is noticed 20 s after the last byte from it, if nothing is on its way there: else a link must
# look, see `has_vanished`. macOS has TCP_KEEPALIVE for TCP_KEEPIDLE.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPALIVE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
_UNIX_SEND_BYTES = 1 << 20  # Linux's default is 208 KB: four times the wakeups
_DISCARDED_BYTES = 1 << 22  # read and dropped at a close, so that it is no reset, which ends what is on its way
EMPTY = memoryview(bytearray())


class SocketLink(Link):
    """One rank's transfers over connected sockets, whose other ends have proved which ranks they are.

    Transfers to one rank are made in the order in which they were begun. A forked child closes all connections. A
    message has less than 4 GiB.

    Args:
        rank: This rank.
        connections: For each other rank the connection with it; closed with the link.
        hub: See `Link`: then a rank's connection is with the server alone, and the server's are with all ranks.
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
        # Why transfers with a rank will not be over: an error, or the rank that it says it has lost, perhaps itself.
        self._faults: dict[int, int | PeerLost | ProtocolError] = {}
        self._lock = threading.Lock()  # while sockets and memory are used
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
            # Until something is over, which is then still in the cache, or nothing can be moved.
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
        with contextlib.suppress(OSError):  # another thread closes the link
            for peer, connection in [*self._connections.items()]:
                if has_vanished(connection.socket):
                    self.lost = peer
                    raise self._gone(peer, f"its machine has answered nothing for {VANISHED_SECONDS:g} s")

    def gone(self) -> list[int]:
        """The ranks that have closed their links, or whose connections are lost."""
        return [peer for peer, each in self._connections.items() if each.has_ended]

    def traffic(self) -> list[tuple[int, str, int, int]]:
        """For each rank its number, its address, and the bytes that were received from it and sent to it."""
        ordered = sorted(self._connections.items())
        return [(peer, origin(each.socket), each.received, each.sent) for peer, each in ordered]

    def refuse_unsaid(self, missed: Collection[int] = ()) -> None:
        """Raise for a rank that is gone: one of `missed`, one that has not said so, or one that left for another."""
        said = self._said()
        if gone := [peer for peer in self._faults if peer in missed or said.get(peer) != peer]:
            # The one that was lost first, if none says another: some may have closed for that amid a message.
            peer = min(gone, key=lambda peer: said.get(peer, peer) == peer)
            if isinstance(fault := self._faults[peer], int):
                raise self.lost_by(peer, fault)
            self.lost = peer
            raise fault

    def close(self) -> None:
        self.is_closed = True
        self.bell.end()  # whoever waits for it has the lock
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
        """Raise for a rank whose transfers will never be over, once all that it had sent before was received."""
        missed = {transfer.peer for transfer in self._open} & self._faults.keys()
        # A rank that has left for another one ends the group also where nothing more was to come from it.
        if missed or (self._open and any(fault != peer for peer, fault in self._said().items())):
            self.refuse_unsaid(missed)

    def _said(self) -> dict[int, int]:
        """By rank that has closed its link, the rank that it says it has lost, perhaps itself."""
        return {peer: fault for peer, fault in self._faults.items() if isinstance(fault, int)}

    def _move(self, connection: Connection) -> None:
        """Receive and send what can be now, until one receive is over or nothing more can be done."""
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
            self.bell.due.append(connection)  # TLS has received more already

    def _push(self, connection: Connection) -> None:
        """Send until there is no room, and let the bell ring when there is more to do."""
        try:
            while connection.outgoing:
                self._write(connection)
        except BlockingIOError:
            pass
        except OSError as fault:  # what came before is still to be received
            self._fail(connection, fault)
        self.bell.watch(connection)

    def _read(self, connection: Connection) -> None:
        """Receive until there is no more, a payload is complete, or no receive is open for the next message."""
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
        """Receive some of the missing bytes; returns how many."""
        return connection.socket.recv_into(connection.missing)

    def _place(self, connection: Connection) -> None:
        """Find the memory for what a head announces."""
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
        """Ancillary data of a message, as `sendmsg` takes it."""
        return ()

    def _fail(self, connection: Connection, fault: OSError | PeerLost | ProtocolError) -> None:
        """Send nothing more to a rank, and keep its first fault, to be raised."""
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
    """The host at the other end of a connection, for people."""
    if connection.family == socket.AF_UNIX:
        return "this host"
    try:
        return str(connection.getpeername()[0]).removeprefix("::ffff:")  # IPv4, where a socket listens for both
    except OSError:
        return "gone"


def has_vanished(connection: socket.socket) -> bool:
    """Whether the machine at the other end answers nothing any more; that of a process which is only stopped does.

    Keepalive finds this only where nothing is on its way there.
    """
    if sys.platform != "linux" or connection.family == socket.AF_UNIX:
        return False
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    missing, silent_ms = _TCP_INFO.unpack(info)
    return bool(missing) and silent_ms > 1000 * VANISHED_SECONDS


def set_options(connection: socket.socket) -> None:
    """Set the options that make a socket fast, and that notice a machine that vanishes."""
    if connection.family == socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_SEND_BYTES)
        return
    with contextlib.suppress(OSError):  # macOS: the other end is gone already, as reading will show
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@final
class Connection:
    """A socket, and the messages that are being sent and received over it."""

    def __init__(self, peer: int, connection: socket.socket, says: str) -> None:
        self.peer, self.socket, self.says = peer, connection, says  # how errors of its messages begin
        self.pending: Callable[[], int] = getattr(connection, "pending", int)  # bytes that TLS has deciphered
        self.outgoing: deque[Completion] = deque()
        self.parts: list[memoryview] = []  # what is left of the first of them, once it is being sent
        self.head = bytearray(HEAD_BYTES)
        self.attached: Sequence[tuple[int, int, Any]] = ()  # what goes with the first byte of them
        self.missing = memoryview(self.head)  # what is not received of a head or payload
        self.receiving: Completion | None = None  # whose payload is received
        self.checksum = 0  # that its head announces
        self.held: int | None = None  # the tag of the head, where nobody receives what it announces
        self.has_ended = False  # nothing is received any more
        self.received = self.sent = 0  # bytes
        self.events = 0  # that the bell is rung for
        connection.setblocking(False)
        set_options(connection)
        close_in_children(connection)


@final
class _SocketBell(Bell):
    """A bell that connections ring too, while they can be read or written; a thread waits for it under the lock."""

    def __init__(self, lock: threading.Lock, connections: Iterable[Connection]) -> None:
        self._lock, self._rope_lock = lock, threading.Lock()
        # To be moved though nothing else rings for them. At first these are all: TLS may have read more.
        self.due = [*connections]
        self._selector = selectors.DefaultSelector()
        self._bell, self._rope = socket.socketpair()
        for end in (self._bell, self._rope):
            end.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)

    def ring(self) -> None:
        with contextlib.suppress(OSError), self._rope_lock:  # it is full of rings, or closed
            self._rope.send(b"\0")

    def wait(self, seconds: float | None = None) -> bool:
        with self._lock:
            is_rung = bool(self.due) or self._rope.fileno() < 0 or bool(self._selector.select(seconds))
            with contextlib.suppress(OSError):
                self._bell.recv(1 << 12)
            return is_rung

    def watch(self, connection: Connection) -> None:
        """Let a connection ring the bell when it can be read or written, if that is to be done."""
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
        """The connections that are due, or else those that can be read or written now."""
        if self.due:
            due, self.due = [*dict.fromkeys(self.due)], []
            return due
        return [key.data for key, _ in self._selector.select(0) if key.data is not None]

    def end(self) -> None:
        """End the wait that is under way, and each later one at once."""
        with self._rope_lock:  # else another thread might ring a file that gets its number
            self._rope.close()

    def close(self) -> None:
        """Close the selector and the bell's own sockets, after `end` and under the lock."""
        self._bell.close()
        self._selector.close()


_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_links: weakref.WeakSet[SocketLink] = weakref.WeakSet()


def close_in_children(connection: socket.socket) -> None:
    """Let forked children close their copy of a socket."""
    _sockets.add(connection)


def _close_all() -> None:
    _links.clear()
    for each in _sockets:
        each.close()


@atexit.register
def _leave_all() -> None:
    """Have a process that ends without closing its exchange say so, or it would look killed."""
    for link in list(_links):
        link.close()


if hasattr(os, "register_at_fork"):
    # A forked child that kept them open would hide the end of this process from the other ranks.
    os.register_at_fork(after_in_child=_close_all)
