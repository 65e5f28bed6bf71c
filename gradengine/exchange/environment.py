"""Reads a launcher's environment variables: rank, world size, secret and job, each with the variable it is from.

`LAUNCHERS` begins with the innermost: under mpiexec or in a Slurm job, what torchrun started has torchrun's ranks.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, final

from gradengine.arguments import MOST_RANKS, checked_rank, whole_number
from gradengine.errors import CallerError, renamed
from gradengine.exchange.handshake import refuse_bad_job, refuse_bad_secret
from gradengine.exchange.tls import content_of

JOBS = (
    "GRADENGINE_JOB",
    "TORCHELASTIC_RUN_ID",  # torchrun's --rdzv-id; "none" where it was not given
    "PMIX_NAMESPACE",  # mpirun of Open MPI 4 and 5; srun --mpi=pmix, which is left to SLURM_JOB_ID
    "SLURM_JOB_ID",  # one for each element of an array, one for all steps and for all parts of a heterogeneous job
)

_MOST_SECRET_BYTES = 4096


@final
class Launcher(NamedTuple):
    """The variables by which a launcher tells each process its place.

    Attributes:
        name: The launcher's name in errors.
        rank: The variable of the rank; so are `world_size`, `local_rank` and `local_size`, the ranks on this host.
        run: The variables that distinguish two runs at one time on one host, of which some may be missing.
        host: The variables of which one names the first host, or all of them in Slurm's brackets.
        sign: A variable without which the others are not this launcher's.
    """

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_size: str = ""
    run: tuple[str, ...] = ()
    host: tuple[str, ...] = ()
    sign: str = ""

    def is_in(self, environment: Mapping[str, str]) -> bool:
        """Whether it started this process, or another of its variables is missing."""
        is_signed = not self.sign or self.sign in environment
        return is_signed and (self.rank in environment or self.world_size in environment)


LAUNCHERS = (
    Launcher(
        "by hand", "GRADENGINE_RANK", "GRADENGINE_WORLD_SIZE", "GRADENGINE_LOCAL_RANK", "GRADENGINE_LOCAL_SIZE"
    ),
    Launcher(
        "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
        run=("TORCHELASTIC_RUN_ID", "MASTER_PORT"), host=("MASTER_ADDR",),
    ),
    Launcher(
        "Open MPI's mpiexec", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE", run=("PMIX_NAMESPACE",),
    ),
    Launcher(  # nothing that it says distinguishes two runs
        "MPICH's mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", sign="MPI_LOCALRANKID"
    ),
    # SLURM_LAUNCH_NODE_IPADDR is where srun was called, which may be a login node. A batch script has no step.
    Launcher(
        "srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", run=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        host=("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), sign="SLURM_STEP_ID",
    ),
)  # fmt: skip


# Who passes rank and world size to `connect`, under no launcher, may have set torch's variables for the address.
_CALLER = Launcher(
    "the caller", "rank", "world_size", "", run=("TORCHELASTIC_RUN_ID", "MASTER_PORT"), host=("MASTER_ADDR",)
)


@final
class Fact(NamedTuple):
    """A value, and the names of the variables that it was read from."""

    value: str
    source: str


@final
class World(NamedTuple):
    """A process's rank among those that were started with it; values that are not known are None."""

    launcher: Launcher
    rank: int
    world_size: int
    local_rank: int | None
    local_size: int | None


def launcher_of(environment: Mapping[str, str]) -> Launcher | None:
    """Return the innermost launcher that started this process; None if none of them did."""
    return next((each for each in LAUNCHERS if each.is_in(environment)), None)


@cache
def warn_of_other_ranks() -> None:
    """Warn, once in a process, if a launcher started several ranks: for a step that has no exchange with them."""
    launcher = launcher_of(os.environ)
    size = os.environ.get(launcher.world_size, "") if launcher else ""
    if not size.isdecimal() or int(size) < 2 or _is_in_torchs_group():
        return
    warnings.warn(
        f"this process is one of {size} ranks, and the engine has no exchange: it trains by itself. "
        "Pass exchange=connect_if_launched() to sum over all ranks.",
        stacklevel=2,
    )


def _is_in_torchs_group() -> bool:
    """Whether torch has a process group: DistributedDataParallel then sums by itself."""
    distributed: Any = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


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


def not_taken(environment: Mapping[str, str]) -> list[str]:
    """The variables of further launchers that disagree with the innermost one, for a report."""
    here = dict.fromkeys((each.rank, each.world_size) for each in LAUNCHERS if each.is_in(environment))
    places = [(pair, [environment.get(name, "") for name in pair]) for pair in here]
    others = [(names, values) for names, values in places if values != places[0][1]]
    return [", ".join(f"{name}={value}" for name, value in zip(*other, strict=True)) for other in others]


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
        refuse_bad_secret(value, "the secret of GRADENGINE_SECRET")
        found.append(Fact(value.strip(), "GRADENGINE_SECRET"))
    if path := environment.get("GRADENGINE_SECRET_FILE"):
        found.append(Fact(secret_in(path, " (of GRADENGINE_SECRET_FILE)"), "GRADENGINE_SECRET_FILE"))
        refuse_bad_secret(found[-1].value, "the secret of GRADENGINE_SECRET_FILE")
    if len({fact.value for fact in found}) > 1:
        raise CallerError("GRADENGINE_SECRET and GRADENGINE_SECRET_FILE hold different secrets", do="unset one of them")
    return found[0] if found else None


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
    return CallerError(
        "no launcher found",
        got="a Slurm job without a step" if "SLURM_JOB_ID" in environment else "none of its variables",
        do="start the ranks by torchrun, srun or mpiexec, or call connect(url, rank, world_size)",
    )
