"""Links, and small data over them: every way in which bytes move between ranks, as threads of one process."""

import contextlib
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
from transports import HAS_SHARED_MEMORY, SOCKET_LINKS, Lending, outcomes, rank_order_sum, shared, tcp_pair, until

from gradengine.errors import CallerError, DeadlineExceeded, DeviceUnavailable, PeerLost, ProtocolError
from gradengine.exchange.gather import Gather
from gradengine.exchange.linked import Exchange, Progress
from gradengine.exchange.links import sockets, threads
from gradengine.exchange.links.link import Completed, Idle
from gradengine.exchange.links.mpi import MpiLink
from gradengine.exchange.links.sockets import SocketLink
from gradengine.exchange.links.threads import thread_links
from gradengine.exchange.pump import Pump
from gradengine.exchange.transfers import Send
from gradengine.layout import GradientLayout

SENT, RECEIVED = Completed.SENT, Completed.RECEIVED


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


@pytest.mark.parametrize("dtype", ["float32", "float64", "uint8", "<i8"])
@pytest.mark.parametrize("size", [0, 1, 33, 70_000])
@pytest.mark.parametrize("is_sent_first", [True, False])
def test_memory_arrives_whichever_side_begins(links, dtype, size, is_sent_first):
    first, second = links(2)
    source, sink = np.arange(size).astype(dtype), np.zeros(size, dtype)
    begins = [partial(first.send, 1, 9, source), partial(second.receive, 0, 9, sink)]
    for begin in begins if is_sent_first else reversed(begins):
        begin()
    assert until(2, first, second) == [[(SENT, 1, 9)], [(RECEIVED, 0, 9)]]
    assert np.array_equal(source, sink)
    assert first.poll() == second.poll() == []


def test_many_transfers_are_open_at_a_time_and_each_is_reported_once(links):
    group, tags = links(4), range(20)
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    sinks = {(a, b, tag): np.zeros(3) for a, b in pairs for tag in tags}
    numbers = np.random.default_rng(0)
    for a, b, tag in numbers.permutation([*sinks]).tolist():
        group[b].receive(a, tag, sinks[a, b, tag])
    for a, b, tag in numbers.permutation([*sinks]).tolist():
        group[a].send(b, tag, np.array([a, b, tag], float))
    reports = until(2 * len(sinks), *group)
    for rank, report in enumerate(reports):
        expected = {(kind, peer, tag) for kind in (SENT, RECEIVED) for peer in range(4) if peer != rank for tag in tags}
        assert len(report) == len(expected)
        assert {*report} == expected
    assert all(np.array_equal(key, sink) for key, sink in sinks.items())


def test_one_tag_again_and_again_arrives_in_order(links):
    first, second = links(2)
    for value in range(5):
        source, sink = np.full(4, float(value)), np.zeros(4)
        first.send(1, 3, source)
        reports = [first.poll() if value % 2 else [], []]
        second.receive(0, 3, sink)
        assert until(2, first, second, reports=reports) == [[(SENT, 1, 3)], [(RECEIVED, 0, 3)]]
        assert np.array_equal(source, sink)


def test_what_was_sent_may_be_overwritten(links):
    first, second = links(2)
    source, sink = np.ones(1000), np.zeros(1000)
    second.receive(0, 1, sink)
    first.send(1, 1, source)
    report = []
    while not report:
        second.poll()
        report = first.poll()
    source[:] = 7
    while not sink.any():
        second.poll()
    assert (sink == 1).all()


def test_a_rank_that_is_gone_is_named_where_a_transfer_with_it_is_open(links):
    first, second, third = links(3)
    first.receive(2, 5, np.zeros(2))
    third.close()
    with pytest.raises(PeerLost, match="rank 2 is gone"):
        until(1, first)
    assert second.poll() == []
    second.send(2, 1, np.zeros(2))
    with pytest.raises(PeerLost, match="rank 2 is gone"):
        until(1, second)


def test_who_was_gone_first_is_named(links):
    """Also by a rank that had nothing to do with it, but with one that has closed for it."""
    first, second, third = links(3)
    first.receive(2, 1, np.zeros(2))
    second.receive(0, 1, np.zeros(2))
    third.close()
    with pytest.raises(PeerLost, match="rank 2 is gone: it has closed its link"):
        until(1, first)
    first.close()
    with pytest.raises(PeerLost, match="rank 2 is gone or late: rank 0 has closed its link for that"):
        until(1, second)


