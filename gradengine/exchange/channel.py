"""Messages over a stream socket, with payloads sent from and received into the caller's memory; addresses.

After a partial read or write the stream is out of sync, so any fault ends the channel and nothing is retried.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
import time
from pathlib import Path
from typing import TypeAlias, TypeVar

from gradengine.arguments import as_index, refuse_other_kind, said
from gradengine.errors import CallerError, PeerLost, ProtocolError
from gradengine.exchange.rendezvous import LOOPBACK
from gradengine.exchange.wire import (
    MAX_SMALL_PAYLOAD,
    PREFIX_BYTES,
    Message,
    decode_header,
    decode_prefix,
    encode_head,
    expect_payload,
)

Address: TypeAlias = tuple[str, int] | str  # (host, port) of TCP, or the path of a Unix socket
Kind = TypeVar("Kind", bound=Message)

RETRY_SECONDS = 0.05
_UNIX_SEND_BYTES = 1 << 20  # Linux's default of 208 KB: four times the wakeups, 55 ms for 100 MB instead of 45


class Channel:
    """Messages over a connected socket, which it owns; one thread may send while another receives."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self._socket, self.peer = connection, peer
        if connection.family == socket.AF_UNIX:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_SEND_BYTES)
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Message, payload: bytes | memoryview = b"") -> None:
        """Send a message and its payload, which is not copied."""
        body = memoryview(payload).cast("B")
        parts = [memoryview(encode_head(message, body.nbytes)), body]
        try:
            while parts:
                sent = self._socket.sendmsg(parts)  # header and payload in one call, which may send a part
                while parts and sent >= parts[0].nbytes:
                    sent -= parts.pop(0).nbytes
                if parts:
                    parts[0] = parts[0][sent:]
        except OSError as fault:
            raise self._lost(fault, "sending") from None

    def receive(self) -> tuple[Message, int]:
        """The next message, and the length of its payload, which must be received next."""
        header_bytes, payload_bytes = decode_prefix(self._read(PREFIX_BYTES))
        return decode_header(self._read(header_bytes), payload_bytes), payload_bytes

    def receive_into(self, memory: memoryview) -> None:
        """Fill `memory` with a payload of exactly its length."""
        view, filled = memory.cast("B"), 0
        try:
            while filled < view.nbytes:
                count = self._socket.recv_into(view[filled:])
                if count == 0:
                    raise PeerLost(
                        f"{self.peer} closed the connection", got=f"{filled} bytes", expected=f"{view.nbytes} bytes"
                    )
                filled += count
        except OSError as fault:
            raise self._lost(fault, "receiving") from None

    def receive_bytes(self, message: Message, payload_bytes: int, limit: int = MAX_SMALL_PAYLOAD) -> bytes:
        """A small payload, whose length is checked before it is allocated."""
        expect_payload(message, payload_bytes, limit)
        return self._read(payload_bytes)

    def expect(self, kind: type[Kind]) -> tuple[Kind, bytes]:
        """The next message, which must be of the given kind, and its small payload."""
        message, payload_bytes = self.receive()
        if not isinstance(message, kind):
            raise self.unexpected(message, kind.kind)
        return message, self.receive_bytes(message, payload_bytes)

    def unexpected(self, message: Message, expected: str) -> ProtocolError:
        """The error for a message of another kind."""
        return ProtocolError(f"{self.peer} sent another message", got=message.kind, expected=expected)

    def set_deadline(self, seconds: float | None) -> None:
        """Set the timeout of each single read or write; None for no timeout (until another thread closes)."""
        with contextlib.suppress(OSError):  # closed already
            self._socket.settimeout(seconds)

    def finish_sending(self) -> None:
        """Shut down the sending side."""
        with contextlib.suppress(OSError):  # the peer may be gone already
            self._socket.shutdown(socket.SHUT_WR)

    def discard_until_end(self) -> None:
        """Read until the end, since a close with unread data resets the connection before our last message arrives."""
        scratch = bytearray(1 << 16)
        with contextlib.suppress(OSError):
            while self._socket.recv_into(scratch):
                pass

    def close(self) -> None:
        """Close the connection and wake threads that read or write."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, size: int) -> bytes:
        memory = bytearray(size)
        self.receive_into(memoryview(memory))
        return bytes(memory)

    def _lost(self, fault: OSError, doing: str) -> PeerLost:
        reason = "stood still too long" if isinstance(fault, TimeoutError) else (fault.strerror or str(fault))
        return PeerLost(f"connection with {self.peer} broke while {doing} ({reason})")


def checked_address(address: Address) -> Address:
    """The address as (host, port) or the path of a Unix socket; `CallerError` for anything else."""
    if isinstance(address, str):
        if address and "\0" not in address:
            return address
    elif isinstance(address, (tuple, list)) and len(address) == 2 and isinstance(address[0], str):
        port = as_index(address[1])
        if port is not None and 0 <= port < 1 << 16:
            return address[0], port
    raise CallerError("not a valid address", got=said(address), expected="(host, port) or the path of a Unix socket")


def refuse_bad_token(token: str | None) -> None:
    """Raise `CallerError` unless the token is text or None."""
    if token is not None:
        refuse_other_kind("token", token, str)


def refuse_public_address(address: Address, token: str | None) -> None:
    """Raise `CallerError` for an address that other machines reach, without a token."""
    if isinstance(address, str) or token or address[0] in LOOPBACK:
        return
    raise CallerError(
        f"{shown(address)} is reachable from other machines and there is no token",
        expected="a loopback address, or token=",
        do="give every worker the same token",
    )


def listen_socket(address: Address, *, is_private: bool = False) -> socket.socket:
    """A listening socket, on request for this user alone; `CallerError` where the address cannot be bound."""
    family = _family(address)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if isinstance(address, str):
            _remove_stale(address)
        if family != socket.AF_UNIX:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        if is_private and isinstance(address, str):
            Path(address).chmod(0o600)  # before anybody can connect
        listener.listen(128)
    except (TypeError, ValueError) as fault:
        listener.close()
        raise _no_address(address, fault) from None
    except OSError as fault:
        listener.close()
        raise CallerError(
            f"cannot listen at {shown(address)} ({fault.strerror or fault})",
            do="another process may have it: choose another port, or port 0 for any free one"
            if fault.errno == errno.EADDRINUSE
            else "check the host or path",
        ) from None
    except BaseException:
        listener.close()  # interrupted
        raise
    return listener


def connect_socket(address: Address, timeout: float) -> socket.socket:
    """A connection to the coordinator, retried until the timeout; then `PeerLost`."""
    deadline = time.monotonic() + timeout
    while True:  # ranks start in any order, so the coordinator may not listen yet
        try:
            return connect_once(address, max(RETRY_SECONDS, deadline - time.monotonic()))
        except OSError as fault:
            reason = fault.strerror or fault
        if time.monotonic() + RETRY_SECONDS > deadline:
            raise PeerLost(
                f"no coordinator at {shown(address)} ({reason})",
                got=f"no connection in {timeout:g} s",
                do="start rank 0 (it hosts the coordinator), and check host and port",
            )
        time.sleep(RETRY_SECONDS)


def connect_once(address: Address, timeout: float) -> socket.socket:
    """A connection to whoever listens there; `OSError` if nobody does, `CallerError` if it is no address."""
    connection = socket.socket(_family(address), socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout)
        connection.connect(address)
        if connection.getsockname() == connection.getpeername():
            raise OSError("only itself answers there")  # noqa: TRY301  (our own port: a TCP self-connect)
    except (TypeError, ValueError) as fault:
        connection.close()
        raise _no_address(address, fault) from None
    except BaseException:
        connection.close()
        raise
    return connection


def _no_address(address: Address, fault: Exception) -> CallerError:
    """The error for text that cannot be encoded as a host or path, or is too long."""
    return CallerError(f"not a valid address: {shown(address)}", got=said(fault), do="check the host or path")


def shown(address: Address) -> str:
    """An address as in a URL: "127.0.0.1:5000"."""
    if isinstance(address, str):
        return address
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def url_of(address: Address) -> str:
    """An address as a URL for `connect`."""
    return f"unix://{address}" if isinstance(address, str) else f"tcp://{shown(address)}"


def _remove_stale(path: str) -> None:
    """Remove a stale Unix socket; with one that still answers, bind fails."""
    if not Path(path).is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()
        except OSError:
            return  # bind gives the error


def _family(address: Address) -> socket.AddressFamily:
    """The address family, on a system with Unix sockets and `sendmsg`, which Windows has not."""
    if not hasattr(socket, "AF_UNIX") or not hasattr(socket.socket, "sendmsg"):
        raise CallerError(
            f"no exchange over {url_of(address)}: this system's sockets are not POSIX",
            got=sys.platform,
            expected="Linux or macOS",
            do="use WSL on Windows; threads of one process need no sockets: local_group",
        )
    if isinstance(address, str):
        return socket.AF_UNIX
    return socket.AF_INET6 if ":" in address[0] else socket.AF_INET
