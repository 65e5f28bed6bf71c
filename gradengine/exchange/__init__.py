"""Ordered all-reduce over workers: one interface, the transports of it, the same bytes from each.

In: a layout and a flat fp32 arena in host memory on every rank. Out: the arena with the sum over ranks. `interface.py`
is what a transport is: `local.py` (threads), `tcp.py` and `server.py` (sockets); `group.py` adds the ranks' gradients,
for each of them. Imports `layout` and `kernels`.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from gradengine.arguments import checked_rank, said, truth_value
from gradengine.errors import CallerError
from gradengine.exchange.channel import Address
from gradengine.exchange.interface import (
    DEFAULT_BUCKET_BYTES,
    DEFAULT_JOIN_TIMEOUT,
    DEFAULT_TIMEOUT,
    Exchange,
    NonFiniteValue,
    Progress,
)
from gradengine.exchange.launcher import job_or_launchers
from gradengine.exchange.local import LocalExchange, local_group
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
    url: str,
    rank: int,
    world_size: int,
    *,
    token: str | None = None,
    job: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    join_timeout: float = DEFAULT_JOIN_TIMEOUT,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    served: bool = False,
) -> Exchange:
    """This rank's exchange in a process group. Rank 0 hosts the coordinator, unless a server does; the others connect.

    Nothing is sent before the engine binds a layout, so workers may start in any order.

    Args:
        url: "tcp://host:port", the same on all ranks; or "unix:///path" on one machine.
        rank: This worker's rank, 0..world_size - 1.
        world_size: Workers in the group.
        token: A secret that all workers share; required unless the host is loopback.
        job: The name of this run, the same on all ranks, which keeps two runs with one address apart. None: the job
            that the launcher names (torchrun --rdzv-id, Open MPI's mpirun, Slurm, PBS, LSF). "": none.
        timeout: Seconds without any progress after which waiting ranks fail.
        join_timeout: Seconds to wait for all ranks to join.
        bucket_bytes: Bytes of one message; the coordinator's value is used, and changes no bit of the result.
        served: True if `gradengine serve` runs the coordinator: then rank 0 connects like the others.

    Raises:
        CallerError: A bad URL, rank or job, an address beyond loopback without a token, or rank 0 cannot listen there.

    Example:
        >>> with connect("tcp://127.0.0.1:0", rank=0, world_size=1) as exchange:
        ...     exchange.rank, exchange.world_size
        (0, 1)
    """
    rank, world_size = checked_rank(rank, world_size)
    served = truth_value("served", served)
    address = _address(url)
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


def _address(url: str) -> Address:
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
        port = parts.port
    except ValueError:  # of the port, or of a bracket
        parts, port = urlsplit(""), None
    if parts.scheme == "unix" and parts.path and not parts.netloc:
        return parts.path
    if parts.scheme == "tcp" and parts.hostname and port is not None:
        return parts.hostname, port
    raise CallerError(
        "not a valid group URL",
        got=said(url),
        expected="'tcp://host:port' or 'unix:///path'",
        do="threads of one process use local_group(world_size)",
    )
