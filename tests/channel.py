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

    def send(self, kind, *fields):
        """Send a message; `PeerLost` if it does not go."""
        self.send_bytes(encoded(kind, *fields))

    def send_bytes(self, data):
        """Send any bytes; `PeerLost` if they do not go."""
        try:
            self._socket.sendall(data)
        except OSError as fault:
            raise PeerLost(f"connection with {self.peer} broke while sending ({fault})") from None

    def receive(self):
        """The kind and the fields of the next message."""
        kind, check, size = announced(self._read(HEAD_BYTES), self.peer)
        return kind, decoded(kind, check, self._read(size))

    def expect(self, kind):
        """The fields of the next message, which must be of the given kind."""
        found, fields = self.receive()
        if found != kind:
            raise ProtocolError(f"{self.peer} sent another message", got=found, expected=kind)
        return fields

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


def tag_of(kind):
    """The tag of a kind of message."""
    return int.from_bytes(encoded(kind)[2:6], "big")


def framed(kind, payload):
    """A frame of a kind of message with this payload, and the right checksum."""
    return head(tag_of(kind), checksum(tag_of(kind), payload), len(payload)) + payload


def claim(kind, size):
    """The head of a frame of a kind of message, which announces so many bytes."""
    return head(tag_of(kind), 0, size)
