"""A link over shared memory: what a rank lends that it has not, who leaves while it is read, and what stays behind."""

import array
import errno
import fcntl
import gc
import os
import socket
import threading
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
from test_arrays_shared import descriptors, mappings
from transports import (
    HAS_SHARED_MEMORY,
    LARGE,
    SOCKET_LINKS,
    SOON,
    Worker,
    bound,
    contributions,
    on_all,
    outcomes,
    rank_order_sum,
    shared,
    until,
)

from gradengine.arrays.shared import place_of, shared_array
from gradengine.errors import ExchangeError, PeerLost, ProtocolError
from gradengine.exchange import wire
from gradengine.exchange.exchange import Exchange
from gradengine.exchange.links import shared_memory
from gradengine.exchange.links.link import DAMAGED, RECEIVE, SEND
from gradengine.exchange.links.shared_memory import SharedMemoryLink
from gradengine.exchange.ordered_all_reduce import RECEIVING, SUMMED, OrderedAllReduce
from gradengine.kernels import CHUNK
from gradengine.layout import GradientLayout

pytestmark = pytest.mark.skipif(not HAS_SHARED_MEMORY, reason="no memfd on this platform")
LENT, RELEASED, FAREWELL = 1 << 22, 1 << 23, 1 << 21  # as they are on the wire


def message(tag, payload=b""):
    check = wire.checksum(tag, np.frombuffer(payload, np.uint8))
    return wire.head(tag, check, len(payload)) + payload


def lent(tag, start, size):
    return message(LENT | tag, np.array([start, size], "<u8").tobytes())


@pytest.fixture
def stranger():
    """A link of rank 0 of 2, and the socket of a rank 1 that sends what it likes."""
    ours, theirs = socket.socketpair()
    link = SharedMemoryLink(0, {1: ours})
    yield link, theirs
    link.close()
    theirs.close()


@pytest.fixture
def pair():
    """Two links, some shared memory, and where it is received."""
    links = SOCKET_LINKS["shared memory"](2)
    yield *links, shared(np.arange(100, dtype=np.float32)), np.zeros(10, np.float32)
    for link in links:
        link.close()


def show(theirs, memory, message, times=1):
    """Send a message with the descriptor of some memory, or any other."""
    descriptor = memory if isinstance(memory, int) else place_of(memory)[0].descriptor
    theirs.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor] * times))])


# ---- what is lent ----


def test_what_lies_in_shared_memory_is_not_sent_but_lent(stranger):
    link, theirs = stranger
    memory = shared(np.arange(100, dtype=np.float32))
    link.send(1, 7, memory[10:30])
    head, brought, *_ = theirs.recvmsg(1000, 1000)
    assert head == lent(7, 40, 80)
    ((_, _, descriptor),) = brought
    (descriptor,) = array.array("i", descriptor)
    assert os.path.samestat(os.fstat(descriptor), os.fstat(place_of(memory)[0].descriptor))
    os.close(descriptor)
    assert link.poll() == []
    theirs.send(message(RELEASED | 7))
    assert until(1, link) == [[(SEND, 1, 7)]]
    link.send(1, 8, memory[:5])
    assert theirs.recvmsg(1000, 1000)[:2] == (lent(8, 0, 20), [])  # the descriptor goes once
    private = np.arange(4.0)
    link.send(1, 9, private)
    assert until(1, link) == [[(SEND, 1, 9)]]
    assert theirs.recv(1000) == message(9, private.tobytes())


def test_what_is_private_is_not_lent_and_what_is_lent_is_not_written(pair):
    first, second, memory, _ = pair
    assert not first.lends(memory.copy())
    assert not first.lends(None)
    first.send(1, 3, memory[5:9])
    second.borrow(0, 3)
    until(1, second)
    assert not second.borrowed(0, 3).flags.writeable


def test_other_memory_may_be_lent_from_one_message_to_the_next(pair):
    first, second, memory, sink = pair
    others = [memory, shared(memory + 1000), shared(memory + 2000)]
    for number in (0, 1, 1, 2, 0):
        first.send(1, 4, others[number][:10])
        second.receive(0, 4, sink)
        until(2, first, second)
        assert np.array_equal(sink, np.arange(10) + 1000 * number)


