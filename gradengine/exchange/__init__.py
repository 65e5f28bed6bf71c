"""Ordered all-reduce over workers: one interface, the transports of it, the same bytes from each.

In: a layout and a flat fp32 arena in host memory on every rank. Out: the arena with the sum over ranks. `interface.py`
is what a transport is: `local.py` (threads), `tcp.py` and `server.py` (sockets); `group.py` adds the ranks' gradients,
for each of them. Nothing uses the rest yet: `links/` moves bytes between any two ranks, `gather.py` small data over
them; `ordered_all_reduce.py` adds the shares that `shares.py` cuts, each at its owner; `pump.py` runs it over a link.
Imports `layout` and `kernels`.
"""

from __future__ import annotations

from gradengine.arguments import checked_rank, truth_value
from gradengine.exchange.environment import job_or_launchers
from gradengine.exchange.interface import (
    DEFAULT_BUCKET_BYTES,
    DEFAULT_JOIN_TIMEOUT,
    DEFAULT_TIMEOUT,
    Exchange,
    NonFiniteValue,
    Progress,
)
from gradengine.exchange.local import LocalExchange, local_group
from gradengine.exchange.rendezvous import address_of, joining
from gradengine.exchange.server import GradientServer
from gradengine.exchange.tcp import WorkerClient

__all__ = [
    "Exchange",
    "GradientServer",
    "LocalExchange",
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
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    served: bool = False,
) -> Exchange:
    """This rank's exchange in a process group. Rank 0 hosts the coordinator, unless a server does; the others connect.

    What is not given is what the launcher says (torchrun, mpiexec, srun, or GRADENGINE_RANK, GRADENGINE_WORLD_SIZE and
    GRADENGINE_ADDRESS); `gradengine env` prints it. Nothing is sent before the engine binds a layout, so workers may
    start in any order.

    Args:
        url: "tcp://host:port", the same on all ranks; or "unix:///path" on one machine. None: GRADENGINE_ADDRESS, or
            where the launcher's ranks meet: a Unix socket on one host, else a port of the first one.
        rank: This worker's rank, 0..world_size - 1.
        world_size: Workers in the group.
        token: A secret that all workers share; required unless the host is loopback. None: that of GRADENGINE_TOKEN, or
            in the file that GRADENGINE_TOKEN_FILE names.
        job: The name of this run, the same on all ranks, which keeps two runs with one address apart. None: the job
            of GRADENGINE_JOB, or that the launcher names (torchrun --rdzv-id, Open MPI's mpirun, Slurm, PBS, LSF).
            "": none.
        timeout: Seconds without any progress after which waiting ranks fail.
        join_timeout: Seconds to wait for all ranks to join.
        bucket_bytes: Bytes of one message; the coordinator's value is used, and changes no bit of the result.
        served: True if `gradengine serve` runs the coordinator: then rank 0 connects like the others.

    Raises:
        CallerError: A bad URL, rank or job, an address beyond loopback without a token, or rank 0 cannot listen there;
            or what was not given no variable of the environment says.

    Example:
        >>> with connect("tcp://127.0.0.1:0", rank=0, world_size=1) as exchange:
        ...     exchange.rank, exchange.world_size
        (0, 1)
    """
    served = truth_value("served", served)
    url, rank, world_size, token = joining(url, rank, world_size, token, job, served=served)
    rank, world_size = checked_rank(rank, world_size)
    address = address_of(url)
    if served or rank > 0:
        return WorkerClient(address, rank, world_size, token=token, job=job, timeout=timeout, join_timeout=join_timeout)
    server = GradientServer(
        world_size,
        address,
        token=token,
        job=job_or_launchers(job),
        timeout=timeout,
        join_timeout=join_timeout,
        bucket_bytes=bucket_bytes,
    )
    try:
        return LocalExchange(server.group, 0, on_close=server.close, url=server.url)
    except BaseException:
        server.close()  # interrupted: the caller has no reference to it
        raise
