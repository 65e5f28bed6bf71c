"""Ordered all-reduce over workers: one interface, the transports of it, the same bytes from each.

In: a layout and a flat fp32 arena in host memory on every rank. Out: the arena with the sum over ranks. `linked.py` is
the exchange, over threads, sockets or MPI: `links/` moves bytes between any two ranks, `gather.py` small data over
them, and `comparison.py` what must be alike; `ordered_all_reduce.py` adds the shares that `shares.py` cuts, each at its
owner; `pump.py` runs it over a link; `mesh.py` connects ranks over sockets, and chooses their link; `listener.py` is
where they call, `torch_group.py` how the ranks of a process group of torch find that, `device_calls.py` what NCCL does
for it. In a group with a server, `server.py`, that owns all shares: `hub.py` runs it there. Imports `arrays`, `layout`
and `kernels`.
"""

from __future__ import annotations

from typing import Any

from gradengine.arguments import as_index, said, truth_value
from gradengine.errors import CallerError
from gradengine.exchange.device_calls import device_calls_of
from gradengine.exchange.environment import job_or_launchers
from gradengine.exchange.interface import (
    DEFAULT_JOIN_TIMEOUT,
    DEFAULT_TIMEOUT,
    NonFiniteValue,
    checked_seconds,
)
from gradengine.exchange.linked import DEFAULT_SHARE_BYTES, Exchange, Progress, WorkerClient, local_group
from gradengine.exchange.links.link import Link
from gradengine.exchange.links.mpi import MpiLink
from gradengine.exchange.mesh import Meeting
from gradengine.exchange.rendezvous import MPI_URL, address_of, is_over_mpi, joining
from gradengine.exchange.server import GradientServer
from gradengine.exchange.torch_group import meeting_by_torch

__all__ = [
    "Exchange",
    "GradientServer",
    "NonFiniteValue",
    "Progress",
    "WorkerClient",
    "connect",
    "local_group",
]


