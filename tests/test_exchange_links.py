"""Links, and small data over them: every way in which bytes move between ranks, as threads of one process."""

import contextlib
import itertools
import os
import socket
import struct
import subprocess
import sys
import threading
from functools import partial

import msgpack
import numpy as np
import pytest
from interrupts import interrupted_at, places_of
from test_arrays_shared import descriptors
from transports import HAS_SHARED_MEMORY, SOCKET_LINKS, Lending, outcomes, shared, tcp_pair, until

from gradengine.errors import PeerLost, ProtocolError
from gradengine.exchange import wire
from gradengine.exchange.links import threads
from gradengine.exchange.links.link import DAMAGED, RECEIVE, SEND
from gradengine.exchange.links.sockets import SocketLink
from gradengine.exchange.links.threads import thread_links


def lending_links(world_size):
    """Over shared memory, in which all lies that is sent."""
    return [Lending(link) for link in SOCKET_LINKS["shared memory"](world_size)]


TRANSPORTS = {"threads": thread_links} | SOCKET_LINKS
if HAS_SHARED_MEMORY:
    TRANSPORTS["shared memory, lent"] = lending_links

over_sockets = pytest.mark.parametrize("links", SOCKET_LINKS, indirect=True)


@pytest.fixture(params=TRANSPORTS)
def links(request):
    """Makes a group's links, which are closed in the end."""
    made = []

    def make(world_size):
        made.extend(TRANSPORTS[request.param](world_size))
        return made[-world_size:]

    yield make
    for link in made:
        link.close()


@pytest.fixture(params=["threads", *(["shared memory"] if HAS_SHARED_MEMORY else [])])
def borrowing(request):
    """Two links, and memory of the first of which the second may read in place."""
    links = TRANSPORTS[request.param](2)
    yield *links, shared(np.arange(100, dtype=np.float32))
    for link in reversed(links):
        link.close()


@pytest.mark.parametrize("is_sent_first", [True, False])
def test_memory_arrives_whichever_side_begins(links, is_sent_first):
    first, second = links(2)
    for dtype, size in itertools.product(["float32", "float64", "uint8", "<i8"], [0, 1, 33, 70_000]):
        source, sink = np.arange(size).astype(dtype), np.zeros(size, dtype)
        begins = [partial(first.send, 1, 9, source), partial(second.receive, 0, 9, sink)]
        for begin in begins if is_sent_first else reversed(begins):
            begin()
        assert until(2, first, second) == [[(SEND, 1, 9)], [(RECEIVE, 0, 9)]]
        assert np.array_equal(source, sink)
        assert first.poll() == second.poll() == []


def test_one_tag_again_and_again_arrives_in_order_though_what_was_sent_is_overwritten(links):
    first, second = links(2)
    source = np.zeros(1000)
    for value in range(1, 6):
        sink, report, got = np.zeros(1000), [], []
        source[:] = value
        if value % 2:
            second.receive(0, 3, sink)
        first.send(1, 3, source)
        if not value % 2:
            report = first.poll()
            second.receive(0, 3, sink)
        while not report:
            got += second.poll()
            report += first.poll()
        source[:] = 7
        until(1, second, reports=[got])
        assert (report, got) == ([(SEND, 1, 3)], [(RECEIVE, 0, 3)])
        assert (sink == value).all()


def test_who_was_gone_first_is_named_and_ranks_that_are_left_go_on_till_then(links):
    """Named also by a rank that had nothing to do with it, but with one that has closed for it."""
    first, second, third = links(3)
    third.close()
    sink = np.zeros(2)
    first.send(1, 1, np.ones(2))
    second.receive(0, 1, sink)
    until(2, first, second)
    assert sink.all()
    first.receive(2, 1, np.zeros(2))
    assert second.poll() == []
    second.receive(0, 1, np.zeros(2))
    with pytest.raises(PeerLost, match="rank 2 is gone: it has closed its link"):
        until(1, first)
    first.close()
    with pytest.raises(PeerLost, match="rank 2 is gone or late: rank 0"):
        until(1, second)


def test_a_rank_that_was_given_up_reads_that_it_was_late_itself():
    first, second = thread_links(2)
    second.receive(0, 1, np.zeros(2))
    first.lost = 1
    first.close()
    with pytest.raises(PeerLost, match=r"this rank \(1\) was lost or late"):
        second.poll()


