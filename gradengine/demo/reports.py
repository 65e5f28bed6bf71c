"""What the demo's processes tell the one that started them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["Evaluated", "Failed", "Finished", "Kept", "Listening", "Replayed", "Report", "Stepped", "Weights"]

Weights: TypeAlias = "dict[str, npt.NDArray[np.float32]]"


@dataclass(frozen=True)
class Listening:
    """Rank 0 takes connections at `url`."""

    url: str


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
    """Rank 0's weights after the steps that are compared; the other ranks send only the digest."""

    rank: int
    digest: str
    weights: Weights | None


@dataclass(frozen=True)
class Finished:
    """A rank made all its steps."""

    rank: int
    digest: str


@dataclass(frozen=True)
class Replayed:
    """The weights after the compared steps, from the replay of that name."""

    name: str
    weights: Weights


@dataclass(frozen=True)
class Failed:
    """The process gives up; it ends after this report.

    Attributes:
        message: Why.
        lost_peer: Whether the fault is another's, who may have more to say.
    """

    message: str
    lost_peer: bool


Report: TypeAlias = Listening | Stepped | Evaluated | Kept | Finished | Replayed | Failed
