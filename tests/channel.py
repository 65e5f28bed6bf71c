"""Messages over a socket, for tests that speak the wire by hand: blocking, and with no more than that needs."""

from gradengine.errors import PeerLost, ProtocolError
from gradengine.exchange.addresses import connect_once
from gradengine.exchange.wire import (
    MAX_SMALL_PAYLOAD,
    PREFIX_BYTES,
    decode_header,
    decode_prefix,
    encode_head,
    expect_payload,
)

SECRET = "a secret of all ranks"


class Channel:
    """Messages over a connected socket, which it owns."""

    def __init__(self, connection, peer):
        self._socket, self.peer = connection, peer
        connection.settimeout(10.0)

    def send(self, message, payload=b""):
        """Send a message; `PeerLost` if it does not go."""
        try:
            self._socket.sendall(encode_head(message, len(payload)) + payload)
        except OSError as fault:
            raise PeerLost(f"connection with {self.peer} broke while sending ({fault})") from None

    def receive(self):
        """The next message, and its payload."""
        header_bytes, payload_bytes = decode_prefix(self._read(PREFIX_BYTES))
        message = decode_header(self._read(header_bytes), payload_bytes)
        expect_payload(message, payload_bytes, MAX_SMALL_PAYLOAD)
        return message, self._read(payload_bytes)

    def expect(self, kind):
        """The next message, which must be of the given kind, and its payload."""
        message, payload = self.receive()
        if not isinstance(message, kind):
            raise ProtocolError(f"{self.peer} sent another message", got=message.kind, expected=kind.kind)
        return message, payload

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