def connect(
    url: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    *,
    token: str | None = None,
    job: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    join_timeout: float = DEFAULT_JOIN_TIMEOUT,
    bucket_bytes: int = DEFAULT_SHARE_BYTES,
    link: str | None = None,
    served: bool = False,
    process_group: Any = None,
    communicator: Any = None,
) -> Exchange:
    """This rank's exchange in a process group, for one engine; each rank sums a share for all, unless a server does.

    What is not given is what the launcher says (torchrun, mpiexec, srun, or GRADENGINE_RANK, GRADENGINE_WORLD_SIZE and
    GRADENGINE_ADDRESS); `gradengine env` prints it.

    Over sockets rank 0 listens from now on, and nothing is sent before the engine binds a layout: workers may start in
    any order. Then each rank listens, at a port of its own, until all are connected with each other. Ranks of one host
    find that out, also over tcp://, and go on over Unix sockets; where all are, they read each other's arenas in shared
    memory, if the engine is made with this exchange, on the CPU, and the address is loopback or a Unix socket's.

    With a communicator of MPI or a process group of torch, rank and world size are the group's, and all of its ranks
    call this together. Bytes go over a private duplicate of the communicator; a process group only tells its ranks a
    secret, and where they meet: over sockets, as above. Where its backend for CUDA is NCCL and all engines are on GPUs,
    it moves the gradients itself, on their streams, and a step waits for nothing on the host (docs/nccl.md).

    Args:
        url: "tcp://host:port" of rank 0, the same on all ranks; or "unix:///path" on one machine; or "mpi://", all
            ranks that mpiexec has started (needs mpi4py). None: GRADENGINE_ADDRESS, or where the launcher's ranks meet:
            a Unix socket on one host, else a port of the first one.
        rank: This worker's rank, 0..world_size - 1.
        world_size: Workers in the group.
        token: A secret that all workers share; required unless the host is loopback. None: that of GRADENGINE_TOKEN, or
            in the file that GRADENGINE_TOKEN_FILE names.
        job: The name of this run, the same on all ranks, which keeps two runs with one address apart. None: the job
            of GRADENGINE_JOB, or that the launcher names (torchrun --rdzv-id, Open MPI's mpirun, Slurm, PBS, LSF).
            "": none.
        timeout: Seconds without any progress after which waiting ranks fail.
        join_timeout: Seconds to wait for all ranks to join.
        bucket_bytes: Bytes that a rank sums at a time; rank 0's value is used, or the server's, and changes no bit of
            the result.
        link: "tcp", "unix" or "shared_memory": what bytes go over between ranks that meet at an address. None: what
            rank 0 chooses, the best that there is where they are, unless it was given one. `exchange.link` says which
            it is: "unix" too where not all engines have their arena in shared memory.
        served: True if all connect to `gradengine serve`, which sums for them: needs one port that all reach.
        process_group: A group of torch.distributed with any backend; torch.distributed.group.WORLD is its default one,
            which is None before `init_process_group`. Without url, token, job and served.
        communicator: An mpi4py communicator, of which "mpi://" takes MPI.COMM_WORLD. Without url, token, job, link and
            served.

    Raises:
        CallerError: A bad URL, rank or job, an address beyond loopback without a token, or rank 0 cannot listen there;
            or what was not given no variable of the environment says; or what was given contradicts the communicator
            or process group, or is not needed with it.
        DeviceUnavailable: There is no mpi4py here, or no MPI library that it can load; or no shared memory for the link
            that is asked for.
        PeerLost: Not all ranks of the communicator or the process group called this in time.

    Example:
        >>> with connect("tcp://127.0.0.1:0", rank=0, world_size=1) as exchange:
        ...     exchange.rank, exchange.world_size
        (0, 1)
    """
    served = truth_value("served", served)
    group: Link | Meeting
    if process_group is not None or communicator is not None or is_over_mpi(url):
        _refuse_of_sockets(url, process_group, communicator, token=token, job=job, link=link, served=served or None)
        url, seconds = None, checked_seconds("join_timeout", join_timeout)
        if process_group is not None:
            group = meeting_by_torch(process_group, link=link, timeout=seconds)
        else:
            url, group = MPI_URL, MpiLink(communicator, timeout=seconds)
    else:
        url, rank, world_size, token = joining(url, rank, world_size, token, job, served=served)
        job, at = job_or_launchers(job), address_of(url)
        group = Meeting(at, rank, world_size, token=token, job=job, link=link, is_served=served)
    try:
        _refuse_other_place(group, rank, world_size)
        calls = None if process_group is None else device_calls_of(process_group)
        return Exchange(
            group, url=url, timeout=timeout, join_timeout=join_timeout, bucket_bytes=bucket_bytes, device_calls=calls
        )
    except BaseException:
        group.close()  # the caller has no reference to it, and other ranks are told
        raise


def _refuse_of_sockets(url: str | None, process_group: Any, communicator: Any, **given: object) -> None:
    """Raise `CallerError` for an argument that is needed only where ranks meet at an address."""
    if process_group is not None and communicator is not None:
        raise CallerError("connect takes a process_group or a communicator, and was given both", do="give one of them")
    way = f'url="{MPI_URL}"'
    if process_group is not None or communicator is not None:
        way, given = "process_group" if communicator is None else "communicator", {"url": url, **given}
    if process_group is not None:
        del given["link"]
    why = {
        "url": "who the ranks are, and how they reach each other, is the group's",
        "token": "nobody can join who is not in the group already",
        "link": "the bytes go over the group's own",
        "job": "the ranks are those of one group, whatever runs beside it",
        "served": "there is no server, each rank sums a share",
    }
    for name, value in given.items():
        if value is not None:
            raise CallerError(f"connect with {way} takes no {name}: {why[name]}", do=f"leave {name} out")


def _refuse_other_place(group: Link | Meeting, rank: int | None, world_size: int | None) -> None:
    for name, given, own in (("rank", rank, group.rank), ("world_size", world_size, group.world_size)):
        if given is not None and as_index(given) != own:
            raise CallerError(f"{name} is not the group's", got=said(given), expected=own, do=f"leave {name} out")
