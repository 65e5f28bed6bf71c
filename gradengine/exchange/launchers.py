"""Reads what a launcher tells a process: rank, world size, secret and job, and the address that each rank makes alike.

`LAUNCHERS` begins with the innermost: under mpiexec or in a Slurm job, what torchrun started has torchrun's ranks. If
all ranks are on one host the address is a Unix socket in a folder of this user alone. Otherwise it is a port of the
first host, from a hash of what distinguishes the run from others. The launcher's own servers and ports are not used.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, final
from urllib.parse import urlsplit

from gradengine.arguments import MOST_RANKS, as_index, checked_rank, said, whole_number
from gradengine.errors import CallerError, renamed
from gradengine.exchange.addresses import (
    LOOPBACK,
    MPI_URL,
    address_of,
    everywhere,
    is_loopback,
    make_private,
    number_of,
    ports_of,
    socket_path,
    url_of,
)
from gradengine.exchange.handshake import refuse_bad_job, refuse_bad_secret
from gradengine.exchange.tls import content_of

JOBS = (
    "GRADENGINE_JOB",
    "TORCHELASTIC_RUN_ID",  # torchrun's --rdzv-id; "none" where it was not given
    "PMIX_NAMESPACE",  # mpirun of Open MPI 4 and 5; srun --mpi=pmix, which is left to SLURM_JOB_ID
    "SLURM_JOB_ID",  # one for each element of an array, one for all steps and for all parts of a heterogeneous job
)
ADDRESS, PORTS = "GRADENGINE_ADDRESS", "GRADENGINE_PORTS"
_DO = f"set {ADDRESS}=tcp://host:port on all ranks: rank 0's host, and a port that is free there"
_MOST_SECRET_BYTES = 4096
_PORTS = range(20_000, 29_000)  # below those that systems give to connections, and torchrun's 29400 and 29500
_THIS_HOST = "0.0.0.0"  # noqa: S104  (rank 0 listens on all interfaces, and the ranks beside it reach it there)
_HOST = re.compile(r"[a-z0-9_][a-z0-9_.-]{0,252}|[0-9a-f:.]{2,45}", re.IGNORECASE | re.ASCII)
_FIRST_NODE = re.compile(r"((?:[a-z0-9_.-]|\[[0-9][0-9,-]*\])+)(,|\Z)", re.IGNORECASE | re.ASCII)


@final
class Launcher(NamedTuple):
    """The variables by which a launcher tells each process its place.

    Attributes:
        name: The launcher's name in errors.
        rank: The variable of the rank; so are `world_size`, `local_rank` and `local_size`, the ranks on this host.
        run: The variables that distinguish two runs at one time on one host, of which some may be missing.
        host: The variable that names the first host, or all of them in Slurm's brackets.
        sign: A variable without which the others are not this launcher's.
    """

    name: str
    rank: str
    world_size: str
    local_rank: str = ""
    local_size: str = ""
    run: tuple[str, ...] = ()
    host: str = ""
    sign: str = ""

    def is_in(self, environment: Mapping[str, str]) -> bool:
        """Whether it started this process, or another of its variables is missing."""
        is_signed = not self.sign or self.sign in environment
        return is_signed and (self.rank in environment or self.world_size in environment)


_TORCH_RUN, _TORCH_HOST = ("TORCHELASTIC_RUN_ID", "MASTER_PORT"), "MASTER_ADDR"
_OMPI = "OMPI_COMM_WORLD"
LAUNCHERS = (
    Launcher(
        "by hand", "GRADENGINE_RANK", "GRADENGINE_WORLD_SIZE", "GRADENGINE_LOCAL_RANK", "GRADENGINE_LOCAL_SIZE"
    ),
    # Kubeflow's PyTorchJob sets torchrun's too, with MASTER_ADDR=localhost on rank 0.
    Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", _TORCH_RUN, _TORCH_HOST),
    Launcher(  # 4 and 5
        "Open MPI's mpiexec", f"{_OMPI}_RANK", f"{_OMPI}_SIZE", f"{_OMPI}_LOCAL_RANK", f"{_OMPI}_LOCAL_SIZE",
        run=("PMIX_NAMESPACE",),
    ),
    Launcher(  # Hydra says nothing that distinguishes two runs
        "MPICH's mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", sign="MPI_LOCALRANKID",
    ),
    # SLURM_LAUNCH_NODE_IPADDR is where srun was called, which may be a login node. A batch script has no step.
    Launcher(
        "srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", run=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        host="SLURM_STEP_NODELIST", sign="SLURM_STEP_ID",
    ),
)  # fmt: skip
# A caller that passes rank and world size to `connect`, under no launcher, may have set torch's variables.
_CALLER = Launcher("the caller", "rank", "world_size", run=_TORCH_RUN, host=_TORCH_HOST)


@final
class Fact(NamedTuple):
    """A value, and the names of the variables that it was read from."""

    value: str
    source: str


@final
class World(NamedTuple):
    """A process's rank among those that were started with it; values that are not given are None."""

    launcher: Launcher
    rank: int
    world_size: int
    local_rank: int | None
    local_size: int | None


