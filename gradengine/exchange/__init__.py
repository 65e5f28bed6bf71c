"""Ordered all-reduce over ranks: one interface, and several transports with bitwise equal results.

Each rank passes a layout and a flat fp32 arena. The all-reduce replaces the arena by the sum over ranks, added in rank
order from rank 0's value on. It also returns the squared sums of the arena's chunks and the first NaN or Inf of each
rank. The package imports `arrays`, `layout` and `kernels`. This text describes how its parts work together.
docs/specs/wire.md describes the bytes that they send.

Lifetimes
---------

- A process owns sockets and descriptors. A forked child closes all that it inherits, and every exchange of its parent
  refuses the child's calls.
- A group is a fixed number of ranks that have met once. `Exchange` is one rank's side of it. `connect` makes an
  exchange, `bind` lets the ranks meet, and `close` ends it. A group that has failed cannot be used again. To continue,
  the ranks make new exchanges, and `bind(replaces=...)` closes the old one.
- A link lives as long as its group. It moves bytes between this rank and each other rank, and does not depend on
  layouts or steps. `links/` has a file for each kind.
- A step begins with `begin`. It ends when all sums have arrived and all ranks have gathered their stats. An exchange
  has one open step, and the engine numbers it.
- A span is a range of the arena that backward completes in one go. It is a block, or a component outside of blocks. It
  is started once in a step, and spans may start in any order.
- A share is a range of the arena that one rank, its owner, sums for all. Shares are cut from the layout when ranks
  join (`shares.py`), and they become ready as their spans are started. Only `ReadyShares` records which spans were
  started.
- A message is one part, one sum, the facts of one owner, or a piece of a gather. It has a tag, and memory at both
  ends.

Calls
-----

    reduction.Reducer                does what a step of the engine needs
      -> Exchange                    one rank of a group; raises errors, and closes itself then
           -> Meeting                meets the other ranks, and makes the link (mesh.py)
           -> hello                  compares what must be the same on all ranks
           -> OrderedAllReduce       decides what to transfer and to sum: no I/O, no threads, no clock
                -> ReadyShares       decides which shares are ready
                -> HostKernels       K1: the sum of W parts in rank order, measured in the same pass
           -> Gather                 small data from each rank to each: no I/O, no threads, no clock
           -> Pump                   makes the transfers of both, and reports those that are over
                -> Link              send, receive, borrow, release, poll
                -> DeviceArena       copies between a GPU's arena and rows on the host

Calls only go down. Results and errors go up. A server uses the same parts with a different entry point.
`GradientServer` accepts one group after the other. Its `Hub` is a pump whose all-reduce owns all shares and starts by
itself.

A span is reduced as follows. `Exchange.start` marks it in `ReadyShares` and wakes the pump. The pump gets transfers
from `OrderedAllReduce`, which are the parts of the shares that became ready. Each part is sent to its owner. The owner
sums a share once all parts have arrived, and sends the sum to all. After its last sum of the step it sends its facts,
which are the squared sums of its chunks and the first NaN or Inf of each rank's part. `Exchange.wait` returns when all
sums and facts have arrived and all sends of this rank are over. Then the ranks gather their stats, which ends the step.

Threads
-------

Only the engine's thread calls an exchange, one call at a time. Any thread may call `close`.

During `wait` or `gather` the caller's thread moves all bytes itself. For spans that are started in the background, the
pump has its own thread, from the first such span to the end of the step. This thread also sums shares. Only one of the
two threads turns the pump at a time. A thread that has new work for the other rings a bell. `Pump.lock` is held around
each call of `OrderedAllReduce` and `Gather`. No lock is held while bytes move. A server has one thread for everything.

States of a group
-----------------

    new ------ bind ------> between steps ---- first start ----> summing ---- wait ----> summed
     |                            ^                                 |                       |
     |                            +------- begin: the step is over on all ranks -----------+
     +---- any error, an interrupted call, or close: ended ---------+-----------------------+

- New: Rank 0 listens at the address. Nothing was sent.
- Between steps a rank may leave without an error on the others, because no rank waits for it.
- Summing: Parts and sums are in flight. The arena may not be read or written.
- Summed: The arena holds the sums, and `wait` returns the same again.
- Ended: Every call that needs a different rank raises the first error. `wait` and `tell` return a result of this step
  that they already have, and `start` leaves the error to `wait`. `holds_sums` is false if the arena is still this
  rank's own part.

Failures
--------

- A wrong call raises `CallerError` or `WindowError`. Nothing was sent, and the exchange is unchanged. In `bind` it ends
  the exchange if the ranks have met already, for example if the buckets cut the layout into too many shares.
- A rank with a different secret, job or world size is refused when it calls. The others wait for the right one until
  `join_timeout`, and then name the last refusal. Ranks that differ in layout, settings or step all get the same
  `HandshakeRefused`, which names the rank and the difference. Nothing was summed. A rank whose `link=` differs from
  rank 0's raises an error itself, and the others lose it.
- A rank that is gone (`PeerLost`), is late (`DeadlineExceeded`) or sends invalid data (`ProtocolError`) ends the group.
  Each rank closes its link and sends the name of the rank that it has lost, so that all ranks name the same one. A rank
  that is in the middle of a message then may name the one that closed.
- A rank that waits for a part fails first, and names the rank at fault. A rank that waits for a sum fails later by a
  second and a tenth of the timeout, and one that waits in a gather by twice that. Sums and gathers depend on parts.
- Ranks may name the wrong rank if they reach a step further apart than that, or have different timeouts. The same can
  happen if a part of a share takes longer than the timeout. Only the owner sees its bytes arrive, and the ranks that
  wait for the sum do not. A rank that is a step ahead names a rank that is still in the last step's gather, since it
  cannot see which rank that one waits for.
- A step is never continued in the middle. If no rank holds sums, the ranks meet in a new group and step again from
  their own parts. Otherwise `bind` reports to all of them that the window is lost.
- An interrupted call (Ctrl-C) closes the exchange. The other ranks then lose this rank without a timeout.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from gradengine.arguments import checked_seconds, truth_value
from gradengine.errors import CallerError
from gradengine.exchange.addresses import MPI_URL, address_of
from gradengine.exchange.exchange import DEFAULT_SHARE_BYTES, Exchange, local_group
from gradengine.exchange.launchers import ADDRESS, joining, launcher_of, read_job, read_ports
from gradengine.exchange.links.collectives import COLLECTIVES, link_over_mpi
from gradengine.exchange.links.link import Link
from gradengine.exchange.links.mpi import MpiLink
from gradengine.exchange.mesh import Meeting
from gradengine.exchange.pump import DEFAULT_JOIN_TIMEOUT, DEFAULT_TIMEOUT
from gradengine.exchange.server import GradientServer
from gradengine.exchange.tls import certificates_of
from gradengine.exchange.torch_group import device_calls_of, link_over_torch, meeting_by_torch

__all__ = ["Exchange", "GradientServer", "connect", "connect_if_launched", "local_group"]


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
    GRADENGINE_RANK, GRADENGINE_WORLD_SIZE and GRADENGINE_ADDRESS). `gradengine doctor` prints them.

    Over sockets rank 0 listens from this call on. Nothing is sent before the engine binds a layout, so ranks may
    start in any order. Then each rank listens at its own port until all are connected with each other. If all ranks are
    on one host, they detect it, even with tcp://, and use Unix sockets. They then read each other's arenas in shared
    memory if the engine is built with this exchange, on the CPU, and the address is loopback or a Unix socket.

    With an MPI communicator or a torch process group, rank and world size are the group's, and all of its ranks call
    this together. MPI sends the bytes over a private duplicate of the communicator. A process group only sends its
    ranks an address and a secret, and then they connect over sockets, as above. If the group's backend for CUDA is NCCL
    and all engines are on GPUs, NCCL moves the gradients on gradengine's streams. No step then waits on the host
    (docs/how-to/nccl.md).

    Args:
        url: "tcp://host:port" of rank 0, the same on all ranks. Or "unix:///path" on one machine, or "mpi://" for all
            ranks that mpiexec has started (needs mpi4py). None uses GRADENGINE_ADDRESS, or an address made from the
            launcher's variables. That is a Unix socket if all ranks are on one host, otherwise a port of the first one.
        rank: The number of this rank, 0..world_size - 1.
        world_size: Number of ranks in the group.
        secret: A secret that all ranks share, of at least 16 characters; required unless the host is loopback. None
            uses GRADENGINE_SECRET, or the file named by GRADENGINE_SECRET_FILE.
        job: The name of this run, the same on all ranks, which separates two runs that use one address. None uses
            GRADENGINE_JOB, or the launcher's name (torchrun --rdzv-id, Open MPI's mpirun, Slurm). "" means no name.
        timeout: Seconds without any progress after which waiting ranks fail, the same on all ranks. A rank that waits
            for a waiting rank fails up to 2 s and a fifth of this later.
        join_timeout: Seconds to wait for all ranks to join.
        bucket_bytes: Bytes that a rank sums at a time, at most 1 GiB. The value of rank 0, or of the server, is used.
            It changes no bit of the result.
        link: How bytes are sent. Ranks that connect at an address can use "tcp", "unix" or "shared_memory". With a
            process group, a communicator or "mpi://", "collectives" is also possible. It uses the all-to-all of torch's
            backend or of MPI, without a socket, port or secret. It sums the same bits, on the host, and does not name a
            rank that is missing after `timeout`. None uses rank 0's value, or the best link for the ranks' hosts if
            rank 0 has none. `exchange.link` is the one in use. It is "unix" in place of "shared_memory" if not all
            engines have their arena in shared memory.
        served: Whether all ranks connect to a `gradengine serve`, which sums for them. Only its port must be reachable.
        tls: A folder with ca.crt, tls.crt and tls.key. All data that is sent to other hosts is then encrypted, both
            ends show certificates of one authority (docs/how-to/tls.md), and NCCL moves no gradients. None uses
            GRADENGINE_TLS. Without either, data is not encrypted.
        ports: The ports at which ranks listen over TCP, as "29000-29100", for firewalls. Rank 0 listens at the port of
            `url`, and each other rank at the first free port of these. None uses GRADENGINE_PORTS, or any port.
        process_group: A group of torch.distributed with any backend. torch.distributed.group.WORLD is the default one,
            which is None before `init_process_group`. Not together with url, rank, world_size, secret, job or served.
        communicator: An mpi4py communicator; "mpi://" means MPI.COMM_WORLD. Not together with url, rank, world_size,
            secret, job, served, ports or tls, nor with a `link` except "collectives". MPI does not encrypt.

    Raises:
        CallerError: A URL, rank, job, secret or TLS file is invalid. Or an address that is not loopback has no secret,
            or rank 0 cannot listen there. Or an argument is missing here and in the environment, or is not needed with
            a communicator or process group.
        DeviceUnavailable: mpi4py or its MPI library is missing, or `link` is "shared_memory" and the system has none.
        PeerLost: Not all ranks of the communicator or the process group called this in time.

    Example:
        >>> with connect("tcp://127.0.0.1:0", rank=0, world_size=1) as exchange:
        ...     exchange.rank, exchange.world_size
        (0, 1)
    """
    served, certificates, listening = truth_value("served", served), certificates_of(tls), read_ports(os.environ, ports)
    options: Any = {"link": link, "tls": certificates, "ports": listening}
    seconds, calls = checked_seconds("join_timeout", join_timeout), None
    group: Link | Meeting
    given = {"rank": rank, "world_size": world_size, "secret": secret, "job": job, "served": served or None}
    if process_group is not None and communicator is not None:
        raise CallerError("connect got both a process_group and a communicator", do="pass one of them")
    address = str(os.environ.get(ADDRESS) if url is None else url)
    is_over_mpi = communicator is not None or (process_group is None and address == MPI_URL)
    if link == COLLECTIVES and (process_group is not None or is_over_mpi):
        _refuse_given(f'link="{COLLECTIVES}"', {**given, "tls": tls, "ports": ports})
        limit = checked_seconds("timeout", timeout)
        group = link_over_mpi(communicator, limit) if is_over_mpi else link_over_torch(process_group, limit)
    elif process_group is not None:
        _refuse_given("process_group", {"url": url, **given})
        group = meeting_by_torch(process_group, seconds, **options)
    elif is_over_mpi:
        way, at = (f'url="{MPI_URL}"', {}) if communicator is None else ("communicator", {"url": url})
        _refuse_given(way, {**at, **given, "link": link, "tls": tls, "ports": ports})
        group = MpiLink(communicator, timeout=seconds)
    else:
        if served and url is None and not os.environ.get(ADDRESS):
            raise CallerError("served=True needs the server's address", do=f"pass its url, or set {ADDRESS} to it")
        url, rank, world_size, secret = joining(url, rank, world_size, secret, job, listening)
        job = read_job(os.environ)[0] if job is None else job
        options |= {"secret": secret, "job": job, "is_served": served}
        group = Meeting(address_of(url), rank, world_size, **options)
    try:
        if process_group is not None and certificates is None:  # NCCL does not encrypt the gradients
            calls = device_calls_of(process_group)
        settings: Any = {"timeout": timeout, "join_timeout": join_timeout, "bucket_bytes": bucket_bytes}
        return Exchange(group, url=MPI_URL if is_over_mpi else None, device_calls=calls, **settings)
    except BaseException:
        group.close()  # The caller has no reference to close. This reports the failure to the other ranks.
        raise


def connect_if_launched(**options: Any) -> Exchange | None:
    """Return `connect(**options)` if a launcher started this process, otherwise None, for a script that may run alone.

    It detects torchrun, mpiexec, srun, and `GRADENGINE_RANK` with `GRADENGINE_WORLD_SIZE`, as `connect` does.

    Args:
        options: Keyword arguments for `connect`, used only under a launcher.

    Raises:
        CallerError, DeviceUnavailable, PeerLost: As `connect`, under a launcher. Also a `CallerError` if only one
            of the variables of rank and world size is set.

    Example::

        engine = GradientEngine(layout, exchange=connect_if_launched())
    """
    return None if launcher_of(os.environ) is None else connect(**options)


def _refuse_given(way: str, given: Mapping[str, object]) -> None:
    """Raise `CallerError` for an argument that is only used if ranks connect at an address."""
    for name, value in given.items():
        if value is not None:
            raise CallerError(f"connect with {way} takes no {name}", do=f"leave {name} out")
