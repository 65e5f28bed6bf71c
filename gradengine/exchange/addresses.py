"""Addresses at which ranks reach each other, their URLs and checks, and the sockets that listen or connect there."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import socket
import stat
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, final

from gradengine.arguments import as_index, refuse_unknown, said
from gradengine.arrays.shared import refuse_without_shared_memory
from gradengine.errors import CallerError, HandshakeRefused, ProtocolError
from gradengine.exchange.handshake import refuse_bad_secret
from gradengine.exchange.links.sockets import close_in_children

Address: TypeAlias = tuple[str, int] | str  # (host, port) of TCP, or the path of a Unix socket

MPI_URL = "mpi://"  # no address; it stands for all ranks that MPI has started
LOOPBACK = ("127.0.0.1", "::1", "localhost")  # reachable from this machine only, so that no secret is needed
LINKS = ("tcp", "unix", "shared_memory")  # each one works for fewer placements of the ranks than the one before
MOST_PATH_BYTES = 101 if sys.platform == "linux" else 97  # rank 0's path; another rank's is up to 6 bytes longer
RETRY_SECONDS = 0.05
_BACKLOG = 128
_EVERYWHERE = {"0.0.0.0", "::"}  # noqa: S104  (a rank with this host in a list of ranks is on rank 0's host)
_URL = re.compile(r"unix://(/[^?#]*)|tcp://(?:\[([^]/?#@]+)\]|([^]/?#@:[]+)):([0-9]{1,5})", re.IGNORECASE | re.ASCII)
_LINUX_PEER = "iII", socket.SOL_SOCKET, getattr(socket, "SO_PEERCRED", 0)  # process, user, group
_BSD_PEER = "IIh16I", 0, 1  # macOS: version, user, groups; SOL_LOCAL; LOCAL_PEERCRED
_TAKEN = "another process may use it; choose a different address, more ports, or for each group of a run its own job="
_ANOTHER_FOLDER = "set TMPDIR to a different folder, or set GRADENGINE_ADDRESS=unix:///path, on all ranks"


# ---- URLs and hosts ----


def checked_address(address: Address) -> Address:
    """Return the address as (host, port) or the path of a Unix socket. Raises `CallerError` for an invalid address."""
    if isinstance(address, str):
        if address and "\0" not in address:
            return address
    elif isinstance(address, (tuple, list)) and len(address) == 2 and isinstance(address[0], str):
        port = as_index(address[1])
        if port is not None and 0 <= port < 1 << 16:
            return address[0], port
    raise CallerError("not a valid address", got=said(address), expected="(host, port) or the path of a Unix socket")


def address_of(url: object, named_by: str = "") -> Address:
    """Return the (host, port) of a TCP URL, or the path of a Unix socket's URL. Raises `CallerError` for other text."""
    found = _URL.fullmatch(url) if isinstance(url, str) else None
    if found and found[1]:
        return found[1]
    if found and int(found[4]) < 1 << 16:
        return (found[2] or found[3]).lower(), int(found[4])
    # A user, query or fragment is refused, because two groups that differ only in it would meet. The error does not
    # show it, because it may be a secret.
    has_more = isinstance(url, str) and not {"@", "?", "#"}.isdisjoint(url)
    got = "a URL with a user, query or fragment" if has_more else said(url)
    expected = f"'tcp://host:port', 'unix:///path' or '{MPI_URL}'"
    do = "call local_group(world_size) instead for threads of one process"
    raise CallerError(f"not a valid group URL{named_by}", got=got, expected=expected, do=do)


def shown(address: Address) -> str:
    """Return an address as in a URL, for example "127.0.0.1:5000"."""
    if isinstance(address, str):
        return address
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def url_of(address: Address) -> str:
    """Return an address as a URL for `connect`."""
    return f"unix://{address}" if isinstance(address, str) else f"tcp://{shown(address)}"


def is_loopback(host: str) -> bool:
    """Return whether a host is reachable from this machine only."""
    return host in LOOPBACK or host.startswith("127.")


def everywhere() -> str:
    """Return the host that means all interfaces of IPv4 and IPv6. A listener there needs a secret."""
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104


# ---- where this process is ----


def this_host() -> str:
    """Return an identifier that is the same for processes of one user that see one loopback and the same files.

    On Linux it is a hash of the user, the boot id, and the network and mount namespaces. Without /proc it differs at
    each call. On other systems it is a hash of the user and the host's name.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        place = [boot, *(os.readlink(f"/proc/self/ns/{name}") for name in ("net", "mnt"))]
    except OSError:
        place = [secrets.token_hex() if sys.platform == "linux" else socket.gethostname()]
    # Windows has no user id. A later check refuses Windows by name.
    return hashlib.sha256(repr([*place, getattr(os, "geteuid", int)()]).encode()).hexdigest()


def socket_path(environment: Mapping[str, str], name: str) -> str:
    """Return the path of a Unix socket of this name in this user's own folder, which `make_private` makes."""
    _refuse_other_system("unix://")
    folder = Path(environment.get("TMPDIR") or "/tmp") / f"gradengine-{os.getuid()}"  # noqa: S108  (made private)
    return str(folder.absolute() / name)


