"""Gathers of small data without a link: messages are moved by hand, in any order."""

import struct

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradengine.errors import CallerError, ProtocolError
from gradengine.exchange.gather import _HEAD_TAG, _REST_TAG, _ROOM, Gather, is_of_gather, refuse_long_part
from gradengine.exchange.links.link import RECEIVE, SEND, Completion
from gradengine.exchange.shares import MOST_SHARES
from gradengine.exchange.wire import MAX_SMALL_PAYLOAD


def run(gathers, rng):
    """Deliver what was sent, one message after the other."""
    sends, receives = {}, {}
    while True:
        for rank, gather in enumerate(gathers):
            for transfer in gather.transfers():
                if transfer.kind == SEND:
                    sends[rank, transfer.peer, transfer.tag] = transfer.memory
                else:
                    receives[transfer.peer, rank, transfer.tag] = transfer.memory
        ready = sorted(sends.keys() & receives.keys())
        if not ready:
            assert not sends
            assert not receives
            return
        source, sink, tag = key = rng.choice(ready)
        receives.pop(key)[:] = sends.pop(key)
        gathers[sink].over(Completion(RECEIVE, source, tag))
        gathers[source].over(Completion(SEND, sink, tag))


def refused(gather, peer, match):
    """The first piece of a peer's part, the last that was missing: the gather does not end without it."""
    for transfer in gather.transfers():
        if transfer.kind == SEND:
            gather.over(Completion(SEND, transfer.peer, transfer.tag))
    with pytest.raises(ProtocolError, match=match):
        gather.over(Completion(RECEIVE, peer, _HEAD_TAG))
    assert not gather.is_done
    assert gather.transfers() == []


sizes = st.sampled_from([0, 1, _ROOM - 1, _ROOM, _ROOM + 1, 3 * _ROOM])


@given(st.lists(sizes, min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_every_rank_has_every_part_in_rank_order(sizes, rng):
    parts = [bytes([rank + 1]) * size for rank, size in enumerate(sizes)]
    gathers = [Gather(rank, len(parts), part) for rank, part in enumerate(parts)]
    run(gathers, rng)
    assert all(gather.is_done for gather in gathers)
    assert [gather.parts for gather in gathers] == [parts] * len(parts)


def test_who_is_waited_for_is_said():
    gather = Gather(1, 3, b"x")
    for transfer in gather.transfers():
        if transfer.kind != SEND:
            transfer.memory[:] = 0
    assert gather.awaited == [0, 2]
    gather.over(Completion(RECEIVE, 0, _HEAD_TAG))
    assert gather.awaited == [2]
    gather.over(Completion(RECEIVE, 2, _HEAD_TAG))
    assert gather.awaited == [0, 2], "their receipt of this rank's part"
    assert not gather.is_done


@pytest.mark.parametrize(
    ("world", "length"),
    [((0, 2), -1), ((0, 2), MAX_SMALL_PAYLOAD + 1), ((0, 2), 1 << 62), ((1, 2, 2), 3 * (MAX_SMALL_PAYLOAD + 8) + 1)],
)
def test_who_announces_too_much_is_refused_before_anything_is_allocated(world, length):
    """A server may send as much as all ranks and it have."""
    rank, size, *server = world
    gather, peer = Gather(rank, size, b"x", *server), server[0] if server else 1
    gather._received[peer][:8] = np.frombuffer(struct.pack("<q", length), np.uint8)
    refused(gather, peer, match=f"announces too much to gather: got {length} bytes")


def test_as_much_as_may_be_is_gathered_and_one_byte_more_is_refused():
    assert [t.tag for t in Gather(0, 2, bytes(_ROOM)).transfers()] == [_HEAD_TAG] * 2
    assert [t.tag for t in Gather(0, 2, bytes(MAX_SMALL_PAYLOAD)).transfers()] == [_HEAD_TAG, _HEAD_TAG, _REST_TAG]
    refuse_long_part(bytes(MAX_SMALL_PAYLOAD))
    with pytest.raises(CallerError):
        refuse_long_part(bytes(MAX_SMALL_PAYLOAD + 1))
    gather, most = Gather(1, 2, b"x", 2), 3 * (MAX_SMALL_PAYLOAD + 8)
    assert len(msgpack.packb([bytes(MAX_SMALL_PAYLOAD)] * 3)) <= most
    gather._received[2][:8] = np.frombuffer(struct.pack("<q", most), np.uint8)
    gather.over(Completion(RECEIVE, 2, _HEAD_TAG))


def test_tags_of_a_gather_are_no_all_reduces():
    assert not is_of_gather(6 * MOST_SHARES - 1)
    assert 6 * MOST_SHARES <= _HEAD_TAG < _REST_TAG < 1 << 21
    assert is_of_gather(_HEAD_TAG)
    assert is_of_gather(_REST_TAG)


# ---- through a server ----


def through_a_server(parts, own=b"the server's"):
    ranks = len(parts)
    return [*(Gather(rank, ranks, part, ranks) for rank, part in enumerate(parts)), Gather(ranks, ranks, own, ranks)]


@given(st.lists(sizes, min_size=1, max_size=5), sizes, st.randoms(use_true_random=False))
def test_through_a_server_every_rank_has_every_part_and_the_servers_own(sizes, own, rng):
    parts = [bytes([rank + 1]) * size for rank, size in enumerate(sizes)]
    gathers = through_a_server(parts, b"\xff" * own)
    run(gathers, rng)
    assert all(gather.is_done for gather in gathers)
    assert [gather.parts for gather in gathers] == [[*parts, b"\xff" * own]] * len(gathers)


def test_a_rank_waits_for_the_server_alone_and_the_server_for_who_is_missing():
    first, _, server = through_a_server([b"x", b"y"])
    assert first.awaited == [2]
    assert server.awaited == [0, 1]
    receive = server.transfers()[0]
    receive.memory[:] = 0
    server.over(Completion(RECEIVE, 0, _HEAD_TAG))
    assert server.awaited == [1]
    assert server.transfers() == []


THREE = [b"", b"", "text"]


@pytest.mark.parametrize("data", [*map(msgpack.packb, (THREE[:2], THREE, 7)), b"", b"\x91" * 1000 + b"\xc0"])
def test_what_a_server_cannot_have_gathered_is_refused(data):
    gather = Gather(1, 2, b"x", 2)
    gather._received[2][:] = 0
    gather._received[2][: 8 + len(data)] = np.frombuffer(struct.pack("<q", len(data)) + data, np.uint8)
    refused(gather, 2, match="the server")