def test_what_was_over_before_is_reported_first(links):
    first, second = links(2)
    second.receive(0, 1, np.zeros(2))
    first.send(1, 1, np.ones(2))
    first.send(1, 2, np.zeros(16_000_000))  # more than any socket takes for a rank that does not receive it
    reports = [first.poll()]
    until(1, second)
    second.close()
    assert until(1, first, reports=reports) == [[(SEND, 1, 1)]]
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        until(1, first)


def test_what_was_sent_arrives_though_the_sender_has_closed(links):
    first, second = links(2)
    sinks, sent, received = [np.zeros(2), np.zeros(1_000_000), np.zeros(1)], [], []
    for tag, sink in enumerate(sinks):
        second.receive(0, tag, sink)
    for tag, sink in enumerate(sinks[:2]):
        first.send(1, tag, np.full_like(sink, 7))
    while len(sent) < 2:
        sent += first.poll()
        received += second.poll()
    first.close()
    with pytest.raises(PeerLost, match="rank 0 is gone"):
        until(3, second, reports=[received])
    assert received == [(RECEIVE, 0, 0), (RECEIVE, 0, 1)]
    assert all((sink == 7).all() for sink in sinks[:2])


def test_a_closed_link_is_refused_and_may_be_closed_again(links):
    first, second = links(2)
    memory = np.zeros(2)
    first.receive(1, 1, memory)
    first.close()
    first.close()
    second.send(0, 1, np.ones(2))
    with pytest.raises(PeerLost, match="rank 0 is gone"):
        until(1, second)
    assert not memory.any()
    for call in (first.poll, lambda: first.send(1, 2, memory), lambda: first.receive(1, 2, memory)):
        with pytest.raises(PeerLost, match="the link of rank 0 is closed"):
            call()


def test_another_size_is_refused(links):
    first, second = links(2)
    memory = np.zeros(3)
    second.receive(0, 4, memory)
    first.send(1, 4, np.ones(2))
    with pytest.raises(ProtocolError, match=r"rank 0 sent rank 1 .*wrong size with tag 4"):
        until(2, first, second)
    assert not memory.any()


def closing_amid(monkeypatch, owner, name, close, has_begun=lambda: True):
    """A thread that closes while this call is made, which it is to wait for; and the log of what ended when."""
    log, sound = [], getattr(owner, name)
    closer = threading.Thread(target=lambda: (close(), log.append("closed")))

    def slow(*given):
        closer.start()
        while not has_begun():
            pass
        closer.join(0.1)  # it ends here if it does not wait
        sound(*given)
        log.append("called")

    monkeypatch.setattr(owner, name, slow)
    return closer, log


def test_nothing_writes_a_ranks_memory_after_it_has_closed(monkeypatch):
    """It is in the middle of a copy when another thread closes it."""
    first, second = thread_links(2)
    closer, log = closing_amid(monkeypatch, threads.np, "copyto", second.close, lambda: second.is_closed)
    second.receive(0, 1, np.zeros(2))
    first.send(1, 1, np.ones(2))
    second.poll()
    closer.join(60)
    assert log == ["called", "closed"]


def test_what_is_copied_from_a_rank_that_closes_meanwhile_is_not_received(monkeypatch):
    first, second = thread_links(2)
    copy = np.copyto
    monkeypatch.setattr(threads.np, "copyto", lambda *given: (first.close(), copy(*given)))
    second.receive(0, 1, np.zeros(2))
    first.send(1, 1, np.ones(2))
    with pytest.raises(PeerLost, match="rank 0 is gone"):
        until(1, second)


# ---- memory that is read in place ----


def test_what_is_borrowed_is_the_senders_memory_until_it_is_released(borrowing):
    first, second, memory = borrowing
    assert first.reads_in_place
    assert first.lends(memory[3:])
    second.borrow(0, 3)
    assert second.borrowed(0, 3) is None
    first.send(1, 3, memory[5:9])
    assert until(1, second) == [[(RECEIVE, 0, 3)]]
    memory[5] = 50
    assert second.borrowed(0, 3).tolist() == [50, 6, 7, 8]
    assert first.poll() == second.poll() == []
    second.release(0, 3)
    assert second.borrowed(0, 3) is None
    assert until(1, first) == [[(SEND, 1, 3)]]
    assert second.poll() == []


def borrow(first, second, memory):
    first.send(1, 3, memory)
    second.borrow(0, 3)
    assert until(1, second) == [[(RECEIVE, 0, 3)]]


def test_who_has_borrowed_closes_and_the_lender_loses_it(borrowing):
    first, second, _ = borrowing
    borrow(*borrowing)
    second.close()
    with pytest.raises(PeerLost, match="rank 1 is gone: it has closed its link"):
        until(1, first)
    first.close()
    with pytest.raises(PeerLost, match="the link of rank 1 is closed"):
        second.release(0, 3)
    assert second.borrowed(0, 3) is None


