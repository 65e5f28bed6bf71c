"""Mutual authentication by a shared secret, and comparison of job and world size; no I/O.

Each proof is an HMAC-SHA256 over the prover's role, both nonces, the protocol version, job, rank, world size, the rank
that is called, the group and, over TLS, both certificates, so that it can be neither replayed, reflected nor passed on.
The secret is never sent.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

import msgpack

from gradengine.arguments import refuse_other_kind, said
from gradengine.errors import CallerError, DeadlineExceeded, ExchangeError, HandshakeRefused, PeerLost, ProtocolError
from gradengine.exchange.wire import NONCE_BYTES, PROTOCOL_VERSION, Hello

MAX_JOB_CHARACTERS = 256
LEAST_SECRET_CHARACTERS = 16
_DO = "create one with `openssl rand -hex 16` and use it on all ranks"


def new_nonce() -> bytes:
    """Random bytes for one handshake."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(
    secret: str | None, role: str, hello: Hello, nonce: bytes, called: int, group: bytes, channel: bytes = b""
) -> bytes:
    """The HMAC of this handshake under the secret; None means an empty secret.

    `role` is "caller" or "called"; `called` is the rank that is called, the world size for a server, and `nonce` its
    nonce. `channel` is `Line.channel`.
    """
    bound = [role, PROTOCOL_VERSION, hello.job, hello.rank, hello.world_size, hello.nonce, nonce, called, group]
    bound += [channel] if channel else []
    return hmac.new((secret or "").encode(), msgpack.packb(bound), hashlib.sha256).digest()


def check_hello(hello: Hello, world_size: int) -> None:
    """Raise `HandshakeRefused` for a worker with another world size, or a rank out of range."""
    if len(hello.nonce) != NONCE_BYTES:
        raise ProtocolError("nonce has another length", got=len(hello.nonce), expected=NONCE_BYTES)
    if hello.world_size != world_size:
        what = f"rank {hello.rank} was started for another world size"
        do = "give every worker, and the server if there is one, the same world_size, and each job its own job="
        raise HandshakeRefused(what, got=hello.world_size, expected=world_size, do=do)
    if not 0 <= hello.rank < world_size:
        raise HandshakeRefused("rank is out of range", got=hello.rank, expected=f"0..{world_size - 1}")


def refuse_bad_secret(secret: str | None, source: str = "secret") -> None:
    """Raise `CallerError` unless the secret is None, empty (there is none), or text that is not guessed.

    Whoever hears a proof can compare it with those of any number of secrets; only the length makes that hopeless.
    """
    if secret is None:
        return
    refuse_other_kind(source, secret, str)
    if not secret.isascii():
        _refuse_surrogates(secret, source)
    if secret and len(secret.strip()) < LEAST_SECRET_CHARACTERS:
        got, expected = f"{len(secret.strip())} characters", f"at least {LEAST_SECRET_CHARACTERS}"
        raise CallerError(f"{source} is too short", got=got, expected=expected, do=_DO)


def _refuse_surrogates(secret: str, source: str) -> None:
    """Raise `CallerError` for text that has no UTF-8, as of a variable with other bytes; the error does not show it."""
    try:
        secret.encode()
    except UnicodeEncodeError:
        raise CallerError(f"{source} is not UTF-8", do=_DO) from None


def refuse_bad_job(job: str, source: str = "this") -> None:
    """Raise `CallerError` unless a job's name is printable and at most 256 characters; `source` is for the error."""
    if not isinstance(job, str) or len(job) > MAX_JOB_CHARACTERS or not job.isprintable():
        expected = f"at most {MAX_JOB_CHARACTERS} printable characters"
        do = 'pass the same job="name" on all ranks, or job="" for none'
        raise CallerError(f"{source} is not a valid job name", got=said(job), expected=expected, do=do)


def refuse_other_job(hello: Hello, job: str) -> None:
    """Raise `HandshakeRefused` for a worker of another job."""
    if hello.job != job:
        what, do = f"rank {hello.rank} belongs to another job", "two jobs use one address: give each its own address"
        do += ", and all ranks of a job the same job="
        raise HandshakeRefused(what, got=f"job={hello.job!r}", expected=f"job={job!r}", do=do)


def is_same_proof(given: bytes, expected: bytes) -> bool:
    """Whether a proof is the expected one."""
    return hmac.compare_digest(given, expected)  # not ==, whose duration shows how many leading bytes are right


def refuse_other_proof(given: bytes, expected: bytes, who: str, *, is_encrypted: bool = False) -> None:
    """Raise `HandshakeRefused` unless a proof is the expected one."""
    if not is_same_proof(given, expected):
        what, do = f"{who} has another secret", "start all with the same secret="
        if is_encrypted:
            what += ", or is not the one at the other end of TLS"
            do += ", and connect them directly: a proxy that decrypts TLS is refused"
        raise HandshakeRefused(what, do=do)


def error_told(name: str, text: str) -> ExchangeError:
    """A peer's error, of the class with this name if it is one of ours."""
    kinds = {kind.__name__: kind for kind in (HandshakeRefused, ProtocolError, PeerLost, DeadlineExceeded)}
    return kinds.get(name, ExchangeError)(text)


def differing_rows(mine: bytes, theirs: bytes, limit: int = 8) -> str:
    """The rows in which two valid layout tables differ, as at most `limit` lines for an error message."""
    (ours, order, *part), (others, other_order, *other_part) = msgpack.unpackb(mine), msgpack.unpackb(theirs)
    pad = max(len(ours), len(others))
    pairs = zip(ours + [None] * (pad - len(ours)), others + [None] * (pad - len(others)), strict=True)
    lines = [f"row {i}: here {_shown(a)}, there {_shown(b)}" for i, (a, b) in enumerate(pairs) if a != b]
    if order != other_order and not lines:
        first = next((i for i, (a, b) in enumerate(zip(order, other_order, strict=False)) if a != b), 0)
        here, there = order[first : first + limit], other_order[first : first + limit]
        lines = [f"backward order from {first}: here {here}, there {there}"]
    if part != other_part:
        lines.insert(0, f"part of a model: here {_shown_part(part)}, there {_shown_part(other_part)}")
    more = [f"and {len(lines) - limit} more rows"] if len(lines) > limit else []
    return "\n".join(lines[:limit] + more)


def _shown_part(part: list[list[object]]) -> str:
    if not part:
        return "the whole"
    tp_rank, tp_size, partitions = part[0]
    assert isinstance(partitions, list)  # noqa: S101  (tables are validated before they are compared)
    counts = ", ".join(f"{partitions.count(kind)} {kind}" for kind in dict.fromkeys(partitions))
    return f"tp_rank {tp_rank} of {tp_size} ({counts})"


def _shown(row: list[object] | None) -> str:
    if row is None:
        return "nothing"
    name, shape, block, *order = row
    assert isinstance(shape, list)  # noqa: S101  (tables are validated before they are compared)
    lies = f", dimensions {order[0]} in memory" if order else ""
    return f"{name!r} {tuple(shape)}" + ("" if block is None else f" in {block!r}") + lies
