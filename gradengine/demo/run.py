"""The demo's two halves: train on the workers, and replay the beginning of it in one process."""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from functools import partial
from typing import TYPE_CHECKING, Protocol

from gradengine.demo.crew import Crew
from gradengine.demo.record import Record, Step
from gradengine.demo.replay import report_replay
from gradengine.demo.reports import Listening, Replayed, Weights
from gradengine.demo.settings import Transport
from gradengine.demo.worker import train_as_rank_0, train_as_threads, train_at

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gradengine.demo.crew import Member
    from gradengine.demo.settings import Settings, Texts

__all__ = ["Watcher", "replay_all", "train"]


class Watcher(Protocol):
    """Who is told how the run goes."""

    def started(self, processes: Mapping[str, int | None]) -> None:
        """Processes were started: name -> id."""
        ...

    def listening(self, url: str) -> None:
        """Rank 0 waits for the others."""
        ...

    def stepped(self, step: Step) -> None:
        """All ranks made a step."""
        ...


def train(settings: Settings, texts: Texts, watcher: Watcher) -> Record:
    """Train on all workers.

    Raises:
        PeerLost: A worker died.
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
                watcher.listening(report.url)
                for rank, member in enumerate(members[1:], 1):
                    member.give(partial(train_at, settings, texts, rank, report.url, token))
            elif (step := record.take(report)) is not None:
                watcher.stepped(step)
    record.seconds = time.perf_counter() - begin
    return record


def _give_first(member: Member, settings: Settings, texts: Texts, path: str, token: str) -> None:
    if settings.transport is Transport.LOCAL:
        member.give(partial(train_as_threads, settings, texts))
    else:
        address = path if settings.transport is Transport.UNIX else ("127.0.0.1", settings.port)
        member.give(partial(train_as_rank_0, settings, texts, address, token))


def replay_all(settings: Settings, texts: Texts) -> dict[str, Weights]:
    """The weights of each replay.

    Returns:
        "one" process with all micro-batches in order; "reversed", the same in reverse order; and "ranks", one process
        that adds as the workers did.

    Raises:
        ExchangeError: A replay failed.
    """
    works = {
        "one": partial(report_replay, "one", settings, texts, 1),
        "reversed": partial(report_replay, "reversed", settings, texts, 1, backwards=True),
        "ranks": partial(report_replay, "ranks", settings, texts, settings.workers),
    }
    with Crew() as crew:
        members = {name: crew.start(f"the replay {name!r}") for name in works}
        for name, work in works.items():
            members[name].give(work)
        return {report.name: report.weights for report in crew.reports() if isinstance(report, Replayed)}
