"""The address at which the ranks of a run connect, computed by each rank alike from its environment variables.

If all are on one host: a Unix socket in a folder of this user alone. Else a port of the first host, from a hash of what
distinguishes the run from others. The launcher's own servers are not asked, and their ports are not used.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gradengine.arguments import as_index, said
from gradengine.errors import CallerError
from gradengine.exchange.environment import Fact, Launcher, World, read_secret, read_world
from gradengine.exchange.handshake import refuse_bad_job

LOOPBACK = ("127.0.0.1", "::1", "localhost")  # reachable from this machine alone, so that no secret is needed
MPI_URL = "mpi://"  # not an address: all ranks that MPI has started
_ADDRESS = "GRADENGINE_ADDRESS"
_DO = f"set {_ADDRESS}=tcp://host:port on all ranks: rank 0's host, and a port that is free there"
_ANOTHER_FOLDER = f"set TMPDIR to another folder, or {_ADDRESS}=unix:///path, on all ranks"
_FIRST_PORT, _PORTS = 20_000, 9_000  # below those that systems give to connections, and torchrun's 29400 and 29500
_THIS_HOST = "0.0.0.0"  # noqa: S104  (rank 0 listens on all interfaces, and the ranks beside it reach it there)
_HOST = re.compile(r"[a-z0-9_][a-z0-9_.-]{0,252}|[0-9a-f:.]{2,45}", re.IGNORECASE | re.ASCII)
_FIRST_NODE = re.compile(r"((?:[a-z0-9_.-]|\[[0-9][0-9,-]*\])+)(,|\Z)", re.IGNORECASE | re.ASCII)


def places_of(host: str, port: int) -> list[tuple[socket.AddressFamily, Any]]:
    """Return where a host's sockets are: each address family with what `bind` and `connect` take, IPv4 first.

    Ranks that listen take the first place, and ranks that call try all of them.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({(each[0], each[4]): None for each in found}, key=lambda place: place[0] != socket.AF_INET)


def everywhere() -> str:
    """Return the host, as in a URL, that means all interfaces, of IPv4 and IPv6; a listener there needs a secret."""
    return "[::]" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104


def is_loopback(host: str) -> bool:
    """Whether a host is reachable from this machine alone."""
    return host in LOOPBACK or host.startswith("127.")


def is_over_mpi(url: object) -> bool:
    """Whether ranks connect by MPI: `connect` was given "mpi://", or no URL while GRADENGINE_ADDRESS is that."""
    said_so = os.environ.get(_ADDRESS) if url is None else url
    return isinstance(said_so, str) and said_so == MPI_URL


def joining(
    url: str | None, rank: int | None, world_size: int | None, secret: str | None, job: str | None, *, served: bool
) -> tuple[str, int, int, str | None]:
    """The URL, rank, world size and secret of `connect`; those that were not given are read from the environment.

    Raises:
        CallerError: An argument is neither given nor in the environment, or cannot be used; nothing was opened.
    """
    if job is not None:
        refuse_bad_job(job)
    if secret is None:
        found = read_secret(os.environ)
        secret = found.value if found else None
    if rank is None or world_size is None:
        world = read_world(os.environ, rank, world_size)
        rank = world.rank if rank is None else rank
        world_size = world.world_size if world_size is None else world_size
    if url is None:
        address = read_address(os.environ, job, secret, rank, world_size)
        refuse_without_secret(address, secret)
        url = address.value if address.source == _ADDRESS else _made_usable(address, as_index(rank) == 0, served)
    return url, rank, world_size, secret


