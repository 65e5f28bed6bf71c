"""Reads a process's rank, world size, secret and job from the environment, and makes the address that all ranks use.

`LAUNCHERS` begins with the innermost launcher. A process that torchrun started under mpiexec or in a Slurm job uses
torchrun's rank. If all ranks are on one host, the address is a Unix socket in a folder of this user alone. Otherwise it
is a port of the first host. A hash of the values that distinguish this run from others selects the port. The
launcher's own servers and ports are not used.
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
from typing import Any, NamedTuple, TypeAlias, final

from gradengine.arguments import MOST_RANKS, as_index, checked_rank, said, whole_number
from gradengine.errors import CallerError
from gradengine.exchange.addresses import MPI_URL, address_of, is_loopback, made_usable, socket_path, url_of
from gradengine.exchange.handshake import refuse_bad_job, refuse_bad_secret
from gradengine.exchange.tls import content_of

# TORCHELASTIC_RUN_ID is torchrun's --rdzv-id. PMIX_NAMESPACE is set by mpirun of Open MPI 4 and 5. It is ignored if
# srun --mpi=pmix has set it. SLURM_JOB_ID differs between the elements of a job array. It is the same for all steps of
# a job, and for all parts of a heterogeneous job.
JOBS = "GRADENGINE_JOB", "TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE", "SLURM_JOB_ID"
ADDRESS, PORTS = "GRADENGINE_ADDRESS", "GRADENGINE_PORTS"
_DO = f"set {ADDRESS}=tcp://host:port on all ranks, with rank 0's host and a port that is free there"
_PORTS = range(20_000, 29_000)  # below the ephemeral ports of systems, and torchrun's 29400 and 29500
_HOST = re.compile(r"[a-z0-9_][a-z0-9_.-]{0,252}|[0-9a-f:.]{2,45}", re.IGNORECASE | re.ASCII)
_FIRST_NODE = re.compile(r"((?:[a-z0-9_.-]|\[[0-9][0-9,-]*\])+)(,|\Z)", re.IGNORECASE | re.ASCII)


@final
class Launcher(NamedTuple):
    """The environment variables in which a launcher gives each process its rank.

    Attributes:
        name: The launcher's name in errors.
        rank: The variable of the rank.
        world_size: The variable of the world size.
        local_size: The variable of the number of ranks on this host.
        run: The variables that distinguish two simultaneous runs on one host. Some of them may be missing.
        host: The variable that names the first host, or all hosts in Slurm's brackets.
        sign: A variable that this launcher always sets. Without it a different launcher has set the others.
    """

    name: str
    rank: str
    world_size: str
    local_size: str = ""
    run: tuple[str, ...] = ()
    host: str = ""
    sign: str = ""

    def is_in(self, environment: Mapping[str, str]) -> bool:
        """Return whether this launcher started the process. One of rank and world size may be missing."""
        is_signed = not self.sign or self.sign in environment
        return is_signed and (self.rank in environment or self.world_size in environment)


_TORCH_RUN, _TORCH_HOST = ("TORCHELASTIC_RUN_ID", "MASTER_PORT"), "MASTER_ADDR"
_OMPI, _SLURM_RUN = "OMPI_COMM_WORLD", ("SLURM_JOB_ID", "SLURM_STEP_ID")
LAUNCHERS = (
    Launcher("by hand", "GRADENGINE_RANK", "GRADENGINE_WORLD_SIZE", "GRADENGINE_LOCAL_SIZE"),
    Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", _TORCH_RUN, _TORCH_HOST),
    # Open MPI 4 and 5.
    Launcher("Open MPI's mpiexec", f"{_OMPI}_RANK", f"{_OMPI}_SIZE", f"{_OMPI}_LOCAL_SIZE", ("PMIX_NAMESPACE",)),
    # Hydra sets no variable that distinguishes two runs.
    Launcher("MPICH's mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", sign="MPI_LOCALRANKID"),
    # SLURM_LAUNCH_NODE_IPADDR is the node that called srun, which may be a login node. A batch script has no step.
    Launcher("srun", "SLURM_PROCID", "SLURM_NTASKS", "", _SLURM_RUN, "SLURM_STEP_NODELIST", "SLURM_STEP_ID"),
)
Fact: TypeAlias = tuple[str, str]  # a value, and the names of the variables that it was read from
# A caller that passes rank and world size to `connect`, under no launcher, may have set torch's variables.
_CALLER = Launcher("the caller", "rank", "world_size", run=_TORCH_RUN, host=_TORCH_HOST)


@final
class World(NamedTuple):
    """A process's rank and sizes among the processes started with it. `local_size` is None if it is not given."""

    launcher: Launcher
    rank: int
    world_size: int
    local_size: int | None


def launcher_of(environment: Mapping[str, str]) -> Launcher | None:
    """Return the innermost launcher that started this process, or None."""
    return next((each for each in LAUNCHERS if each.is_in(environment)), None)