def test_a_receive_is_not_over_before_the_sender_will_hear_of_it(stranger):
    """Else a pump, which has nothing more to do then, would leave the other rank waiting."""
    link, theirs = stranger
    memory, sink = shared(np.ones(10, np.float32)), np.zeros(10, np.float32)
    link.send(1, 1, np.zeros(16_000_000))  # more than any socket takes
    assert link.poll() == []
    link.receive(1, 7, sink)
    show(theirs, memory, lent(7, 0, 40))
    for _ in range(3):
        assert link.poll() == []
    assert sink.all()
    theirs.settimeout(SOON)
    reader = threading.Thread(target=lambda: [*iter(lambda: theirs.recv(1 << 20)[-20:], message(RELEASED | 7))])
    reader.start()
    assert until(2, link) == [[(SEND, 1, 1), (RECEIVE, 1, 7)]]
    reader.join(SOON)
    assert not reader.is_alive()


@pytest.mark.parametrize("ways", [(True, True), (True, False), (False, True), (False, False)])
def test_what_nobody_receives_is_held_however_it_came_before(stranger, ways):
    link, theirs = stranger
    memory, sink = shared(np.ones(2, np.float32)), np.zeros(2, np.float32)
    for is_lent in ways:
        show(theirs, memory, lent(7, 0, 8) if is_lent else message(7, memory.tobytes()))
        while [*link.held().values()] != [7]:
            assert link.poll() == []
        assert not sink.any()
        link.receive(1, 7, sink)
        assert until(1, link) == [[(RECEIVE, 1, 7)]]
        assert sink.all()
        sink[:] = 0


# ---- what cannot be ----


@pytest.mark.parametrize("way", ["receive", "borrow"])
@pytest.mark.parametrize(
    ("start", "size", "is_shown"),
    [
        *((0, 404, True), (400, 4, True), (2**64 - 4, 8, True), (4, 2**64 - 4, True)),
        *((2**64 - 1, 2**64 - 1, True), (0, 4, False)),
    ],
)
def test_what_is_not_in_its_memory_a_rank_cannot_lend(stranger, is_shown, way, start, size):
    link, theirs = stranger
    sink, memory = np.zeros(2), shared_array(100)
    link.receive(1, 7, sink) if way == "receive" else link.borrow(1, 7)
    show(theirs, memory, lent(7, start, size), times=int(is_shown))
    for _ in range(2):
        with pytest.raises(ProtocolError, match="an invalid range"):
            until(1, link)
    assert link.lost == 1
    assert not sink.any()


@pytest.mark.parametrize(
    ("sent", "word"),
    [
        *((lent(8, start, size), "invalid range") for start, size in ((2, 8), (0, 6), (1, 3))),
        *((message(LENT | 7, bytes(size)), "wrong size") for size in (8, 24)),
        *((message(RELEASED | tag), "what was not lent") for tag in (5, LENT | 7)),
        *((lent(7, 0, 12), "wrong size"), (message(RELEASED | 6) * 2, "what was not lent")),
        *((message(8, bytes(16)), "data that it should lend"), (message(1 << 24), "an invalid head")),
    ],
)
def test_a_message_that_cannot_be_is_refused_before_anything_is_written(stranger, sent, word):
    link, theirs = stranger
    memory, sink = shared(np.ones(100, np.float32)), np.zeros(4, np.float32)
    link.send(1, 6, memory[:1])
    link.receive(1, 7, sink)
    link.borrow(1, 8)
    show(theirs, memory, sent)
    over = []
    with pytest.raises(ProtocolError, match=word):
        until(3, link, reports=[over])
    assert over == ([(SEND, 1, 6)] if sent == message(RELEASED | 6) * 2 else [])
    assert not sink.any()


def test_what_should_be_lent_and_came_before_it_is_borrowed_is_refused(stranger):
    link, theirs = stranger
    theirs.send(message(8, bytes(16)))
    while not link.held():
        assert link.poll() == []
    link.borrow(1, 8)
    with pytest.raises(ProtocolError, match="data that it should lend"):
        until(1, link)


