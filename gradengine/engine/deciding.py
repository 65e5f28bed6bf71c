"""The decision about a step, by an engine's bounds, its loss scale, and its policies for NaN, Inf and spikes."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, final

from gradengine.accumulate.state import State
from gradengine.engine.clipping import Clipping
from gradengine.engine.loss_scaling import LossScaling
from gradengine.engine.noise import StepNoise
from gradengine.engine.result import DeferredErrors
from gradengine.engine.settings import Average, OnNonFinite
from gradengine.errors import ExchangeError, GradientError, NonFiniteGradient
from gradengine.kernels import Decision, decide, refuse_bad_divisor
from gradengine.kernels.spikes import Norms, SpikePolicy, Spikes
from gradengine.reduction.reducer import Reducer
from gradengine.reduction.stats import StepStats


@final
class Deciding:
    """One engine's rules, which turn the sums of a step into norms, scales and a verdict.

    Attributes:
        clipping: The clip groups and their bounds.
        scaling: The loss scale.
    """

    def __init__(
        self,
        reducer: Reducer,
        clipping: Clipping,
        scaling: LossScaling,
        on_non_finite: OnNonFinite,
        on_spike: SpikePolicy | None,
        average: Average,
    ) -> None:
        self._average = average
        self._reducer, self.clipping, self.scaling, self._on_non_finite = reducer, clipping, scaling, on_non_finite
        self._accumulator, self._kernels = reducer.accumulator, reducer.accumulator.kernels
        self._spikes = on_spike and Spikes(on_spike, partial(self._kernels.kept, self._accumulator.arena))

    @property
    def norms(self) -> Norms:
        """The mean and variance of the spike policy, for a saved state; zeros without one. On a GPU this waits."""
        return Norms() if self._spikes is None else Norms(*self._spikes.kept.read())

    @norms.setter
    def norms(self, norms: Norms) -> None:
        if self._spikes is not None:
            self._spikes.kept.write(*norms)

    def decide(
        self, step: int, late: DeferredErrors | None
    ) -> tuple[StepStats, Decision, NonFiniteGradient | None, Any]:
        """Sum over the ranks, agree and decide, without writing a gradient. Return a dynamic loss scale's value last.

        `late` counts the device's steps. It is None on the CPU, and in a graph, which counts its own steps.
        """
        reducer, dynamic, zero_if_bad = self._reducer, self.scaling.dynamic, self._on_non_finite != "propagate"
        plan, spikes = self.clipping.plan, self._spikes
        try:
            scale = self.scaling.known(reducer)
            norms = str(self.norms) if spikes is not None and reducer.waits else None
            stats = reducer.agree(scale, norms)
            # If each micro-batch was dropped, the step is skipped. K2 checks a weight that only the device has.
            is_empty = isinstance(stats.weight, float) and stats.weight == 0
            divisor = math.inf if is_empty else scale[0] * reducer.divisor(stats)
            if not is_empty:
                refuse_bad_divisor(divisor, "the window's weight times the loss scale")
            if stats.totals.size:
                # All ranks make the same decision, from the sums that they agreed on.
                judged = None if spikes is None else spikes.judged
                decision = decide(stats.totals, plan, divisor, zero_if_bad=zero_if_bad, judged=judged)
            else:
                decision = self._kernels.finalise(
                    self._accumulator.arena, plan, divisor, weight=stats.on_device, counted=stats.counted,
                    loss_scale=dynamic, bounds=self.clipping.bounds, spikes=spikes, zero_if_bad=zero_if_bad,
                    step=0 if late is None else late.note_queued(step),
                )  # fmt: skip
            non_finite = reducer.find_non_finite(decision.bad) if decision.bad else None
        except ExchangeError:
            reducer.fail()
            raise
        except Exception as fault:
            # An exception of a signal handler may have interrupted a sum.
            if not isinstance(fault, GradientError):
                self._accumulator.state.now = State.BROKEN
            raise
        if non_finite is not None and self._on_non_finite == "raise":
            # Measure again, because a rank may correct its arena and run the step again.
            self._accumulator.forget_measured()
            raise non_finite
        if non_finite is not None:
            non_finite.do = f"the step has ended, by on_non_finite={self._on_non_finite!r}"
        used = decision.loss_scale if decision.bad is None else scale[0]
        return stats, decision, non_finite, None if dynamic is None else used

    def noise(self, stats: StepStats, used_scale: Any) -> StepNoise:
        """Return the facts of the step's gradient noise, for an engine that measures it."""
        known_scale = self.scaling.value if used_scale is None else used_scale
        return StepNoise(stats, self._accumulator.first, self._average, self._reducer.worker[1], known_scale)

    def follow(self, decision: Decision) -> None:
        """Update loss scale and spike policy after a step that the host decided. K2 has done so for its own steps."""
        if self.scaling.dynamic is not None:
            self.scaling.follow(decision)
        if self._spikes is not None:
            self._spikes.follow(decision)
