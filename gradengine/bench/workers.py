"""Workers of this machine that sum a gradient set: what each of them does, and the crew that does it together."""

from __future__ import annotations

import gc
import importlib
import os
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

from gradengine.bench.case import relative_error
from gradengine.exchange import Exchange, Progress, connect
from gradengine.exchange.channel import Address, connect_socket, listen_socket
from gradengine.layout import GradientLayout
from gradengine.processes import ProcessPool, Reporter

__all__ = [
    "Crew", "ExchangeReduction", "GlooReduction", "ProcessCrew", "Reduction", "SocketReduction", "ThreadCrew",
    "contribution", "free_port", "receive_all", "sockets_of", "span_layout",
]  # fmt: skip

_SPAN = 1 << 20  # elements: 4 MB, a weight matrix of the 350M model
_JOIN_SECONDS = 60.0


def span_layout(elements: int) -> GradientLayout:
    """A gradient set of that many elements, in components of at most 4 MB.

    >>> span_layout(3 << 19).num_elements
    1572864
    """
    starts = range(0, elements, _SPAN)
    return GradientLayout.of({f"layers.{i}.w": (min(_SPAN, elements - start),) for i, start in enumerate(starts)})


def contribution(rank: int, elements: int) -> npt.NDArray[np.float32]:
    """What a rank contributes: the same numbers in whatever process they are asked for."""
    return np.random.default_rng(rank).standard_normal(elements, np.float32)


