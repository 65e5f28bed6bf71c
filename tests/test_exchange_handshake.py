"""Who may join: proofs that hold for one role, one connection, one group and one token, and for nothing else."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac

import msgpack
import pytest

from gradengine.errors import HandshakeRefused, ProtocolError
from gradengine.exchange.handshake import answer_hello, check_challenge, check_hello, check_proof, new_nonce, proof
from gradengine.exchange.wire import Challenge, Hello, Join

HELLO = Hello(rank=1, world_size=4, job="pretrain", nonce=new_nonce())


def join(token, hello, challenge):
    return Join(proof(token, "worker", hello, challenge.nonce), 0, 0, 0, 0, b"", 0, 0)


@pytest.mark.parametrize("token", ["secret", "", None, "ключ"])
def test_both_sides_accept_each_other(token):
    challenge = answer_hello(token, HELLO)
    check_challenge(token, HELLO, challenge)
    check_proof(token, HELLO, challenge, join(token, HELLO, challenge))


def test_proof_is_the_documented_hmac():
    facts = ["worker", 2, "pretrain", 1, 4, HELLO.nonce, bytes(32)]
    expected = hmac.new(b"secret", msgpack.packb(facts), hashlib.sha256).digest()
    assert proof("secret", "worker", HELLO, bytes(32)) == expected


@pytest.mark.parametrize(("mine", "theirs"), [("a", "b"), ("a", None), (None, "b"), ("a", "A")])
def test_another_token_is_refused_by_both_sides(mine, theirs):
    challenge = answer_hello(theirs, HELLO)
    with pytest.raises(HandshakeRefused, match="the coordinator has another token; start all with the same token="):
        check_challenge(mine, HELLO, challenge)
    with pytest.raises(HandshakeRefused, match="rank 1 has another token; start all with the same token="):
        check_proof(theirs, HELLO, challenge, join(mine, HELLO, challenge))


def test_proof_of_an_earlier_connection_is_refused():
    earlier = answer_hello("secret", HELLO)
    replayed = join("secret", HELLO, earlier)
    with pytest.raises(HandshakeRefused, match="another token"):
        check_proof("secret", HELLO, answer_hello("secret", HELLO), replayed)
    with pytest.raises(HandshakeRefused, match="another token"):
        check_challenge("secret", dataclasses.replace(HELLO, nonce=new_nonce()), earlier)


def test_own_proof_reflected_is_refused():
    challenge = answer_hello("secret", HELLO)
    with pytest.raises(HandshakeRefused, match="another token"):
        check_proof("secret", HELLO, challenge, Join(challenge.proof, 0, 0, 0, 0, b"", 0, 0))
    worker_proof = join("secret", HELLO, challenge).proof
    with pytest.raises(HandshakeRefused, match="another token"):
        check_challenge("secret", HELLO, Challenge(challenge.nonce, worker_proof))


@pytest.mark.parametrize("change", [{"rank": 2}, {"world_size": 5}, {"job": "finetune"}, {"nonce": bytes(32)}])
def test_proof_holds_for_no_other_hello(change):
    challenge = answer_hello("secret", HELLO)
    with pytest.raises(HandshakeRefused, match="another token"):
        check_proof("secret", dataclasses.replace(HELLO, **change), challenge, join("secret", HELLO, challenge))


@pytest.mark.parametrize("cut", [b"", b"x", bytes(31), bytes(33)])
def test_proof_of_another_length_is_refused(cut):
    challenge = answer_hello("secret", HELLO)
    with pytest.raises(HandshakeRefused, match="another token"):
        check_proof("secret", HELLO, challenge, Join(cut, 0, 0, 0, 0, b"", 0, 0))


def test_nonces_are_fresh():
    assert len({new_nonce() for _ in range(100)}) == 100
    assert answer_hello("secret", HELLO).nonce != answer_hello("secret", HELLO).nonce


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
