"""The demo's two halves: train on the workers, and replay the beginning of it in one process."""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from gradengine.demo.comparison import report_comparison
from gradengine.demo.record import Compared, Listening, Record, Replayed, Step, Weights
from gradengine.demo.settings import Transport
from gradengine.demo.worker import replay, report_replay, train_as_rank_0, train_as_threads, train_at
from gradengine.processes import Job, ProcessPool

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gradengine.demo.settings import Settings, Texts
    from gradengine.exchange.channel import Address

__all__ = ["Replays", "Watcher", "replay_all", "train"]

ENVIRONMENT = {
    # One BLAS thread each: workers share the cores, and a product's bits may depend on how it is divided.
    **{f"{name}_NUM_THREADS": "1" for name in ("OPENBLAS", "OMP", "MKL", "BLIS")},
    "VECLIB_MAXIMUM_THREADS": "1",
    # glibc otherwise returns each large array's pages to the system, and faults them in again.
    "MALLOC_TRIM_THRESHOLD_": "1000000000",
    "MALLOC_MMAP_THRESHOLD_": "33554432",
}


class Watcher(Protocol):
    """Who is told how the run goes."""

    def started(self, processes: Mapping[str, int | None]) -> None:
        """Processes were started: name -> id."""
        ...

    def listening(self, urls: Sequence[str]) -> None:
        """Rank 0 waits for the others, for each shard at a url of its own."""
        ...

    def stepped(self, step: Step) -> None:
        """All ranks made a step."""
        ...


def train(settings: Settings, texts: Texts, watcher: Watcher) -> Record:
    """Train on all workers.

    Raises:
        PeerLost: A worker died.
        DeadlineExceeded: The workers reported nothing for too long.
        ExchangeError: A worker gave up.
    """
    record, is_local = Record(settings), settings.transport is Transport.LOCAL
    names = ["all ranks"] if is_local else [f"rank {rank}" for rank in range(settings.workers)]
    with tempfile.TemporaryDirectory(prefix="gradengine-") as folder, ProcessPool(environment=ENVIRONMENT) as pool:
        first, *others = [pool.start(name) for name in names]
        watcher.started({worker.name: worker.process.pid for worker in (first, *others)})
        token, addresses = secrets.token_hex(), _addresses(settings, os.path.join(folder, "exchange"))
        as_rank_0 = partial(train_as_rank_0, settings, texts, addresses, token)
        pool.give(first, partial(train_as_threads, settings, texts) if is_local else as_rank_0)
        begin = time.perf_counter()
        for report in pool.reports():
            if isinstance(report, Listening):
                watcher.listening(report.urls)
                for rank, worker in enumerate(others, 1):
                    pool.give(worker, partial(train_at, settings, texts, rank, report.urls, token))
            elif (step := record.take(report)) is not None:
                watcher.stepped(step)
    record.seconds = time.perf_counter() - begin
    return record


def _addresses(settings: Settings, path: str) -> list[Address]:
    """Where rank 0 listens for each shard: at ports that follow each other, where one was chosen."""
    shards = range(settings.tensor_parallel)
    if settings.transport is Transport.UNIX:
        return [f"{path}-{tp_rank}" for tp_rank in shards]
    return [("127.0.0.1", settings.port and settings.port + tp_rank) for tp_rank in shards]


@dataclass(frozen=True)
class Replays:
    """What the workers are compared with.

    The weights are of "one" process with all micro-batches in order and the model in one piece; "reversed", the same in
    reverse order; and "ranks", one process that adds as the workers and their shards did.
    """

    weights: dict[str, Weights]
    comparison: Compared | None  # of the shards with the model in one piece; None where there is one shard


def replay_all(settings: Settings, texts: Texts) -> Replays:
    """Repeat the beginning of a run, each way in a process of its own; raises as `train`."""
    whole, has_shards = replace(settings, tensor_parallel=1), settings.tensor_parallel > 1
    replays = {
        "one": partial(replay, whole, texts, 1),
        "reversed": partial(replay, whole, texts, 1, backwards=True, staging=has_shards),
        "ranks": partial(replay, settings, texts, settings.workers),
    }
    jobs: dict[str, Job] = {f"the replay {name!r}": partial(report_replay, name, run) for name, run in replays.items()}
    if has_shards:
        jobs["the comparison of shards"] = partial(report_comparison, settings, texts)
    with ProcessPool(environment=ENVIRONMENT) as pool:
        for worker, job in [(pool.start(name), job) for name, job in jobs.items()]:
            pool.give(worker, job)
        reports = list(pool.reports())
    weights = {report.name: report.weights for report in reports if isinstance(report, Replayed)}
    return Replays(weights, next((report for report in reports if isinstance(report, Compared)), None))
