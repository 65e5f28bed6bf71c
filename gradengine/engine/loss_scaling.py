"""An engine's loss scale, which is either set by the caller or changed by the verdicts of the steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, final

import numpy as np

from gradengine.accumulate import PerBlockGradientAccumulator
from gradengine.accumulate.state import Call, Facts
from gradengine.arguments import as_float, out_of_range, said
from gradengine.errors import CallerError
from gradengine.kernels import Decision
from gradengine.kernels.loss_scale import DynamicLossScale, LossScale
from gradengine.reduction.reducer import Reducer
from gradengine.reduction.stats import Scale


@final
class LossScaling:
    """One engine's loss scale.

    Attributes:
        dynamic: The scale that verdicts change; None if the caller sets the scale.
    """

    def __init__(self, scale: float | DynamicLossScale, accumulator: PerBlockGradientAccumulator) -> None:
        self._is_on_gpu, self._state = accumulator.kernels.device.name != "cpu", accumulator.state
        rule = scale if isinstance(scale, DynamicLossScale) else None
        kept = partial(accumulator.kernels.kept, accumulator.arena)
        self.dynamic: LossScale | None = rule and LossScale(rule, kept)
        self._number = 1.0 if isinstance(scale, DynamicLossScale) else scale

    @property
    def value(self) -> Any:
        """The factor of the open window's loss."""
        return self._number if self.dynamic is None else self.dynamic.value

    def set(self, value: float, facts: Callable[[], Facts] | None) -> None:
        """Set the scale. With `facts`, which an error quotes, a change is refused if a window is open.

        Raises:
            WindowError: A window is open.
            CallerError: The number is out of range, or the scale is a dynamic one.
        """
        if self.dynamic is not None:
            raise CallerError("a dynamic loss scale cannot be set", got=said(value))
        scale = checked_loss_scale(value)
        if facts is not None and scale != self._number:
            told = facts()
            change = f"{scale} after {told['count']} micro-batches of {self._number}"
            self._state.ask(Call.SET, lambda: {**told, "setting": "loss scale", "change": change})
        self._number = scale

    def known(self, reducer: Reducer) -> Scale:
        """Return the scale by which the host divides, which the ranks compare, or (1, 0) if only the device has it."""
        if self.dynamic is None:
            return self._number, 0
        return (1.0, 0) if self._is_on_gpu and not reducer.waits else self.saved()

    def saved(self) -> Scale:
        """Return the scale and, for a dynamic one, the number of finite steps in a row. On a GPU this waits."""
        if self.dynamic is None:
            return self._number, 0
        scale, tracker = self.dynamic.read()
        return float(scale), tracker

    def follow(self, decision: Decision) -> None:
        """Change a dynamic scale after a step that the host decided. K2 has done so for its own steps."""
        if self.dynamic is not None and decision.bad is not None:
            scale, tracker = self.dynamic.rule.after(*self.dynamic.read(), is_finite=not decision.bad)
            self.dynamic.kept.write(float(scale), tracker)

    def load(self, scale: float, tracker: int) -> None:
        """Load a saved scale. Raise `CallerError` if the number is not a valid loss scale."""
        if self.dynamic is None or not 0 < np.float32(scale) < np.inf:
            scale = checked_loss_scale(scale)
        if self.dynamic is None:
            self._number = scale
        else:
            self.dynamic.kept.write(float(np.float32(scale)), tracker)


def checked_loss_scale(value: float) -> float:
    """Return the loss scale as a float. Raise `CallerError` unless it is a number in 2**-126..2**126."""
    scale = as_float(value)
    if not 2.0**-126 <= scale <= 2.0**126:  # NaN is refused too.
        do = "pass scaler.get_scale() or a DynamicLossScale" if math.isnan(scale) else None
        raise out_of_range("loss_scale", value, "2**-126..2**126", do=do)
    return scale
