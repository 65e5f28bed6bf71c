"""A link over torch.distributed: gloo's send and receive between host arrays, in a group of its own.

Beside NCCL too: a receive of NCCL that waits for a late rank would hold the whole device. Gloo tells those alone that a
transfer is over who wait for it: so there are two threads for each other rank. What goes to one rank goes in order,
a head before each: its tag and its size.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import re
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, final

import numpy as np

from gradengine.arguments import said
from gradengine.errors import CallerError, PeerLost, ProtocolError
from gradengine.exchange.links.link import Completed, Completion, Link, Memory
from gradengine.threads import Bell

_ALWAYS, _AT_ONCE = timedelta(days=365), timedelta(milliseconds=1)
_DATA_TAG, _NOBODYS_TAG = 0, 1
_CLOSE_SECONDS = 5.0


def torch_link(process_group: Any = None, *, timeout: float = 60.0) -> TorchLink:
    """This rank's link to the ranks of a process group of torch.distributed; made on all of them together.

    Args:
        process_group: torch's; None is the default group. Its own messages are not met.
        timeout: Seconds in which all ranks have to make the link.

    Raises:
        CallerError: torch.distributed is not initialized, or this is no group of torch's with this process.
        PeerLost: A rank did not make the link in time.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        do = "call torch.distributed.init_process_group first"
        raise CallerError("there is no torch process group in this process", do=do)
    distributed: Any = torch.distributed
    if process_group is not None and not isinstance(process_group, distributed.ProcessGroup):  # torch's -100, say
        raise _no_group(process_group)
    try:
        ranks, rank = distributed.get_process_group_ranks(process_group), distributed.get_rank(process_group)
    except (KeyError, ValueError):  # it was destroyed
        raise _no_group(process_group) from None
    limit = timedelta(seconds=timeout)
    try:
        gloo = distributed.new_group(ranks, limit, backend="gloo", use_local_synchronization=True)
        distributed.barrier(group=gloo)  # a rank that closes at once would cut off another that still connects
    except RuntimeError as fault:
        what, do = f"not all ranks make a link with rank {rank} ({_said(fault)})", "make the link on every rank"
        raise PeerLost(what, do=do) from None
    return TorchLink(gloo, rank, [sorted(ranks).index(each) for each in ranks])


def _no_group(given: object) -> CallerError:
    do = "give what torch.distributed.new_group returned, on the ranks that are in it"
    return CallerError("this is no process group of torch with this process", got=said(given), do=do)


