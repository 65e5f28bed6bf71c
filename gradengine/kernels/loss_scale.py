"""A loss scale that follows the results of steps by the rule of torch.amp.GradScaler, on the host or in K2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np

from gradengine.arguments import as_float, out_of_range, whole_number
from gradengine.kernels.decision import Scalar
from gradengine.kernels.kept import Kept

_MOST_STEPS = (1 << 31) - 1
_MOST = 2.0**64  # the limit in finalise.cu too, at which a step with a weight up to 2**62 can still be divided
_SCALING = np.dtype([("scale", "<f4"), ("tracker", "<u4")])  # struct Scaling of finalise.cu


@final
@dataclass(frozen=True)
class DynamicLossScale:
    """A loss scale that grows while gradients are finite and shrinks when one is not, as in torch.amp.GradScaler.

    Args:
        initial: The initial loss scale, rounded to fp32, from 2**-64 to 2**64.
        growth_factor: The factor after `growth_interval` finite steps in a row, above 1 and at most 2**64. The scale
            does not grow beyond 2**64.
        backoff_factor: The factor after a step whose gradient is not finite, at least 2**-64 and below 1.
        growth_interval: The number of finite steps in a row before the scale grows, at least 1.

    Raises:
        CallerError: A number is out of range.

    Example:
        >>> from gradengine import GradientEngine, GradientLayout
        >>> rule = DynamicLossScale(initial=1024.0)
        >>> engine = GradientEngine(GradientLayout.of({"w": (1,)}), on_non_finite="skip", loss_scale=rule)
        >>> engine.add({"w": np.array([np.inf], np.float32)})
        >>> engine.step().skipped, engine.loss_scale
        (True, 512.0)
    """

    initial: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        ranges = {"initial": (2.0**-64, _MOST), "growth_factor": (1.0, 2.0**64), "backoff_factor": (2.0**-64, 1.0)}
        for name, (least, most) in ranges.items():
            number = as_float(getattr(self, name))
            is_at_one = name != "initial" and number == 1
            if not least <= number <= most or is_at_one:  # NaN is refused too.
                raise out_of_range(
                    name, getattr(self, name), f"{least:g}..{most:g}{', without 1' * (name != 'initial')}"
                )
            object.__setattr__(self, name, number)
        interval = whole_number("growth_interval", self.growth_interval, 1, _MOST_STEPS)
        object.__setattr__(self, "growth_interval", interval)

    def after(self, scale: np.float32, tracker: int, *, is_finite: bool) -> tuple[np.float32, int]:
        """Return the scale and the number of finite steps in a row, after one more step."""
        with np.errstate(over="ignore"):
            if not is_finite:
                return np.float32(float(scale) * self.backoff_factor), 0
            if tracker + 1 < self.growth_interval:
                return scale, tracker + 1
            grown = np.float32(float(scale) * self.growth_factor)
        return (grown if grown <= _MOST else scale), 0


@final
class LossScale:
    """A dynamic loss scale in its device's memory. On a GPU, K2 updates it in each step.

    Attributes:
        rule: The rule by which it changes.
        kept: The scale and the number of finite steps in a row.
    """

    def __init__(self, rule: DynamicLossScale, kept: Callable[..., Kept]) -> None:
        self.rule, self.kept = rule, kept(_SCALING, float(np.float32(rule.initial)), 0)

    @property
    def value(self) -> Scalar:
        """The factor of the open window's loss. On a GPU it is always the same 0-d array."""
        return self.kept.field("scale")

    def read(self) -> tuple[np.float32, int]:
        """Return the scale and the number of finite steps in a row. On a GPU this waits."""
        scale, tracker = self.kept.read()
        return np.float32(scale), tracker