@cache
def warn_of_other_ranks() -> None:
    """Warn once in a process if a launcher started several ranks and the step has no exchange with them."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return  # DistributedDataParallel sums the gradients
    launcher = launcher_of(os.environ)
    size = os.environ.get(launcher.world_size, "") if launcher else ""
    if size.isdecimal() and int(size) > 1:
        what = f"this process is one of {size} ranks, but the engine has no exchange and trains alone. "
        warnings.warn(what + "Pass exchange=connect_if_launched() to sum over all ranks.", stacklevel=2)


# ---- its place ----


def read_world(environment: Mapping[str, str], rank: int | None = None, world_size: int | None = None) -> World:
    """Return the rank and sizes that the innermost launcher gave this process.

    Args:
        environment: The environment variables.
        rank: The rank that was passed to `connect`, used if the variable of the rank is not set.
        world_size: The world size that was passed to `connect`, used if the variable of the world size is not set.

    Raises:
        CallerError: A variable is missing, and its value was not given.
    """
    launcher = launcher_of(environment)
    if launcher is None:
        if rank is None or world_size is None:
            do = "start the ranks by torchrun, srun or mpiexec, or call connect(url, rank, world_size)"
            raise CallerError("no launcher found", do=do)
        return World(_CALLER, *checked_rank(rank, world_size), None)
    size = _number(environment, launcher.world_size, 1, MOST_RANKS, world_size)
    place = _number(environment, launcher.rank, 0, size - 1, rank)
    has_local = launcher.local_size in environment
    return World(launcher, place, size, _number(environment, launcher.local_size, 1, size) if has_local else None)


def _number(environment: Mapping[str, str], variable: str, least: int, most: int, given: int | None = None) -> int:
    """Return the number in a variable, or the given number if it is not set. Raises `CallerError` out of range."""
    text = environment.get(variable)
    value = given if text is None else int(text) if re.fullmatch("-?[0-9]{1,9}", text) else text
    return whole_number(f"environment variable {variable}", value, least, most)


# ---- its secret, job and ports ----


def read_secret(environment: Mapping[str, str]) -> Fact:
    """Return the group's secret from GRADENGINE_SECRET, or from the file in GRADENGINE_SECRET_FILE, or "".

    Raises:
        CallerError: The file cannot be read, the secret is too short, or both are set.
    """
    value, path = environment.get("GRADENGINE_SECRET", ""), environment.get("GRADENGINE_SECRET_FILE", "")
    if value and path:
        raise CallerError("GRADENGINE_SECRET and GRADENGINE_SECRET_FILE are both set", do="unset one of them")
    source = "GRADENGINE_SECRET_FILE" if path else "GRADENGINE_SECRET"
    secret = secret_in(path) if path else value
    refuse_bad_secret(secret, f"the secret of {source}")
    return secret.strip(), source


def secret_in(path: str | Path) -> str:
    """Return the only line of a file. Raises `CallerError` if it cannot be read, or has no or several lines."""
    try:
        lines = content_of(Path(path), is_secret=True).decode().strip().splitlines()
    except (OSError, ValueError) as fault:
        reason = getattr(fault, "strerror", "not UTF-8")
        raise CallerError(f"cannot read the secret from {str(path)!r}: {reason}") from None
    if len(lines) != 1:
        raise CallerError(f"there is no secret in {str(path)!r}", got=f"{len(lines)} lines", expected="one")
    return lines[0]


def read_job(environment: Mapping[str, str]) -> Fact:
    """Return the run's name from GRADENGINE_JOB, or the launcher's name as "variable=value", or "".

    The first variable of `JOBS` that is set counts. Launchers precede the schedulers that they run under. If mpirun
    starts ranks over ssh, only some ranks see the scheduler's variables.
    """
    for variable in JOBS:
        value = environment.get(variable, "")
        # The ranks of one run may belong to several Slurm steps, with different names slurm.pmix.<job>.<step>.
        if value and (variable, value) != ("TORCHELASTIC_RUN_ID", "none") and not value.startswith("slurm.pmix."):
            name = value if variable == "GRADENGINE_JOB" else f"{variable}={value}"
            refuse_bad_job(name, source=f"the job of {variable}")
            return name, variable
    return "", ""


def read_ports(environment: Mapping[str, str], given: str | None = None) -> range | None:
    """Return the ports at which ranks listen, from `given` or GRADENGINE_PORTS, or None. The last port is included.

    Raises:
        CallerError: The text is not two ports such as "29000-29100".
    """
    text = environment.get(PORTS) or None if given is None else given
    if text is None:
        return None
    found = re.fullmatch("([0-9]{1,5})-([0-9]{1,5})", text) if isinstance(text, str) else None
    ports = range(int(found[1]), int(found[2]) + 1) if found else range(0)
    if not ports or not ports[0] or ports[-1] >= 1 << 16:
        what = f"{'ports' if given is not None else f'environment variable {PORTS}'} is not a range of ports"
        raise CallerError(what, got=said(text), expected="'29000-29100'", do="name the first and the last port")
    return ports


# ---- where the ranks meet ----


def joining(
    url: str | None, rank: int | None, world_size: int | None, secret: str | None, job: str | None, ports: range | None
) -> tuple[str, int, int, str | None]:
    """Return the URL, rank, world size and secret for `connect`. Missing arguments are read from the environment.

    Raises:
        CallerError: An argument is neither given nor in the environment, or is invalid. Nothing was opened.
    """
    if secret is None:
        secret, _ = read_secret(os.environ)
    if url is None or rank is None or world_size is None:
        world = read_world(os.environ, rank, world_size)
        rank, world_size = [b if a is None else a for a, b in ((rank, world.rank), (world_size, world.world_size))]
    if url is None:
        url, source = read_address(os.environ, world, job, ports)
        refuse_without_secret(url, source, secret)
        url = url if source == ADDRESS else made_usable(url, hosts=as_index(rank) == 0)
    return url, rank, world_size, secret


def read_address(environment: Mapping[str, str], world: World, job: str | None, ports: range | None) -> Fact:
    """Return the URL at which the ranks connect, from GRADENGINE_ADDRESS or made from the launcher's variables.

    Args:
        environment: The environment variables.
        world: The result of `read_world`.
        job: The job's name that was passed to `connect`. Two groups of one run need two names.
        ports: The ports from which rank 0's port is selected.

    Raises:
        CallerError: No variable names a host that all ranks can reach, or none distinguishes this run from others.
    """
    if given := environment.get(ADDRESS):
        if given != MPI_URL:
            address_of(given, f" (of environment variable {ADDRESS})")
        return given, ADDRESS
    if world.world_size == 1:
        return "tcp://127.0.0.1:0", world.launcher.world_size
    host, source = _first_host(environment, world)
    name, named_by = _run_name(environment, world.launcher, job)
    if host is None:
        return f"unix://{socket_path(environment, name)}", f"{source}, {named_by}"
    ports = ports or _PORTS
    free = [port for port in ports if str(port) != environment.get("MASTER_PORT")] or ports
    return url_of((host, free[int(name, 16) % len(free)])), f"{source}, {named_by}"


def refuse_without_secret(url: str, source: str, secret: str | None) -> None:
    """Raise `CallerError` if other machines can reach a URL from the environment and there is no secret."""
    if not secret and url.startswith("tcp://") and not is_loopback(address_of(url)[0]):
        do = "write one line of `openssl rand -hex 16` to a file, and set GRADENGINE_SECRET_FILE to it on all ranks"
        raise CallerError(f"{url} (from {source}) is reachable from other machines and needs a secret", do=do)


def first_node(nodes: str) -> tuple[str, bool]:
    """Return the first node of Slurm's list, and whether it is the only one. The node is "" for an invalid list.

    >>> first_node("rack[02-04,7]-node[1,3],login"), first_node("gpu1")
    (('rack02-node1', False), ('gpu1', True))
    """
    match = _FIRST_NODE.match(nodes)
    if match is None:
        return "", False
    node = re.sub(r"\[([0-9]+)[^]]*\]", r"\1", match[1])
    return node, match.end() == len(nodes) and not match[2] and not re.search(r"\[[^]]*[,-]", match[1])


def _first_host(environment: Mapping[str, str], world: World) -> tuple[str | None, str]:
    """Return the host of rank 0 and the variable that names it. The host is None if all ranks are on this host."""
    launcher = world.launcher
    if world.local_size == world.world_size:
        return None, launcher.local_size
    named = environment.get(launcher.host, "")
    host, is_only_one = first_node(named) if launcher.host.endswith("NODELIST") else (named, False)
    if not _HOST.fullmatch(host):
        what = f"environment variable {launcher.host or ADDRESS} names no host that all ranks can reach"
        raise CallerError(what, got=said(named), expected="a host's name or address", do=_DO)
    return None if is_only_one else host, launcher.host


def _run_name(environment: Mapping[str, str], launcher: Launcher, job: str | None) -> tuple[str, str]:
    """Return a 64-bit hash (hex) of the values that distinguish this run from others, and the names of the values."""
    parts = {name: environment[name] for name in launcher.run if environment.get(name)}
    name, given = ("GRADENGINE_JOB", environment.get("GRADENGINE_JOB", "")) if job is None else ("job=", job)
    refuse_bad_job(given)
    if not given and not parts:
        do = f"set GRADENGINE_JOB (a different name for each run) or {ADDRESS}=unix:///path on all ranks"
        raise CallerError(f"{launcher.name} sets no variable that distinguishes two runs on one host", do=do)
    text = "\0".join([given, *parts.values()])
    sources = [*parts, name] if given else parts
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16], ", ".join(sources)
