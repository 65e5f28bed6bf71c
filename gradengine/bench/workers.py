"""`bench exchange`: W workers on this machine sum one gradient set; each worker's work, and the crew of processes.

Bytes counted, for every variant alike: 2 (W - 1) sets, which cross between workers in a star as in a ring.
"""

from __future__ import annotations

import gc
import importlib
import os
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

from gradengine.arrays.shared import shared_array
from gradengine.bench.device import Case, Host
from gradengine.bench.harness import Variant, relative_error
from gradengine.console.processes import ProcessPool
from gradengine.exchange import Exchange, connect, local_group
from gradengine.layout import GradientLayout

_SPAN = 1 << 20  # elements: 4 MB, a weight matrix of the 350M model
_JOIN_SECONDS = 60.0


def span_layout(elements: int) -> GradientLayout:
    """A gradient set of that many elements, in components of at most 4 MB."""
    starts = range(0, elements, _SPAN)
    return GradientLayout.of({f"layers.{i}.w": (min(_SPAN, elements - start),) for i, start in enumerate(starts)})


def contribution(rank: int, elements: int) -> npt.NDArray[np.float32]:
    """A rank's contribution: the same numbers in every process."""
    return np.random.default_rng(rank).standard_normal(elements, np.float32)


class Reduction(ABC):
    """One worker: `prepare` puts its contribution into its arena, `run` makes the arena the sum of all ranks."""

    def __init__(self, rank: int, world_size: int, elements: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._mine = contribution(rank, elements)
        self.arena = self._mine.copy()

    def prepare(self) -> None:
        """Restore the contribution, which the last run has overwritten with the sum."""
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


@final
class ExchangeReduction(Reduction):
    """Ours, over any transport: takes an exchange that is not bound yet, and returns when all ranks have joined."""

    def __init__(self, exchange: Exchange, elements: int) -> None:
        super().__init__(exchange.rank, exchange.world_size, elements)
        if exchange.shares_memory:  # as the arena of an engine that is made with it
            self.arena = shared_array(elements)
        self._exchange, self._layout, self._step = exchange, span_layout(elements), 0
        exchange.bind(self._layout, self.arena)

    @staticmethod
    def over(url: str, link: str, world_size: int, elements: int, rank: int) -> ExchangeReduction:
        """The reduction through `connect(url, link=link)`."""
        return ExchangeReduction(connect(url, rank, world_size, link=link, join_timeout=_JOIN_SECONDS), elements)

    def run(self) -> None:
        """Start every span at once and wait for the last sum."""
        self._exchange.start(*self._layout.spans)
        self._exchange.wait()
        self._step += 1
        self._exchange.begin(self._step)


@final
class ThreadReductions:
    """Ours between threads: all the ranks in one process, a thread for each."""

    def __init__(self, world_size: int, elements: int, _: int) -> None:
        self._pool, group = ThreadPoolExecutor(world_size), local_group(world_size)
        self._ranks = list(self._pool.map(lambda exchange: ExchangeReduction(exchange, elements), group))

    def prepare(self) -> None:
        """See `Reduction.prepare`."""
        list(self._pool.map(Reduction.prepare, self._ranks))

    def run(self) -> None:
        """See `Reduction.run`."""
        list(self._pool.map(ExchangeReduction.run, self._ranks))

    def error(self) -> float:
        """The largest error of any rank."""
        return float(np.max(list(self._pool.map(Reduction.error, self._ranks))))


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


def free_port() -> int:
    """A free port of 127.0.0.1."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


Build: TypeAlias = Callable[[int], Any]  # rank -> its worker, often a `Reduction`; importable and picklable
_built: list[Any] = []  # in a process of a crew: its worker


@final
class Crew:
    """A process for each worker of a group, in which it is built; each is spawned, and shares nothing with this one.

    If a worker cannot be built, or fails, an `ExchangeError` names it, and the others are ended too.
    """

    def __init__(self, build: Build, world_size: int) -> None:
        self._pool = ProcessPool()
        self._workers = [self._pool.start(f"rank {rank}") for rank in range(world_size)]
        self._all([partial(_build, build, rank) for rank in range(world_size)])

    def tell(self, method: str) -> list[Any]:
        """Let every worker call one of its methods; returns all results, in rank order."""
        return self._all([partial(_call, method)] * len(self._workers))

    def prepare(self) -> None:
        """Let every worker restore its contribution."""
        self.tell("prepare")

    def run(self) -> None:
        """Let the workers sum."""
        self.tell("run")

    def error(self) -> float:
        """The largest error of any worker's result; NaN if one is NaN."""
        return float(np.max(self.tell("error")))

    def close(self) -> None:
        """End the workers."""
        self._pool.terminate()

    def _all(self, jobs: Sequence[Any]) -> list[Any]:
        """Give each worker a job; if one fails, or Ctrl-C comes, all are ended, as they may wait for each other."""
        try:
            for worker, job in zip(self._workers, jobs, strict=True):
                self._pool.give(worker, job)
            return self._pool.results()
        except BaseException:
            self._pool.terminate()
            raise


def _build(build: Build, rank: int, **_: object) -> None:
    """Build the worker of this process, which stays until the process ends."""
    gc.disable()
    _built.append(build(rank))


def _call(method: str, **_: object) -> Any:
    """Call a method of this process's worker."""
    return getattr(_built[0], method)()


@contextmanager
def exchange_variants(host: Host, world_size: int, elements: int) -> Iterator[list[Variant]]:
    """Ours over TCP, over Unix sockets, in shared memory and between threads; and gloo.

    The processes live until the context ends; the set is a multiple of 32 elements.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="gradengine-bench-")))

        def variant(name: str, kind: Callable[..., Any], *where: object, processes: int = world_size) -> Variant:
            def build() -> Case:
                if kind is GlooReduction:
                    assert host.torch  # or it is missing
                crew = Crew(partial(kind, *where, world_size, elements), processes)
                stack.callback(crew.close)
                return Case(crew.run, crew.error, crew.prepare)

            return Variant(name, 2 * (world_size - 1) * 4 * elements, build, base=name.startswith("ours"))

        yield [
            variant("ours tcp://", ExchangeReduction.over, f"tcp://127.0.0.1:{free_port()}", "tcp"),
            variant("ours unix://", ExchangeReduction.over, f"unix://{folder / 'unix'}", "unix"),
            variant("ours shared memory", ExchangeReduction.over, f"unix://{folder / 'memory'}", "shared_memory"),
            variant("ours threads", ThreadReductions, processes=1),
            variant("torch gloo", GlooReduction, str(folder / "gloo")),
        ]
