"""Whoever has not proved itself costs a few kilobytes, one descriptor and no thread, whatever it announces or sends."""

import contextlib
import threading
import tracemalloc

import pytest
from channel import Channel, claim, framed, knock
from test_exchange_mesh import Started, form, refusal_of, start

from gradengine.errors import ProtocolError
from gradengine.exchange.handshake import Line, new_nonce
from gradengine.exchange.wire import _KINDS, HEAD_BYTES, encoded

MOST = 64  # strangers that may be connected, besides one for each rank
MOST_BYTES = HEAD_BYTES + 4096  # of what a stranger may say


@pytest.fixture
def lines(monkeypatch):
    """All lines that are made."""
    made, sound = [], Line.__init__

    def noted(line, *arguments):
        sound(line, *arguments)
        made.append(line)

    monkeypatch.setattr(Line, "__init__", noted)
    return made


def longest_hello():
    """Of which the last byte is missing."""
    room = MOST_BYTES - len(encoded("hello", 1, 2, "j" * 300, bytes(32))) + 300
    message = encoded("hello", 1, 2, "j" * room, bytes(32))
    assert len(message) == MOST_BYTES
    return message[:-1]


def test_strangers_by_the_hundred_hold_little_memory_and_no_thread(listener, lines):
    before = threading.active_count()
    first, says = Started(listener, 0, 2), longest_hello()
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(contextlib.closing(knock(listener.address)))._socket.sendall(says)
        with contextlib.closing(knock(listener.address)) as last:
            last.send("hello", 1, 2, "", new_nonce())
            last.expect("nonce")  # so that those who came before have been heard
            held = [len(line._read) for line in lines if line.socket.fileno() >= 0]
            assert len(held) == MOST + 2
            assert sum(held) <= len(held) * MOST_BYTES
            assert max(held) == len(says)
            assert threading.active_count() == before + 1  # rank 0's, of this test
        form([first, *start(listener, 2, [1])])


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("size", [4097, (1 << 32) - 1])
def test_what_a_caller_announces_is_refused_before_any_of_it_is_there(listener, kind, size):
    first = Started(listener, 0, 2)
    stranger = knock(listener.address)
    stranger.send_bytes(claim(kind, size))
    assert "too long" in (told := refusal_of(stranger)) or "sent a wrong message" in told
    form([first, *start(listener, 2, [1])])


@pytest.mark.parametrize(
    ("kind", "size"), [("abort", (1 << 16) + 1), ("abort", (1 << 32) - 1), ("nonce", 4097), ("members", 9)]
)
def test_nor_does_a_rank_wait_for_what_whoever_it_calls_announces(listener, kind, size):
    listener.socket.setblocking(True)
    second = Started(listener.address, 1, 2)
    with listener.socket.accept()[0] as bare:
        Channel(bare, "rank 1").expect("hello")
        bare.sendall(claim(kind, size))
        error, told = second.error()
    assert error is ProtocolError
    assert "too long" in told or "sent a wrong message" in told


@pytest.mark.parametrize("nested", [b"\xdd\0\0\x0f\xff", b"\x91", b"\x81\xa1k"], ids=["long", "arrays", "maps"])
def test_what_is_nested_costs_a_stranger_more_than_rank_0(listener, nested):
    """msgpack allocates what an array announces before its items are there."""
    first, payload = Started(listener, 0, 2), (nested * 4096)[:4096]
    stranger = knock(listener.address)
    tracemalloc.start()
    stranger.send_bytes(framed("hello", payload))
    assert "cannot be read" in refusal_of(stranger)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 20
    form([first, *start(listener, 2, [1])])