def test_a_rank_that_was_given_up_reads_that_it_was_late_itself():
    first, second = thread_links(2)
    second.receive(0, 1, np.zeros(2))
    first.lost = 1
    first.close()
    with pytest.raises(PeerLost, match=r"rank 0 has closed its link: this rank \(1\) was lost or late"):
        second.poll()


def test_ranks_that_are_left_go_on_with_each_other(links):
    first, second, third = links(3)
    third.close()
    sink = np.zeros(2)
    first.send(1, 1, np.ones(2))
    second.receive(0, 1, sink)
    until(2, first, second)
    assert sink.all()


def test_what_was_over_before_is_reported_first(links):
    first, second = links(2)
    second.receive(0, 1, np.zeros(2))
    first.send(1, 1, np.ones(2))
    first.send(1, 2, np.zeros(16_000_000))  # more than any socket takes for a rank that does not receive it
    reports = [first.poll()]
    until(1, second)
    second.close()
    assert until(1, first, reports=reports) == [[(SENT, 1, 1)]]
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
    assert received == [(RECEIVED, 0, 0), (RECEIVED, 0, 1)]
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
    with pytest.raises(ProtocolError, match=r"rank 0 sent rank 1 another size with tag 4: got 16 bytes, expected 24"):
        until(2, first, second)
    assert not memory.any()


def test_a_link_is_not_copied(links):
    with pytest.raises(CallerError, match="cannot be copied"):
        links(1)[0].__reduce_ex__(2)


@pytest.mark.parametrize("closes", [0, 1])
def test_nothing_reads_or_writes_a_ranks_memory_after_it_has_closed(closes, monkeypatch):
    """The other rank is in the middle of a copy then."""
    group, log, copyto = thread_links(2), [], np.copyto

    def close():
        group[closes].close()
        log.append("closed")

    def slow(sink, source):
        closer.start()
        while not group[0]._group.ranks[closes].is_closed:
            pass
        closer.join(0.1)  # it ends here if it does not wait
        copyto(sink, source)
        log.append("copied")

    closer = threading.Thread(target=close)
    monkeypatch.setattr(threads.np, "copyto", slow)
    group[1].receive(0, 1, np.zeros(2))
    group[0].send(1, 1, np.ones(2))
    group[1].poll()
    closer.join(60)
    assert log == ["copied", "closed"]


def test_what_is_borrowed_is_the_senders_memory_until_it_is_released():
    first, second = thread_links(2)
    assert first.reads_in_place
    source = np.arange(5.0)
    second.borrow(0, 3)
    assert second.borrowed(0, 3) is None
    first.send(1, 3, source)
    assert second.poll() == [(RECEIVED, 0, 3)]
    assert second.borrowed(0, 3) is source
    assert first.poll() == second.poll() == []
    second.release(0, 3)
    assert second.borrowed(0, 3) is None
    assert first.poll() == [(SENT, 1, 3)]
    first.close()
    assert second.poll() == []


def borrowing():
    """Two links, of which the second has borrowed of the first."""
    first, second = thread_links(2)
    first.send(1, 3, np.zeros(2))
    second.borrow(0, 3)
    assert second.poll() == [(RECEIVED, 0, 3)]
    return first, second


@pytest.mark.parametrize("ends", [lambda link: link.release(0, 3), lambda link: link.close()])
def test_who_has_lent_memory_closes_when_nobody_reads_it_any_more(ends):
    first, second = borrowing()
    closer = threading.Thread(target=first.close)
    closer.start()
    with pytest.raises(PeerLost, match="rank 0 is gone"):
        until(1, second)
    assert second.borrowed(0, 3) is not None
    closer.join(0.1)
    assert closer.is_alive()
    ends(second)
    closer.join(60)
    assert not closer.is_alive()


def test_who_has_borrowed_closes_and_the_lender_loses_it():
    first, second = borrowing()
    second.close()
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        first.poll()
    first.close()
    with pytest.raises(PeerLost, match="the link of rank 1 is closed"):
        second.release(0, 3)


