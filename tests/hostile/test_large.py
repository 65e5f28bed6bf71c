"""Whoever has not proved itself costs a few kilobytes, one descriptor and no thread, whatever it announces or sends."""

import contextlib
import threading

import pytest
from channel import Channel, knock
from test_exchange_mesh import Started, form, refusal_of, start

from gradengine.errors import ProtocolError
from gradengine.exchange.handshake import new_nonce
from gradengine.exchange.line import Line
from gradengine.exchange.wire import (
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    Abort,
    Hello,
    Listening,
    Members,
    Nonce,
    Proof,
    Refused,
    encode_head,
)

MOST = 64  # strangers that may be connected, besides one for each rank


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
    room = MAX_HEADER_BYTES + PREFIX_BYTES - len(encode_head(Hello(1, 2, "j" * 300, bytes(32)))) + 300
    message = encode_head(Hello(1, 2, "j" * room, bytes(32)))
    assert len(message) == MAX_HEADER_BYTES + PREFIX_BYTES
    return message[:-1]


def test_strangers_by_the_hundred_hold_little_memory_and_no_thread(listener, lines):
    before = threading.active_count()
    first, says = Started(listener, 0, 2), longest_hello()
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(contextlib.closing(knock(listener.address)))._socket.sendall(says)
        with contextlib.closing(knock(listener.address)) as last:
            last.send(Hello(1, 2, "", new_nonce()))
            last.expect(Nonce)  # so that those who came before have been heard
            held = [len(line._read) for line in lines if line.socket.fileno() >= 0]
            assert len(held) == MOST + 2
            assert sum(held) <= len(held) * (MAX_HEADER_BYTES + PREFIX_BYTES)
            assert max(held) == len(says)
            assert threading.active_count() == before + 1  # rank 0's, of this test
        form([first, *start(listener, 2, [1])])


TOO_LONG = [Hello(1, 2, "", bytes(32)), Proof(bytes(32)), Listening("x"), Members(b"", ""), Refused(), Abort("")]


@pytest.mark.parametrize("message", TOO_LONG)
@pytest.mark.parametrize("payload_bytes", [1, (1 << 32) - 1])
def test_what_a_caller_announces_is_refused_before_any_of_it_is_there(listener, message, payload_bytes):
    first = Started(listener, 0, 2)
    stranger = knock(listener.address)
    stranger._socket.sendall(encode_head(message, payload_bytes))
    assert "too long" in (told := refusal_of(stranger)) or "sent another message" in told
    form([first, *start(listener, 2, [1])])


@pytest.mark.parametrize(
    ("message", "payload_bytes"),
    [(Refused(), (1 << 16) + 1), (Abort("PeerLost"), (1 << 32) - 1), (Nonce(bytes(32), ""), 1), (Members(b"", ""), 9)],
)
def test_nor_does_a_rank_wait_for_what_whoever_it_calls_announces(listener, message, payload_bytes):
    listener.socket.setblocking(True)
    second = Started(listener.address, 1, 2)
    with listener.socket.accept()[0] as bare:
        Channel(bare, "rank 1").expect(Hello)
        bare.sendall(encode_head(message, payload_bytes))
        kind, told = second.error()
    assert kind is ProtocolError
    assert "too long" in told or "sent another message" in told


@pytest.mark.parametrize("nested", [b"\x91", b"\x81\xa1k"], ids=["arrays", "maps"])
def test_what_is_nested_is_refused_before_it_is_decoded(listener, nested):
    first = Started(listener, 0, 2)
    stranger = knock(listener.address)
    message = encode_head(Hello(1, 2, "x", bytes(32)))
    deep = message[PREFIX_BYTES:].replace(b"\xa1x", nested * 9 + b"\xc0")
    prefix = bytearray(message[:PREFIX_BYTES])
    prefix[7:11] = len(deep).to_bytes(4, "big")
    stranger._socket.sendall(bytes(prefix) + deep)
    assert "a message header is nested too deep" in refusal_of(stranger)
    form([first, *start(listener, 2, [1])])