@pytest.mark.parametrize("way", ["lent", "released"])
def test_what_was_damaged_may_be_sent_again_with_the_same_tag(stranger, way):
    link, theirs = stranger
    memory, sink = shared(np.ones(100, np.float32)), np.zeros(4, np.float32)
    if way == "lent":
        link.receive(1, 7, sink)
        show(theirs, memory, lent(7, 0, 16)[:-1] + b"\1")
    else:
        link.send(1, 7, memory)
        theirs.send(wire.head(RELEASED | 7, 0, 0))
    assert until(1, link) == [[(DAMAGED, 1, 7)]]
    link.receive(1, 7, sink)
    theirs.send(message(7, sink.tobytes()))
    assert until(1, link) == [[(RECEIVE, 1, 7)]]


# ---- descriptors ----


def sealed(seals, size):
    descriptor = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def unreadable():
    memory = shared_array(1)
    return os.open(f"/proc/self/fd/{place_of(memory)[0].descriptor}", os.O_WRONLY)


@pytest.mark.parametrize(
    "make",
    [
        *(partial(sealed, *way) for way in ((0, 4096), (fcntl.F_SEAL_GROW, 4096), (fcntl.F_SEAL_SHRINK, 0))),
        *(partial(os.open, *way) for way in ((__file__, os.O_RDONLY), ("/dev/zero", os.O_RDONLY), ("/", os.O_PATH))),
        *(unreadable, lambda: socket.socket().detach()),
    ],
)
def test_a_descriptor_of_anything_else_is_refused_and_closed(stranger, make):
    link, theirs = stranger
    descriptor, before = make(), descriptors()
    link.receive(1, 7, np.zeros(1))
    show(theirs, descriptor, lent(7, 0, 8))
    with pytest.raises(ExchangeError, match="cannot map"):
        until(1, link)
    assert descriptors() == before
    os.close(descriptor)


def test_a_limit_of_this_process_is_not_another_rank_s_fault(stranger, monkeypatch):
    monkeypatch.setattr(shared_memory, "mapped", Mock(side_effect=OSError(errno.ENOMEM, "Cannot allocate memory")))
    link, theirs = stranger
    link.receive(1, 7, np.zeros(1))
    show(theirs, shared_array(10), lent(7, 0, 8))
    with pytest.raises(ExchangeError, match="ulimit"):
        until(1, link)
    assert link.lost is None


def test_several_descriptors_at_once_are_refused_and_closed(stranger):
    link, theirs = stranger
    memory = shared_array(10)
    link.receive(1, 7, np.zeros(1))
    before = descriptors()
    show(theirs, memory, lent(7, 0, 8), times=3)
    with pytest.raises(ProtocolError, match="ulimit"):
        until(1, link)
    link.close()
    gc.collect()
    assert len(descriptors()) < len(before)


def test_a_descriptor_in_the_middle_of_a_message_is_dropped(stranger):
    link, theirs = stranger
    sink, source = np.zeros(2), np.array([1.0, 2.0])
    link.receive(1, 7, sink)
    sent, before = message(7, source.tobytes()), descriptors()
    theirs.send(sent[:20])
    show(theirs, shared_array(10), sent[20:])
    assert until(1, link) == [[(RECEIVE, 1, 7)]]
    assert np.array_equal(sink, source)
    assert descriptors() == before


def test_what_another_rank_lends_stays_as_long_as_it_is_borrowed(stranger):
    """It shows other memory instead, or ends: what is borrowed may be read all the same."""
    link, theirs = stranger
    memory = shared(np.arange(100, dtype=np.float32))
    link.borrow(1, 7)
    show(theirs, memory, lent(7, 0, 400))
    until(1, link)
    borrowed = link.borrowed(1, 7)
    link.receive(1, 8, np.zeros(1))
    show(theirs, shared_array(1000), lent(8, 0, 8))
    until(1, link)
    del memory
    theirs.close()
    link.close()
    assert borrowed.sum() == 4950


# ---- who leaves ----


def ends(first, memory):
    """A rank leaves, and its user goes on with its memory."""
    first.close()
    memory[:] = -1


