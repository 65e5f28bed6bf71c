"""What a run of the demo left behind: its curves, its digests, and the weights to compare."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gradengine.demo.reports import Evaluated, Finished, Kept, Stepped, Weights

if TYPE_CHECKING:
    from gradengine.demo.reports import Report
    from gradengine.demo.settings import Settings

__all__ = ["Record", "Step"]


@dataclass(frozen=True)
class Step:
    """One optimizer step: loss and norm, the same on all ranks, and the mean of their times."""

    number: int
    loss: float
    norm: float
    exchange_seconds: float


@dataclass
class Record:
    """Filled report by report.

    Attributes:
        settings: The choices of the run.
        steps: The steps that all ranks have made.
        evaluations: Held-out losses, by steps made.
        digests: Of the last weights, by rank.
        replicated_digests: Of each shard's copy of what all shards hold, by rank.
        kept_digests: Of the weights after the compared steps, by rank.
        kept: Rank 0's weights then.
        seconds: How long training took.
    """

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
        elif isinstance(report, Kept):
            self.kept_digests[report.rank] = report.digest
            self.kept = report.weights or self.kept
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