def launcher_of(environment: Mapping[str, str]) -> Launcher | None:
    """Return the innermost launcher that started this process; None if none of them did."""
    return next((each for each in LAUNCHERS if each.is_in(environment)), None)


def not_taken(environment: Mapping[str, str]) -> list[str]:
    """The variables of further launchers that disagree with the innermost one, for a report."""
    here = dict.fromkeys((each.rank, each.world_size) for each in LAUNCHERS if each.is_in(environment))
    values = {pair: [environment.get(name, "") for name in pair] for pair in here}
    others = [pair for pair in here if values[pair] != values[next(iter(here))]]
    return [", ".join(f"{name}={environment.get(name, '')}" for name in pair) for pair in others]


@cache
def warn_of_other_ranks() -> None:
    """Warn, once in a process, if a launcher started several ranks: for a step that has no exchange with them."""
    launcher = launcher_of(os.environ)
    size = os.environ.get(launcher.world_size, "") if launcher else ""
    if size.isdecimal() and int(size) > 1 and not _is_in_torchs_group():
        what = f"this process is one of {size} ranks, and the engine has no exchange: it trains by itself. "
        warnings.warn(what + "Pass exchange=connect_if_launched() to sum over all ranks.", stacklevel=2)


def _is_in_torchs_group() -> bool:
    """Whether torch has a process group: DistributedDataParallel then sums by itself."""
    distributed: Any = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


# ---- its place ----


def read_world(environment: Mapping[str, str], rank: int | None = None, world_size: int | None = None) -> World:
    """The rank and sizes that the innermost launcher gave this process.

    Args:
        environment: The environment variables.
        rank: The rank that `connect` was given, for a variable that is not there; so is `world_size`.

    Raises:
        CallerError: A variable is missing, and its value was not given.
    """
    launcher = launcher_of(environment)
    if launcher is None:
        if rank is None or world_size is None:
            raise _no_launcher(environment, rank, world_size)
        return World(_CALLER, *checked_rank(rank, world_size), None, None)
    names = launcher.rank, launcher.world_size
    for there, missing, value in zip(names, names[::-1], (world_size, rank), strict=True):
        if missing not in environment and value is None:
            got, do = f"{there}={environment[there][:80]!r}", f"set {missing} as {launcher.name} does, or unset {there}"
            what = f"environment variable {there} is set and {missing} is not"
            raise CallerError(what, got=got, expected="both or none", do=do)
    size = _number(environment, launcher.world_size, 1, MOST_RANKS, world_size)
    place = _number(environment, launcher.rank, 0, size - 1, rank)
    local_rank = _number(environment, launcher.local_rank, 0, size - 1)
    return World(launcher, place, size, local_rank, _number(environment, launcher.local_size, 1, size))


def _number(environment: Mapping[str, str], variable: str, least: int, most: int, given: int | None = None) -> Any:
    """The number in a variable that is set, or the given one, in this range; None without either."""
    text = environment.get(variable)
    if text is None and given is None:
        return None
    value = given if text is None else int(text) if re.fullmatch("-?[0-9]{1,9}", text) else text
    return whole_number(f"environment variable {variable}", value, least, most)


def _no_launcher(environment: Mapping[str, str], rank: int | None, world_size: int | None) -> CallerError:
    if rank is not None or world_size is not None:
        missing, there = ("world_size", "rank") if world_size is None else ("rank", "world_size")
        return CallerError(f"{missing}= is missing", do=f"pass it with {there}=")
    got = "a Slurm job without a step" if "SLURM_JOB_ID" in environment else "none of its variables"
    do = "start the ranks by torchrun, srun or mpiexec, or call connect(url, rank, world_size)"
    return CallerError("no launcher found", got=got, do=do)


