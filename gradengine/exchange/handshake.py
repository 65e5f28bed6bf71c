"""Connections between ranks that are not yet a group: messages, proofs of the secret, and checks of job and world size.

A proof is an HMAC-SHA256 over the prover's role, both nonces, the protocol version, job, rank, world size, called rank
and group. Over TLS it also covers both certificates. So it cannot be replayed, reflected or relayed. The secret is
never sent.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import ssl
from collections.abc import Callable, Collection
from itertools import zip_longest
from typing import Any, final

import msgpack

from gradengine.arguments import refuse_other_kind, said
from gradengine.errors import CallerError, DeadlineExceeded, ExchangeError, HandshakeRefused, PeerLost, ProtocolError
from gradengine.exchange.links.sockets import close_in_children, origin
from gradengine.exchange.wire import HEAD_BYTES, VERSION, Hello, announced, decoded, encoded

MAX_JOB_CHARACTERS = 256
LEAST_SECRET_CHARACTERS = 16


@final
class Line:
    """A connection from which only the expected message is read. The link reads all later bytes.

    Args:
        connection: The connected socket. The caller closes it.
        who: The name of the other end, for errors.
        left: Returns the seconds for which this end may still wait. At 0 or less it never waits.
    """

    hello: Hello  # message of the calling end, set once it was received
    nonce: bytes  # nonce for the proof of the calling end
    url = host = ""  # address and host of the calling end, set at rank 0

    def __init__(self, connection: socket.socket, who: str, left: Callable[[], float] = lambda: 0.0) -> None:
        self.socket, self.who, self.left, self._read = connection, who, left, bytearray()
        self.awaited = ["hello"]  # expected kinds of message, at the end that is called
        self.origin = origin(connection)  # The other end may be gone later.
        close_in_children(connection)

    def say(self, kind: str, *fields: object) -> None:
        """Send a message. Raises `OSError` if that fails."""
        try:
            self.socket.settimeout(max(self.left(), 0.0))
            self.socket.sendall(encoded(kind, *fields))
        except BlockingIOError:
            raise ConnectionError("the other end does not read") from None

    def expect(self, *kinds: str) -> tuple[str, list[Any]]:
        """Return the next message, of one of these kinds, as `hear` does. Raises the other end's refusal."""
        kind, fields = self.hear([*kinds, "abort"])
        if kind != "abort":
            return kind, fields
        # A stranger's text must stay on one line, so that it cannot look like several messages.
        name, text = ("".join(each if each.isprintable() else ascii(each)[1:-1] for each in field) for field in fields)
        errors = {kind.__name__: kind for kind in (HandshakeRefused, ProtocolError, PeerLost, DeadlineExceeded)}
        raise errors.get(name, ExchangeError)(text)

    def hear(self, kinds: Collection[str]) -> tuple[str, list[Any]]:
        """Return the kind of the next message, one of `kinds`, and its fields.

        Raises:
            BlockingIOError: The message is not complete, and this end does not wait or its time is over. Call again.
            OSError: The connection was lost or timed out.
            ProtocolError: The message has a different kind.
        """
        self._fill(HEAD_BYTES)
        kind, check, size = announced(self._read[:HEAD_BYTES], self.who)
        if kind not in kinds:
            expected = " or ".join(kinds) or "nothing more"
            raise ProtocolError(f"{self.who} sent a wrong message", got=kind, expected=expected)
        self._fill(HEAD_BYTES + size)
        payload, self._read = bytes(self._read[HEAD_BYTES:]), bytearray()
        return kind, decoded(kind, check, payload)

    def leave(self, kind: str, *fields: str) -> None:
        """Send a last message and close, without waiting."""
        with contextlib.suppress(OSError):
            try:
                self.say(kind, *fields)
            except ssl.SSLError:
                # Send plain bytes, because OpenSSL sends nothing to a caller without TLS.
                socket.socket.send(self.socket, encoded(kind, *fields))
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
            self.socket.recv(1 << 16)  # Unread data would reset the connection, and the reason could be lost.
        self.socket.close()

    def refuse_other(self, given: bytes, expected: bytes) -> None:
        """Raise `HandshakeRefused` unless a proof of the other end is the expected one."""
        if not hmac.compare_digest(given, expected):  # The time of == shows how many leading bytes are right.
            do = "start all with the same secret=, all or none with served=True, and without a proxy that decrypts TLS"
            raise HandshakeRefused(f"{self.who} has a different secret", do=do)

    # ---- inside ----

    def _fill(self, size: int) -> None:
        while len(self._read) < size:
            self.socket.settimeout(max(self.left(), 0.0))  # All calls end at one deadline.
            data = self.socket.recv(size - len(self._read))
            if not data:
                raise ConnectionError("the connection was closed")
            self._read += data


