"""A policy for spikes of the gradient norm: what a spike is, and what is done about it, on the host or in K2."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, final, get_args

import numpy as np

from gradengine.arguments import as_float, out_of_range, refuse_unknown, whole_number
from gradengine.errors import CallerError
from gradengine.kernels.decision import Decision, Spike
from gradengine.kernels.kept import Kept

SpikeAction: TypeAlias = Literal["skip", "clip"]

_MOST_STEPS = (1 << 31) - 1
_NORMS = np.dtype([("mean", "<f8"), ("variance", "<f8"), ("steps", "<u8")])  # struct Norms of finalise.cu


class Norms(NamedTuple):
    """The running mean and variance of the global norm."""

    mean: float = 0.0
    variance: float = 0.0
    steps: int = 0  # with a finite norm


@final
@dataclass(frozen=True)
class SpikePolicy:
    """A rule that calls a step whose global norm is far too large a spike, and skips or clips the step.

    A norm is a spike above `threshold`, or above mean + `z_score` x standard deviation of the norms before it. Running
    mean and variance are those of ZClip (Kumar and others, 2025, arXiv:2504.02507): of all norms of the warm-up, and
    exponentially weighted after it. On a GPU the decision is made there, and the host does not wait.

    "clip" clips as ZClip does: to mean + `z_score`² x variance / (norm - mean), so the larger the norm, the smaller its
    bound; or to `threshold`. The clipped norm enters mean and variance. "skip" hands back zeros on all workers and sets
    `result.skipped`. The bound that the norm has passed enters mean and variance, so that a lasting rise of the norm is
    accepted after some tens of steps. A norm that is not finite is no spike, and enters nothing.

    Args:
        action: "skip" or "clip".
        z_score: Standard deviations above the mean; None for a fixed threshold alone.
        threshold: A norm that is always a spike if it is exceeded; None for none.
        decay: The share of the old mean that a step after the warm-up keeps.
        warm_up: Steps before `z_score` is asked.

    Raises:
        CallerError: A value is out of range, or both `z_score` and `threshold` are None.

    Example:
        >>> from gradengine import GradientEngine, GradientLayout
        >>> policy = SpikePolicy("skip", threshold=10.0)
        >>> engine = GradientEngine(GradientLayout.of({"w": (1,)}), on_spike=policy)
        >>> engine.add({"w": np.array([50], np.float32)})
        >>> result = engine.step()
        >>> result.spiked, result.skipped, result.norm
        (True, True, 50.0)
    """

    action: SpikeAction = "skip"
    z_score: float | None = 2.5
    threshold: float | None = None
    decay: float = 0.97
    warm_up: int = 25

    def __post_init__(self) -> None:
        refuse_unknown("action", self.action, get_args(SpikeAction))
        for name in ("z_score", "threshold"):
            given = getattr(self, name)
            number = None if given is None else as_float(given)
            if number is not None and not 0 < number < math.inf:  # NaN is refused too
                raise out_of_range(name, given, "a finite number above 0, or None")
            object.__setattr__(self, name, number)
        if self.z_score is None and self.threshold is None:
            raise CallerError("a spike policy needs z_score or threshold", got="None for both")
        decay = as_float(self.decay)
        if not 0 < decay < 1:
            raise out_of_range("decay", self.decay, "between 0 and 1")
        object.__setattr__(self, "decay", decay)
        object.__setattr__(self, "warm_up", whole_number("warm_up", self.warm_up, 2, _MOST_STEPS))

    def judged(self, norm: float, before: Norms) -> Spike:
        """Return whether a finite norm is a spike after these norms, and what it counts as."""
        mean, variance, steps = before
        by_score, most = math.inf, math.inf if self.threshold is None else self.threshold
        if self.z_score is not None and steps >= self.warm_up and variance > 0:
            by_score = mean + self.z_score * math.sqrt(variance)
        bound = held = min(by_score, most)
        if not norm > bound:
            return Spike(bound, norm)
        if self.action == "clip" and self.z_score is not None and norm > by_score:
            held = min(most, mean + self.z_score**2 * variance / (norm - mean))
        return Spike(bound, held, is_found=True, skips=self.action == "skip")

    def after(self, held: float, before: Norms) -> Norms:
        """Return mean and variance with one more norm, as it counts."""
        mean, variance, steps = before
        is_warm = steps >= self.warm_up
        share = 1 - self.decay if is_warm else 1 / (steps + 1)
        new_mean = mean + share * (held - mean)
        squared = (held - new_mean) * (held - (new_mean if is_warm else mean))
        return Norms(new_mean, variance + share * (squared - variance), steps + 1)


@final
class Spikes:
    """One engine's policy, and the norms so far in its device's memory; on a GPU K2 changes them with each verdict.

    Attributes:
        policy: The policy.
        kept: The fields of `Norms`.
    """

    def __init__(self, policy: SpikePolicy, kept: Callable[..., Kept]) -> None:
        self.policy, self.kept = policy, kept(_NORMS, *Norms())

    def judged(self, norm: float) -> Spike:
        """Return the policy's judgement of a finite norm; on a GPU this waits."""
        return self.policy.judged(norm, Norms(*self.kept.read()))

    def follow(self, decision: Decision) -> None:
        """Change the norms by a step that the host decided; K2 has done so for its own."""
        if decision.spike is not None:
            self.kept.write(*self.policy.after(decision.spike.held, Norms(*self.kept.read())))