def make_private(folder: Path) -> None:
    """Make a folder for this user alone. Raises `CallerError` if other users own or can access the folder."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as fault:
        raise CallerError(f"cannot make {str(folder)!r} for a socket: {fault.strerror}", do=_ANOTHER_FOLDER) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        got, expected = f"owner {found.st_uid}, {stat.filemode(found.st_mode)}", f"owner {os.getuid()}, drwx------"
        what, do = f"{str(folder)!r} is not private", f"remove it, or {_ANOTHER_FOLDER}"
        raise CallerError(what, got=got, expected=expected, do=do)


def made_usable(url: str, *, hosts: bool) -> str:
    """Return the computed URL for this rank. Rank 0's has all interfaces as host. Makes the folder of a Unix socket."""
    at = address_of(url)
    if isinstance(at, str):
        make_private(Path(at).parent)
    elif hosts and not is_loopback(at[0]):
        return url_of((everywhere(), at[1]))
    return url


# ---- the address and link that a rank reports ----


def own_host(called: str, host: str) -> str:
    """Return the host at which a rank listens, which is the host from which it has called rank 0.

    The rank listens on all interfaces if rank 0's host name means loopback on this machine, as in Debian's /etc/hosts.
    It is then on rank 0's host, and ranks on other machines find it at rank 0's address.
    """
    return everywhere() if is_loopback(host) and not is_loopback(called) else host


def address_told(url: object) -> Address:
    """Return the address in the URL that a rank sent as the one at which it listens."""
    try:
        return address_of(url)
    except CallerError as fault:
        raise ProtocolError("a rank sent an invalid address", got=fault.got) from None


def addresses_of(urls: Sequence[object], count: int, host_of_rank_0: str) -> list[Address]:
    """Return the addresses of `count` ranks from the list that rank 0 sent."""
    if len(urls) != count:
        raise ProtocolError("rank 0 sent an invalid list of ranks", got=urls, expected=f"{count} URLs")
    addresses = [address_told(url) for url in urls]
    return [(host_of_rank_0, int(each[1])) if each[0] in _EVERYWHERE else each for each in addresses]


def refuse_impossible(link: str | None, address: Address) -> None:
    """Raise `CallerError` for an unknown link, an impossible link for this address, or a path that is too long."""
    if isinstance(address, str) and len(address.encode(errors="replace")) > MOST_PATH_BYTES:
        raise CallerError("the path is too long", got=address, expected=f"at most {MOST_PATH_BYTES} bytes")
    if link is not None:
        refuse_unknown("link", link, LINKS, do="pass one of them, or None for the best")
    if link == "tcp" and isinstance(address, str):
        raise CallerError('link="tcp" over a Unix socket', do="pass tcp://host:port of rank 0, or a different link")
    if link == "shared_memory":
        refuse_without_shared_memory()


def refuse_chosen_link(link: str, own: str | None, address: Address, who: str) -> None:
    """Raise an error if rank 0 has chosen a link that is impossible at its address, or not the link of `who`."""
    if link not in (LINKS[1:] if isinstance(address, str) else LINKS[:1]):
        raise ProtocolError("rank 0 chose an impossible link", got=said(link), expected=f"one for {shown(address)}")
    if own not in {None, link}:
        raise HandshakeRefused(f"{who} has a different link", got=own, expected=link, do="pass one link on all ranks")


# ---- sockets ----


@final
class Listener:
    """A socket that other ranks connect to. Only this user can connect to a socket at a path.

    Args:
        address: (host, port), or the path of a Unix socket. Port 0 means any free port. A stale socket at the path is
            removed.
        secret: The group's secret. A host other than loopback needs one.
        ports: The ports from which port 0 takes the first free one. None means all ports.

    Attributes:
        address: The address with the actual port.
        socket: The socket that listens there.

    Raises:
        CallerError: The address cannot be bound, or other machines can reach it and there is no secret.
    """

    def __init__(self, address: Address, secret: str | None = None, ports: range | None = None) -> None:
        self.address = checked_address(address)
        refuse_bad_secret(secret)
        if not (isinstance(address, str) or secret or address[0] in LOOPBACK):
            what = f"{shown(self.address)} may be reachable from other machines, and there is no secret"
            do = "give every rank the same secret (secret=, GRADENGINE_SECRET or GRADENGINE_SECRET_FILE)"
            raise CallerError(what, expected="a loopback address, or a secret", do=do)
        self.socket = _listening(self.address, ports)
        close_in_children(self.socket)  # a child's copy would keep the address in use
        self.socket.setblocking(False)
        if not isinstance(address, str):
            self.address = self.socket.getsockname()[:2]

    def close(self) -> None:
        """Stop listening and free the address. May be called twice."""
        if isinstance(self.address, str) and self.socket.fileno() >= 0:  # another listener may have the path by now
            with contextlib.suppress(OSError):
                Path(self.address).unlink()
        self.socket.close()