def test_what_is_released_after_its_lender_has_closed_does_not_count(borrowing):
    first, second, _ = borrowing
    borrow(*borrowing)
    first.close()
    for call in (partial(second.release, 0, 3), second.poll):
        with pytest.raises(PeerLost, match="rank 0 is gone"):
            call()


def test_who_closes_does_not_wait_for_those_who_have_not_begun_to_read(borrowing):
    first, second, memory = borrowing
    first.send(1, 3, memory)
    second.borrow(0, 3)
    first.close()
    with pytest.raises(PeerLost, match="rank 0 is gone"):
        until(2, second)


# ---- rest ----


def test_who_rests_is_woken_by_what_the_other_rank_does(links):
    first, second = links(2)
    reports = []
    second.receive(0, 1, np.zeros(1))
    assert second.poll() == []
    sender = threading.Thread(target=lambda: (first.send(1, 1, np.ones(1)), until(1, first)))
    sender.start()
    while not reports:
        second.bell.wait()
        reports += second.poll()
    assert reports == [(RECEIVE, 0, 1)]
    sender.join(60)
    threading.Thread(target=first.close).start()
    second.bell.wait()
    second.receive(0, 2, np.zeros(1))
    with pytest.raises(PeerLost):
        until(1, second)


def resting(bell):
    """A thread that rests."""
    thread = threading.Thread(target=bell.wait)
    thread.start()
    thread.join(0.01)
    assert thread.is_alive()
    return thread


def is_awake(thread):
    thread.join(60)
    return not thread.is_alive()


def test_a_bell_that_is_rung_ends_one_rest(links):
    first, _ = links(2)
    first.poll()
    for _ in range(2):
        first.bell.ring()
    assert [first.bell.wait(), first.bell.wait(0.01)] == [True, False]
    rests = resting(first.bell)
    first.bell.ring()
    assert is_awake(rests)
    first.close()
    first.bell.ring()


@over_sockets
def test_who_has_begun_what_is_over_at_once_or_never_does_not_rest(links):
    first, second = links(2)
    first.send(1, 2, np.ones(1))
    assert first.bell.wait()
    assert first.poll() == [(SEND, 1, 2)]
    second.close()
    for begin in (first.send, first.receive):
        begin(1, 2, np.ones(1))
        first.bell.wait()
        with pytest.raises(PeerLost, match="rank 1 is gone"):
            until(1, first)


@over_sockets
def test_who_rests_or_comes_to_rest_is_woken_where_another_thread_closes(links):
    link, _ = links(2)
    link.poll()
    rests = resting(link.bell)
    link.close()
    assert is_awake(rests)
    assert [link.bell.wait(60.0), link.bell.wait(60.0)] == [True, True]


# ---- sockets ----


@pytest.fixture(params=[socket.socketpair, tcp_pair])
def stranger(request):
    """A link of rank 0 of 2, and the socket of a rank 1 that sends what it likes."""
    ours, theirs = request.param()
    link = SocketLink(0, {1: ours})
    yield link, theirs
    link.close()
    theirs.close()


def head(tag, size, check=0):
    return wire.head(tag, check, size)


def message(tag, payload):
    return head(tag, len(payload), wire.checksum(tag, np.frombuffer(payload, np.uint8))) + payload


@pytest.mark.parametrize(
    "sent",
    [
        *(head((1 << 21) + 1, 16), head(7, 16)[1:] + b"\0", b"\xff" * 20),
        *(head(7, 17), head(7, 2**32 - 1), head(7, 0)),  # of another size
    ],
)
def test_a_head_that_cannot_be_is_refused_before_anything_is_written(stranger, sent):
    link, theirs = stranger
    memory = np.zeros(2)
    link.receive(1, 7, memory)
    theirs.send(sent + b"\1" * 32)
    for poll in (partial(until, 1, link), link.poll):
        with pytest.raises(ProtocolError, match=r"rank 1 sent rank 0 (an invalid head|.*wrong size with tag 7)"):
            poll()
    assert not memory.any()
    assert link.lost == 1


@pytest.mark.parametrize("sent", [b"", head(7, 16)[:5], head(7, 16), head(7, 16) + b"\1" * 9])
def test_a_connection_that_ends_in_a_message_is_a_lost_rank(stranger, sent):
    link, theirs = stranger
    link.receive(1, 6, np.zeros(2))
    link.receive(1, 7, np.zeros(2))
    theirs.send(message(6, bytes(16)) + sent)
    theirs.shutdown(socket.SHUT_RDWR)
    assert until(1, link) == [[(RECEIVE, 1, 6)]]
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        until(1, link)
    assert link.lost == 1


