"""A loss scale that follows the verdicts of steps, by the rule of torch's GradScaler, on the host or in K2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np

from gradengine.arguments import as_float, out_of_range, whole_number
from gradengine.kernels.decision import Scalar
from gradengine.kernels.kept import Kept

_MOST_STEPS = (1 << 31) - 1
_MOST = 2.0**64  # a step of a weight up to 2**62 can still be divided; also in finalise.cu
_SCALING = np.dtype([("scale", "<f4"), ("tracker", "<u4")])  # struct Scaling of finalise.cu


@final
@dataclass(frozen=True)
class DynamicLossScale:
    """A loss scale that grows while gradients are finite and backs off when one is not, as torch's GradScaler does.

    Args:
        initial: The first one, used as fp32.
        growth_factor: What it is multiplied by after `growth_interval` finite steps in a row, unless that passes 2**64.
        backoff_factor: What it is multiplied by after a step that was skipped.
        growth_interval: Steps.

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
            if not least <= number <= most or is_at_one:  # NaN is refused too
                raise out_of_range(
                    name, getattr(self, name), f"{least:g}..{most:g}{', without 1' * (name != 'initial')}"
                )
            object.__setattr__(self, name, number)
        interval = whole_number("growth_interval", self.growth_interval, 1, _MOST_STEPS)
        object.__setattr__(self, "growth_interval", interval)

    def after(self, scale: np.float32, tracker: int, *, is_finite: bool) -> tuple[np.float32, int]:
        """The scale, and how many finite steps in a row it has seen, after one more step."""
        with np.errstate(over="ignore"):
            if not is_finite:
                return np.float32(float(scale) * self.backoff_factor), 0
            if tracker + 1 < self.growth_interval:
                return scale, tracker + 1
            grown = np.float32(float(scale) * self.growth_factor)
        return (grown if grown <= _MOST else scale), 0


@final
class LossScale:
    """A dynamic loss scale in its device's memory; on a GPU K2 updates it with each verdict.

    Attributes:
        rule: The rule by which it changes.
        kept: The scale, and the finite steps in a row that it has seen.
    """

    def __init__(self, rule: DynamicLossScale, kept: Callable[..., Kept]) -> None:
        self.rule, self.kept = rule, kept(_SCALING, float(np.float32(rule.initial)), 0)

    @property
    def value(self) -> Scalar:
        """The factor of the open window's loss: a number; on a GPU always the same 0-d array."""
        return self.kept.field("scale")

    def read(self) -> tuple[np.float32, int]:
        """Return the scale, and the finite steps in a row that it has seen; on a GPU this waits."""
        scale, tracker = self.kept.read()
        return np.float32(scale), tracker