def test_who_closes_does_not_wait_for_those_who_have_not_begun_to_read():
    first, second = thread_links(2)
    first.send(1, 3, np.zeros(2))
    second.borrow(0, 3)
    first.close()
    with pytest.raises(PeerLost, match="rank 0 is gone"):
        second.poll()


def test_who_waits_for_something_else_besides_rests_for_milliseconds_only(links):
    idle = Idle(links(2)[1])
    for _ in range(3):
        idle.rest(is_woken=False)


def test_who_rests_is_woken_by_what_the_other_rank_does(links):
    first, second = links(2)
    idle, reports = Idle(second), []
    second.receive(0, 1, np.zeros(1))
    assert second.poll() == []
    sender = threading.Thread(target=lambda: (first.send(1, 1, np.ones(1)), until(1, first)))
    sender.start()
    while not reports:
        idle.rest()
        reports += second.poll()
    assert reports == [(RECEIVED, 0, 1)]
    sender.join(60)
    threading.Thread(target=first.close).start()
    idle.rest()
    second.receive(0, 2, np.zeros(1))
    with pytest.raises(PeerLost):
        until(1, second)


def test_a_bell_that_is_rung_ends_one_rest(links):
    first, _ = links(2)
    first.poll()
    for _ in range(2):
        first.bell.ring()
    assert [first.bell.wait(), first.bell.wait(0.01)] == [True, False]
    resting = threading.Thread(target=first.bell.wait)
    resting.start()
    resting.join(0.01)
    assert resting.is_alive()
    first.bell.ring()
    resting.join(60)
    assert not resting.is_alive()
    first.close()
    first.bell.ring()


@over_sockets
def test_who_has_begun_what_is_over_at_once_or_never_does_not_rest(links):
    first, second = links(2)
    first.send(1, 2, np.ones(1))
    assert first.bell.wait()
    assert first.poll() == [(SENT, 1, 2)]
    second.close()
    for begin in (first.send, first.receive):
        begin(1, 2, np.ones(1))
        first.bell.wait()
        with pytest.raises(PeerLost, match="rank 1 is gone"):
            until(1, first)


@over_sockets
def test_who_rests_or_comes_to_rest_is_woken_where_another_thread_closes(links):
    link, _ = links(2)
    resting = threading.Thread(target=link.bell.wait)
    resting.start()
    resting.join(0.01)
    assert outcomes(SocketLink.close, [link]) == [None]
    resting.join(60)
    assert not resting.is_alive()
    assert [link.bell.wait(60.0), link.bell.wait(60.0)] == [True, True]


# ---- sockets ----


@pytest.fixture(params=[socket.socketpair, tcp_pair])
def stranger(request):
    """A link of rank 0 of 2, and the socket of a rank 1 that sends what it likes."""
    ours, theirs = request.param()
    link = SocketLink(0, {1: [ours]})
    yield link, theirs
    link.close()
    theirs.close()


def head(tag, size, check=0):
    return sockets.head(tag, check, size)


def message(tag, payload):
    return head(tag, len(payload), sockets.checksum(tag, np.frombuffer(payload, np.uint8))) + payload


@pytest.mark.parametrize(
    ("sent", "what"),
    [
        (
            head((1 << 21) + 1, 16),
            "rank 1 sent rank 0 an invalid head of a message: got 93 ce 00 20 00 01 cf .* below 2097152",
        ),
        (head(7, 16)[1:] + b"\0", "rank 1 sent rank 0 an invalid head of a message: got ce 00 00 00 07 cf"),
        (b"\xff" * 20, "rank 1 sent rank 0 an invalid head of a message: got ff ff"),
        (head(7, 17), "another size with tag 7: got 17 bytes, expected 16 bytes"),
        (head(7, 2**32 - 1), "another size with tag 7"),
        (head(7, 0), "another size with tag 7"),
    ],
)
def test_a_head_that_cannot_be_is_refused_before_anything_is_written(stranger, sent, what):
    link, theirs = stranger
    memory = np.zeros(2)
    link.receive(1, 7, memory)
    theirs.send(sent + b"\1" * 32)
    with pytest.raises(ProtocolError, match=what):
        until(1, link)
    assert not memory.any()
    assert link.lost == 1
    with pytest.raises(ProtocolError, match=what):
        link.poll()


