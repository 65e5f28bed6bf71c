"""An engine's clip groups and their bounds, which can be set between windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import final

from gradengine.accumulate import PerBlockGradientAccumulator
from gradengine.accumulate.state import State
from gradengine.clip import MaxNorm, bounds_of_groups
from gradengine.engine.settings import SharedSettings, shown_bounds
from gradengine.errors import CallerError
from gradengine.kernels import ClipPlan
from gradengine.kernels.kept import bounds_of


@final
class Clipping:
    """One engine's clip groups and their bounds.

    Attributes:
        plan: The groups, and the bounds of the next step.
        names: The groups' names.
        bounds: The bounds in the device's memory, from which a captured step reads them.
    """

    def __init__(
        self, plan: ClipPlan, names: Sequence[str], accumulator: PerBlockGradientAccumulator, shared: SharedSettings
    ) -> None:
        self.plan, self.names, self._shared, self._state = plan, names, shared, accumulator.state
        dtype = bounds_of(len(names))
        self.bounds = accumulator.kernels.kept(accumulator.arena, dtype, plan.digest, plan.max_norms)

    @property
    def value(self) -> MaxNorm:
        """The bound, or one for each group by name. None disables clipping."""
        bounds: list[float | None] = [None if bound == math.inf else bound for bound in self.plan.max_norms]
        return bounds[0] if len(bounds) == 1 else MappingProxyType(dict(zip(self.names, bounds, strict=True)))

    def with_bounds(self, max_norm: MaxNorm) -> ClipPlan:
        """Return the plan with these bounds. Raise `CallerError` if one is missing, 0, negative or NaN."""
        return replace(self.plan, max_norms=bounds_of_groups(max_norm, self.names))

    def with_saved(self, max_norms: Sequence[float]) -> ClipPlan:
        """Return the plan with the bounds of a saved state, one for each group in order, or raise `CallerError`."""
        if len(max_norms) != len(self.names):
            expected = f"{len(self.names)}, one for each group"
            raise CallerError("'max_norms' of a saved state has a wrong length", got=len(max_norms), expected=expected)
        return self.with_bounds(dict(zip(self.names, max_norms, strict=True)))

    def use(self, plan: ClipPlan, over: State) -> None:
        """Use the bounds of this plan for the next steps and replays, after all queued work.

        The step is BROKEN during the call and then in the state `over`. After an interrupt call it with `self.plan`.
        """
        self._state.now, self.plan = State.BROKEN, plan
        self._shared["max_norm"] = shown_bounds(plan)
        self.bounds.write(plan.digest, plan.max_norms)
        self._state.now = over
