"""A connection between ranks that are not yet a group: reads whole messages and no byte more, waiting or not."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable, Collection
from typing import TypeVar, final

from gradengine.errors import HandshakeRefused, ProtocolError
from gradengine.exchange.handshake import error_told
from gradengine.exchange.links.sockets import close_in_children, origin
from gradengine.exchange.tls import hashes_of, tell_in_plain
from gradengine.exchange.wire import HEAD_BYTES, Abort, Hello, Message, Refused, announced, decoded, encoded

Kind = TypeVar("Kind", bound=Message)


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
        return hashes_of(self.socket)

    def say(self, message: Message) -> None:
        """Send a message; raises `OSError` if that fails."""
        self._limit()
        try:
            self.socket.sendall(encoded(message))
        except BlockingIOError:
            raise ConnectionError("nothing is read there") from None

    def expect(self, *kinds: type[Kind]) -> Kind:
        """The next message, of one of these kinds; raises the other end's refusal if it sends one."""
        message = self.hear((*kinds, Refused, Abort))
        if isinstance(message, Abort):
            raise error_told(message.error, _in_one_line(message.text))
        if isinstance(message, Refused):
            raise HandshakeRefused(f"{self.who} refuses: {_in_one_line(message.text)}")
        assert isinstance(message, kinds)  # noqa: S101  (the only one left)
        return message

    def hear(self, kinds: Collection[type[object]]) -> Message:
        """The next message, of one of these kinds.

        Raises:
            BlockingIOError: The message is not complete yet, and this end does not wait; call again.
            OSError: The connection was lost or timed out.
            ProtocolError: The message is of another kind.
        """
        self._fill(HEAD_BYTES)
        kind, check, size = announced(self._read[:HEAD_BYTES], self.who)
        if kind not in kinds:
            expected = " or ".join(each.__name__ for each in kinds) or "nothing more"
            raise ProtocolError(f"{self.who} sent another message", got=kind.__name__, expected=expected)
        self._fill(HEAD_BYTES + size)
        payload, self._read = bytes(self._read[HEAD_BYTES:]), bytearray()
        return decoded(kind, check, payload)

    def leave(self, message: Message) -> None:
        """Send why and close, without waiting."""
        with contextlib.suppress(OSError):
            try:
                self.say(message)
            except ssl.SSLError:
                tell_in_plain(self.socket, encoded(message))
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


def _in_one_line(text: str) -> str:
    """Escape the characters of a text that are not printable: one line of a stranger must not look like several."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)
