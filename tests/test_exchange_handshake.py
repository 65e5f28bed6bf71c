"""Who may join: proofs that hold for one role, one connection, one called end, one group and one secret alone."""

from __future__ import annotations

import hashlib
import hmac
import socket

import msgpack
import pytest

from gradengine.errors import CallerError, HandshakeRefused
from gradengine.exchange.handshake import (
    Line,
    check_hello,
    new_nonce,
    proof,
    refuse_bad_secret,
)
from gradengine.exchange.wire import Hello

HELLO = Hello(rank=1, world_size=4, job="pretrain", nonce=new_nonce())
NONCE = bytes(range(32))


def proven(secret="secret", role="caller", hello=HELLO, nonce=NONCE, called=0, group=b"", channel=b""):
    return proof(secret, role, hello, nonce, called, group, channel)


@pytest.fixture
def line():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Line(ours, "rank 1")


@pytest.mark.parametrize("secret", ["secret", "", None, "ключ", "not UTF-8: \udcff"])
def test_both_sides_make_the_same_proof(secret, line):
    line.refuse_other(proven(secret), proven(secret))
    line.refuse_other(proven(""), proven(None))


def test_proof_is_the_documented_hmac():
    facts = ["caller", 5, "pretrain", 1, 4, HELLO.nonce, NONCE, 4, b"group"]
    for channel in (b"", bytes(range(64))):
        packed = msgpack.packb(facts + [channel] * bool(channel))
        expected = hmac.new(b"secret", packed, hashlib.sha256).digest()
        assert proven(called=4, group=b"group", channel=channel) == expected


@pytest.mark.parametrize(
    "change",
    [
        *({"secret": secret} for secret in ("a", "Secret", "", None)),
        *({"role": "called"}, {"nonce": bytes(32)}, {"called": 4}, {"group": bytes(16)}, {"channel": bytes(64)}),
        *(
            {"hello": HELLO._replace(**{name: value})}
            for name, value in (("rank", 2), ("world_size", 5), ("job", "finetune"), ("nonce", bytes(32)))
        ),
    ],
)
def test_proof_holds_for_nothing_else(change, line):
    for given in (proven(**change), b"", proven()[:31], proven() + b"\0"):
        with pytest.raises(HandshakeRefused, match="rank 1 has a different secret"):
            line.refuse_other(given, proven())


@pytest.mark.parametrize("secret", ["0" * 15, " " * 32, "0" * 15 + "\n"])
def test_a_secret_that_can_be_guessed_is_refused(secret):
    with pytest.raises(CallerError, match="secret is too short"):
        refuse_bad_secret(secret)


def test_nonces_are_fresh():
    assert len({new_nonce() for _ in range(100)}) == 100


@pytest.mark.parametrize(
    "change",
    [*({"world_size": size} for size in (2, 5)), *({"rank": rank} for rank in (-1, 4, 2**64 - 1)), {"job": ""}],
)
def test_who_is_of_another_group_is_refused(change):
    for job in (HELLO.job, None):
        check_hello(HELLO, 4, job)
    with pytest.raises(HandshakeRefused):
        check_hello(HELLO._replace(**change), 4, HELLO.job)