@final
class TorchLink(Link):
    """See `torch_link`.

    Args:
        gloo: A gloo group that nobody else uses.
        rank: This rank.
        places: Each rank's place in that group.
    """

    name = "torch"

    def __init__(self, gloo: Any, rank: int, places: Sequence[int]) -> None:
        self.rank, self.world_size = rank, len(places)
        self._torch, self._gloo, self._places = sys.modules["torch"], gloo, places
        self._changed = threading.Condition()
        self._open: dict[Completion, Memory] = {}
        self._over: list[Completion] = []
        self._held: dict[int, int] = {}  # by rank, the tag of its next message, which nobody receives yet
        self._faults: dict[int, PeerLost | ProtocolError] = {}  # why no more comes from a rank, or goes to it
        self.bell = Bell()
        self._is_closed, self._has_left, self._closing = False, False, threading.Lock()
        self._process = os.getpid()
        self._outgoing: dict[int, queue.SimpleQueue[Completion | None]] = {}
        self._threads: list[threading.Thread] = []
        for peer in range(self.world_size):
            if peer != rank:
                self._outgoing[peer] = queue.SimpleQueue()
                for work, way in ((self._send_all, "to"), (self._receive_all, "from")):
                    name = f"gradengine-{rank}-{way}-{peer}"
                    thread = threading.Thread(target=self._run, args=(work, peer), name=name, daemon=True)
                    self._threads.append(thread)
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)  # a thread that still waits when Python has ended would abort the process

    def send(self, peer: int, tag: int, memory: Memory) -> None:
        transfer = Completion(Completed.SENT, peer, tag)
        self._begin(transfer, memory)
        self._outgoing[peer].put(transfer)

    def receive(self, peer: int, tag: int, memory: Memory) -> None:
        self._begin(Completion(Completed.RECEIVED, peer, tag), memory)

    def poll(self) -> list[Completion]:
        with self._changed:
            self._refuse_closed()
            over, self._over = self._over, []
            awaited = set() if over else {peer for _, peer, _ in self._open}
            for peer in self._faults:  # the one that was lost first: others may have closed for that
                if peer in awaited:
                    self.lost = peer
                    raise self._faults[peer]
            return over

    def held(self) -> list[int]:
        with self._changed:
            return [*self._held.values()]

    def close(self) -> None:
        if os.getpid() != self._process:  # a fork's exit is not the end of the group
            return
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        with self._closing:  # when Python ends no other thread that closes the link may be in gloo, or come there
            if self._has_left:
                return
            for peer, outgoing in self._outgoing.items():
                outgoing.put(None)
                # A wait that ends without its transfer closes all connections, and so ends the other waits.
                with contextlib.suppress(RuntimeError):
                    self._gloo.recv([self._torch.zeros(1)], self._places[peer], _NOBODYS_TAG).wait(_AT_ONCE)
            for thread in self._threads:
                thread.join(_CLOSE_SECONDS)
            self._has_left = True
        atexit.unregister(self.close)

    def _begin(self, transfer: Completion, memory: Memory) -> None:
        with self._changed:
            self._refuse_closed()
            self._open[transfer] = memory
            self._changed.notify_all()
            if transfer.peer in self._faults:
                self.bell.ring()

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise PeerLost(f"the link of rank {self.rank} is closed")

    # ---- the threads of one other rank ----

    def _run(self, work: Callable[[int], None], peer: int) -> None:
        try:
            work(peer)
        except RuntimeError as fault:
            what = f"rank {peer} is gone: the connection with it is lost ({_said(fault)})"
            self._fail(peer, PeerLost(what, do="reconnect on all ranks"))
        except ProtocolError as fault:
            self._fail(peer, fault)

    def _send_all(self, peer: int) -> None:
        while (transfer := self._outgoing[peer].get()) is not None:
            memory = self._open[transfer]
            self._move(self._gloo.send, peer, np.array([transfer.tag, memory.nbytes], "<i8"))
            self._move(self._gloo.send, peer, memory if memory.flags.writeable else memory.copy())
            self._end(transfer)

    def _receive_all(self, peer: int) -> None:
        head = np.zeros(2, "<i8")
        while True:
            self._move(self._gloo.recv, peer, head)
            tag, size = head.tolist()
            transfer = Completion(Completed.RECEIVED, peer, tag)
            with self._changed:
                if transfer not in self._open:
                    self._held[peer] = tag
                    self.bell.ring()
                while transfer not in self._open and not self._is_closed:
                    self._changed.wait()
                self._held.pop(peer, None)
                if self._is_closed:
                    return
                memory = self._open[transfer]
            if size != memory.nbytes:
                what = f"rank {peer} sent rank {self.rank} another size with tag {tag}"
                raise ProtocolError(what, got=f"{size} bytes", expected=f"{memory.nbytes} bytes")
            self._move(self._gloo.recv, peer, memory)
            self._end(transfer)

    def _move(self, begin: Any, peer: int, memory: Memory) -> None:
        """Send or receive; returns when it is over."""
        if memory.nbytes:
            tensor = self._torch.from_numpy(memory.reshape(-1).view(np.uint8))
            begin([tensor], self._places[peer], _DATA_TAG).wait(_ALWAYS)

    def _end(self, transfer: Completion) -> None:
        with self._changed:
            del self._open[transfer]
            self._over.append(transfer)
        self.bell.ring()

    def _fail(self, peer: int, fault: PeerLost | ProtocolError) -> None:
        with self._changed:
            self._faults.setdefault(peer, fault)
        self.bell.ring()


def _said(fault: RuntimeError) -> str:
    """The first line, without the place in gloo's source."""
    return re.sub(r"^\[\S*\] ", "", str(fault).partition("\n")[0])[-200:]