# ---- its secret, job and ports ----


def read_secret(environment: Mapping[str, str]) -> Fact | None:
    """The group's secret, from GRADENGINE_SECRET or the file named by GRADENGINE_SECRET_FILE; None without both.

    Raises:
        CallerError: The file cannot be read, the secret is too short, both are set and differ, or an old name is set.
    """
    for old in ("GRADENGINE_TOKEN", "GRADENGINE_TOKEN_FILE"):
        if environment.get(old):
            raise renamed(old)
    found = []
    if value := environment.get("GRADENGINE_SECRET"):
        found.append(Fact(value, "GRADENGINE_SECRET"))
    if path := environment.get("GRADENGINE_SECRET_FILE"):
        found.append(Fact(secret_in(path, " (of GRADENGINE_SECRET_FILE)"), "GRADENGINE_SECRET_FILE"))
    for value, source in found:
        refuse_bad_secret(value, f"the secret of {source}")
    if len({fact.value.strip() for fact in found}) > 1:
        raise CallerError("GRADENGINE_SECRET and GRADENGINE_SECRET_FILE hold different secrets", do="unset one of them")
    return found[0]._replace(value=found[0].value.strip()) if found else None


def secret_in(path: str | Path, named_by: str = "") -> str:
    """The only line of a file; raises `CallerError` if it cannot be read, is empty or longer than any secret."""
    try:
        secret = content_of(path, _MOST_SECRET_BYTES + 1, is_secret=True).decode().strip()
    except (OSError, ValueError) as fault:
        reason = "not UTF-8" if isinstance(fault, UnicodeError) else getattr(fault, "strerror", None) or fault
        raise CallerError(f"cannot read the secret from {str(path)!r}{named_by}: {reason}") from None
    if not secret or len(secret) > _MOST_SECRET_BYTES or len(secret.splitlines()) > 1:
        got = "more than a line" if secret else "an empty file"
        raise CallerError(f"there is no secret in {str(path)!r}{named_by}", got=got, expected="one line")
    return secret


def read_job(environment: Mapping[str, str]) -> Fact:
    """The run's name: that in GRADENGINE_JOB, or the launcher's as "variable=value"; "" if there is none.

    The first variable of `JOBS` that is set counts. Launchers precede the schedulers that they run under: if one mpirun
    starts ranks over ssh, only some of them see the scheduler's variables.
    """
    for variable in JOBS:
        value = environment.get(variable, "")
        if _names_a_job(variable, value):
            name = value if variable == "GRADENGINE_JOB" else f"{variable}={value}"
            refuse_bad_job(name, source=f"the job of {variable}")
            return Fact(name, variable)
    return Fact("", "")


def job_or_launchers(job: str | None) -> str:
    """The job's name, or the environment's if it is None."""
    if job is None:
        return read_job(os.environ).value
    refuse_bad_job(job)
    return job


def _names_a_job(variable: str, value: str) -> bool:
    if variable == "PMIX_NAMESPACE" and value.startswith("slurm."):
        return False  # slurm.pmix.<job>.<step>: ranks of one run may come by several steps
    return bool(value) and (variable, value) != ("TORCHELASTIC_RUN_ID", "none")


def read_ports(environment: Mapping[str, str], given: str | None = None) -> range | None:
    """The ports at which ranks listen: those that were given, or in GRADENGINE_PORTS; None if there are neither."""
    if given is not None:
        return ports_of(given)
    text = environment.get(PORTS)
    return ports_of(text, f"environment variable {PORTS}") if text else None


# ---- where the ranks meet ----


def is_over_mpi(url: object) -> bool:
    """Whether ranks connect by MPI: `connect` was given "mpi://", or no URL while GRADENGINE_ADDRESS is that."""
    given = os.environ.get(ADDRESS) if url is None else url
    return isinstance(given, str) and given == MPI_URL


