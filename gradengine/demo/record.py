"""What workers report of a run, and the record that it makes."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from gradengine.demo.settings import Settings

__all__ = [
    "Compared", "Evaluated", "Finished", "Heartbeat", "Listening", "Record", "Replayed", "Report", "Step",
    "Stepped", "Weights",
]  # fmt: skip

Weights: TypeAlias = dict[str, npt.NDArray[np.float32]]
Report: TypeAlias = Any  # one of the classes below


@dataclass(frozen=True)
class Heartbeat:
    """A process goes on with work of which it has nothing else to say."""


@dataclass(frozen=True)
class Listening:
    """Rank 0 takes connections, for each shard at a url of its own."""

    urls: tuple[str, ...]


@dataclass(frozen=True)
class Stepped:
    """A rank made step `step`, counted from 1: the mean loss and the norm before clipping of all ranks.

    `exchange_seconds` is what backward did not hide of the exchange, waiting for slower ranks included, and the clip.
    """

    rank: int
    step: int
    loss: float
    norm: float
    exchange_seconds: float


@dataclass(frozen=True)
class Evaluated:
    """The held-out loss after `step` steps."""

    step: int
    loss: float


@dataclass(frozen=True)
class Finished:
    """A rank's digests, shards united: of its last weights, and of those after the compared steps, if it made them.

    `replicated` is each shard's digest of what all shards hold whole; `compared_weights` are rank 0's own.
    """

    rank: int
    digest: str
    replicated: tuple[str, ...] = ()
    compared_digest: str | None = None
    compared_weights: Weights | None = None


@dataclass(frozen=True)
class Replayed:
    """The weights after the compared steps, from the replay of that name."""

    name: str
    weights: Weights


@dataclass(frozen=True)
class Compared:
    """How far shards are from the model in one piece, on one micro-batch; each is relative, and NaN stays NaN."""

    outputs: float  # the largest difference of a logit
    gradients: float  # of any gradient as backward gives it
    norm: float
    scale: float
    clipped: float  # of any gradient as the engine hands it back
    descended: float  # of the weights after one step of plain gradient descent (L2), in parts of that step
    weights: float  # the same after one step of the optimizer


@dataclass(frozen=True)
class Step:
    """One optimizer step: loss and norm, the same on all ranks, and the mean of their times."""

    number: int
    loss: float
    norm: float
    exchange_seconds: float


@dataclass
class Record:
    """A run, filled report by report: curves, digests by rank, and rank 0's weights after the compared steps."""

    settings: Settings
    steps: list[Step] = field(default_factory=list)
    evaluations: dict[int, float] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    replicated_digests: dict[int, tuple[str, ...]] = field(default_factory=dict)
    kept_digests: dict[int, str] = field(default_factory=dict)
    kept: Weights = field(default_factory=dict)
    seconds: float = 0.0
    _open: dict[int, list[Stepped]] = field(default_factory=dict)

    def take(self, report: Report) -> Step | None:
        """Note a report; return a step where it was the last one missing from it."""
        if isinstance(report, Stepped):
            return self._take_step(report)
        if isinstance(report, Evaluated):
            self.evaluations[report.step] = report.loss
        elif isinstance(report, Finished):
            self.digests[report.rank] = report.digest
            self.replicated_digests[report.rank] = report.replicated
            if report.compared_digest is not None:
                self.kept_digests[report.rank] = report.compared_digest
                self.kept = report.compared_weights or self.kept
        return None

    def _take_step(self, report: Stepped) -> Step | None:
        reports = self._open.setdefault(report.step, [])
        reports.append(report)
        if len(reports) < self.settings.workers:
            return None
        del self._open[report.step]
        seconds = statistics.fmean(r.exchange_seconds for r in reports)
        self.steps.append(Step(report.step, report.loss, report.norm, seconds))
        return self.steps[-1]
