"""A policy that finds spikes of the gradient norm and skips or clips them, on the host or in K2."""

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
    steps: int = 0  # number of steps with a finite norm


@final
@dataclass(frozen=True)
class SpikePolicy:
    """A rule that skips or clips a step whose global gradient norm is far too large, a spike.

    A norm is a spike above `threshold`, or above mean + `z_score` x standard deviation of the norms before it. Running
    mean and variance are those of ZClip (Kumar and others, 2025, arXiv:2504.02507). They contain all norms of the
    warm-up, and are exponentially weighted after it. On a GPU the decision is made there, and the host does not wait.

    The action "clip" clips as ZClip does, to mean + `z_score`² x variance / (norm - mean), or to `threshold` if that is
    less. The larger the norm, the smaller ZClip's bound. The clipped norm enters mean and variance. The action "skip"
    writes zeros on all ranks and sets `result.skipped`. The bound that the norm exceeded enters mean and variance, so
    a lasting rise of the norm is accepted after some tens of steps. A norm that is not finite is not a spike, and does
    not enter mean and variance.

    Args:
        action: "skip" or "clip".
        z_score: The number of standard deviations above the mean, above 0. None uses `threshold` alone.
        threshold: A norm above which each step is a spike, above 0. None sets no threshold.
        decay: The weight of the old mean in a step after the warm-up, between 0 and 1.
        warm_up: The number of steps before `z_score` is used, at least 2.

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
            if number is not None and not 0 < number < math.inf:  # NaN is refused too.
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
        """Return whether a finite norm is a spike after these norms, and the value that it counts as."""
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
        """Return mean and variance with one more norm, which counts as `held`."""
        mean, variance, steps = before
        is_warm = steps >= self.warm_up
        share = 1 - self.decay if is_warm else 1 / (steps + 1)
        new_mean = mean + share * (held - mean)
        squared = (held - new_mean) * (held - (new_mean if is_warm else mean))
        return Norms(new_mean, variance + share * (squared - variance), steps + 1)


@final
class Spikes:
    """One engine's policy, and the norms so far in its device's memory. On a GPU, K2 updates them in each step.

    Attributes:
        policy: The policy.
        kept: The fields of `Norms`.
    """

    def __init__(self, policy: SpikePolicy, kept: Callable[..., Kept]) -> None:
        self.policy, self.kept = policy, kept(_NORMS, *Norms())

    def judged(self, norm: float) -> Spike:
        """Return the policy's judgement of a finite norm. On a GPU this waits."""
        return self.policy.judged(norm, Norms(*self.kept.read()))

    def follow(self, decision: Decision) -> None:
        """Update the norms after a step that the host decided. K2 updates them in its own steps."""
        if decision.spike is not None:
            self.kept.write(*self.policy.after(decision.spike.held, Norms(*self.kept.read())))
