"""Ordered all-reduce over workers: one interface, several transports, the same bytes from each.

In: a layout and a flat fp32 arena on every rank. Out: the arena with the sum over ranks, taken in rank order from rank
0's value on, the squared sums of its chunks, and the first NaN or Inf of each rank. Imports `arrays`, `layout` and
`kernels`. This page says how the parts work together. docs/wire.md says which bytes they send.

How long each object lives
--------------------------

- A process holds sockets and descriptors. A forked child closes all that it inherits, and is refused by every exchange
  of its parent.
- A group is a fixed number of ranks that have met once. `Exchange` is one rank's side of it. `connect` makes an
  exchange, `bind` lets the ranks meet, and `close` ends it. A group that has failed does not come back: ranks that go
  on make new exchanges, and `bind(replaces=...)` closes the old one.
- A link lives as long as its group. It moves bytes between this rank and each other rank, and it has no idea of
  layouts or steps. `links/` has a file for each kind.
- A step begins with `begin` and ends when all sums are here and all ranks have gathered their stats. An exchange has
  one open step. Its number is the engine's.
- A span is a range of the arena that backward completes at once: a block, or a component outside of blocks. It is
  started once in a step, in any order.
- A share is a range of the arena that one rank, its owner, sums for all. Shares are cut from the layout when ranks
  join (`shares.py`), and they become ready as their spans are started. `ReadyShares` holds what was started, and
  nothing else does.
- A message is one part, one sum, the facts of one owner, or a piece of a gather. It has a tag, and memory at both
  ends.

Who calls whom
--------------

    reduction.Reducer                what the engine's step asks for
      -> Exchange                    one rank of a group; raises what went wrong, and closes itself then
           -> Meeting                meets the other ranks, and makes the link (mesh.py)
           -> hello                  compares what must be the same on all ranks
           -> OrderedAllReduce       which transfers to make, and what to sum: no I/O, no threads, no clock
                -> ReadyShares       which shares are ready
                -> HostKernels       K1: the sum of W parts in rank order, measured in the same pass
           -> Gather                 small data from each rank to each: no I/O, no threads, no clock
           -> Pump                   takes the transfers of both, makes them, and reports those that are over
                -> Link              send, receive, borrow, release, poll
                -> DeviceArena       copies between a GPU's arena and rows on the host

Calls go down only. What goes up is an answer or an error. A server is the same house with another door:
`GradientServer` accepts one group after another, and its `Hub` is a pump whose all-reduce owns all shares and starts
by itself.

The way of one span: `Exchange.start` marks it in `ReadyShares` and wakes the pump. The pump asks `OrderedAllReduce`
for transfers, which gives it the parts of the shares that became ready. Each part goes to its owner. The owner sums a
share once all parts are there, and sends the sum to all. After its last sum of the step it sends its facts: the
squared sums of its chunks, and the first NaN or Inf of each rank's part. `Exchange.wait` returns when all sums and
facts are here, and when nothing of this rank is on its way any more. Then the ranks gather their stats, which ends the
step.

On which thread
---------------

One thread at a time makes the calls of an exchange: the engine's. `close` may come from any thread.

While `wait` or `gather` waits, the caller's thread moves all bytes itself. For spans that are started in the
background the pump has a thread of its own, from the first such span to the end of the step. It sums shares too. One
of the two turns the pump at a time, and whoever has something new for the other rings a bell. `Pump.lock` is held
around each call of `OrderedAllReduce` and `Gather`. No lock is held while bytes move. A server has one thread for
everything.

The states of a group
---------------------

    new ------ bind ------> between steps ---- first start ----> summing ---- wait ----> summed
     |                            ^                                 |                       |
     |                            +------- begin: the step is over on all ranks -----------+
     +---- any error, an interrupted call, or close: ended ---------+-----------------------+

- new: the address is taken, if this is rank 0. Nothing was sent.
- between steps: a rank may leave without an error at the others, because nobody waits for it.
- summing: parts and sums are on their way. The arena may not be read or written.
- summed: the arena holds the sums, and `wait` returns the same again.
- ended: every call that needs another rank raises the first error. `wait` and `tell` return what is here already,
  and `start` leaves the error to `wait`. `holds_sums` says whether the arena is still this rank's own part.

What each failure does
----------------------

- A wrong call is a `CallerError` or `WindowError`. Nothing was sent, and the exchange is as it was. In `bind` it ends
  the exchange if the ranks have met already: buckets that cut the layout into too many shares are found then.
- A rank with a different secret, job or world size is refused when it calls. The others wait for the right one until
  `join_timeout`, and then name the last refusal. Ranks that differ in layout, settings or step all get the same
  `HandshakeRefused`, which names the rank and the difference. Nothing was summed. A rank with another `link=` than rank
  0 is refused by itself, and the others lose it.
- A rank that is gone (`PeerLost`), late (`DeadlineExceeded`) or says what it should not (`ProtocolError`) ends the
  group. Each rank closes its link, and says there which rank it has lost, so that all that hear it name the same one.
  A rank that is amid a message at that moment may name the one that closed.
- A rank that waits for a part names the rank at fault itself. It gives up first. A rank that waits for a sum gives up
  a second and a tenth of the timeout later, and one that waits in a gather twice that later, since they depend on it.
  If ranks come to a step with a larger difference, or have different timeouts, they may name an innocent one. So they
  may if a part of a share takes longer than the timeout: the owner sees its bytes, and those who wait for the sum not.
  A rank that is a step ahead names a rank that is still in the last step's gather, since it cannot see for whom that
  one waits.
- Nothing is gone on with in the middle. If no rank holds sums, the ranks meet in a new group and step again from their
  own parts. Otherwise `bind` tells all of them that the window is lost.
- An interrupted call (Ctrl-C) closes the exchange. The other ranks lose this rank at once.
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
        timeout: Seconds without any progress after which waiting ranks fail, the same on all ranks. A rank that
            depends on another one's wait fails up to 2 s and a fifth of this later.
        join_timeout: Seconds to wait for all ranks to join.
        bucket_bytes: Bytes that a rank sums at a time, at most 1 GiB; rank 0's value, or the server's, is used. It
            changes no bit of the result.
        link: How bytes are sent. Between ranks that connect at an address: "tcp", "unix" or "shared_memory". With a
            process group, communicator or "mpi://" also "collectives": by the all-to-all that torch's backend or MPI
            has, without a socket, port or secret of ours. It sums the same bits, on the host, and a rank that does not
            take part within `timeout` is not named. None: rank 0's value, or if rank 0 has none, the best for the
            ranks' hosts. `exchange.link` says which it is; it is "unix" if not all engines have their arena in shared
            memory.
        served: True if all ranks connect to a `gradengine serve`, which sums for them: only its port must be reachable.
        tls: A folder with ca.crt, tls.crt and tls.key, by which all that leaves this host is encrypted, both ends show
            certificates of one authority (docs/tls.md), and NCCL moves no gradients. None: that in GRADENGINE_TLS; if
            there is none, data is sent in plain.
        ports: The ports at which ranks listen over TCP, as "29000-29100", for firewalls. Rank 0 listens at the port of
            `url`, and each other rank at the first free port of these. None: those in GRADENGINE_PORTS, or any.
        process_group: A group of torch.distributed with any backend; torch.distributed.group.WORLD is the default one,
            which is None before `init_process_group`. Not together with url, rank, world_size, secret, job or served.
        communicator: An mpi4py communicator; "mpi://" means MPI.COMM_WORLD. Not together with url, rank,
            world_size, secret, job, link, served, ports or tls: MPI's own messages are not encrypted.

    Raises:
        CallerError: A bad URL, rank, job or secret; an address beyond loopback without a secret; an address at which
            rank 0 cannot listen; an argument that is neither given nor in the environment; or one that is not
            needed with a communicator or process group; or a file of TLS cannot be used.
        DeviceUnavailable: mpi4py or its MPI library is missing; or `link` is "shared_memory" and the system has none.
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
        raise CallerError("connect takes a process_group or a communicator, and was given both", do="give one of them")
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
        if process_group is not None and certificates is None:  # NCCL sends the gradients in plain
            calls = device_calls_of(process_group)
        settings: Any = {"timeout": timeout, "join_timeout": join_timeout, "bucket_bytes": bucket_bytes}
        return Exchange(group, url=MPI_URL if is_over_mpi else None, device_calls=calls, **settings)
    except BaseException:
        group.close()  # the caller has no reference to it; this tells the other ranks
        raise


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


def _refuse_given(way: str, given: Mapping[str, object]) -> None:
    """Raise `CallerError` for an argument that is needed only if ranks connect at an address."""
    for name, value in given.items():
        if value is not None:
            raise CallerError(f"connect with {way} takes no {name}", do=f"leave {name} out")
