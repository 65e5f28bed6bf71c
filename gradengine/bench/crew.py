"""A crew of workers that do the same at the same time: processes that wait for a word, or threads of this one."""

from __future__ import annotations

import gc
import multiprocessing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, TypeAlias, final

from gradengine.bench.reduction import Reduction
from gradengine.demo.crew import interrupts_blocked
from gradengine.errors import ExchangeError

__all__ = ["Build", "Crew", "ProcessCrew", "ThreadCrew"]

Build: TypeAlias = Callable[[int], Reduction]  # rank -> its worker; of a process: importable and picklable

_PATIENCE = 120.0


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
    """A thread of this process for each worker.

    Args:
        build: Makes a rank's worker, in its thread.
        world_size: Workers.
    """

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
    """A process for each worker, started anew so that it shares nothing with this one.

    Args:
        build: Makes a rank's worker, in its process.
        world_size: Workers.

    Raises:
        ExchangeError: A worker could not be made.
    """

    def __init__(self, build: Build, world_size: int) -> None:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(world_size)]
        self._pipes: Sequence[Connection] = [near for near, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(far, build, rank), daemon=True) for rank, (_, far) in enumerate(pipes)
        ]
        with interrupts_blocked():
            for process, (_, far) in zip(self._processes, pipes, strict=True):
                process.start()
                far.close()  # this process's copy: without it a dead worker's end reads as the end of the file
        with self._ended_by_a_fault():
            self._answers()

    def tell(self, method: str) -> list[Any]:
        """See `Crew.tell`."""
        with self._ended_by_a_fault():
            for pipe in self._pipes:
                pipe.send(method)
            return self._answers()

    def close(self) -> None:
        """See `Crew.close`."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(_PATIENCE)

    def _answers(self) -> list[Any]:
        return [self._answer(rank, pipe) for rank, pipe in enumerate(self._pipes)]

    def _answer(self, rank: int, pipe: Connection) -> Any:
        try:
            fault, answer = pipe.recv() if pipe.poll(_PATIENCE) else (f"no answer in {_PATIENCE:g} s", None)
        except EOFError:
            fault = "its process ended"
        if fault is not None:
            raise ExchangeError(f"rank {rank} of the benchmark failed", got=fault)
        return answer

    @contextmanager
    def _ended_by_a_fault(self) -> Iterator[None]:
        """End the workers at once if the block does not end well, Ctrl-C too: they may wait for each other."""
        try:
            yield
        except BaseException:
            for process in self._processes:
                process.terminate()
            raise


def _serve(pipe: Connection, build: Build, rank: int) -> None:
    """A worker's process: do what is told until the other end of the pipe is gone."""
    gc.disable()
    try:
        worker = build(rank)
        pipe.send((None, None))
        while (method := _next(pipe)) is not None:
            pipe.send((None, getattr(worker, method)()))
        worker.close()
    except Exception as fault:  # noqa: BLE001  (whatever it is, the parent says it)
        pipe.send((f"{type(fault).__name__}: {fault}", None))


def _next(pipe: Connection) -> str | None:
    try:
        method: str = pipe.recv()
    except EOFError:
        return None
    return method
