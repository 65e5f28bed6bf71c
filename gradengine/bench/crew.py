"""A crew of workers that do the same at the same time: processes that wait for a word, or threads of this one."""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias, final

from gradengine.bench.reduction import Reduction
from gradengine.processes import ProcessPool, Reporter

__all__ = ["Build", "Crew", "ProcessCrew", "ThreadCrew"]

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
