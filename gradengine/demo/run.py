"""The two halves of the demo, training on the workers, and a replay of the first steps in one process."""

from __future__ import annotations

import os
import secrets
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from gradengine.console.processes import ProcessPool
from gradengine.demo.model import Weights
from gradengine.demo.settings import Settings, counted
from gradengine.demo.text import Texts
from gradengine.demo.worker import Finished, Listening, Step, replay, train_at, train_launched
from gradengine.exchange import Exchange

Say = Callable[[str, str], None]  # prints a line, a name and a text

ENVIRONMENT = {
    # BLAS uses one thread, since workers share the cores, and a product's bits may depend on its division by threads.
    **{f"{name}_NUM_THREADS": "1" for name in ("OPENBLAS", "OMP", "MKL", "BLIS")},
    "VECLIB_MAXIMUM_THREADS": "1",
    # Otherwise glibc returns the pages of each large array to the system, and faults them in again.
    "MALLOC_TRIM_THRESHOLD_": "1000000000",
    "MALLOC_MMAP_THRESHOLD_": "33554432",
}
_ROWS = 20  # printed lines of a whole run


@dataclass
class Record:
    """The steps of a run, and the result of each rank."""

    settings: Settings
    steps: list[Step] = field(default_factory=list)
    ends: dict[int, Finished] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def evaluations(self) -> dict[int, float]:
        """The held-out loss by step."""
        return {step.number: step.held_out for step in self.steps if step.held_out is not None}


def begin_anew() -> None:
    """Start this program again in the same process if it lacks `ENVIRONMENT`, which NumPy reads when it is imported.

    Call it before joining any group, because MPI cannot be started a second time.
    """
    if not ENVIRONMENT.items() <= os.environ.items():
        command = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **ENVIRONMENT})  # noqa: S606  (needs no shell)


def train(settings: Settings, texts: Texts, say: Say, exchange: Exchange | None = None) -> Record:
    """Train on all workers and print the progress. Starts the workers, unless rank 0 of launched ranks has `exchange`.

    Raises:
        PeerLost: A worker died.
        DeadlineExceeded: The workers reported nothing for too long.
        ExchangeError: A worker gave up.
    """
    record, begin = Record(settings), time.perf_counter()
    note = partial(_note, record, say)
    if exchange is None:
        _train_started(settings, texts, say, note)
    else:
        say("workers", f"{counted(settings.workers, 'rank')} that were launched, over {exchange.url}")
        train_launched(settings, texts, exchange, note)
    record.seconds = time.perf_counter() - begin
    wait = 1e3 * statistics.median(step.exchange_seconds for step in record.steps)
    steps = counted(len(record.steps), "step")
    say("\ntrained ", f" {steps} in {record.seconds:.1f} s; the median step waited {wait:.1f} ms for the exchange")
    return record


def _train_started(settings: Settings, texts: Texts, say: Say, note: Callable[[object], None]) -> None:
    """Train on workers that are processes of a pool."""
    with ProcessPool(environment=ENVIRONMENT) as pool:
        workers = [pool.start(f"rank {rank}") for rank in range(settings.workers)]
        say("workers", ", ".join(f"{worker.name}: process {worker.pid}" for worker in workers))
        secret, urls = secrets.token_hex(), ["tcp://127.0.0.1:0"] * settings.tensor_parallel
        pool.give(workers[0], partial(train_at, settings, texts, 0, urls, secret))
        for report in pool.reports():
            if isinstance(report, Listening):
                say("", "over " + ", ".join(report.urls))
                for rank, worker in enumerate(workers[1:], 1):
                    pool.give(worker, partial(train_at, settings, texts, rank, report.urls, secret))
            else:
                note(report)


def _note(record: Record, say: Say, report: object) -> None:
    if isinstance(report, Step):
        record.steps.append(report)
        if report.number == 1:
            say("\n   step ", "  loss    norm  wait ms")
        if report.number % max(1, record.settings.steps // _ROWS) == 0:
            say(f"{report.number:>7}", f"{report.loss:>6.3f} {report.norm:>7.2f} {1e3 * report.exchange_seconds:>8.1f}")
    elif isinstance(report, Finished):
        record.ends[report.rank] = report


def replay_all(settings: Settings, texts: Texts) -> dict[str, Weights]:
    """Repeat the first steps of a run in two ways, each in a new process. Raises the errors of `train`.

    Returns:
        The weights at the end of both ways. "one" adds all micro-batches in order, with the model in one piece. "ranks"
        adds in the order of the workers and their shards.
    """
    ranks = replace(settings, is_replay=True)
    one = replace(ranks, workers=1, micro_batches=settings.micro_batches_in_all, tensor_parallel=1)
    jobs = {f"the replay {name!r}": partial(replay, name, way, texts) for name, way in (("one", one), ("ranks", ranks))}
    with ProcessPool(environment=ENVIRONMENT) as pool:
        for worker, job in [(pool.start(name), job) for name, job in jobs.items()]:
            pool.give(worker, job)
        return dict(report for report in pool.reports() if report is not None)
