"""One group of workers over each transport, with its ranks as threads; what the exchange tests share."""

from __future__ import annotations

import contextlib
import enum
import functools
import os
import random
import socket
import sys
import tempfile
import threading

import numpy as np

from gradengine.arrays.shared import place_of, shared_array
from gradengine.exchange import GradientServer, connect, local_group
from gradengine.exchange.links.link import Link
from gradengine.exchange.links.shared_memory import SharedMemoryLink
from gradengine.exchange.links.sockets import SocketLink
from gradengine.exchange.pump import Pump
from gradengine.kernels.cuda_device import DeviceArena
from gradengine.layout import GradientLayout

JOINED_SECONDS = 120.0  # a thread that still runs then hangs
SOON = 60.0  # seconds in which what waits for nothing is done on any machine; what would be waited for takes longer


class Transport(enum.Enum):
    """Every way in which workers can be joined on one machine."""

    THREADS = "threads"  # of one process
    TCP = "tcp"  # by connect(): a connection of each two ranks
    UNIX = "unix"  # the same over Unix sockets
    if hasattr(os, "memfd_create"):
        SHARED_MEMORY = "shared_memory"  # the same, and arenas are read where they lie
    SERVER = "server"  # a GradientServer alone, all ranks reach it over TCP


class SlowArena(DeviceArena):
    """An arena in the host's memory that is treated as a device's: a copy is made some polls after it was begun."""

    def __init__(self, memory, polls=2):
        self.memory, self.polls, self.begun, self.noted = memory, polls, [], set()

    @property
    def is_copying(self):
        return bool(self.begun)

    def rows(self, count, size):
        return np.full((count, size), np.nan, np.float32)

    def note(self, key):
        self.noted.add(key)

    def copy(self, name, row, start, *, is_to_arena, behind):
        assert behind in self.noted
        there = self.memory[start : start + row.size]
        self.begun.append([self.polls, name, *((there, row) if is_to_arena else (row, there))])

    def poll(self, *, waits=False):
        over = []
        for copy in [*self.begun]:
            copy[0] -= 1
            if waits or copy[0] <= 0:
                _, name, target, source = copy
                target[:] = source
                self.begun = [other for other in self.begun if other is not copy]
                over.append(name)
        return over


class Failing(Link):
    """A link that closes once so many transfers are over, if that is given, and is polled if that is said."""

    def __init__(self, link, left=None, *, is_polled=False):
        self.link, self.rank, self.world_size, self.left = link, link.rank, link.world_size, left
        self.reads_in_place, self.hub = link.reads_in_place, link.hub
        self.send, self.receive, self.close = link.send, link.receive, link.close
        self.lends, self.borrow, self.borrowed, self.release = link.lends, link.borrow, link.borrowed, link.release
        self.bell, self.is_polled = link.bell, is_polled

    def send(self, peer, tag, memory):
        raise NotImplementedError

    receive = close = send

    def held(self):
        return self.link.held()

    def poll(self):
        if self.left is not None and self.left <= 0:
            self.link.close()
        over = self.link.poll()
        self.left = None if self.left is None else self.left - len(over)
        return over


class Lending(Failing):
    """A link over shared memory that has all that it sends in there."""

    def __init__(self, link):
        super().__init__(link)
        self.send, self.room = self.lend, shared_array(0)

    def lend(self, peer, tag, memory):
        size = -(-memory.nbytes // 64) * 16
        if size > self.room.size:
            self.room = shared_array(max(size, 1 << 18))
        lent, self.room = self.room[:size].view(np.uint8)[: memory.nbytes].view(memory.dtype), self.room[size:]
        lent[:] = memory
        self.link.send(peer, tag, lent)


def shared(array):
    """A copy of an array of fp32 in shared memory, where this system has any."""
    copy = shared_array(array.size) if HAS_SHARED_MEMORY else np.empty_like(array)
    copy[:] = array
    return copy


def tcp_pair():
    """Two connected sockets."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = socket.create_connection(listener.getsockname())
        return first, listener.accept()[0]


def socket_links(world_size, pair=socket.socketpair, link=SocketLink):
    """Links over a connection of each pair of ranks."""
    connections = [{} for _ in range(world_size)]
    for a in range(world_size):
        for b in range(a):
            connections[a][b], connections[b][a] = pair()
    return [link(rank, theirs) for rank, theirs in enumerate(connections)]


def until(count, *links, reports=None):
    """What each link reports, until it is so much of all."""
    reports = reports or [[] for _ in links]
    while sum(map(len, reports)) < count:
        for link, report in zip(links, reports, strict=True):
            report.extend(link.poll())
    return reports


HAS_SHARED_MEMORY = hasattr(os, "memfd_create")
SOCKET_LINKS = {
    "unix": socket_links,
    "tcp": functools.partial(socket_links, pair=tcp_pair),
}
if HAS_SHARED_MEMORY:
    SOCKET_LINKS["shared memory"] = functools.partial(socket_links, link=SharedMemoryLink)


@contextlib.contextmanager
def group(transport, world_size, *, secret=None, **options):
    """A group's exchanges in rank order, closed in the end."""
    with contextlib.ExitStack() as stack:
        exchanges = _exchanges(stack, transport, world_size, secret, options)
        # Workers leave first, as they do when rank 0 is the last to be done.
        for exchange in exchanges:
            stack.callback(exchange.close)
        yield exchanges


def _exchanges(stack, transport, world_size, secret, options):
    if transport is Transport.THREADS:
        return local_group(world_size, **options)
    if transport is Transport.SERVER:
        server = GradientServer(world_size, secret=secret, **options)
        stack.callback(server.close)
        worker_options = {name: value for name, value in options.items() if name != "bucket_bytes"}
        return [
            connect(server.url, rank, world_size, served=True, secret=secret, **worker_options)
            for rank in range(world_size)
        ]
    url = "tcp://127.0.0.1:0"
    if transport is Transport.UNIX:
        url = f"unix://{stack.enter_context(tempfile.TemporaryDirectory(prefix='ge'))}/s"
    options["link"] = transport.value
    hosted = connect(url, 0, world_size, secret=secret, **options)
    return [hosted] + [connect(hosted.url, rank, world_size, secret=secret, **options) for rank in range(1, world_size)]


def outcomes(work, arguments):
    """`work(argument)` in one thread for each argument; what each returned, or the exception it ended with."""
    results = [None] * len(arguments)

    def run(i, argument):
        try:
            results[i] = work(argument)
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(arguments)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOINED_SECONDS)
    assert not any(thread.is_alive() for thread in threads), f"hangs; the others: {results}"
    return results