def nearer_listener(secret: str | None) -> Listener:
    """Return a listener at a Unix socket with a random name in this user's folder. Raises `CallerError` on failure."""
    path = socket_path(os.environ, secrets.token_hex(8))
    make_private(Path(path).parent)
    return Listener(path, secret)


def connect_once(address: Address, timeout: float) -> socket.socket:
    """Return a connection to an address. Raises `OSError` if no process listens, `CallerError` for an invalid address.

    All IP addresses of a host name are tried, each with an equal part of the timeout. The first one's error is raised.
    """
    places, failures = _places(address), list[OSError]()
    for family, place in places:
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            connection.settimeout(timeout / len(places))
            connection.connect(place)
            if connection.getsockname() != connection.getpeername():
                return connection
            raise OSError("connected to itself")  # noqa: TRY301  (our own port: a TCP self-connect)
        except OSError as fault:
            connection.close()
            failures.append(fault)
    raise failures[0]


def refuse_other_user(connection: socket.socket, secret: str | None) -> None:
    """Raise `HandshakeRefused` for a Unix socket with a user other than this one and root, if there is no secret."""
    if secret or connection.family != socket.AF_UNIX or (user := user_at(connection)) in {0, os.geteuid()}:
        return  # a secret proves both ends
    what = "another user is at the other end of the Unix socket"
    do = "choose a folder that only you can write to, or give every rank the same secret"
    raise HandshakeRefused(what, got=f"user {user}", expected=f"user {os.geteuid()}", do=do)


def user_at(connection: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket, as recorded by the kernel."""
    form, level, option = _LINUX_PEER if sys.platform == "linux" else _BSD_PEER
    return int(struct.unpack(form, connection.getsockopt(level, option, struct.calcsize(form)))[1])


def _listening(address: Address, ports: range | None) -> socket.socket:
    try:
        family, place = _places(address)[0]
        return _at_path(place) if isinstance(place, str) else _at_port(family, place, ports)
    except OSError as fault:
        do = _TAKEN if fault.errno == errno.EADDRINUSE else "check the host or path"
        reason = (fault.strerror or str(fault)).partition(" (")[0]  # create_server repeats the address
        raise CallerError(f"cannot listen at {shown(address)} ({reason})", do=do) from None


def _at_port(family: socket.AddressFamily, place: Any, ports: range | None) -> socket.socket:
    """Listen at a place's port. If the port is 0, listen at the first free one of `ports`."""
    tried = range(place[1], place[1] + 1) if place[1] or ports is None else ports
    for port in tried:
        try:
            where, is_for_both = (place[0], port, *place[2:]), place[0] == "::"
            return socket.create_server(where, family=family, backlog=_BACKLOG, dualstack_ipv6=is_for_both)
        except OSError as fault:
            if fault.errno != errno.EADDRINUSE or tried is not ports:
                raise
    raise OSError(errno.EADDRINUSE, f"no port of {tried[0]}-{tried[-1]} is free")


def _at_path(path: str) -> socket.socket:
    """Listen at a path after removing a stale socket there. Fails if there is anything else."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if Path(path).is_socket() and probe.connect_ex(path) == errno.ECONNREFUSED:
            Path(path).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        Path(path).chmod(0o600)  # before it listens, and any other user can connect
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _places(address: Address) -> list[tuple[socket.AddressFamily, Any]]:
    """Return the families and addresses of sockets, IPv4 first. Ranks listen at the first, and try all when calling."""
    _refuse_other_system(url_of(address))
    try:
        if isinstance(address, str):
            os.fsencode(address)
            return [(socket.AF_UNIX, address)]
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
    except ValueError as fault:  # text that cannot be encoded as a host or path
        raise CallerError(f"not a valid address: {shown(address)}", got=said(fault), do="check it") from None
    return sorted({(each[0], each[4]): None for each in found}, key=lambda place: place[0] != socket.AF_INET)


def _refuse_other_system(url: str) -> None:
    """Raise `CallerError` on a system without POSIX sockets, such as Windows."""
    if not hasattr(socket, "AF_UNIX") or not hasattr(socket.socket, "sendmsg"):
        what = f"no exchange over {url}, because this system has no POSIX sockets"
        do = "use WSL on Windows, or local_group for threads of one process"
        raise CallerError(what, got=sys.platform, expected="Linux or macOS", do=do)
