"""A rank's or server's listening sockets: at an address, and over TCP also a Unix socket for ranks on the same host."""

from __future__ import annotations

import contextlib
import re
import secrets
import socket
import sys
from pathlib import Path
from typing import final

from gradengine.errors import NotCopied
from gradengine.exchange.addresses import (
    Address,
    checked_address,
    listen_socket,
    refuse_public_address,
)
from gradengine.exchange.handshake import refuse_bad_secret
from gradengine.exchange.links.sockets import close_in_children

_PREFIX = "\0gradengine-"


@final
class Listener(NotCopied, instead="make one in the process that listens"):
    """A socket that other ranks connect to; one at a path is for this user alone.

    Args:
        address: (host, port), port 0 for any free one; or the path of a Unix socket: a stale one is removed.
        secret: The group's secret; required beyond loopback.
        is_beside: Whether to listen also at a Unix socket without a path, for ranks on the same host, where there are
            such sockets (Linux).

    Attributes:
        address: The address, with the actual port.
        socket: The socket that listens there.
        beside: The name of the Unix socket, "" if there is none; `nearby` is that socket, in a list.

    Raises:
        CallerError: The address cannot be bound, or it is beyond loopback and there is no secret.
    """

    def __init__(self, address: Address, secret: str | None = None, *, is_beside: bool = False) -> None:
        address = checked_address(address)
        refuse_bad_secret(secret)
        refuse_public_address(address, secret)
        self.address, self.beside = address, ""
        self.nearby: list[socket.socket] = []
        self.socket = listen_socket(address, is_private=True)
        try:
            if not isinstance(address, str):
                self.address = self.socket.getsockname()[:2]
                if is_beside and sys.platform == "linux":
                    self.beside = secrets.token_hex(16)
                    self.nearby.append(listen_socket(nameless(self.beside)))
            for each in (self.socket, *self.nearby):
                close_in_children(each)  # which would keep the address
                each.setblocking(False)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop listening and free the address; may be called twice."""
        if self.socket.fileno() < 0:
            return  # another listener may have the path by now
        with contextlib.suppress(OSError):
            if isinstance(self.address, str):
                Path(self.address).unlink()
        for each in (*self.nearby, self.socket):
            each.close()


def nameless(name: str) -> str:
    """The address of a Unix socket without a path (Linux's abstract sockets), which vanishes with its process."""
    return f"{_PREFIX}{name}"


def is_nameless(address: Address) -> bool:
    """Whether this is the address of a socket without a path."""
    return isinstance(address, str) and address.startswith(_PREFIX)


def is_name(text: str) -> bool:
    """Whether this text has the form of the random names that listeners choose."""
    return re.fullmatch("[0-9a-f]{32}", text) is not None