def joining(
    url: str | None, rank: int | None, world_size: int | None, secret: str | None, job: str | None, ports: range | None
) -> tuple[str, int, int, str | None]:
    """The URL, rank, world size and secret of `connect`; those that were not given are read from the environment.

    Raises:
        CallerError: An argument is neither given nor in the environment, or cannot be used; nothing was opened.
    """
    if job is not None:
        refuse_bad_job(job)
    if secret is None:
        secret = found.value if (found := read_secret(os.environ)) else None
    if rank is None or world_size is None:
        world = read_world(os.environ, rank, world_size)
        rank, world_size = [b if a is None else a for a, b in ((rank, world.rank), (world_size, world.world_size))]
    if url is None:
        address = read_address(os.environ, job, secret, rank, world_size, ports)
        refuse_without_secret(address, secret)
        url = address.value if address.source == ADDRESS else _made_usable(address, as_index(rank) == 0)
    return url, rank, world_size, secret


def read_address(
    environment: Mapping[str, str],
    job: str | None = None,
    secret: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    ports: range | None = None,
) -> Fact:
    """The URL at which the ranks connect: GRADENGINE_ADDRESS, or one made from the launcher's variables.

    Args:
        environment: The environment variables.
        job: The job's name that was given to `connect`; two groups of one run need two names.
        secret: The group's secret; with one, rank 0 may listen on all interfaces.
        rank: The rank that was given to `connect`, for a launcher's variable that is not there; so is `world_size`.
        ports: The ports of which rank 0 takes one.

    Raises:
        CallerError: No variable names a host that all ranks can reach, or none distinguishes this run from others.
    """
    if given := environment.get(ADDRESS):
        if given != MPI_URL:
            address_of(given, f" (of environment variable {ADDRESS})")
        return Fact(given, ADDRESS)
    world = read_world(environment, rank, world_size)
    if (world.world_size if world_size is None else world_size) == 1:
        return Fact("tcp://127.0.0.1:0", world.launcher.world_size)
    host, source = _first_host(environment, world, secret)
    name, named_by = _run_name(environment, world.launcher, job)
    if host is None:
        return Fact(f"unix://{socket_path(environment, name)}", f"{source}, {named_by}")
    ports = ports or _PORTS
    free = [port for port in ports if str(port) != environment.get("MASTER_PORT")] or ports
    return Fact(url_of((host, free[int(name, 16) % len(free)])), f"{source}, {named_by}")


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


def _first_host(environment: Mapping[str, str], world: World, secret: str | None) -> tuple[str | None, str]:
    """The host of rank 0, or None if all ranks are on this host; and the variables that it was read from.

    Kubeflow names rank 0's host "localhost" there, and elsewhere by its service. So a loopback name stands for all
    interfaces if ranks may be on other hosts and have a secret.
    """
    launcher = world.launcher
    if world.local_size == world.world_size:
        return None, launcher.local_size
    variable = launcher.host
    if not environment.get(variable):
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
    return None if is_only_one else host, variable


def _run_name(environment: Mapping[str, str], launcher: Launcher, job: str | None) -> tuple[str, str]:
    """A hash (64 bits, in hex) of all that distinguishes this run from others, and the variables that it is from."""
    parts = {name: environment[name] for name in launcher.run if environment.get(name)}
    given = environment.get("GRADENGINE_JOB", "") if job is None else job
    if not given and not parts:
        what, got = "tells this process nothing that distinguishes two runs on one host", launcher.rank
        do = f"set GRADENGINE_JOB on all ranks, to another name for each run; or {ADDRESS}=unix:///path"
        raise CallerError(f"{launcher.name} {what}", got=f"{got} and {launcher.world_size} alone", do=do)
    text = "\0".join([given, *parts.values()])
    sources = [*parts] + ["GRADENGINE_JOB" if job is None else "job="] * bool(given)
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16], ", ".join(sources)


def _made_usable(address: Fact, hosts: bool) -> str:
    """The computed URL as this rank needs it; a Unix socket's folder is made."""
    at = address_of(address.value)
    if isinstance(at, str):
        make_private(Path(at).parent)
    return url_of((_own_host(at[0], address.source), at[1])) if hosts and not isinstance(at, str) else address.value


def _own_host(host: str, source: str) -> str:
    """The host at which rank 0 listens: its own, or everywhere if that means loopback, as in Debian's /etc/hosts."""
    try:
        number = number_of(host)
    except (OSError, UnicodeError) as fault:  # of a name with an empty part, or too long a one
        what = f"rank 0 cannot listen at {host} ({getattr(fault, 'strerror', None) or fault}), made of {source}"
        raise CallerError(what, do=_DO) from None
    is_hidden = is_loopback(number) and host not in {number, *LOOPBACK}
    return everywhere() if is_hidden or host == _THIS_HOST else host