def new_nonce() -> bytes:
    """Return random bytes for one handshake."""
    return secrets.token_bytes(32)


def proof(
    secret: str | None, role: str, hello: Hello, nonce: bytes, called: int, group: bytes, channel: bytes = b""
) -> bytes:
    """Return the HMAC of this handshake under the secret. None means an empty secret.

    `role` is "caller" or "called". `called` is the rank that is called, or the world size for a server, and `nonce` is
    its nonce. `channel` has the hashes of both certificates of a connection over TLS.
    """
    bound = [role, VERSION, hello.job, hello.rank, hello.world_size, hello.nonce, nonce, called, group]
    bound += [channel] if channel else []
    # A secret has surrogates if its environment variable is not UTF-8.
    return hmac.new((secret or "").encode(errors="surrogatepass"), msgpack.packb(bound), hashlib.sha256).digest()


def check_hello(hello: Hello, world_size: int, job: str | None) -> None:
    """Raise an error for a rank with a different job or world size, or with a bad number. A job of None matches any."""
    if job is not None and hello.job != job:
        what, got, expected = f"rank {hello.rank} belongs to a different job", f"job={hello.job!r}", f"job={job!r}"
        do = "give each job its own address, and all ranks of a job the same job="
        raise HandshakeRefused(what, got=got, expected=expected, do=do)
    if hello.world_size != world_size:
        what = f"rank {hello.rank} was started for a different world size"
        do = "give all ranks and the server the same world_size, and each job its own job="
        raise HandshakeRefused(what, got=hello.world_size, expected=world_size, do=do)
    if not 0 <= hello.rank < world_size:
        raise HandshakeRefused("rank is out of range", got=hello.rank, expected=f"0..{world_size - 1}")


def refuse_bad_secret(secret: str | None, source: str = "secret") -> None:
    """Raise `CallerError` unless the secret is None, empty (no secret), or text that cannot be guessed.

    A host that receives a proof can compare it with the proofs of any number of secrets. Only a long secret resists.
    """
    if secret is not None:
        refuse_other_kind(source, secret, str)
    if secret and len(secret.strip()) < LEAST_SECRET_CHARACTERS:
        got, expected = f"{len(secret.strip())} characters", f"at least {LEAST_SECRET_CHARACTERS}"
        do = "create one with `openssl rand -hex 16` and use it on all ranks"
        raise CallerError(f"{source} is too short", got=got, expected=expected, do=do)


def refuse_bad_job(job: object, source: str = "this") -> None:
    """Raise `CallerError` unless a job's name is printable and at most 256 characters. The error names `source`."""
    if not isinstance(job, str) or len(job) > MAX_JOB_CHARACTERS or not job.isprintable():
        expected = f"at most {MAX_JOB_CHARACTERS} printable characters"
        do = 'pass the same job="name" on all ranks, or job="" for none'
        raise CallerError(f"{source} is not a valid job name", got=said(job), expected=expected, do=do)


def differing_rows(mine: bytes, theirs: bytes, limit: int = 8) -> str:
    """Return at most `limit` lines that show how two valid layout tables differ, and count the other differences."""
    (ours, order, *part), (others, other_order, *other_part) = msgpack.unpackb(mine), msgpack.unpackb(theirs)
    compared: list[tuple[str, Any, Any, Callable[[Any], str]]] = [("part of a model", part, other_part, _shown_part)]
    compared += [(f"row {i}", *pair, _shown) for i, pair in enumerate(zip_longest(ours, others))]
    # A difference in the rows also changes the order, so show the order only if the rows are the same.
    if ours == others:
        compared += [(f"backward order at {i}", *pair, repr) for i, pair in enumerate(zip_longest(order, other_order))]
    lines = [f"{name}: here {shown(a)}, there {shown(b)}" for name, a, b, shown in compared if a != b]
    more = [f"and {len(lines) - limit} more"] if len(lines) > limit else []
    return "\n".join(lines[:limit] + more)


def _shown_part(part: list[Any]) -> str:
    if not part:
        return "the whole"
    tp_rank, tp_size, partitions = part[0]
    counts = ", ".join(f"{partitions.count(kind)} {kind}" for kind in dict.fromkeys(partitions))
    return f"tp_rank {tp_rank} of {tp_size} ({counts})"


def _shown(row: list[Any] | None) -> str:
    if row is None:
        return "nothing"
    name, shape, block, *order = row
    lies = f", dimensions {order[0]} in memory" if order else ""
    return f"{name!r} {tuple(shape)}" + ("" if block is None else f" in {block!r}") + lies
