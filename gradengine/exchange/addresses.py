"""Addresses of sockets: their checks, and sockets that listen at an address or are connected with it."""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
from pathlib import Path
from typing import Any, TypeAlias

from gradengine.arguments import as_index, said
from gradengine.errors import CallerError, HandshakeRefused
from gradengine.exchange.rendezvous import LOOPBACK, places_of

Address: TypeAlias = tuple[str, int] | str  # (host, port) of TCP, or the path of a Unix socket

MOST_PATH_BYTES = 107 if sys.platform == "linux" else 103  # of a Unix socket
RETRY_SECONDS = 0.05
_LINUX_PEER = struct.Struct("iII")  # process, user, group
_BSD_PEER = struct.Struct("IIh16I"), 0, 1  # macOS: version, user, groups; SOL_LOCAL; LOCAL_PEERCRED


def checked_address(address: Address) -> Address:
    """The address as (host, port) or the path of a Unix socket; raises `CallerError` for anything else."""
    if isinstance(address, str):
        if address and "\0" not in address:
            return address
    elif isinstance(address, (tuple, list)) and len(address) == 2 and isinstance(address[0], str):
        port = as_index(address[1])
        if port is not None and 0 <= port < 1 << 16:
            return address[0], port
    raise CallerError("not a valid address", got=said(address), expected="(host, port) or the path of a Unix socket")


def refuse_public_address(address: Address, secret: str | None) -> None:
    """Raise `CallerError` for an address that other machines can reach, if there is no secret."""
    if isinstance(address, str) or secret or address[0] in LOOPBACK:
        return
    raise CallerError(
        f"{shown(address)} is reachable from other machines and there is no secret",
        expected="a loopback address, or a secret",
        do="give every worker the same secret (secret=, GRADENGINE_SECRET or GRADENGINE_SECRET_FILE)",
    )


def refuse_long_path(path: str) -> None:
    """Raise `CallerError`, on all ranks alike, if the last rank's path is too long for a Unix socket."""
    if len(os.fsencode(path)) > MOST_PATH_BYTES:
        what, do = f"the path is too long for a Unix socket of each rank: {path}", "choose a shorter one"
        raise CallerError(what, got=f"{len(os.fsencode(path))} bytes", expected=f"at most {MOST_PATH_BYTES}", do=do)


def refuse_other_user(connection: socket.socket, secret: str | None) -> None:
    """Raise `HandshakeRefused` for a connection at a path with another user than root, if there is no secret."""
    if secret or not _is_at_path(connection) or (user := user_at(connection)) in {0, os.geteuid()}:
        return  # a secret proves both ends
    raise HandshakeRefused(
        "another user is at the other end of the Unix socket",
        got=f"user {user}",
        expected=f"user {os.geteuid()}",
        do="choose a folder that only you can write to, or give every rank the same secret",
    )


def user_at(connection: socket.socket) -> int:
    """The user id of the process at the other end of a Unix socket, as the kernel noted it."""
    form, level, option = _BSD_PEER
    if hasattr(socket, "SO_PEERCRED"):
        form, level, option = _LINUX_PEER, socket.SOL_SOCKET, socket.SO_PEERCRED
    return int(form.unpack(connection.getsockopt(level, option, form.size))[1])


def _is_at_path(connection: socket.socket) -> bool:
    """Whether this is a Unix socket, and one of its ends has a path; the name of an abstract one is bytes."""
    if connection.family != socket.AF_UNIX:
        return False
    return any(isinstance(name, str) and name for name in (connection.getsockname(), connection.getpeername()))


def listen_socket(address: Address, *, is_private: bool = False) -> socket.socket:
    """A listening socket, on request for this user alone; raises `CallerError` if the address cannot be bound."""
    try:
        return _listening(*_places(address)[0], is_private=is_private)
    except (TypeError, ValueError) as fault:
        raise _no_address(address, fault) from None
    except OSError as fault:
        raise CallerError(
            f"cannot listen at {shown(address)} ({fault.strerror or fault})",
            do="another process may use it: take another address, or for a second group of a run its own job="
            if fault.errno == errno.EADDRINUSE
            else "check the host or path",
        ) from None


def connect_once(address: Address, timeout: float) -> socket.socket:
    """A connection to an address; raises `OSError` if no process listens, `CallerError` if it is not an address.

    Each of the places that a host's name stands for gets its part of the timeout; the error is that of the first.
    """
    try:
        places, failure = _places(address), None
        for place in places:
            try:
                return _connected(*place, timeout / len(places))
            except OSError as fault:  # noqa: PERF203  (the next place is tried)
                failure = failure or fault
    except (TypeError, ValueError) as fault:
        raise _no_address(address, fault) from None
    raise failure or OSError("the name has no address")


def _listening(family: socket.AddressFamily, place: Any, *, is_private: bool) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if isinstance(place, str):
            _remove_stale(place)
        else:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and place[0] == "::":
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # IPv4 too, whatever the system's default
        listener.bind(place)
        if is_private and isinstance(place, str):
            Path(place).chmod(0o600)  # before any other user can connect
        listener.listen(128)
    except BaseException:
        listener.close()
        raise
    return listener


def _connected(family: socket.AddressFamily, place: Any, timeout: float) -> socket.socket:
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout)
        connection.connect(place)
        if connection.getsockname() == connection.getpeername():
            raise OSError("connected to itself")  # noqa: TRY301  (our own port: a TCP self-connect)
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
    if path.startswith("\0") or not Path(path).is_socket():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            Path(path).unlink()
        except OSError:
            return  # bind gives the error


def _places(address: Address) -> list[tuple[socket.AddressFamily, Any]]:
    """The families and addresses of sockets; raises an error on a system without POSIX sockets, as Windows."""
    if not hasattr(socket, "AF_UNIX") or not hasattr(socket.socket, "sendmsg"):
        raise CallerError(
            f"no exchange over {url_of(address)}: this system's sockets are not POSIX",
            got=sys.platform,
            expected="Linux or macOS",
            do="use WSL on Windows; threads of one process need no sockets: local_group",
        )
    return [(socket.AF_UNIX, address)] if isinstance(address, str) else [*places_of(*address)]
