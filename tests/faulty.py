"""Groups whose ranks 0 and 1 have something between them that does to their bytes what networks do, over every link."""

from __future__ import annotations

import array
import contextlib
import os
import random
import selectors
import socket
import struct
import threading

import certificates
from transports import (
    JOINED_SECONDS,
    SMALL,
    SOCKET_LINKS,
    SOON,
    Worker,
    contributions,
    outcomes,
    rank_order_sum,
    shared,
    socket_links,
    tcp_pair,
)

from gradengine.errors import HandshakeRefused
from gradengine.exchange.exchange import Exchange
from gradengine.exchange.links.sockets import SocketLink, set_options
from gradengine.exchange.server import Hub
from gradengine.exchange.tls import Certificates

HEAD = struct.Struct(">BBIBQBI")  # docs/specs/wire.md: before a payload
SERVED, TLS, SHARED_MEMORY = "served", "TLS", "shared memory"
KINDS = [*SOCKET_LINKS, SERVED]
ONE_DESCRIPTOR = socket.CMSG_LEN(array.array("i").itemsize)


class Way:
    """What one rank sends the other: carries it as it is."""

    has_ended = False

    def __init__(self):
        self.carried, self.messages = 0, []  # bytes; tag and size of each message that has begun
        self._head, self._left = bytearray(), 0

    def pieces(self, data):
        """What goes on of these bytes, piece by piece; `ConnectionResetError` to reset the connection."""
        data = bytearray(data)
        self.read(bytes(data))
        whole = self.changed(data)
        self.carried += len(data)
        return [whole] if whole else []

    def changed(self, data):
        return data

    def read(self, data):
        """Note which messages there are."""
        while data:
            taken = min(len(data), self._left or HEAD.size - len(self._head))
            if self._left:
                self._left -= taken
            else:
                self._head += data[:taken]
                if len(self._head) == HEAD.size:
                    _, _, tag, _, _, _, self._left = HEAD.unpack(self._head)
                    self.messages.append((tag, self._left))
                    self._head.clear()
            data = data[taken:]


class Flip(Way):
    """Flips one bit of one message.

    Args:
        message: Its number among those of this way.
        is_in_head: Whether it is a bit of what is before the payload; always so where there is no payload.
        place: Which part of those bits is before it.
    """

    hit = None  # the message's tag, and which of its bits; once that has happened

    def __init__(self, message, is_in_head, place):
        super().__init__()
        self.message, self.is_in_head, self.place = message, is_in_head, place

    def changed(self, data):
        if self.hit is None and len(self.messages) > self.message:
            tag, size = self.messages[self.message]
            first, bits = (0, 8 * HEAD.size) if self.is_in_head or not size else (8 * HEAD.size, 8 * size)
            bit = first + int(bits * self.place)
            at = sum(HEAD.size + size for _, size in self.messages[: self.message]) + bit // 8 - self.carried
            if 0 <= at < len(data):
                data[at] ^= 1 << bit % 8
                self.hit = tag, bit
        return data


class Slices(Way):
    """Passes on a few bytes at a time."""

    def __init__(self, seed):
        super().__init__()
        self.random = random.Random(seed)

    def pieces(self, data):
        while data:
            size = self.random.choice([1, 2, 19, 20, 21, 64])
            yield from super().pieces(data[:size])
            data = data[size:]


class Hole(Way):
    """Loses all after so many bytes, and the connection stays."""

    def __init__(self, after):
        super().__init__()
        self.after = after

    def changed(self, data):
        return data[: max(0, self.after - self.carried)]

    @property
    def has_begun(self):
        return self.carried > self.after


class Cut(Hole):
    """Ends the connection in this way after so many bytes, as its sender would."""

    @property
    def has_ended(self):
        return self.has_begun


class Reset(Hole):
    """Resets the connection after so many bytes."""

    def changed(self, data):
        if self.carried + len(data) > self.after:
            raise ConnectionResetError
        return data


class Between:
    """A thread between two ends, with a way for what each of them sends."""

    def __init__(self, pair, *ways):
        (self.first, first), (self.second, second) = pair(), pair()
        for end in (first, second):
            set_options(end)
        self.ways = dict(zip((first, second), ways, strict=True))
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def end(self):
        """Return when both ends are closed."""
        self.thread.join(JOINED_SECONDS)
        assert not self.thread.is_alive(), "an end was not closed"

    def _run(self):
        first, second = self.ways
        with first, second, selectors.DefaultSelector() as selector:
            for source, sink in ((first, second), (second, first)):
                selector.register(source, selectors.EVENT_READ, sink)
            while selector.get_map():
                for key, _ in selector.select():
                    try:
                        goes_on = self._carry(key.fileobj, key.data)
                    except ConnectionError:
                        for end in (first, second):
                            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        return
                    if not goes_on:
                        selector.unregister(key.fileobj)

    def _carry(self, source, sink):
        """Carry what is there; false at the end."""
        data, attached, *_ = source.recvmsg(1 << 16, ONE_DESCRIPTOR if source.family == socket.AF_UNIX else 0)
        if not data:
            return self._end_one_way(sink)
        rest = attached
        try:
            for piece in self.ways[source].pieces(data):
                sink.sendmsg([piece], rest)  # an end has room for all that a small step sends
                rest = []
        finally:
            for _, _, descriptors in attached:
                for descriptor in array.array("i", descriptors):
                    os.close(descriptor)
        return self._end_one_way(sink) if self.ways[source].has_ended else True

    def _end_one_way(self, sink):
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
        return False


