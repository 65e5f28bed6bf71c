"""What workers report of a run, and the record that it makes; `None` only says that work goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from gradengine.demo.model import Weights
from gradengine.demo.settings import Settings

__all__ = ["Finished", "Listening", "Record", "Report", "Step"]


@dataclass(frozen=True)
class Listening:
    """Rank 0 takes connections, for each shard at a url of its own."""

    urls: tuple[str, ...]


@dataclass(frozen=True)
class Step:
    """All ranks made step `number`, counted from 1: their mean loss and the norm before clipping.

    `exchange_seconds` is what rank 0's backward did not hide of the exchange, waiting for slower ranks and the clip
    included; `held_out` the loss of the held-out text, where it was taken.
    """

    number: int
    loss: float
    norm: float
    exchange_seconds: float
    held_out: float | None = None


@dataclass(frozen=True)
class Finished:
    """A rank's digests, shards united: of its last weights, and of those after the compared steps.

    `replicated` is each shard's digest of what all shards hold whole; `compared_weights` are rank 0's own.
    """

    rank: int
    digest: str
    replicated: tuple[str, ...]
    compared_digest: str
    compared_weights: Weights | None = None


Report: TypeAlias = Callable[[Any], None]  # is told one of the above, `(name, result)` of a replay, or None


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