@pytest.mark.parametrize("sent", [b"", head(7, 16)[:5], head(7, 16), head(7, 16) + b"\1" * 9])
def test_a_connection_that_ends_in_a_message_is_a_lost_rank(stranger, sent):
    link, theirs = stranger
    link.receive(1, 6, np.zeros(2))
    link.receive(1, 7, np.zeros(2))
    theirs.send(message(6, bytes(16)) + sent)
    theirs.shutdown(socket.SHUT_RDWR)
    assert until(1, link) == [[(RECEIVED, 1, 6)]]
    with pytest.raises(PeerLost, match="rank 1 is gone: its connection has ended"):
        until(1, link)
    assert link.lost == 1


def test_a_connection_that_is_reset_is_a_lost_rank():
    ours, theirs = tcp_pair()
    link = SocketLink(0, {1: [ours]})
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    theirs.close()
    for begin in (link.receive, link.send):
        begin(1, 7, np.zeros(2))
        with pytest.raises(PeerLost, match=r"rank 1 is gone: the connection with it is lost \(Connection reset"):
            until(1, link)
    link.close()


@pytest.mark.parametrize("bit", range(0, (20 + 16) * 8, 5))
def test_a_bit_that_was_flipped_is_never_taken_for_what_was_sent(bit):
    ours, theirs = socket.socketpair()
    link, memory, payload = SocketLink(0, {1: [ours]}), np.zeros(16, np.uint8), bytes(range(16))
    sent = bytearray(message(7, payload))
    sent[bit // 8] ^= 1 << bit % 8
    link.receive(1, 7, memory)
    theirs.send(sent)
    is_in_the_tag, is_in_a_word_of_msgpack_or_the_size = 2 <= bit // 8 < 6, bit // 8 in {0, 1, 6, *range(15, 20)}
    if is_in_the_tag and (7 ^ 1 << 24 - 8 * (bit // 8 - 2) + bit % 8) <= 1 << 21:
        with contextlib.suppress(PeerLost):  # a farewell
            assert link.poll() == []
    elif is_in_the_tag or is_in_a_word_of_msgpack_or_the_size:
        with pytest.raises(ProtocolError, match=r"rank 1 sent rank 0 (an invalid head of a message|another size)"):
            until(1, link)
    else:
        assert until(1, link) == [[(Completed.DAMAGED, 1, 7)]]
    link.close()
    theirs.close()


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 64, 1001])
def test_a_checksum_is_the_sum_of_words_bytes_tag_and_size(size):
    payload = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    words = [int.from_bytes(payload[n : n + 8].tobytes(), "little") for n in range(0, size, 8)]
    assert sockets.checksum(5, payload) == (sum(words) + 5 + size * 2**32) % 2**64


def test_what_goes_over_a_socket_is_msgpack(stranger):
    link, theirs = stranger
    source = np.arange(1000.0)
    link.send(1, 7, source)
    link.send(1, 8, source[:0])
    until(2, link)
    link.close()
    read = msgpack.Unpacker()
    read.feed(b"".join(iter(lambda: theirs.recv(1 << 16), b"")))
    expected = [[7, sockets.checksum(7, source), source.tobytes()], [8, 8, b""], [1 << 21, 0, b""]]
    assert [*read] == expected


def test_a_message_of_4_gib_is_refused(stranger):
    link, _ = stranger
    with pytest.raises(CallerError, match=r"too long for a link over sockets: got 4294967296 bytes, .* bucket_bytes"):
        link.send(1, 7, np.broadcast_to(np.uint8(0), 1 << 32))


def test_a_message_may_come_byte_by_byte(stranger):
    link, theirs = stranger
    memory, source = np.zeros(2), np.array([3.0, 4.0])
    link.receive(1, 7, memory)
    reports = []
    for byte in message(7, source.tobytes()):
        assert reports == []
        theirs.send(bytes([byte]))
        assert link.bell.wait(60.0)
        reports += link.poll()
    assert reports == [(RECEIVED, 1, 7)]
    assert np.array_equal(memory, source)


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
    assert until(1, link) == [[(SENT, 1, 3)]]
    assert theirs.recv(100) == message(3, np.ones(1).tobytes())
    link.receive(1, 8, memory)
    with pytest.raises(ProtocolError, match="another size with tag 8: got 4294967295 bytes, expected 16 bytes"):
        until(1, link)


def test_a_message_that_comes_before_it_is_received_waits_with_those_after_it(stranger):
    link, theirs = stranger
    sinks = {tag: np.zeros(1) for tag in (5, 6)}
    link.receive(1, 6, sinks[6])
    theirs.send(b"".join(message(tag, np.full(1, float(tag)).tobytes()) for tag in sinks))
    assert link.poll() == link.poll() == []
    link.receive(1, 5, sinks[5])
    for tag in sinks:  # one at a time, which is then still in the cache
        assert link.poll() == [(RECEIVED, 1, tag)]
    assert all(sink == tag for tag, sink in sinks.items())


@pytest.mark.parametrize("size", [0, 16])
def test_a_message_that_came_before_it_is_received_wakes_who_receives_it(stranger, size):
    """Though nothing more comes by which the link would notice it, where it is empty."""
    link, theirs = stranger
    memory = np.zeros(size, np.uint8)
    theirs.send(message(7, b"\1" * size))
    while link.held() != [7]:
        assert link.poll() == []
    link.receive(1, 7, memory)
    assert link.bell.wait(60.0)
    assert link.poll() == [(RECEIVED, 1, 7)]
    assert memory.all()


def test_what_comes_over_other_connections_is_received_after_one_has_ended():
    pairs, memory = [tcp_pair(), tcp_pair()], np.zeros(1)
    link, (whole, ended) = SocketLink(0, {1: [ours for ours, _ in pairs]}), [theirs for _, theirs in pairs]
    ended.close()
    link.receive(1, 0, memory)
    assert link.poll() == link.poll() == []
    whole.send(message(0, np.ones(1).tobytes()))
    assert until(1, link) == [[(RECEIVED, 1, 0)]]
    for begin, tag in ((link.receive, 2), (link.send, 0)):
        begin(1, tag, memory)
        with pytest.raises(PeerLost, match="rank 1 is gone: its connection has ended"):
            until(1, link)
    link.close()
    whole.close()


def test_a_rank_that_says_farewell_has_closed_its_link(stranger):
    link, theirs = stranger
    theirs.send(head(1 << 21, 0))
    theirs.close()
    link.receive(1, 6, np.zeros(2))
    with pytest.raises(PeerLost, match="rank 1 is gone: it has closed its link"):
        until(1, link)


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
    assert came[:20] == head(7, 128_000_000, sockets.checksum(7, np.zeros(16_000_000)))
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
    memory, log = np.zeros(2), []
    link.receive(1, 7, memory)
    theirs.send(message(7, b"\1" * 16))

    def close():
        link.close()
        log.append("closed")

    def slow(connection):
        closer.start()
        closer.join(0.1)  # it ends here if it does not wait
        read(connection)
        log.append("read")

    closer, read = threading.Thread(target=close), link._read
    monkeypatch.setattr(link, "_read", slow)
    assert link.poll() == [(RECEIVED, 1, 7)]
    closer.join(60)
    assert log == ["read", "closed"]


@pytest.mark.parametrize("call", ["send", "receive", "ring", "close"])
def test_a_link_over_sockets_that_is_interrupted_at_any_line_can_be_closed(call):
    """By another thread too: nothing stays locked; and no descriptor stays open."""

    def begun():
        ours, theirs = socket.socketpair()
        link = SocketLink(0, {1: [ours]})
        theirs.send(head(7, 0))
        link.receive(1, 8, np.zeros(2))
        assert link.poll() == []
        calls = {
            "send": lambda: link.send(1, 6, np.zeros(2)),
            "receive": lambda: link.receive(1, 7, np.zeros(0)),
            "ring": link.bell.ring,
            "close": link.close,
        }
        return link, ours, theirs, calls[call]

    def end(link, ours, theirs):
        assert outcomes(SocketLink.close, [link]) == [None]
        assert [each.fileno() for each in (ours, link.bell._bell, link.bell._rope)] == [-1] * 3
        theirs.close()

    *ends, sound = begun()
    places = places_of(sound)
    end(*ends)
    assert len(places) > 2
    for at in places:
        *ends, interrupted = begun()
        assert interrupted_at(at, interrupted)[0], at
        end(*ends)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_a_forked_child_does_not_hide_from_other_ranks_that_a_process_has_ended():
    script = """
import os, socket
from gradengine.exchange.links.sockets import SocketLink

ours, theirs = socket.socketpair()
link = SocketLink(0, {1: [ours]})
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


def test_without_mpi4py_a_link_over_mpi_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(DeviceUnavailable, match=r"needs mpi4py and an MPI library .* pip install 'gradengine\[mpi\]'"):
        MpiLink()


# ---- sums ----


@pytest.mark.parametrize(("world_size", "bucket_bytes"), [(2, 1 << 22), (4, 1 << 18)])
def test_steps_over_any_link_end_with_the_sums_in_rank_order(links, world_size, bucket_bytes):
    """With gathers between the spans, and shares that are larger than what a socket takes at once."""
    layout = GradientLayout.of({"layers.0.w": (1000,), "layers.1.w": (1_500_000,), "head": (77,)})
    numbers = np.random.default_rng(world_size)
    parts = np.zeros((2, world_size, layout.arena_size), np.float32)
    for slot in layout.slots:
        parts[..., slot.offset : slot.stop] = numbers.standard_normal((2, world_size, slot.size))

    def work(link):
        arena, found = shared(np.empty(layout.arena_size, np.float32)), []
        exchange, progress = Exchange(link, bucket_bytes=bucket_bytes), Progress()
        exchange.bind(layout, arena, progress)
        for step in range(2):
            arena[:] = parts[step, link.rank]
            for span in layout.spans:
                exchange.start(span)
                exchange.gather(bytes(5000))
            exchange.wait()
            exchange.gather(b"done")
            progress.next_step()
            found.append(arena.tobytes())
        exchange.close()
        return found

    expected = [rank_order_sum(step).tobytes() for step in parts]
    assert outcomes(work, links(world_size)) == [expected] * world_size


# ---- small data ----


def gathered(link, *parts, **options):
    """What the ranks give to these gathers in a row."""
    pump = Pump(link, **options)
    try:
        return [pump.gather(part, 60.0) for part in parts]
    finally:
        pump.close()


@pytest.mark.parametrize("world_size", range(1, 5))
def test_all_have_every_ranks_bytes_in_rank_order(links, world_size):
    sizes = [(31 * rank * rank) % 7 * 1000 for rank in range(world_size)]
    whole = [bytes([rank]) * size for rank, size in enumerate(sizes)]
    leaving = threading.Barrier(world_size)

    def work(link):
        pump = Pump(link)
        found = [pump.gather(part, 60.0) for part in (whole[link.rank], b"", b"again")]
        leaving.wait(60.0)
        pump.close()
        return found

    assert outcomes(work, links(world_size)) == [[whole, [b""] * world_size, [b"again"] * world_size]] * world_size


def test_a_late_rank_is_named(links):
    has_come, looks = threading.Event(), []

    def clock():
        looks.append(has_come.is_set())
        return 61.0 * (sum(looks) > 12)  # once what has come was polled: two looks for each of four transfers at most

    def work(link):
        if link.rank == 0:
            return gathered(link, b"x", clock=clock)
        if link.rank == 1:  # it sends its part, so that rank 2 alone is late
            gather = Gather(1, 3, b"")
            for transfer in gather.transfers():
                begin = link.send if isinstance(transfer, Send) else link.receive
                if transfer.peer == 0:
                    begin(*transfer)
            until(2, link)
            has_come.set()
        return None

    late, *_ = outcomes(work, links(3))
    assert isinstance(late, DeadlineExceeded)
    assert "rank 2 is late for a gather (end of step or barrier), rank 0 waits: got nothing for 60 s" in str(late)


def test_a_rank_that_is_gone_ends_a_gather(links):
    group = links(3)
    lost = outcomes(lambda link: link.close() if link.rank == 2 else gathered(link, b"x"), group)
    assert all(isinstance(fault, PeerLost) and str(fault).startswith("rank 2 is gone") for fault in lost[:2])
