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
from gradengine.demo.crew import Crew
from gradengine.demo.record import Record, Step
from gradengine.demo.replay import report_replay
from gradengine.demo.reports import Compared, Listening, Replayed, Weights
from gradengine.demo.settings import Transport
from gradengine.demo.worker import train_as_rank_0, train_as_threads, train_at

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gradengine.demo.crew import Member
    from gradengine.demo.settings import Settings, Texts
    from gradengine.exchange.channel import Address

__all__ = ["Replays", "Watcher", "replay_all", "train"]


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
    record = Record(settings)
    with tempfile.TemporaryDirectory(prefix="gradengine-") as folder, Crew() as crew:
        names = (
            ["all ranks"] if settings.transport is Transport.LOCAL else [f"rank {r}" for r in range(settings.workers)]
        )
        members = [crew.start(name) for name in names]
        watcher.started({member.name: member.process.pid for member in members})
        token = secrets.token_hex()
        _give_first(members[0], settings, texts, os.path.join(folder, "exchange"), token)
        begin = time.perf_counter()
        for report in crew.reports():
            if isinstance(report, Listening):
                watcher.listening(report.urls)
                for rank, member in enumerate(members[1:], 1):
                    member.give(partial(train_at, settings, texts, rank, report.urls, token))
            elif (step := record.take(report)) is not None:
                watcher.stepped(step)
    record.seconds = time.perf_counter() - begin
    return record


def _give_first(member: Member, settings: Settings, texts: Texts, path: str, token: str) -> None:
    if settings.transport is Transport.LOCAL:
        member.give(partial(train_as_threads, settings, texts))
    else:
        addresses = [_address(settings, path, tp_rank) for tp_rank in range(settings.tensor_parallel)]
        member.give(partial(train_as_rank_0, settings, texts, addresses, token))


def _address(settings: Settings, path: str, tp_rank: int) -> Address:
    """Where rank 0 listens for a shard: at ports that follow each other, where one was chosen."""
    if settings.transport is Transport.UNIX:
        return f"{path}-{tp_rank}" if tp_rank else path
    return ("127.0.0.1", settings.port and settings.port + tp_rank)


@dataclass(frozen=True)
class Replays:
    """What the workers are compared with.

    Attributes:
        weights: Of "one" process with all micro-batches in order and the model in one piece; "reversed", the same in
            reverse order; and "ranks", one process that adds as the workers and their shards did.
        comparison: Of the shards with the model in one piece; None where there is one shard.
    """

    weights: dict[str, Weights]
    comparison: Compared | None


def replay_all(settings: Settings, texts: Texts) -> Replays:
    """Repeat the beginning of a run, each way in a process of its own.

    Raises:
        PeerLost, DeadlineExceeded, ExchangeError: A replay died, reported nothing for too long, or failed.
    """
    in_one_piece, has_shards = replace(settings, tensor_parallel=1), settings.tensor_parallel > 1
    works = {
        "the replay 'one'": partial(report_replay, "one", in_one_piece, texts, 1),
        "the replay 'reversed'": partial(
            report_replay, "reversed", in_one_piece, texts, 1, backwards=True, mirror=has_shards
        ),
        "the replay 'ranks'": partial(report_replay, "ranks", settings, texts, settings.workers),
    }
    if has_shards:
        works["the comparison of shards"] = partial(report_comparison, settings, texts)
    with Crew() as crew:
        for member, work in [(crew.start(name), work) for name, work in works.items()]:
            member.give(work)
        reports = list(crew.reports())
    weights = {report.name: report.weights for report in reports if isinstance(report, Replayed)}
    return Replays(weights, next((report for report in reports if isinstance(report, Compared)), None))
