"""What the demo's processes tell the one that started them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = [
    "Advanced",
    "Compared",
    "Evaluated",
    "Failed",
    "Finished",
    "Kept",
    "Listening",
    "Replayed",
    "Report",
    "Stepped",
    "Weights",
]

Weights: TypeAlias = "dict[str, npt.NDArray[np.float32]]"


@dataclass(frozen=True)
class Listening:
    """Rank 0 takes connections, for each shard at a url of its own."""

    urls: tuple[str, ...]


@dataclass(frozen=True)
class Stepped:
    """A rank made its step number `step`, counted from 1.

    Attributes:
        loss: Mean over all ranks' micro-batches.
        norm: The global norm before clipping, the same on all ranks.
        exchange_seconds: From the end of backward to the gradient: what backward did not hide of the exchange, waiting
            for slower ranks included, and the clip.
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
class Kept:
    """Rank 0's weights after the steps that are compared, its shards united; the other ranks send only the digest."""

    rank: int
    digest: str
    weights: Weights | None


@dataclass(frozen=True)
class Finished:
    """A rank made all its steps.

    Attributes:
        digest: Of its last weights, all shards united.
        replicated: For each shard, the digest of the weights that every shard holds whole.
    """

    rank: int
    digest: str
    replicated: tuple[str, ...] = ()


@dataclass(frozen=True)
class Replayed:
    """The weights after the compared steps, from the replay of that name."""

    name: str
    weights: Weights


@dataclass(frozen=True)
class Advanced:
    """A process goes on with work of which it has nothing else to say."""


@dataclass(frozen=True)
class Compared:
    """How far shards are from the model in one piece, on one micro-batch at the first weights.

    Each is NaN where anything that it is made of is NaN.

    Attributes:
        outputs: The largest difference of a logit, in parts of the largest logit.
        gradients: The same for the gradient of each weight as backward gives it, and of these the largest; in parts of
            a hundredth of the largest gradient of all where the weight's own is smaller.
        norm: The difference of the global norm, in parts of it.
        scale: The difference of the clip scale, in parts of it.
        clipped: As `gradients`, of what the engine hands back: averaged and clipped to a hundredth of the norm.
        descended: The distance (L2) of the weights after one step of plain gradient descent, in parts of that step.
        weights: The same after one step of the optimizer.
    """

    outputs: float
    gradients: float
    norm: float
    scale: float
    clipped: float
    descended: float
    weights: float


@dataclass(frozen=True)
class Failed:
    """The process gives up; it ends after this report.

    Attributes:
        message: Why.
        lost_peer: Whether the fault is another's, who may have more to say.
    """

    message: str
    lost_peer: bool


Report: TypeAlias = Listening | Stepped | Evaluated | Kept | Finished | Replayed | Advanced | Compared | Failed
