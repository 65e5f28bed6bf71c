"""The benchmark of the exchange, in which W workers on this machine sum one gradient set.

Every variant counts the bytes of 2 (W - 1) sets, which cross between workers in a star and in a ring.
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

_SPAN = 1 << 20  # elements of 4 MB, a weight matrix of the 350M model
_JOIN_SECONDS = 60.0


def span_layout(elements: int) -> GradientLayout:
    """Return the layout of a gradient set of that many elements, in components of at most 4 MB."""
    starts = range(0, elements, _SPAN)
    return GradientLayout.of({f"layers.{i}.w": (min(_SPAN, elements - start),) for i, start in enumerate(starts)})


def contribution(rank: int, elements: int) -> npt.NDArray[np.float32]:
    """Return a rank's contribution, the same numbers in every process."""
    return np.random.default_rng(rank).standard_normal(elements, np.float32)


class Reduction(ABC):
    """One worker. `prepare` copies its contribution to its arena, and `run` makes the arena the sum of all ranks."""

    def __init__(self, rank: int, world_size: int, elements: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._mine = contribution(rank, elements)
        self.arena = self._mine.copy()

    def prepare(self) -> None:
        """Restore the contribution, which the last run has overwritten with the sum."""
        np.copyto(self.arena, self._mine)

    @abstractmethod
    def run(self) -> None:
        """Sum over the workers. All of them must call it."""

    def error(self) -> float:
        """Return the largest relative difference from the sum in fp64, after a run."""
        total = np.zeros(self.arena.size)
        for rank in range(self.world_size):
            total += contribution(rank, self.arena.size)
        return relative_error([self.arena], lambda _: total)


@final
class ExchangeReduction(Reduction):
    """The sum by an exchange that is not bound yet, over any transport. It is made when all ranks have joined."""

    def __init__(self, exchange: Exchange, elements: int) -> None:
        super().__init__(exchange.rank, exchange.world_size, elements)
        if exchange.shares_memory:  # an engine with such an exchange shares its arena too
            self.arena = shared_array(elements)
        self._exchange, self._layout, self._step = exchange, span_layout(elements), 0
        exchange.bind(self._layout, self.arena)

    @staticmethod
    def over(url: str, link: str, world_size: int, elements: int, rank: int) -> ExchangeReduction:
        """Return the reduction through `connect(url, link=link)`."""
        return ExchangeReduction(connect(url, rank, world_size, link=link, join_timeout=_JOIN_SECONDS), elements)

    def run(self) -> None:
        """Start all spans together and wait for the last sum."""
        self._exchange.start(*self._layout.spans)
        self._exchange.wait()
        self._step += 1
        self._exchange.begin(self._step)


@final
class ThreadReductions:
    """The sum by an exchange between threads, with all ranks in one process."""

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
        """Return the largest error of any rank."""
        return float(np.max(list(self._pool.map(Reduction.error, self._ranks))))


@final
class GlooReduction(Reduction):
    """PyTorch's gloo over TCP on the loopback interface. The ranks meet at a file, which must not exist before."""

    def __init__(self, path: str, world_size: int, elements: int, rank: int) -> None:
        super().__init__(rank, world_size, elements)
        # Without it gloo uses the address of the host's name, which can be outside this machine.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform.startswith("linux") else "lo0")
        self._distributed = importlib.import_module("torch.distributed")
        store = self._distributed.FileStore(path, world_size)
        self._distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        self._tensor = importlib.import_module("torch").from_numpy(self.arena)

    def run(self) -> None:
        """All-reduce the whole set in one call."""
        self._distributed.all_reduce(self._tensor)


def free_port() -> int:
    """Return a free port of 127.0.0.1."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


Build: TypeAlias = Callable[[int], Any]  # rank -> its worker, often a `Reduction` (importable and picklable)
_built: list[Any] = []  # the worker of this process of a crew


@final
class Crew:
    """Processes in which the workers of a group are built and run, one for each worker.

    Each process is spawned and shares nothing with this one. If a worker cannot be built, or fails, an `ExchangeError`
    names it, and the other processes are ended too.
    """

    def __init__(self, build: Build, world_size: int) -> None:
        self._pool = ProcessPool()
        self._workers = [self._pool.start(f"rank {rank}") for rank in range(world_size)]
        self._all([partial(_build, build, rank) for rank in range(world_size)])

    def tell(self, method: str) -> list[Any]:
        """Call a method of every worker and return the results in rank order."""
        return self._all([partial(_call, method)] * len(self._workers))

    def prepare(self) -> None:
        """Restore the contribution of every worker."""
        self.tell("prepare")

    def run(self) -> None:
        """Sum over the workers."""
        self.tell("run")

    def error(self) -> float:
        """Return the largest error of any worker's result, or NaN if one is NaN."""
        return float(np.max(self.tell("error")))

    def close(self) -> None:
        """End the workers."""
        self._pool.terminate()

    def _all(self, jobs: Sequence[Any]) -> list[Any]:
        """Run a job on each worker. On a failure or Ctrl-C all workers are ended, as they may wait for each other."""
        try:
            for worker, job in zip(self._workers, jobs, strict=True):
                self._pool.give(worker, job)
            return self._pool.results()
        except BaseException:
            self._pool.terminate()
            raise


def _build(build: Build, rank: int, **_: object) -> None:
    """Build the worker of this process and keep it until the process ends."""
    gc.disable()
    _built.append(build(rank))


def _call(method: str, **_: object) -> Any:
    """Call a method of this process's worker."""
    return getattr(_built[0], method)()


@contextmanager
def exchange_variants(host: Host, world_size: int, elements: int) -> Iterator[list[Variant]]:
    """Yield variants over TCP, over Unix sockets, in shared memory, between threads, and by gloo.

    The processes live until the context ends. `elements` is a multiple of 32.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="gradengine-bench-")))

        def variant(name: str, kind: Callable[..., Any], *where: object, processes: int = world_size) -> Variant:
            def build() -> Case:
                if kind is GlooReduction:
                    assert host.torch  # raises `Missing` without torch
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