@pytest.mark.parametrize(
    "damaged",
    [lambda words: words ^ np.uint64(1 << 63), lambda words: words[::-1], lambda words: np.roll(words, 8)],
    ids=["signs", "order", "moved"],
)
def test_damage_that_keeps_the_sum_of_the_words_is_seen(stranger, damaged):
    link, theirs = stranger
    sent = np.random.default_rng(0).integers(0, 1 << 63, 64, np.uint64)
    link.receive(1, 7, np.zeros(64))
    theirs.send(message(7, sent.tobytes())[:20] + damaged(sent).tobytes())
    assert until(1, link) == [[(DAMAGED, 1, 7)]]


@pytest.mark.skipif(sys.platform != "linux", reason="no affinity on this platform: it is not Linux")
@pytest.mark.parametrize(
    ("missing", "silent_ms", "is_lost"), [(3, 20_001, True), (3, 20_000, False), (0, 99_000, False)]
)
def test_a_machine_that_acknowledges_nothing_for_20_s_is_a_lost_rank(monkeypatch, missing, silent_ms, is_lost):
    """A stopped process differs: its machine goes on with that."""
    ours, theirs = tcp_pair()
    with theirs, contextlib.closing(SocketLink(0, {1: ours})) as link:
        link.receive(1, 7, np.zeros(2))
        info = struct.pack("=24xI28xI", missing, silent_ms)  # of <linux/tcp.h>
        monkeypatch.setattr(socket.socket, "getsockopt", lambda *_: info)
        with pytest.raises(PeerLost, match="rank 1 is gone: its machine") if is_lost else contextlib.nullcontext():
            link.refuse_vanished()


def test_what_goes_over_a_socket_is_msgpack(stranger):
    link, theirs = stranger
    source = np.arange(1000.0)
    link.send(1, 7, source)
    link.send(1, 8, source[:0])
    until(2, link)
    link.close()
    read = msgpack.Unpacker()
    read.feed(b"".join(iter(lambda: theirs.recv(1 << 16), b"")))
    sent = [[tag, wire.checksum(tag, part), part.tobytes()] for tag, part in ((7, source), (8, source[:0]))]
    assert [*read] == [*sent, [1 << 21, 0, b""]]


def test_who_sends_what_nobody_receives_is_held_back_by_the_socket(stranger):
    """And the rest of the link goes on: what it sends arrives, and it rests."""
    link, theirs = stranger
    memory, piece, sent = np.zeros(2), bytes(1 << 20), 0
    link.receive(1, 7, memory)
    theirs.setblocking(False)
    theirs.send(head(8, (1 << 32) - 1))
    with contextlib.suppress(BlockingIOError):
        while sent < 1 << 28:
            sent += theirs.send(piece)
            assert link.poll() == []
    assert sent < 1 << 28
    assert not link.bell.wait(0.01)
    link.send(1, 3, np.ones(1))
    assert until(1, link) == [[(SEND, 1, 3)]]
    assert theirs.recv(100) == message(3, np.ones(1).tobytes())
    link.receive(1, 8, memory)
    with pytest.raises(ProtocolError, match="wrong size with tag 8"):
        until(1, link)


@pytest.mark.parametrize("size", [0, 16])
def test_a_message_that_comes_before_it_is_received_waits_with_those_after_it(stranger, size):
    """And wakes who receives it, though nothing more comes by which the link would notice it, where it is empty."""
    link, theirs = stranger
    sinks = {tag: np.zeros(size, np.uint8) for tag in (5, 6)}
    link.receive(1, 6, sinks[6])
    theirs.send(b"".join(message(tag, bytes([tag]) * size) for tag in sinks))
    while [*link.held().values()] != [5]:
        assert link.poll() == []
    link.receive(1, 5, sinks[5])
    assert link.bell.wait(60.0)
    for tag in sinks:  # one at a time, which is then still in the cache
        assert link.poll() == [(RECEIVE, 1, tag)]
    assert all((sink == tag).all() for tag, sink in sinks.items())


