"""Virtual sockets: byte streams between processes, with delays, short reads and writes, ends and cuts, by the seed."""

import contextlib
import errno
import selectors
import socket
from collections import deque
from selectors import EVENT_READ, EVENT_WRITE
from types import SimpleNamespace
from weakref import WeakSet

from gradengine.exchange import addresses, handshake, mesh, pump
from gradengine.exchange.links import sockets
from simulation.clock import VirtualBell, VirtualLock

_DELAY = 2e-3  # seconds on the way, at most, for what is not lost on the first try
_AGAIN = 0.05  # seconds until what was lost is sent again, at most
_SHARE = 64, 2000  # bytes of a message with a share, if it has other bytes than one of a gather, or of a meeting
_ENDS, _RESETS = "ends", "is reset"


class Stream:
    """One direction of a connection."""

    def __init__(self, room, is_local):
        self.room, self.is_local = room, is_local
        self.pieces = deque()  # time of arrival, and bytes
        self.size = 0  # of all pieces
        self.last = 0.0  # when the last of them arrives
        self.ending = None  # time of arrival, and how the stream ends
        self.is_cut = False  # nothing arrives any more


class VirtualSocket:
    """What the exchange uses of a socket."""

    network = clock = None  # of the schedule: see `Network.installed`

    def __init__(self, family=socket.AF_INET, kind=None):
        self.family, self.process = family, self.clock.current.process
        self.number, self.timeout = next(self.network.numbers), None
        self.inbox = self.peer = self.address = self.backlog = self.task = None
        self.is_closed = self.is_shut = False
        self.watchers = {}
        self.process.sockets[self] = True

    # ---- options ----

    def setblocking(self, flag):
        self.timeout = None if flag else 0.0

    def settimeout(self, seconds):
        self.timeout = seconds

    def setsockopt(self, *_):
        pass

    def fileno(self):
        return -1 if self.is_closed else self.number

    def getsockname(self):
        return self.address

    def getpeername(self):
        return self.peer.address

    # ---- connecting ----

    def bind(self, address):
        host, port = address
        address = host, port or next(self.network.ports)
        if address in self.network.listeners:
            raise OSError(errno.EADDRINUSE, "Address already in use")
        self.address = address

    def listen(self, *_):
        self.backlog = deque()
        self.network.listeners[self.address] = self

    def accept(self):
        self._wait_for(lambda: self.backlog)
        connection = self.backlog.popleft()
        return connection, connection.peer.address

    def connect(self, address):
        network, deadline = self.network, self._deadline()
        self.clock.pause(network.delay())
        listener = network.listeners.get(address)
        if listener is not None and network.is_cut(self.process, listener.process):
            self.clock.pause(max(0.0, deadline - self.clock.now))
            raise TimeoutError("timed out")
        if listener is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        other = type(self)(self.family)
        del self.process.sockets[other]
        other.process = listener.process
        listener.process.sockets[other] = True
        self.address, other.address = (self.process.name, next(network.ports)), listener.address
        network.join(self, other)
        listener.backlog.append(other)
        listener.notify()

    # ---- bytes ----

    def send(self, data):
        return self.sendmsg([memoryview(data)])

    def sendall(self, data):
        self.sendmsg([memoryview(data)], is_whole=True)

    def sendmsg(self, parts, attached=(), *, is_whole=False):
        stream = self._outbox()
        if not stream.is_local:
            self.network.operation(self.process)
        self._refuse_closed()
        if self.is_shut or self.is_broken:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        data, count = b"".join(parts), stream.room - stream.size
        if not is_whole:
            if count <= 0:
                raise BlockingIOError
            data = data[: self.network.some(min(count, len(data)), stream)]
        fault = self.network.amid.pop(self.process, None) if _SHARE[0] < len(data) < _SHARE[1] else None
        data = self.network.damaged(data if fault is None else data[: self.network.random.randrange(len(data))], stream)
        if not stream.is_cut and not self.peer.is_closed:
            stream.last = max(stream.last, self.clock.now + self.network.delay(stream))
            stream.pieces.append((stream.last, memoryview(data)))
            stream.size += len(data)
            self.peer.notify(stream.last - self.clock.now)
        if fault is not None:
            fault()
            self.clock.refuse_stopped()
        return len(data)

    def recv(self, size, flags=0):
        memory = bytearray(size)
        return bytes(memory[: self.recv_into(memoryview(memory), is_peek=flags == socket.MSG_PEEK)])

    def recv_into(self, memory, *, is_peek=False):
        stream = self.inbox
        if not stream.is_local:
            self.network.operation(self.process)
        self._refuse_closed()
        if not self.is_readable:
            self._wait_for(lambda: self.is_readable)
        if not stream.pieces:
            if stream.ending[1] == _RESETS:
                raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
            return 0
        _, data = stream.pieces[0]
        count = self.network.some(min(len(memory), len(data)), stream)
        memory[:count] = data[:count]
        if not is_peek:
            was_full = stream.size >= stream.room
            stream.size -= count
            if count == len(data):
                stream.pieces.popleft()
            else:
                stream.pieces[0] = stream.pieces[0][0], data[count:]
            if was_full:
                self.peer.notify(self.network.delay())
        return count

    def shutdown(self, _):
        self._refuse_closed()
        self.is_shut = True
        self.network.end(self._outbox(), _ENDS, self.peer)

    def close(self):
        if self.is_closed:
            return
        self.is_closed = True
        self.process.sockets.pop(self, None)
        for watcher in [*self.watchers]:
            watcher.keys.pop(self, None)
        if self.backlog is not None:
            del self.network.listeners[self.address]
            for connection in self.backlog:
                connection.close()
        elif self.peer is not None:
            self.network.end(self._outbox(), _RESETS if self.inbox.pieces else _ENDS, self.peer)

    # ---- what selectors ask ----

    @property
    def is_readable(self):
        if self.backlog is not None:
            return bool(self.backlog)
        first = self.inbox.pieces[0] if self.inbox.pieces else self.inbox.ending
        return first is not None and first[0] <= self.clock.now

    @property
    def is_writable(self):
        stream = self.peer.inbox
        return stream.size < stream.room or self.is_broken

    @property
    def is_broken(self):
        """Whether this end knows that the other is gone."""
        ending = self.inbox.ending
        return ending is not None and ending[0] <= self.clock.now and (self.peer.is_closed or ending[1] == _RESETS)

    def notify(self, seconds=0.0):
        """Wake whoever waits for this socket, after so long."""
        if seconds > 0:
            self.clock.after(seconds, self.notify)
            return
        if self.task is not None:
            self.clock.wake(self.task)
        for watcher in self.watchers:
            if watcher.task is not None:
                self.clock.wake(watcher.task)

    # ---- inside ----

    def _outbox(self):
        return self.peer.inbox

    def _refuse_closed(self):
        if self.is_closed:
            raise OSError(errno.EBADF, "Bad file descriptor")

    def _deadline(self):
        return float("inf") if self.timeout is None else self.clock.now + self.timeout

    def _wait_for(self, is_ready):
        deadline = self._deadline()
        while not is_ready():
            if self.timeout == 0:
                raise BlockingIOError
            if self.clock.now >= deadline:
                raise TimeoutError("timed out")
            self.task = self.clock.current
            try:
                self.clock.pause(None if self.timeout is None else deadline - self.clock.now)
            finally:
                self.task = None
            self._refuse_closed()


