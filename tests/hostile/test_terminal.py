"""What a stranger says is text in one line: no control character of it reaches a terminal, or makes a line of a log."""

import contextlib
import unicodedata

import msgpack
import pytest
from channel import SECRET, Channel, framed, knock
from test_exchange_mesh import Clock, Started, refusal_of

from gradengine.errors import ExchangeError
from gradengine.exchange.addresses import Listener
from gradengine.exchange.handshake import new_nonce

EVIL = "no\r\n\x1b[2J\x1b]0;mine\x07\x9b31m\u202egnp.exe\u2028rank 0: all is well\0\ud800"
SAYS = EVIL + "\n" * (1 << 15)


def is_one_printable_line(text):
    return not any(unicodedata.category(each) in {"Cc", "Cf", "Cs", "Zl", "Zp"} for each in text)


@pytest.fixture
def listener():
    listener = Listener(("127.0.0.1", 0), SECRET)
    listener.socket.setblocking(True)
    yield listener
    listener.close()


@pytest.mark.parametrize("error", ["HandshakeRefused", "PeerLost", EVIL, "os.system"], ids=range(4))
def test_who_answers_a_call_without_any_proof(listener, error):
    second = Started(listener.address, 1, 2)
    with listener.socket.accept()[0] as bare:
        stranger = Channel(bare, "rank 1")
        stranger.expect("hello")
        stranger.send("abort", error, SAYS)
        kind, told = second.error()
    assert issubclass(kind, ExchangeError)
    assert "no\\r\\n\\x1b[2J" in told
    assert is_one_printable_line(told)
    assert len(told) < 3000


@pytest.mark.parametrize(
    "says",
    [
        framed("hello", msgpack.packb([EVIL[:-1], 5])),
        framed("hello", msgpack.packb(["GE", EVIL[:-1]])),
        framed("hello", b"\x96\xa2GE\x05\x01\x02\xa5\x1b[2J\n"),  # cut off
        framed("hello", b"\x91\xa1\xff"),  # no UTF-8
        b"\x1b[2J\n" * 4,
    ],
    ids=["name", "version", "value", "text", "head"],
)
def test_who_calls_and_what_rank_0_says_of_it_at_the_deadline(listener, says):
    listener.socket.setblocking(False)
    clock = Clock()
    first = Started(listener, 0, 2, clock=clock)
    stranger = knock(listener.address)
    stranger._socket.sendall(says)
    assert is_one_printable_line(refusal_of(stranger))
    clock.jump(listener.address)
    _, told = first.error()
    assert "last refused here: " in told
    assert is_one_printable_line(told)


def test_a_job_of_a_stranger_is_not_even_shown(listener):
    listener.socket.setblocking(False)
    clock = Clock()
    first = Started(listener, 0, 2, clock=clock, job="run 1")
    with contextlib.closing(knock(listener.address)) as stranger:
        stranger.send("hello", 1, 2, EVIL[:-1], new_nonce())
        stranger.expect("nonce")
        stranger.send("proof", bytes(32))
        stranger.expect("abort")
    clock.jump(listener.address)
    _, told = first.error()
    assert "(last refused here: rank 1 has a different secret; " in told
