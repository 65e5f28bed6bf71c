"""Who may join: both sides prove the token without sending it, then the world size is compared (the rest by the group).

Each proof is an HMAC-SHA256 bound to the prover's role, both nonces, the protocol version, the rank and the world size,
so a proof can neither be replayed nor reflected. No I/O here.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

import msgpack

from gradengine.errors import HandshakeRefused, ProtocolError
from gradengine.exchange.wire import NONCE_BYTES, PROTOCOL_VERSION, Challenge, Hello, Join

__all__ = ["answer_hello", "check_challenge", "check_hello", "check_proof", "new_nonce", "proof"]


def new_nonce() -> bytes:
    """Fresh random bytes."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(token: str | None, role: str, hello: Hello, coordinator_nonce: bytes) -> bytes:
    """What only a holder of the token can compute for this handshake.

    Args:
        token: The group's secret; None counts as empty.
        role: "coordinator" or "worker": who proves.
        hello: The worker's first message.
        coordinator_nonce: From the coordinator's challenge.

    Example:
        >>> hello = Hello(rank=1, world_size=2, nonce=bytes(32))
        >>> proof("a", "worker", hello, bytes(32)) == proof("b", "worker", hello, bytes(32))
        False
    """
    facts = [role, PROTOCOL_VERSION, hello.rank, hello.world_size, hello.nonce, coordinator_nonce]
    return hmac.new((token or "").encode(), msgpack.packb(facts), hashlib.sha256).digest()


def check_hello(hello: Hello, world_size: int) -> None:
    """Raise `HandshakeRefused` where a worker belongs to another group."""
    if len(hello.nonce) != NONCE_BYTES:
        raise ProtocolError("nonce has another length", got=len(hello.nonce), expected=NONCE_BYTES)
    if hello.world_size != world_size:
        raise HandshakeRefused(
            f"rank {hello.rank} was started for another world size",
            got=hello.world_size,
            expected=world_size,
            do="give every worker and the coordinator the same world_size",
        )
    if not hello.rank < world_size:
        raise HandshakeRefused("rank is out of range", got=hello.rank, expected=f"0..{world_size - 1}")


def answer_hello(token: str | None, hello: Hello) -> Challenge:
    """The coordinator's challenge."""
    nonce = new_nonce()
    return Challenge(nonce=nonce, proof=proof(token, "coordinator", hello, nonce))


def check_challenge(token: str | None, hello: Hello, challenge: Challenge) -> None:
    """Raise `HandshakeRefused` where the coordinator does not hold the token."""
    if not hmac.compare_digest(challenge.proof, proof(token, "coordinator", hello, challenge.nonce)):
        raise HandshakeRefused("the coordinator has another token", do="start all with the same token=")


def check_proof(token: str | None, hello: Hello, challenge: Challenge, join: Join) -> None:
    """Raise `HandshakeRefused` where the worker does not hold the token."""
    if not hmac.compare_digest(join.proof, proof(token, "worker", hello, challenge.nonce)):
        raise HandshakeRefused(f"rank {hello.rank} has another token", do="start all with the same token=")
