"""Who may join: proofs that hold for one role, one connection, one called end, one group and one token alone."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac

import msgpack
import pytest

from gradengine.errors import HandshakeRefused, ProtocolError
from gradengine.exchange.handshake import check_hello, is_same_proof, new_nonce, proof, refuse_other_proof
from gradengine.exchange.wire import Hello

HELLO = Hello(rank=1, world_size=4, job="pretrain", nonce=new_nonce())
NONCE = bytes(range(32))


def proven(token="secret", role="caller", hello=HELLO, nonce=NONCE, called=0, group=b"", channel=b""):
    return proof(token, role, hello, nonce, called, group, channel)


@pytest.mark.parametrize("token", ["secret", "", None, "ключ"])
def test_both_sides_make_the_same_proof(token):
    refuse_other_proof(proven(token), proven(token), "rank 1")
    assert is_same_proof(proven(""), proven(None))


def test_proof_is_the_documented_hmac():
    facts = ["caller", 4, "pretrain", 1, 4, HELLO.nonce, NONCE, 4, b"group"]
    for channel in (b"", bytes(range(64))):
        packed = msgpack.packb(facts + [channel] * bool(channel))
        expected = hmac.new(b"secret", packed, hashlib.sha256).digest()
        assert proven(called=4, group=b"group", channel=channel) == expected


@pytest.mark.parametrize(
    "change",
    [
        *({"token": token} for token in ("a", "Secret", "", None)),
        {"role": "called"},
        {"nonce": bytes(32)},
        {"called": 4},
        {"group": bytes(16)},
        {"channel": bytes(64)},
        *(
            {"hello": dataclasses.replace(HELLO, **{name: value})}
            for name, value in (("rank", 2), ("world_size", 5), ("job", "finetune"), ("nonce", bytes(32)))
        ),
    ],
)
def test_proof_holds_for_nothing_else(change):
    with pytest.raises(HandshakeRefused, match="rank 1 has another token; start all with the same token="):
        refuse_other_proof(proven(**change), proven(), "rank 1")


@pytest.mark.parametrize("cut", [b"", b"x", bytes(31), bytes(33)])
def test_proof_of_another_length_is_refused(cut):
    with pytest.raises(HandshakeRefused, match="another token"):
        refuse_other_proof(cut, proven(), "rank 1")


def test_nonces_are_fresh():
    assert len({new_nonce() for _ in range(100)}) == 100


def test_another_group_is_refused():
    check_hello(HELLO, 4)
    with pytest.raises(HandshakeRefused, match="rank 1 was started for another world size: got 4, expected 2"):
        check_hello(HELLO, 2)
    with pytest.raises(HandshakeRefused, match=r"rank is out of range: got 4, expected 0\.\.3"):
        check_hello(dataclasses.replace(HELLO, rank=4), 4)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_nonce_of_another_length_is_refused(size):
    with pytest.raises(ProtocolError, match=f"nonce has another length: got {size}, expected 32"):
        check_hello(dataclasses.replace(HELLO, nonce=bytes(size)), 4)