def read_address(
    environment: Mapping[str, str],
    job: str | None = None,
    secret: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> Fact:
    """The URL at which the ranks connect: GRADENGINE_ADDRESS, or one made from the launcher's variables.

    Args:
        environment: The environment variables.
        job: The job's name that was given to `connect`; two groups of one run need two names.
        secret: The group's secret; with one, rank 0 may listen on all interfaces.
        rank: The rank that was given to `connect`, for a launcher's variable that is not there; so is `world_size`.

    Raises:
        CallerError: No variable names a host that all ranks can reach, or none distinguishes this run from others.
    """
    if given := environment.get(_ADDRESS):
        if given != MPI_URL:
            address_of(given, f" (of environment variable {_ADDRESS})")
        return Fact(given, _ADDRESS)
    world = read_world(environment, rank, world_size)
    if (world.world_size if world_size is None else world_size) == 1:
        return Fact("tcp://127.0.0.1:0", world.launcher.world_size)
    host, source = _first_host(environment, world, secret)
    name, named_by = _run_name(environment, world.launcher, job)
    if host is None:
        return Fact(f"unix://{_socket_path(environment, name)}", f"{source}, {named_by}")
    port = _FIRST_PORT + int(name, 16) % _PORTS
    port += str(port) == environment.get("MASTER_PORT")
    return Fact(f"tcp://{host}:{port}", f"{source}, {named_by}")


def refuse_without_secret(address: Fact, secret: str | None) -> None:
    """Raise `CallerError` for an address from the environment that other machines can reach, if there is no secret."""
    parts = urlsplit(address.value)
    if parts.scheme == "tcp" and parts.hostname not in LOOPBACK and not secret:
        do = "write one line of `openssl rand -hex 16` to a file, and set GRADENGINE_SECRET_FILE to it on all ranks"
        raise CallerError(f"{address.value} (from {address.source}) is for several machines, and needs a secret", do=do)


def first_node(nodes: str) -> tuple[str, bool] | None:
    """The first of Slurm's nodes, and whether it is the only one; None if this is not a list of nodes.

    >>> first_node("rack[02-04,7]-node[1,3],login"), first_node("gpu1")
    (('rack02-node1', False), ('gpu1', True))
    """
    match = _FIRST_NODE.match(nodes)
    if match is None:
        return None
    node = re.sub(r"\[([0-9]+)[^]]*\]", r"\1", match[1])
    return node, match.end() == len(nodes) and not match[2] and not re.search(r"\[[^]]*[,-]", match[1])


def address_of(url: object, named_by: str = "") -> tuple[str, int] | str:
    """The (host, port) of a TCP URL, or the path of a Unix socket's; raises `CallerError` for any other text."""
    text = url if isinstance(url, str) else ""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:  # of the port, or of a bracket
        parts, port = urlsplit(""), None
    # Else two groups of two names would meet. What is more may be a secret, which no error shows.
    is_bare = "@" not in text.partition("://")[2].partition("/")[0] and not {"?", "#"} & {*text}
    if is_bare and parts.scheme == "unix" and parts.path and not parts.netloc:
        return parts.path
    if is_bare and parts.scheme == "tcp" and parts.hostname and port is not None and not parts.path:
        return parts.hostname, port
    raise CallerError(
        f"not a valid group URL{named_by}",
        got=said(url) if is_bare else "a URL with a user, query or fragment",
        expected=f"'tcp://host:port', 'unix:///path' or '{MPI_URL}'",
        do="threads of one process use local_group(world_size)",
    )


def _first_host(environment: Mapping[str, str], world: World, secret: str | None) -> tuple[str | None, str]:
    """The host of rank 0, or None if all ranks are on this host; and the variables that it was read from.

    Kubeflow names rank 0's host "localhost" there, and elsewhere by its service. So a loopback name stands for all
    interfaces if ranks may be on other hosts and have a secret.
    """
    launcher = world.launcher
    if world.local_size == world.world_size:
        return None, launcher.local_size
    variable = next((name for name in launcher.host if environment.get(name)), None)
    if variable is None:
        here = "an unknown number" if world.local_size is None else f"{launcher.local_size}={world.local_size}"
        got = f"{launcher.world_size}={world.world_size}, of which {here} on this host"
        raise CallerError("the environment names no host where all ranks could meet", got=got, do=_DO)
    host, is_only_one = environment[variable], False
    if variable.endswith("NODELIST"):
        host, is_only_one = first_node(host) or ("", False)
    if not _HOST.fullmatch(host):
        what, expected = f"environment variable {variable} names no host", "a host's name or address"
        raise CallerError(what, got=said(environment[variable]), expected=expected, do=_DO)
    if is_loopback(host) and secret:
        return _THIS_HOST, f"{variable}, {launcher.local_size}"
    return None if is_only_one else f"[{host}]" if ":" in host else host, variable


def _run_name(environment: Mapping[str, str], launcher: Launcher, job: str | None) -> tuple[str, str]:
    """A hash (64 bits, in hex) of all that distinguishes this run from others, and the variables that it is from."""
    parts = {name: environment[name] for name in launcher.run if environment.get(name)}
    given = environment.get("GRADENGINE_JOB", "") if job is None else job
    if not given and not parts:
        raise CallerError(
            f"{launcher.name} tells this process nothing that distinguishes two runs on one host",
            got=f"{launcher.rank} and {launcher.world_size} alone",
            do=f"set GRADENGINE_JOB on all ranks, to another name for each run; or {_ADDRESS}=unix:///path",
        )
    text = "\0".join([given, *parts.values()])
    sources = [*parts] + ["GRADENGINE_JOB" if job is None else "job="] * bool(given)
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16], ", ".join(sources)


def _socket_path(environment: Mapping[str, str], name: str) -> str:
    if not hasattr(os, "getuid"):
        raise CallerError("this system has no Unix sockets", got=sys.platform, expected="Linux or macOS", do=_DO)
    folder = Path(environment.get("TMPDIR") or "/tmp") / f"gradengine-{os.getuid()}"  # noqa: S108  (made private)
    return str(folder.absolute() / name)


def _made_usable(address: Fact, hosts: bool, served: bool) -> str:
    """The computed URL as this rank needs it; a Unix socket's folder is made."""
    if served:
        raise CallerError("served=True needs the server's address", do=f"pass its url, or set {_ADDRESS} to it")
    if address.value.startswith("unix://"):
        _make_private(Path(address.value.removeprefix("unix://")).parent)
        return address.value
    return f"tcp://{_own_host(address)}:{urlsplit(address.value).port}" if hosts else address.value


def _make_private(folder: Path) -> None:
    """Make a folder for this user alone; raises `CallerError` for one that others made, or may write to."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as fault:
        what = f"cannot make {str(folder)!r} for a Unix socket: {fault.strerror}"
        raise CallerError(what, do=_ANOTHER_FOLDER) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        got, expected = f"owner {found.st_uid}, {stat.filemode(found.st_mode)}", f"owner {os.getuid()}, drwx------"
        what, do = f"{str(folder)!r} is not private", f"remove it, or {_ANOTHER_FOLDER}"
        raise CallerError(what, got=got, expected=expected, do=do)


def _own_host(address: Fact) -> str:
    """The host at which rank 0 listens: its own, or everywhere if that means loopback, as in Debian's /etc/hosts."""
    host = urlsplit(address.value).hostname or ""
    try:
        number = str(places_of(host, 0)[0][1][0])
    except (OSError, UnicodeError) as fault:  # of a name with an empty part, or too long a one
        what = f"rank 0 cannot listen at {host} ({getattr(fault, 'strerror', None) or fault}), made of {address.source}"
        raise CallerError(what, do=_DO) from None
    is_hidden = is_loopback(number) and host not in {number, *LOOPBACK}
    return everywhere() if is_hidden or host == _THIS_HOST else f"[{host}]" if ":" in host else host