def test_memory_that_a_message_has_begun_to_fill_does_not_count_as_unwritten(stranger):
    """A share whose sum has begun to arrive is not this rank's part any more."""
    link, theirs = stranger
    for tag in (5, 6, 7):
        link.receive(1, tag, np.zeros(2))
    theirs.send(message(5, bytes(16)) + message(6, bytes(16))[:-1])
    assert until(1, link) == [[(RECEIVE, 1, 5)]]
    while not link._connections[1].receiving:
        assert link.poll() == []
    link.close()
    assert link.unwritten == [(RECEIVE, 1, 7)]


def test_who_closes_in_the_middle_of_a_message_does_not_say_farewell_in_it(stranger):
    link, theirs = stranger
    link.send(1, 7, np.zeros(16_000_000))
    assert link.poll() == []
    theirs.settimeout(60)
    came = theirs.recv(20)
    theirs.setblocking(False)
    with contextlib.suppress(BlockingIOError):  # so that there is room for more
        while True:
            theirs.recv(1 << 20)
    theirs.settimeout(60)
    link.close()
    came += b"".join(iter(lambda: theirs.recv(1 << 20), b""))
    assert came[:20] == head(7, 128_000_000, wire.checksum(7, np.zeros(16_000_000)))
    assert came[-20:] != head(1 << 21, 0)


def test_what_a_link_has_sent_arrives_though_it_is_closed_with_more_to_read(stranger):
    """A socket that is closed with something unread is reset, which ends what is on its way."""
    link, theirs = stranger
    theirs.send(message(5, bytes(1 << 17)))
    count, source = 0, np.zeros(1 << 13)
    link.send(1, 0, source)
    while link.poll():
        count += 1
        link.send(1, count, source)
    link.close()
    theirs.settimeout(60)
    came = sum(iter(lambda: len(theirs.recv(1 << 20)), 0))
    assert count > 0
    assert came >= count * (20 + source.nbytes)


def test_nothing_is_read_or_written_while_a_link_over_sockets_is_closed_or_after(stranger, monkeypatch):
    """A receive is in the middle of its copy when another thread closes."""
    link, theirs = stranger
    closer, log = closing_amid(monkeypatch, link, "_read", link.close)
    link.receive(1, 7, np.zeros(2))
    theirs.send(message(7, b"\1" * 16))
    assert link.poll() == [(RECEIVE, 1, 7)]
    closer.join(60)
    assert log == ["called", "closed"]


CALLS = {"unix": "send receive ring close"}
if HAS_SHARED_MEMORY:
    CALLS["shared memory"] = "send receive borrow release poll close"


@pytest.mark.parametrize(("kind", "call"), [(kind, call) for kind, calls in CALLS.items() for call in calls.split()])
def test_a_link_that_is_interrupted_at_any_line_can_be_closed(kind, call):
    """By another thread too: nothing stays locked; and no descriptor stays open."""
    memory, sink = shared(np.zeros(100, np.float32)), np.zeros(10, np.float32)

    def begun():
        first, second = SOCKET_LINKS[kind](2)
        for tag in (0, 1):
            first.send(1, tag, memory[:10])
        if kind == "unix":
            until(2, first)
            second.poll()  # it holds a message that nobody receives
        else:
            second.borrow(0, 0)
            until(1, second)
            second.receive(0, 1, sink)
        given = {"send": (0, 6, memory), "receive": (0, 7 if second.reads_in_place else 0, sink), "borrow": (0, 7)}
        owner = second.bell if call == "ring" else second
        return first, second, partial(getattr(owner, call), *(given | {"release": (0, 0)}).get(call, ()))

    def end(*links):
        assert outcomes(SocketLink.close, links) == [None] * 2

    *links, sound = begun()
    places = places_of(sound)
    end(*links)
    assert len(places) > 2
    del links, sound
    before = descriptors()
    for at in places:
        *links, interrupted = begun()
        assert interrupted_at(at, interrupted)[0], at
        end(*links)
        assert all(link.bell._bell.fileno() == link.bell._rope.fileno() == -1 for link in links)
        del links, interrupted
        assert {*descriptors()} <= {*before}, at


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_a_forked_child_does_not_hide_from_other_ranks_that_a_process_has_ended():
    script = """
import os, socket
from gradengine.exchange.links.sockets import SocketLink

ours, theirs = socket.socketpair()
link = SocketLink(0, {1: ours})
heard, told = os.pipe()
child = os.fork()
if not child:
    os.close(told)
    os.read(heard, 1)  # until its parent has seen what it is to see
    os._exit(0)
ours.close()  # and no more than that, as at the end of the process
theirs.settimeout(5.0)
assert theirs.recv(1) == b""
os.close(told)
os.waitpid(child, 0)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], timeout=60, check=True)
