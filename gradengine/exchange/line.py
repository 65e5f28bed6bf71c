"""A connection between ranks that are not yet a group: reads whole messages and no byte more, waiting or not."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable
from typing import TypeVar, final

from gradengine.errors import ExchangeError, HandshakeRefused, ProtocolError
from gradengine.exchange.handshake import error_told
from gradengine.exchange.links.sockets import close_in_children, origin
from gradengine.exchange.tls import hashes_of, tell_in_plain
from gradengine.exchange.wire import (
    MAX_SMALL_PAYLOAD,
    MAX_TEXT_BYTES,
    PREFIX_BYTES,
    Abort,
    Hello,
    Members,
    Message,
    Refused,
    decode_header,
    decode_prefix,
    encode_head,
    expect_payload,
)

Kind = TypeVar("Kind", bound=Message)

_PAYLOADS = {Refused: MAX_TEXT_BYTES, Abort: MAX_TEXT_BYTES, Members: MAX_SMALL_PAYLOAD}  # the others have none


@final
class Line:
    """A connection from which no more is read than the expected message: later bytes are for the link.

    Args:
        connection: The connected socket; the caller closes it.
        who: The name of the other end, for errors.
        left: Returns the seconds for which this end may still wait; None if it never waits.
    """

    hello: Hello  # of the end that called, once it has said it
    nonce: bytes  # for that end's proof
    beside = ""  # the name of a Unix socket for that end, if it is on this host
    called_hash = b""  # on a Unix socket beside an address with TLS: that of the called end's certificate

    def __init__(self, connection: socket.socket, who: str, left: Callable[[], float] | None = None) -> None:
        self.socket, self.who, self.left = connection, who, left
        self.awaited: tuple[type[Message], ...] = (Hello,)  # at the end that is called
        self._read = bytearray()
        self.is_local, self.origin = connection.family == socket.AF_UNIX, origin(connection)  # it may be gone later
        close_in_children(connection)
        if left is None:
            connection.setblocking(False)

    @property
    def has_gone(self) -> bool:
        """Whether the other end has closed, and nothing more is to be received; for a line that never waits."""
        try:
            return not self.socket.recv(1, socket.MSG_PEEK)
        except OSError as fault:
            return not isinstance(fault, BlockingIOError)

    @property
    def channel(self) -> bytes:
        """The certificates' hashes that proofs over this connection hold for: the caller's, the called end's."""
        return self.called_hash or hashes_of(self.socket)

    def say(self, message: Message, payload: bytes = b"") -> None:
        """Send a message; raises `OSError` if that fails."""
        self._limit()
        try:
            self.socket.sendall(encode_head(message, len(payload)) + payload)
        except BlockingIOError:
            raise ConnectionError("nothing is read there") from None

    def expect(self, kind: type[Kind]) -> tuple[Kind, bytes]:
        """The next message, of this kind, and its payload; raises the other end's refusal if it sends one."""
        message, payload = self.hear((kind, Refused, Abort))
        if isinstance(message, kind):
            return message, payload
        text = payload.decode(errors="replace")
        # A stranger may say this, and one line of it is not to look like several, of which others are somebody else's.
        text = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
        if isinstance(message, Abort):
            raise error_told(message.error, text)
        raise HandshakeRefused(f"{self.who} refuses: {text}")

    def hear(self, kinds: tuple[type[Message], ...]) -> tuple[Message, bytes]:
        """The next message, of one of these kinds, and its payload.

        Raises:
            BlockingIOError: The message is not complete yet, and this end does not wait; call again.
            OSError: The connection was lost or timed out.
            ProtocolError: The message is of another kind.
        """
        self._fill(PREFIX_BYTES)
        header_bytes, payload_bytes = decode_prefix(bytes(self._read[:PREFIX_BYTES]))
        start = PREFIX_BYTES + header_bytes
        self._fill(start)
        message = decode_header(bytes(self._read[PREFIX_BYTES:start]), payload_bytes)
        if not isinstance(message, kinds):
            expected = " or ".join(kind.kind for kind in kinds) or "nothing more"
            raise ProtocolError(f"{self.who} sent another message", got=message.kind, expected=expected)
        expect_payload(message, payload_bytes, _PAYLOADS.get(type(message), 0))
        self._fill(start + payload_bytes)
        payload, self._read = bytes(self._read[start:]), bytearray()
        return message, payload

    def leave(self, message: Message, why: ExchangeError) -> None:
        """Send the reason and close, without waiting."""
        payload = str(why).encode(errors="replace")
        with contextlib.suppress(OSError):
            try:
                self.say(message, payload)
            except ssl.SSLError:
                tell_in_plain(self.socket, encode_head(message, len(payload)) + payload)
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)
            self.socket.recv(1 << 16)  # what is not read resets the connection, and the reason may be lost
        self.socket.close()

    # ---- inside ----

    def _fill(self, size: int) -> None:
        while len(self._read) < size:
            self._limit()
            data = self.socket.recv(size - len(self._read))
            if not data:
                raise ConnectionError("the connection was closed")
            self._read += data

    def _limit(self) -> None:
        """Set the socket's timeout to the seconds left, so that repeated calls end at one deadline."""
        if self.left is not None:
            left = self.left()
            if left <= 0:
                raise TimeoutError("timed out")
            self.socket.settimeout(left)