class Faulty:
    """The exchanges of a group with these two ways between ranks 0 and 1, or between the server and rank 1.

    Args:
        kind: One of KINDS, or TLS.
        world_size: Ranks in the group.
        ways: Of what goes to rank 1, and of what that sends.
        clocks: By rank, where it is another than that of all, which stands still.
    """

    def __init__(self, kind, world_size, ways, clocks=None, bucket_bytes=4):
        self._make_pair = tcp_pair if "tcp" in kind or kind in {TLS, SERVED} else socket.socketpair
        self._certificates = Certificates(certificates.folders() / "run") if kind == TLS else None
        clocks = dict.fromkeys(range(world_size + 1), lambda: 0.0) | (clocks or {})
        self._ways, self.between, self.hub, self.failure, self._server = ways[::-1], None, None, None, None
        if kind == SERVED:
            ends = [self._pair(is_faulty=rank == 1) for rank in range(world_size)]
            links = [SocketLink(rank, {world_size: end}, hub=world_size) for rank, (end, _) in enumerate(ends)]
            hub = SocketLink(world_size, {rank: end for rank, (_, end) in enumerate(ends)}, hub=world_size)
            self._serve(hub, clocks[world_size], bucket_bytes)
        else:
            links = SOCKET_LINKS.get(kind, socket_links)(
                world_size, pair=lambda: self._pair(is_faulty=self.between is None)
            )
        self.exchanges = [
            Exchange(link, bucket_bytes=bucket_bytes, timeout=SOON, join_timeout=SOON, clock=clocks[link.rank])
            for link in links
        ]

    def _pair(self, *, is_faulty):
        """Two connected sockets; where there is something between them, the first is rank 1's."""
        if is_faulty:
            self.between = Between(self._make_pair, *self._ways)
        pair = (self.between.first, self.between.second) if is_faulty else self._make_pair()
        if self._certificates is None:
            return pair
        return [self._certificates.encrypted(end, is_called=number == 1) for number, end in enumerate(pair)]

    def _serve(self, link, clock, bucket_bytes):
        hub = self.hub = Hub(link, timeout=SOON, bucket_bytes=bucket_bytes, most_bytes=1 << 40, clock=clock)

        def serve():
            try:
                hub.serve()
            except BaseException as fault:
                self.failure = fault

        self._server = threading.Thread(target=serve, daemon=True)
        self._server.start()

    def has_joined(self, rank):
        """Whether this rank has begun to sum; a server is not asked."""
        pump = None if rank == len(self.exchanges) else self.exchanges[rank]._pump
        return rank == len(self.exchanges) or bool(pump and pump._all_reduce)

    def waits(self, rank, late):
        """Whether this rank, or the server, waits for that one alone."""
        waits = self.hub if rank == len(self.exchanges) else self.exchanges[rank]._pump
        gather, all_reduce = waits and waits._gather, waits and waits._all_reduce
        if gather is not None and not gather.is_done and (waits is not self.hub or waits._is_gathering):
            return gather.awaited == [late]
        with contextlib.suppress(RuntimeError):  # another thread goes on with it at this moment
            awaited = all_reduce.awaited if all_reduce else None
            return awaited is not None and awaited[0] == late
        return False

    def close(self):
        """Close all, and see that nothing goes on."""
        for exchange in self.exchanges:
            exchange.close()
        if self._server is not None:
            self._server.join(JOINED_SECONDS)
            assert not self._server.is_alive(), "the server hangs"
        self.between.end()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


# ---- steps over such groups ----

PARTS = contributions(SMALL, 3)
SUMS = {world_size: rank_order_sum(PARTS[:world_size]).tobytes() for world_size in (2, 3)}


def new_workers(kind, world_size=3):
    parts = [shared(part) if kind == SHARED_MEMORY else part for part in PARTS[:world_size]]
    return [Worker(None, SMALL, part) for part in parts]


def whole_step(worker):
    worker.sum()
    worker.exchange.barrier()


def run(workers, exchanges, work=whole_step):
    """What each worker's step ends with."""
    return outcomes(lambda pair: pair[0].bind(pair[1]) or work(pair[0]), [*zip(workers, exchanges, strict=True)])


def traffic_of(kind, world_size=3, work=whole_step):
    """What goes to rank 1, and from it, until all of an undisturbed group have done this: bytes, and messages.

    The messages are those before the last: whatever becomes of a gather's last one, all ranks miss it.
    """
    ways = Way(), Way()
    with Faulty(kind, world_size, ways) as group:
        found = run(new_workers(kind, world_size), group.exchanges, work)
        assert not any(isinstance(each, Exception) for each in found), found
        return [(way.carried, way.messages[:-1]) for way in ways]


def run_again(workers, group):
    """How a step goes on in new groups, which `group` makes: "made again" from its parts, or "discarded" by all first.

    It is discarded if a rank holds sums of it: then all ranks are refused alike, and the other ranks still hold parts.
    """
    world_size = len(workers)
    holders = [number for number, worker in enumerate(workers) if worker.exchange and worker.exchange.holds_sums]
    for number, worker in enumerate(workers):
        assert number in holders or worker.arena.tobytes() == PARTS[number].tobytes(), number
    with group() as again:
        found = run(workers, again.exchanges)
    if holders:
        assert {*map(type, found)} == {HandshakeRefused}, found
        (said,) = {*map(str, found)}
        assert f"rank {holders[0]} holds sums of it" in said
        assert "discard() the window on every rank" in said
        for worker, part in zip(workers, PARTS, strict=False):
            worker.begin(part, worker.step)
        with group() as anew:
            found = run(workers, anew.exchanges)
    assert found == [None] * world_size
    assert all(worker.arena.tobytes() == SUMS[world_size] for worker in workers)
    return "discarded" if holders else "made again"
