"""Whoever sends byte by byte, or nothing: one deadline is that of the whole, and no byte puts it off."""

import contextlib

import pytest
from channel import knock
from test_exchange_mesh import Clock, Started

from gradengine.errors import PeerLost
from gradengine.exchange.handshake import new_nonce
from gradengine.exchange.wire import encoded

HELLO = encoded("hello", 1, 2, "", bytes(32))


def is_answered_and_left_open(channel):
    """Whether whoever listens has read what came before this: it answers one thing after the other."""
    channel.send("hello", 1, 2, "", new_nonce())
    return channel.receive()[0] == "nonce"


def test_bytes_that_drip_put_off_no_deadline_of_rank_0(listener):
    clock = Clock()
    first = Started(listener, 0, 2, clock=clock)
    with contextlib.ExitStack() as stack:
        dripping = [stack.enter_context(contextlib.closing(knock(listener.address))) for _ in range(20)]
        for second, byte in enumerate(HELLO[:50]):
            for each in dripping:
                each._socket.sendall(bytes([byte]))
            clock.now = float(second)
        with contextlib.closing(knock(listener.address)) as other:
            assert is_answered_and_left_open(other)
        clock.now = 59.0
        clock.jump(listener.address)
        kind, told = first.error()
        assert kind is PeerLost
        assert "rank 1 did not join rank 0 within 60 s (join_timeout)" in told
        for each in dripping:
            with pytest.raises(PeerLost):
                each.receive()


def test_a_rank_that_calls_waits_to_its_own_deadline_for_an_answer_that_drips(listener):
    """Nor does an answer that comes whole at once begin it anew: it is that of all attempts."""
    listener.socket.setblocking(True)
    clock = Clock()
    second = Started(listener.address, 1, 2, clock=clock)
    answer = encoded("nonce", bytes(32))
    with listener.socket.accept()[0] as first:
        first.sendall(answer)
        first.recv(1 << 16)
        clock.now = 59.0
    with listener.socket.accept()[0] as again:
        clock.now = 1e8
        with contextlib.suppress(ConnectionError):
            again.sendall(answer[:1])
        kind, told = second.error()
    assert kind is PeerLost
    assert "rank 1 could not connect to rank 0" in told
