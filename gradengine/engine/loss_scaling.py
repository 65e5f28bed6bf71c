"""An engine's loss scale: a number that is set, or one that the verdicts of the steps change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import numpy as np

from gradengine.accumulate import PerBlockGradientAccumulator
from gradengine.accumulate.state import Call, Facts, StepState
from gradengine.engine.settings import Settings, checked_loss_scale
from gradengine.kernels import Decision
from gradengine.kernels.loss_scale import LossScale
from gradengine.reduction.reducer import Reducer


@final
class LossScaling:
    """One engine's loss scale.

    Attributes:
        dynamic: The scale that verdicts change; None if the scale is a number that is set.
    """

    def __init__(self, settings: Settings, accumulator: PerBlockGradientAccumulator) -> None:
        self._settings, rule = settings, settings.dynamic
        self._is_on_gpu = accumulator.kernels.device.name != "cpu"
        self.dynamic: LossScale | None = rule and accumulator.kernels.loss_scale(accumulator.arena, rule)

    @property
    def value(self) -> Any:
        """The factor of the open window's loss."""
        return self._settings.loss_scale if self.dynamic is None else self.dynamic.value

    def set(self, value: float, state: StepState, facts: Callable[[], Facts]) -> None:
        """Set the next window's number; raises if a window is open, the number out of range, or the scale dynamic."""
        scale, before = checked_loss_scale(value), self._settings.loss_scale
        if scale != before and self.dynamic is None:
            told = facts()
            change = f"{scale} after {told['count']} micro-batches of {before}"
            state.ask(Call.SET_LOSS_SCALE, lambda: {**told, "change": change})
        self._settings.loss_scale = scale

    def known(self, reducer: Reducer) -> float:
        """The scale that the host divides by, which workers compare; 1 if only the device knows the scale."""
        if self.dynamic is None:
            return self._settings.loss_scale
        if self._is_on_gpu and not reducer.waits:
            return 1.0
        scale, tracker = self.dynamic.read()
        self._settings.shared["loss_scale"] = f"{float(scale)!r} for {tracker} steps, by {self.dynamic.rule}"
        return float(scale)

    def made(self, decision: Decision) -> None:
        """Change a dynamic scale by the verdict of a step that the host decided; K2 has done so for its own."""
        if self.dynamic is not None and decision.bad is not None:
            self.dynamic.write(*self.dynamic.rule.after(*self.dynamic.read(), is_finite=not decision.bad))

    def used(self, decision: Decision, known: float) -> Any:
        """The scale of the step that was decided, for its result; None if the scale is a number that is set."""
        if self.dynamic is None:
            return None
        return known if decision.bad is not None else decision.loss_scale

    def saved(self) -> tuple[float, int]:
        """The scale, and the finite steps in a row that a dynamic one has seen; on a GPU this waits."""
        if self.dynamic is None:
            return self._settings.loss_scale, 0
        scale, tracker = self.dynamic.read()
        return float(scale), tracker

    def load(self, scale: float, tracker: int) -> None:
        """Go on with what was saved."""
        if self.dynamic is None:
            self._settings.loss_scale = scale
        else:
            self.dynamic.write(np.float32(scale), tracker)
