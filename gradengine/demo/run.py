"""The demo's two halves: train on the workers, and replay the beginning of it in one process."""

from __future__ import annotations

import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from gradengine.console.processes import Job, ProcessPool
from gradengine.demo.settings import Settings, Transport, counted
from gradengine.demo.text import Texts
from gradengine.demo.worker import Finished, Listening, Step, replay, train_as_threads, train_at, train_launched
from gradengine.exchange import Exchange

__all__ = ["Record", "Say", "begin_anew", "replay_all", "train"]

Say = Callable[[str, str], None]  # a name and what there is to say of it, one line

ENVIRONMENT = {
    # One BLAS thread each: workers share the cores, and a product's bits may depend on how it is divided.
    **{f"{name}_NUM_THREADS": "1" for name in ("OPENBLAS", "OMP", "MKL", "BLIS")},
    "VECLIB_MAXIMUM_THREADS": "1",
    # glibc otherwise returns each large array's pages to the system, and faults them in again.
    "MALLOC_TRIM_THRESHOLD_": "1000000000",
    "MALLOC_MMAP_THRESHOLD_": "33554432",
}
_ROWS = 20  # of steps in a whole run


@dataclass
class Record:
    """A run: its steps, and how each rank ended."""

    settings: Settings
    steps: list[Step] = field(default_factory=list)
    ends: dict[int, Finished] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def evaluations(self) -> dict[int, float]:
        """The held-out loss by step."""
        return {step.number: step.held_out for step in self.steps if step.held_out is not None}


def begin_anew() -> None:
    """Start this program again, as the same process, if it lacks `ENVIRONMENT`, which is read when NumPy is imported.

    Call it before joining any group: MPI cannot be started a second time.
    """
    if not ENVIRONMENT.items() <= os.environ.items():
        command = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **ENVIRONMENT})  # noqa: S606  (there is nothing for a shell)


def train(settings: Settings, texts: Texts, say: Say, exchange: Exchange | None = None) -> Record:
    """Train on all workers, and print the progress; starts them, unless `exchange`, rank 0's, says they were launched.

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
    """Train on workers that are processes of a pool, or threads of one."""
    is_local = settings.transport is Transport.LOCAL
    names = ["all ranks"] if is_local else [f"rank {rank}" for rank in range(settings.workers)]
    with tempfile.TemporaryDirectory(prefix="gradengine-") as folder, ProcessPool(environment=ENVIRONMENT) as pool:
        first, *others = [pool.start(name) for name in names]
        say("workers", ", ".join(f"{worker.name}: process {worker.process.pid}" for worker in (first, *others)))
        token, urls = secrets.token_hex(), _urls(settings, folder)
        as_rank_0 = partial(train_at, settings, texts, 0, urls, token)
        pool.give(first, partial(train_as_threads, settings, texts) if is_local else as_rank_0)
        for report in pool.reports():
            if isinstance(report, Listening):
                say("", "over " + ", ".join(report.urls))
                for rank, worker in enumerate(others, 1):
                    pool.give(worker, partial(train_at, settings, texts, rank, report.urls, token))
            else:
                note(report)


def _urls(settings: Settings, folder: str) -> list[str]:
    """The URLs at which rank 0 listens for each shard; with --port at consecutive ports."""
    shards = range(settings.tensor_parallel)
    if settings.transport is Transport.UNIX:
        return [f"unix://{folder}/exchange-{tp_rank}" for tp_rank in shards]
    return [f"tcp://127.0.0.1:{settings.port and settings.port + tp_rank}" for tp_rank in shards]


def _note(record: Record, say: Say, report: object) -> None:
    if isinstance(report, Step):
        record.steps.append(report)
        _say_step(record.settings, report, say)
    elif isinstance(report, Finished):
        record.ends[report.rank] = report


def _say_step(settings: Settings, step: Step, say: Say) -> None:
    if step.number == 1:
        say("\n   step ", "  loss    norm  wait ms")
    if step.number % max(1, settings.steps // _ROWS) == 0:
        say(f"{step.number:>7}", f"{step.loss:>6.3f} {step.norm:>7.2f} {1e3 * step.exchange_seconds:>8.1f}")


def replay_all(settings: Settings, texts: Texts) -> dict[str, tuple[Step, Finished]]:
    """Repeat the beginning of a run, each way in a process of its own; raises as `train`.

    Returns:
        The first step and the end of "one" process with all micro-batches in order and the model in one piece;
        "reversed", the same in reverse order; and "ranks", one process that adds as the workers and their shards did.
    """
    ranks = replace(settings, is_replay=True)
    one = replace(ranks, workers=1, micro_batches=settings.micro_batches_in_all, tensor_parallel=1)
    ways = {"one": one, "reversed": replace(one, backwards=True), "ranks": ranks}
    jobs: dict[str, Job] = {f"the replay {name!r}": partial(replay, name, way, texts) for name, way in ways.items()}
    with ProcessPool(environment=ENVIRONMENT) as pool:
        for worker, job in [(pool.start(name), job) for name, job in jobs.items()]:
            pool.give(worker, job)
        return dict(report for report in pool.reports() if report is not None)