def on_all(work, arguments):
    """As `outcomes`, but the first exception is raised."""
    results = outcomes(work, arguments)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


class Worker:
    """One rank at the level of the exchange: an arena, and how far its step is."""

    def __init__(self, exchange, layout, contribution):
        is_shared = (exchange is not None and exchange.shares_memory) or place_of(contribution) is not None
        self.exchange, self.layout, self.step = exchange, layout, 0
        self.arena = shared(contribution) if is_shared else contribution.copy()

    def bind(self, exchange=None):
        """Join with this exchange; one that refuses does not replace that which has the sums."""
        exchange = exchange or self.exchange
        replaces = None if exchange is self.exchange else self.exchange
        exchange.bind(self.layout, self.arena, step=self.step, replaces=replaces)
        self.exchange = exchange

    def sum(self, order=None):
        for span in self.layout.spans if order is None else order:
            self.exchange.start(span)
        return tuple(self.exchange.wait().bad)

    def next_step(self, contribution):
        self.exchange.barrier()
        self.begin(contribution, self.step + 1)

    def begin(self, contribution, step):
        """Begin a step with this contribution: the next one, or the same one again, which was dropped."""
        self.step = step
        self.exchange.begin(step)
        self.arena[:] = contribution


def bound(exchanges, layout, contributions):
    """A bound worker for each rank."""
    workers = [Worker(*pair) for pair in zip(exchanges, [layout] * len(exchanges), contributions, strict=True)]
    on_all(Worker.bind, workers)
    return workers


def leave_together(worker):
    """The end of a worker's last step: nobody leaves before all have come so far."""
    worker.exchange.barrier()
    worker.exchange.close()


def contributions(layout, world_size, seed=0):
    """An arena for each rank: numbers of many magnitudes, so that the order of a sum shows, and padding of zeros."""
    rng = np.random.default_rng(seed)
    arenas = []
    for _ in range(world_size):
        arena = np.zeros(layout.arena_size, np.float32)
        for slot in layout.slots:
            values = rng.standard_normal(slot.size) * 10.0 ** rng.integers(-6, 6, slot.size)
            arena[slot.offset : slot.stop] = values
        arenas.append(arena)
    return arenas


def rank_order_sum(arenas):
    """((g0 + g1) + g2) + ..., elementwise in fp32: the definition."""
    return functools.reduce(np.add, arenas)


# Below the ports that the system gives to connections and to whoever asks for any; each process in an order of its own.
PORTS = iter(random.Random(os.getpid()).sample(range(10_000, 30_000), 20_000))


def free_port():
    """A port that nobody listens at, and that nobody is given while it is free."""
    for port in PORTS:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


def package_threads():
    """Threads of exchanges; the host kernels' pool stays for good."""
    named = [
        thread
        for thread in threading.enumerate()
        if thread.name.startswith("gradengine-") and not thread.name.startswith("gradengine-host")
    ]
    # A pump starts its thread below `threading`, which does not know of it.
    return named + [ident for ident, frame in sys._current_frames().items() if Pump._run.__code__ in codes_of(frame)]


def codes_of(frame):
    """What a thread is in the middle of."""
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


SMALL = GradientLayout.of(
    {
        "layers.0.w": (7, 5),
        "layers.0.none": (0,),
        "layers.1.w": (33,),
        "layers.1.one": (1,),
        "embedding": (3, 11),
        "nothing": (0, 4),
        "head": (129,),
    }
)
LARGE = GradientLayout.of({"layers.0.w": (101, 97), "layers.1.w": (20011,), "embedding": (5, 1009), "norm": (17,)})
