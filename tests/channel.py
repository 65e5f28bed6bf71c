"""Messages over a socket, for tests that speak the wire by hand: blocking, and with no more than that needs."""

from gradengine.errors import PeerLost, ProtocolError
from gradengine.exchange.addresses import connect_once
from gradengine.exchange.wire import HEAD_BYTES, announced, checksum, decoded, encoded, head

SECRET = "a secret of all ranks"


class Channel:
    """Messages over a connected socket, which it owns."""

    def __init__(self, connection, peer):
        self._socket, self.peer = connection, peer
        connection.settimeout(10.0)

    def send(self, message):
        """Send a message; `PeerLost` if it does not go."""
        self.send_bytes(encoded(message))

    def send_bytes(self, data):
        """Send any bytes; `PeerLost` if they do not go."""
        try:
            self._socket.sendall(data)
        except OSError as fault:
            raise PeerLost(f"connection with {self.peer} broke while sending ({fault})") from None

    def receive(self):
        """The next message."""
        kind, check, size = announced(self._read(HEAD_BYTES), self.peer)
        return decoded(kind, check, self._read(size))

    def expect(self, kind):
        """The next message, which must be of the given kind."""
        message = self.receive()
        if not isinstance(message, kind):
            raise ProtocolError(f"{self.peer} sent another message", got=message, expected=kind.__name__)
        return message

    def close(self):
        """Close the connection; may be called twice."""
        self._socket.close()

    def _read(self, size):
        data = bytearray()
        try:
            while len(data) < size:
                piece = self._socket.recv(size - len(data))
                if not piece:
                    raise PeerLost(f"{self.peer} closed the connection")
                data += piece
        except OSError as fault:
            raise PeerLost(f"connection with {self.peer} broke while receiving ({fault})") from None
        return bytes(data)


def knock(address):
    """A channel to whoever listens there, which has not said anything yet."""
    return Channel(connect_once(address, 5.0), "the server")


def tag_of(message):
    """The tag of a message's kind."""
    return int.from_bytes(encoded(message)[2:6], "big")


def framed(message, payload):
    """A frame of a message's kind with another payload, and the right checksum."""
    return head(tag_of(message), checksum(tag_of(message), payload), len(payload)) + payload


def claim(message, size):
    """The head of a frame of a message's kind, which announces so many bytes."""
    return head(tag_of(message), 0, size)