class Reduction(ABC):
    """One worker: `prepare` puts its contribution into its arena, `run` makes the arena the sum of all ranks."""

    def __init__(self, rank: int, world_size: int, elements: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._mine = contribution(rank, elements)
        self.arena = self._mine.copy()

    def prepare(self) -> None:
        """Put back what the last run summed over."""
        np.copyto(self.arena, self._mine)

    @abstractmethod
    def run(self) -> None:
        """Sum over the workers; all of them call it."""

    def error(self) -> float:
        """After a run, the largest relative difference from the sum in fp64."""
        total = np.zeros(self.arena.size)
        for rank in range(self.world_size):
            total += contribution(rank, self.arena.size)
        return relative_error([self.arena], lambda _: total)

    @abstractmethod
    def close(self) -> None:
        """Leave the group."""


@final
class ExchangeReduction(Reduction):
    """Ours, over any transport: an exchange that is not bound yet; it is made when all ranks have joined."""

    def __init__(self, exchange: Exchange, elements: int) -> None:
        super().__init__(exchange.rank, exchange.world_size, elements)
        self._exchange, self._layout, self._progress = exchange, span_layout(elements), Progress()
        exchange.bind(self._layout, self.arena, self._progress, lambda *_: None)

    @staticmethod
    def over(url: str, world_size: int, elements: int, rank: int) -> ExchangeReduction:
        """The reduction through `connect(url)`."""
        return ExchangeReduction(connect(url, rank, world_size, join_timeout=_JOIN_SECONDS), elements)

    def run(self) -> None:
        """Start every span at once and wait for the last sum."""
        for span in self._layout.spans:
            self._exchange.start(span)
        self._exchange.wait()
        self._progress.next_step()

    def close(self) -> None:
        """Leave the group."""
        self._exchange.close()


@final
class SocketReduction(Reduction):
    """By hand: every worker sends all it has to rank 0, which listens at the address, adds up and sends it back."""

    def __init__(self, address: Address, world_size: int, elements: int, rank: int) -> None:
        super().__init__(rank, world_size, elements)
        self._others = sockets_of(address, world_size, rank)
        self._received = np.empty_like(self.arena)

    def run(self) -> None:
        """Send and wait; or, on rank 0, receive, add, and send to each."""
        if self.rank:
            self._others[0].sendall(self.arena.data)
            receive_all(self._others[0], self.arena)
            return
        for connection in self._others:
            receive_all(connection, self._received)
            self.arena += self._received
        for connection in self._others:
            connection.sendall(self.arena.data)

    def close(self) -> None:
        """Hang up."""
        for connection in self._others:
            connection.close()


@final
class GlooReduction(Reduction):
    """PyTorch's gloo over TCP on the loopback interface; the ranks meet at a file that does not exist yet."""

    def __init__(self, path: str, world_size: int, elements: int, rank: int) -> None:
        super().__init__(rank, world_size, elements)
        # Else gloo takes the address of the host's name, which need not be this machine's loopback.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform.startswith("linux") else "lo0")
        self._distributed = importlib.import_module("torch.distributed")
        store = self._distributed.FileStore(path, world_size)
        self._distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        self._tensor = importlib.import_module("torch").from_numpy(self.arena)

    def run(self) -> None:
        """One all-reduce of the whole set."""
        self._distributed.all_reduce(self._tensor)

    def close(self) -> None:
        """End the process group."""
        self._distributed.destroy_process_group()


def sockets_of(address: Address, world_size: int, rank: int) -> list[socket.socket]:
    """Plain connections: of rank 0, which listens at the address, one with each other rank; of those one with it."""
    if rank:
        connections = [connect_socket(address, _JOIN_SECONDS)]
    else:
        with listen_socket(address) as listener:
            connections = [listener.accept()[0] for _ in range(world_size - 1)]
    for connection in connections:
        connection.settimeout(_JOIN_SECONDS)
    return connections


def receive_all(connection: socket.socket, memory: npt.NDArray[np.float32]) -> None:
    """Fill an array from a socket."""
    view, filled = memory.data.cast("B"), 0
    while filled < view.nbytes:
        count = connection.recv_into(view[filled:])
        if count == 0:
            raise ConnectionError("the other end closed the connection")
        filled += count


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens at.

    >>> 0 < free_port() < 1 << 16
    True
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


Build: TypeAlias = Callable[[int], Reduction]  # rank -> its worker; of a process: importable and picklable


class Crew(ABC):
    """Workers 0..world_size - 1 of one group."""

    @abstractmethod
    def tell(self, method: str) -> list[Any]:
        """Have every worker call one of its methods; what each returned, in rank order, once all have.

        Raises:
            ExchangeError: A worker failed.
        """

    def prepare(self) -> None:
        """Have every worker put its contribution back."""
        self.tell("prepare")

    def run(self) -> None:
        """Have the workers sum."""
        self.tell("run")

    def error(self) -> float:
        """The largest error of any worker's result; NaN where one is."""
        errors: list[float] = self.tell("error")
        return next((error for error in errors if not error <= max(errors)), max(errors))

    @abstractmethod
    def close(self) -> None:
        """End the workers."""


@final
class ThreadCrew(Crew):
    """A thread of this process for each worker, which is built there."""

    def __init__(self, build: Build, world_size: int) -> None:
        self._pool = ThreadPoolExecutor(world_size, thread_name_prefix="gradengine-bench")
        self._workers = list(self._pool.map(build, range(world_size)))

    def tell(self, method: str) -> list[Any]:
        """See `Crew.tell`."""
        return list(self._pool.map(lambda worker: getattr(worker, method)(), self._workers))

    def close(self) -> None:
        """See `Crew.close`."""
        for worker in self._workers:
            worker.close()
        self._pool.shutdown()


@final
class ProcessCrew(Crew):
    """A process for each worker, which is built there: started anew, so that it shares nothing with this one.

    Raises:
        ExchangeError: A worker could not be made.
    """

    def __init__(self, build: Build, world_size: int) -> None:
        self._pool = ProcessPool()
        self._workers = [self._pool.start(f"rank {rank}") for rank in range(world_size)]
        self._all([partial(_serve, build, rank) for rank in range(world_size)])

    def tell(self, method: str) -> list[Any]:
        """See `Crew.tell`."""
        return self._all([method] * len(self._workers))

    def close(self) -> None:
        """See `Crew.close`."""
        self._pool.close()

    def _all(self, jobs: Sequence[Any]) -> list[Any]:
        """Give each worker a job; if one fails, or Ctrl-C comes, all are ended, as they may wait for each other."""
        try:
            for worker, job in zip(self._workers, jobs, strict=True):
                self._pool.give(worker, job)
            return self._pool.answers()
        except BaseException:
            self._pool.terminate()
            raise


def _serve(build: Build, rank: int, report: Reporter) -> None:
    """A worker's process: call the methods it is told, until the other end of the pipe is gone."""
    gc.disable()
    worker = build(rank)
    report(None)
    for method in report:
        report(getattr(worker, method)())
    worker.close()
