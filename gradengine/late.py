"""What a GPU's steps came to, told late: verdicts are looked at when they have come, and each is raised once."""

from __future__ import annotations

from typing import final

from gradengine.errors import NonFiniteGradient
from gradengine.kernels import ClipPlan, Decision, Kernels, SquaredSums, Verdict
from gradengine.layout import GradientLayout

__all__ = ["LateVerdicts"]


@final
class LateVerdicts:
    """The verdicts of one engine's steps, where the host learns them only behind the device's work.

    On the CPU there are none: each step's decision is known at once.

    Args:
        kernels: The device's kernels.
        layout: Whose components verdicts name.
        sums: The squared sums that the steps decide from.
        plan: Which components share a norm.
    """

    def __init__(self, kernels: Kernels, layout: GradientLayout, sums: SquaredSums, plan: ClipPlan) -> None:
        self._kernels, self._layout = kernels, layout
        self._telemetry = kernels.telemetry(sums, plan)
        self._latest: Verdict | None = None
        self._told_bad_steps = 0

    @property
    def exist(self) -> bool:
        """Whether there will be any: on a GPU."""
        return self._telemetry is not None

    def send(self) -> None:
        """A step was queued: have its verdict sent behind it."""
        if self._telemetry is not None:
            self._telemetry.send()

    def latest(self) -> Verdict | None:
        """The newest verdict that has come; never a wait."""
        found = self._telemetry.newest() if self._telemetry is not None else None
        if found is not None and (self._latest is None or found.step > self._latest.step):
            self._latest = found
        return self._latest

    def untold(self) -> NonFiniteGradient | None:
        """The error of the last bad step, where its verdict has come and nobody was told of it yet."""
        verdict = self.latest()
        # A verdict may also be older than what check() has read since.
        if verdict is None or verdict.bad_steps <= self._told_bad_steps:
            return None
        self._told_bad_steps = verdict.bad_steps
        return self._blamed(verdict)

    def awaited(self) -> NonFiniteGradient | None:
        """The same, waiting for all that the device has to do."""
        if self._telemetry is not None:
            self._latest = self._telemetry.read()
        return self.untold()

    def of_step(self, step: int, decision: Decision) -> NonFiniteGradient | None:
        """What one step found, waiting for the device; of a step before the last only while none after it was bad."""
        verdict = self._kernels.read_verdict(decision)
        if verdict.bad_step != step + 1:
            return None  # and where another step was bad, that one is still to be told
        self._told_bad_steps = verdict.bad_steps
        return self._blamed(verdict)

    def _blamed(self, verdict: Verdict) -> NonFiniteGradient:
        slot = self._layout.slots[verdict.bad_component]
        return NonFiniteGradient(
            slot.name, verdict.bad_index, verdict.bad_value, step=verdict.bad_step - 1, is_late=True
        )