@pytest.mark.parametrize("moment", ["before", "meanwhile"])
@pytest.mark.parametrize("is_holding", [False, True])
def test_what_a_rank_has_left_before_it_was_copied_does_not_count(pair, moment, is_holding, monkeypatch):
    """Its user may have written there: what it had sent otherwise arrives."""
    first, second, memory, sink = pair
    first.lost, facts = 1, np.zeros(2)
    for tag, source in enumerate([memory[:10], np.ones(2), *[np.ones(1)] * is_holding]):
        first.send(1, tag, source)
    until(1 + is_holding, first)
    second.receive(0, 0, sink)
    second.receive(0, 1, facts)
    if moment == "before":
        ends(first, memory)
    else:
        copy = np.copyto
        monkeypatch.setattr(shared_memory.np, "copyto", lambda *given: (ends(first, memory), copy(*given)))
    assert until(1, second) == [[(RECEIVE, 0, 1)]]
    what = "its connection has ended" if is_holding else r"closed its link: this rank \(1\) was lost or late"
    for _ in range(2):
        with pytest.raises(PeerLost, match=what):
            until(1, second)
    assert facts.all()


@pytest.mark.parametrize("is_holding", [False, True])
def test_what_a_rank_has_left_before_it_was_released_was_not_read(pair, is_holding):
    first, second, memory, _ = pair
    first.lost = 1
    first.send(1, 0, memory)
    if is_holding:
        first.send(1, 1, np.ones(1))
        until(1, first)
    second.borrow(0, 0)
    assert until(1, second) == [[(RECEIVE, 0, 0)]]
    while is_holding and not second.held():
        assert second.poll() == []
    ends(first, memory)
    what = "its connection has ended" if is_holding else r"closed its link: this rank \(1\) was lost or late"
    with pytest.raises(PeerLost, match=what):
        second.release(0, 0)
    with pytest.raises(PeerLost, match=what):
        second.poll()
    assert second.lost == 0


def test_no_rank_gets_a_sum_of_what_was_overwritten(monkeypatch):
    """Rank 0 closes while rank 1 sums, and goes on with its memory: rank 2 takes nothing else for a part or a sum.

    Its own sums do not count: it may make them of what rank 0 has overwritten, and then sends them to nobody.
    """
    layout = GradientLayout.of({f"layers.{n}.w": (CHUNK + 17,) for n in range(4)})
    parts = contributions(layout, 3)
    exchanges = [Exchange(link, bucket_bytes=4) for link in SOCKET_LINKS["shared memory"](3)]
    workers = bound(exchanges, layout, [shared(part) for part in parts])
    make, sums, (_, taken) = OrderedAllReduce._sum, [], exchanges[2]._bound()

    def interrupted(all_reduce, share, memories):
        if all_reduce.rank == 1:
            sums.append(share)
            if len(sums) == 2:
                exchanges[0].close()
                workers[0].arena[:] = 1e6
        make(all_reduce, share, memories)

    monkeypatch.setattr(OrderedAllReduce, "_sum", interrupted)
    found = outcomes(Worker.sum, workers)
    assert [type(fault) for fault in found] == [PeerLost] * 3
    assert len(sums) >= 2  # all whose parts were there as the rank began its spans are summed in one go
    whole = rank_order_sum(parts)
    for share in taken._shares:
        state = taken._states[share.number]
        expected = whole if state == SUMMED else parts[2]
        if share.owner != 2 and state != RECEIVING:  # of which nothing is taken
            assert (workers[2].arena == expected)[share.start : share.stop].all()
    for exchange in exchanges:
        exchange.close()


# ---- what stays ----


def what_is_open():
    return descriptors(), mappings()


def test_links_that_are_closed_leave_nothing_open_or_mapped():
    gc.collect()
    before = what_is_open()
    exchanges = [Exchange(link, bucket_bytes=128) for link in SOCKET_LINKS["shared memory"](3)]
    workers = bound(exchanges, LARGE, [shared(part) for part in contributions(LARGE, 3)])
    on_all(Worker.sum, workers)
    assert mappings() == before[1] + 3 + 3 * 2
    for exchange in exchanges:
        exchange.close()
    assert mappings() == before[1] + 3
    del workers, exchanges, exchange
    gc.collect()
    assert what_is_open() == before
