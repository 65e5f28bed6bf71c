"""Ordered all-reduce over workers: one interface, several transports, the same bytes from each.

In: a layout and a flat fp32 arena on every rank. Out: the arena with the sum over ranks. `linked.py` is the exchange,
over threads, sockets or MPI. `links/` moves bytes between two ranks, `gather.py` gathers small data over them, and
`comparison.py` checks what must be the same on all ranks. `shares.py` cuts the arena into shares,
`ordered_all_reduce.py` adds each share at its owner, `pump.py` runs that over a link, and `patience.py` counts the
seconds of a wait. `mesh.py` connects ranks over sockets and chooses their link, `launchers.py` and `addresses.py` say
where, `tls.py` encrypts what they send, and `torch_group.py` tells a torch process group where it is; `device_calls.py`
is what such a group's NCCL does. In a group with a server (`server.py`) the server owns all shares, and `hub.py` runs
it. Imports `arrays`, `layout` and `kernels`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from gradengine.arguments import as_index, checked_seconds, said, truth_value
from gradengine.errors import CallerError, refuses_renamed
from gradengine.exchange.addresses import MPI_URL, address_of
from gradengine.exchange.device_calls import device_calls_of
from gradengine.exchange.exchange import DEFAULT_SHARE_BYTES, Exchange, WorkerClient, local_group
from gradengine.exchange.launchers import ADDRESS, is_over_mpi, job_or_launchers, joining, launcher_of, read_ports
from gradengine.exchange.links.link import Link
from gradengine.exchange.links.mpi import MpiLink
from gradengine.exchange.mesh import Meeting
from gradengine.exchange.ordered_all_reduce import NonFiniteValue
from gradengine.exchange.pump import DEFAULT_JOIN_TIMEOUT, DEFAULT_TIMEOUT
from gradengine.exchange.server import GradientServer
from gradengine.exchange.tls import certificates_of
from gradengine.exchange.torch_group import meeting_by_torch

__all__ = [
    "Exchange",
    "GradientServer",
    "NonFiniteValue",
    "WorkerClient",
    "connect",
    "connect_if_launched",
    "local_group",
]


@refuses_renamed
def connect(
    url: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    *,
    secret: str | None = None,
    job: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    join_timeout: float = DEFAULT_JOIN_TIMEOUT,
    bucket_bytes: int = DEFAULT_SHARE_BYTES,
    link: str | None = None,
    served: bool = False,
    tls: str | os.PathLike[str] | None = None,
    ports: str | None = None,
    process_group: Any = None,
    communicator: Any = None,
) -> Exchange:
    """Connect this rank to its group and return its exchange, for one engine; each rank sums a share for all others.

    Arguments that are not given are read from the launcher's environment variables (torchrun, mpiexec, srun, or
    GRADENGINE_RANK, GRADENGINE_WORLD_SIZE and GRADENGINE_ADDRESS); `gradengine doctor` prints them.

    Over sockets rank 0 listens from now on, and nothing is sent before the engine binds a layout: workers may start in
    any order. Then each rank listens at a port of its own until all are connected with each other. If all ranks are on
    one host, they notice that, also over tcp://, and use Unix sockets. Then they read each other's arenas in shared
    memory, if the engine is built with this exchange, on the CPU, and the address is loopback or a Unix socket.

    With an MPI communicator or a torch process group, rank and world size are the group's, and all of its ranks call
    this together. Bytes are sent over a private duplicate of the communicator; a process group is only used to tell its
    ranks an address and a secret, and then they connect over sockets, as above. If the group's backend for CUDA is NCCL
    and all engines are on GPUs, NCCL moves the gradients, on our streams, and no step waits on the host (docs/nccl.md).

    Args:
        url: "tcp://host:port" of rank 0, the same on all ranks; or "unix:///path" on one machine; or "mpi://" for all
            ranks that mpiexec has started (needs mpi4py). None: GRADENGINE_ADDRESS, or one made from the launcher's
            variables: a Unix socket if all are on one host, else a port of the first host.
        rank: This worker's rank, 0..world_size - 1.
        world_size: Workers in the group.
        secret: A secret that all workers share, of at least 16 characters; required unless the host is loopback. None:
            that in GRADENGINE_SECRET, or in the file named by GRADENGINE_SECRET_FILE.
        job: The name of this run, the same on all ranks, which keeps apart two runs that use one address. None: that in
            GRADENGINE_JOB, or the launcher's (torchrun --rdzv-id, Open MPI's mpirun, Slurm). "": no name.
        timeout: Seconds without any progress after which waiting ranks fail.
        join_timeout: Seconds to wait for all ranks to join.
        bucket_bytes: Bytes that a rank sums at a time; rank 0's value, or the server's, is used. It changes no bit of
            the result.
        link: How bytes are sent between ranks that connect at an address: "tcp", "unix" or "shared_memory". None: rank
            0's value, or if rank 0 has none, the best for the ranks' hosts. `exchange.link` says which it is; it is
            "unix" if not all engines have their arena in shared memory.
        served: True if all ranks connect to a `gradengine serve`, which sums for them: only its port must be reachable.
        tls: A folder with ca.crt, tls.crt and tls.key, by which all that leaves this host is encrypted, both ends show
            certificates of one authority (docs/tls.md), and NCCL moves no gradients. None: that in GRADENGINE_TLS; if
            there is none, data is sent in plain.
        ports: The ports at which ranks listen over TCP, as "29000-29100", for firewalls. Rank 0 listens at the port of
            `url`, and each other rank at the first free port of these. None: those in GRADENGINE_PORTS, or any.
        process_group: A group of torch.distributed with any backend; torch.distributed.group.WORLD is the default one,
            which is None before `init_process_group`. Not together with url, secret, job or served.
        communicator: An mpi4py communicator; "mpi://" means MPI.COMM_WORLD. Not together with url, secret, job, link,
            served, ports or tls: MPI's own messages are not encrypted.

    Raises:
        CallerError: A bad URL, rank, job or secret; an address beyond loopback without a secret; an address at which
            rank 0 cannot listen; an argument that is neither given nor in the environment; or one that contradicts the
            communicator or process group, or is not needed with it; or a file of TLS cannot be used.
        DeviceUnavailable: mpi4py or its MPI library is missing; or `link` is "shared_memory" and the system has none.
        PeerLost: Not all ranks of the communicator or the process group called this in time.

    Example:
        >>> with connect("tcp://127.0.0.1:0", rank=0, world_size=1) as exchange:
        ...     exchange.rank, exchange.world_size
        (0, 1)
    """
    served, certificates = truth_value("served", served), certificates_of(tls)
    group: Link | Meeting
    options: Any
    if process_group is not None or communicator is not None or is_over_mpi(url):
        given = {"secret": secret, "job": job, "link": link, "served": served or None, "tls": tls, "ports": ports}
        _refuse_of_sockets(url, process_group, communicator, given)
        url, seconds = None, checked_seconds("join_timeout", join_timeout)
        if process_group is not None:
            options = {"link": link, "tls": certificates, "ports": read_ports(os.environ, ports)}
            group = meeting_by_torch(process_group, seconds, **options)
        else:
            url, group = MPI_URL, MpiLink(communicator, timeout=seconds)
    else:
        if served and url is None and not os.environ.get(ADDRESS):
            raise CallerError("served=True needs the server's address", do=f"pass its url, or set {ADDRESS} to it")
        some = read_ports(os.environ, ports)
        url, rank, world_size, secret = joining(url, rank, world_size, secret, job, some)
        options = {"job": job_or_launchers(job), "link": link, "tls": certificates, "ports": some}
        group = Meeting(address_of(url), rank, world_size, secret=secret, is_served=served, **options)
    try:
        _refuse_other_place(group, rank, world_size)
        # NCCL would send the gradients in plain.
        calls = None if process_group is None or certificates is not None else device_calls_of(process_group)
        return Exchange(
            group, url=url, timeout=timeout, join_timeout=join_timeout, bucket_bytes=bucket_bytes, device_calls=calls
        )
    except BaseException:
        group.close()  # the caller has no reference to it; this tells the other ranks
        raise


@refuses_renamed
def connect_if_launched(**options: Any) -> Exchange | None:
    """Return `connect(**options)` if a launcher started this process, else None: for a script that may run alone.

    The launchers are those of `connect`: torchrun, mpiexec, srun, or the GRADENGINE_ variables.

    Args:
        options: Keyword arguments of `connect`, with which it is called under a launcher.

    Raises:
        CallerError, DeviceUnavailable, PeerLost: As `connect`, under a launcher.

    Example::

        engine = GradientEngine(layout, exchange=connect_if_launched())
    """
    return None if launcher_of(os.environ) is None else connect(**options)


def _refuse_of_sockets(url: str | None, process_group: Any, communicator: Any, given: Mapping[str, object]) -> None:
    """Raise `CallerError` for an argument that is needed only if ranks connect at an address."""
    if process_group is not None and communicator is not None:
        raise CallerError("connect takes a process_group or a communicator, and was given both", do="give one of them")
    way = f'url="{MPI_URL}"'
    if process_group is not None or communicator is not None:
        way, given = "process_group" if communicator is None else "communicator", {"url": url, **given}
    if process_group is not None:
        given = {name: value for name, value in given.items() if name not in {"link", "tls", "ports"}}
    for name, value in given.items():
        if value is not None:
            raise CallerError(f"connect with {way} takes no {name}", do=f"leave {name} out")


def _refuse_other_place(group: Link | Meeting, rank: int | None, world_size: int | None) -> None:
    for name, given, own in (("rank", rank, group.rank), ("world_size", world_size, group.world_size)):
        if given is not None and as_index(given) != own:
            raise CallerError(f"{name} differs from the group's", got=said(given), expected=own, do=f"leave {name} out")