class VirtualSelector:
    """What the exchange uses of a selector, over virtual sockets."""

    def __init__(self, clock):
        self._clock, self.keys, self.task = clock, {}, None

    def register(self, each, events, data=None):
        self.keys[each] = selectors.SelectorKey(each, each.number, events, data)
        each.watchers[self] = True

    modify = register

    def unregister(self, each):
        self.keys.pop(each, None)
        each.watchers.pop(self, None)

    def select(self, timeout=None):
        deadline = float("inf") if timeout is None else self._clock.now + timeout
        while not (ready := self._ready()) and self._clock.now < deadline:
            self.task = self._clock.current
            try:
                self._clock.pause(None if deadline == float("inf") else deadline - self._clock.now)
            finally:
                self.task = None
        return ready

    def close(self):
        for each in [*self.keys]:
            self.unregister(each)

    def _ready(self):
        ready = []
        for each, key in self.keys.items():
            events = EVENT_READ if key.events & EVENT_READ and each.is_readable else 0
            if key.events & EVENT_WRITE and each.is_writable:
                events |= EVENT_WRITE
            if events:
                ready.append((key, events))
        if len(ready) > 1:
            self._clock.random.shuffle(ready)
        return ready


class Network:
    """All sockets, and what becomes of the bytes between them.

    `faults` are called when so many operations were made: a number of sends and receives over the network; those of
    `amid` when their process is in the middle of sending a share.
    """

    def __init__(self, clock):
        self.clock, self.random = clock, clock.random
        self.processes = []
        self.listeners, self.numbers, self.ports = {}, iter(range(1, 1 << 30)), iter(range(20_000, 60_000))
        self.room = self.random.choice([1500, 6000, 1 << 20])
        self.loss = self.random.choice([0.0, 0.0, 0.02, 0.1])  # how often something has to be sent again
        self.is_short = self.random.random() < 0.5  # reads and writes
        self.operations, self.faults, self.amid, self.flips, self.cuts = 0, {}, {}, 0, {}

    # ---- chance ----

    def delay(self, stream=None):
        """Seconds on the way."""
        if stream is not None and stream.is_local:
            return 0.0
        delay = self.random.random() * _DELAY
        return delay + self.random.random() * _AGAIN if self.loss and self.random.random() < self.loss else delay

    def some(self, count, stream):
        """How many of so many bytes are moved at once."""
        if self.is_short and not stream.is_local and count > 1 and self.random.random() < 0.3:
            return self.random.randint(1, count)
        return count

    def damaged(self, data, stream):
        """The bytes as they arrive."""
        if not self.flips or stream.is_local or len(data) < 100:
            return data
        self.flips -= 1
        place = self.random.randrange(40, len(data))
        return data[:place] + bytes([data[place] ^ 1 << self.random.randrange(8)]) + data[place + 1 :]

    def operation(self, process):
        """Count an operation: a fault may happen just before it, and other tasks may come first."""
        self.operations += 1
        fault = self.faults.pop(self.operations, None)
        if fault is not None:
            fault()
        self.clock.refuse_stopped()
        if self.random.random() < 0.02:
            self.clock.pause(self.random.random() * 1e-3 * process.slowness)

    # ---- connections ----

    def join(self, one, other, *, is_local=False):
        """Connect two sockets."""
        for each, peer in ((one, other), (other, one)):
            each.peer, each.inbox = peer, Stream(1 << 20 if is_local else self.room, is_local)

    def pair(self):
        """A socket pair within a process."""
        one, other = (sockets.socket.socket(socket.AF_UNIX) for _ in range(2))
        self.join(one, other, is_local=True)
        return one, other

    def server(self, address, **_):
        """A socket that listens."""
        listener = addresses.socket.socket()
        listener.bind(address)
        listener.listen()
        return listener

    def end(self, stream, how, reader):
        """End a stream behind all that was sent; its reader hears of that later."""
        if stream.is_cut or (stream.ending is not None and (how == _ENDS or stream.ending[1] == how)):
            return
        at = max(stream.last, self.clock.now + self.delay(stream))
        stream.ending = at, how
        reader.notify(at - self.clock.now)

    # ---- faults ----

    def is_cut(self, one, other):
        """Whether nothing passes between two processes now."""
        return self.cuts.get(frozenset((one.name, other.name)), 0.0) > self.clock.now

    def cut(self, one, other, seconds, *, is_silent):
        """Lose all that is on the way between two hosts, for good; for so long, none can call the other.

        Both ends hear of it, each at a time of its own, unless it is silent.
        """
        self.cuts[frozenset((one, other))] = self.clock.now + seconds
        for stream, reader in self._between(one, other):
            self._lose(stream)
            if not is_silent:
                stream.ending = self.clock.now + self.delay() * self.random.choice([1, 50]), _RESETS
                reader.notify(stream.ending[0] - self.clock.now)
            stream.is_cut = True

    def kill(self, process, *, is_silent):
        """End a process; its connections end, or their other ends hear nothing more."""
        self.clock.kill(process)
        for each in [*process.sockets]:
            if each.peer is not None and each.peer.process is not process:
                if is_silent:
                    self._lose(each.peer.inbox)
                    each.peer.inbox.is_cut = True
                else:
                    self.end(each.peer.inbox, self.random.choice([_ENDS, _RESETS]), each.peer)
            each.close()

    def _between(self, one, other):
        for listed in self.processes:
            for each in [*listed.sockets]:
                if each.peer is not None and {each.process.name, each.peer.process.name} == {one, other}:
                    yield each.inbox, each

    def _lose(self, stream):
        while stream.pieces and stream.pieces[-1][0] > self.clock.now:
            _, data = stream.pieces.pop()
            stream.size -= len(data)

    @contextlib.contextmanager
    def installed(self):
        """A context in which the exchange uses this network, its clock and its tasks, and is otherwise as it is."""
        clock = self.clock
        sort = type("socket", (VirtualSocket,), {"network": self, "clock": clock})
        virtual_socket = SimpleNamespace(
            **vars(socket) | {"socket": sort, "socketpair": self.pair, "create_server": self.server}
        )
        virtual_selectors = SimpleNamespace(**vars(selectors) | {"DefaultSelector": lambda: VirtualSelector(clock)})
        virtual_time = SimpleNamespace(monotonic=clock, sleep=clock.pause)
        virtual_thread = SimpleNamespace(
            start_new_thread=lambda work, arguments: clock.spawn(clock.current.process, work, *arguments),
            get_ident=lambda: id(clock.current),
        )
        replaced = [
            (pump, "_thread", virtual_thread),
            (pump, "Bell", lambda: VirtualBell(clock)),
            (pump, "time", virtual_time),
            (mesh, "time", virtual_time),
            *((module, "socket", virtual_socket) for module in (mesh, addresses, handshake, sockets)),
            *((module, "selectors", virtual_selectors) for module in (mesh, sockets)),
            (sockets, "threading", SimpleNamespace(Lock=lambda: VirtualLock(clock))),
            (sockets, "_links", WeakSet()),  # closed when the real process ends
            (sockets, "_sockets", WeakSet()),
        ]
        kept = [(module, name, getattr(module, name)) for module, name, _ in replaced]
        try:
            for each in replaced:
                setattr(*each)
            yield
        finally:
            for each in kept:
                setattr(*each)
