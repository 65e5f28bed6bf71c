"""What a step hands back, and what was found on the way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gradengine.errors import NonFiniteGradient

__all__ = ["StepResult"]


@dataclass(frozen=True)
class StepResult:
    """What a step hands back.

    Attributes:
        gradients: Name -> fp32 array of the component's shape: a view of the arena, good until the next `add`; or
            the destinations of `out`, those given.
        norm: Global norm of the averaged gradient, before clipping.
        scale: Clip scale; with several groups the smallest of theirs.
        weight: Weight of all micro-batches of all workers.
        micro_batches: Micro-batches of all workers.
        skipped: True where the gradient was not finite and the step is to be skipped; the gradients are zero then.
        group_norms: Each clip group's norm.
        group_scales: Each clip group's scale.
        non_finite: What was found, where the step was skipped or passed on with NaN or Inf in it.
        step: The step's number, counted from 0.
    """

    gradients: Mapping[str, Any]
    norm: float
    scale: float
    weight: float
    micro_batches: int
    skipped: bool
    group_norms: Mapping[str, float]
    group_scales: Mapping[str, float]
    non_finite: NonFiniteGradient | None
    step: int
