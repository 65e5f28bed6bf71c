"""Errors of a GPU's steps, which the host learns behind the device's work: each is raised once, by a later call."""

from __future__ import annotations

from typing import NoReturn, final

from gradengine.errors import NonFiniteGradient, WindowError
from gradengine.kernels import Arena, ClipPlan, Decision, Kernels, StepStatus
from gradengine.layout import GradientLayout

__all__ = ["DeferredErrors"]


@final
class DeferredErrors:
    """Asynchronous non-finite errors of one engine's steps, each raised once; on the CPU there are none.

    `exist` says whether there will be any. `layout` names components in errors.
    """

    def __init__(self, kernels: Kernels, layout: GradientLayout, arena: Arena, plan: ClipPlan) -> None:
        self._kernels, self._layout = kernels, layout
        self._telemetry = kernels.status_readback(arena, plan)
        self.exist = self._telemetry is not None
        self._latest: StepStatus | None = None
        self._raised_bad_steps = 0
        self._counted = 0  # steps, as the device counts them behind what is queued

    def send(self) -> None:
        """A step was queued: have its verdict sent behind it."""
        if self._telemetry is not None:
            self._telemetry.send()

    def note_queued(self, step: int) -> int:
        """The device's count of steps once the step of this number, about to be queued, is done."""
        self._counted = step + 1
        return self._counted

    def count_from(self, step: int) -> None:
        """Set the device's count of steps before a graph's step is queued.

        Interrupted before it was queued, it comes here again, and not as what the device is thought to have counted.
        """
        counted, self._counted = self._counted, step + 1
        if self._telemetry is not None and counted != step:
            self._telemetry.count_from(step)

    def has_run(self, step: int) -> bool:
        """Whether a graph's step of that number was queued before an interrupt; waits for the device."""
        return self._telemetry is not None and self._telemetry.read().step == step + 1

    def latest(self) -> StepStatus | None:
        """The newest verdict that has come; never a wait."""
        found = self._telemetry.newest() if self._telemetry is not None else None
        if found is not None and (self._latest is None or found.step > self._latest.step):
            self._latest = found
        return self._latest

    def wait(self) -> None:
        """Wait for all that the device has to do: the newest verdict has come then."""
        if self._telemetry is not None:
            self._latest = self._telemetry.read()

    def raise_pending(self) -> None:
        """Raise the error of the last bad step, where its verdict has come and nobody was told of it yet."""
        verdict = self.latest()
        # A verdict may also be older than what check() has read since.
        if verdict is not None and verdict.bad_steps > self._raised_bad_steps:
            self._raise(verdict)

    def of_step(self, step: int, decision: Decision) -> NonFiniteGradient | None:
        """What one step found, waiting for the device; `WindowError` where a later step has overwritten it."""
        verdict = self._of_step(step, decision)
        if verdict is None:
            return None
        error = self._blamed(verdict)
        self._raised_bad_steps = verdict.bad_steps
        return error

    def raise_of_step(self, step: int, decision: Decision) -> None:
        """Raise what one step found, as `of_step` finds it."""
        verdict = self._of_step(step, decision)
        if verdict is not None:
            self._raise(verdict)

    def _of_step(self, step: int, decision: Decision) -> StepStatus | None:
        """The verdict of a bad step; None of a good one. Where another step was bad, that one is still to be told."""
        assert self._telemetry is not None  # noqa: S101  (a decision that the host does not know is a device's)
        verdict = self._telemetry.read()
        # The device keeps what the last bad step found, and their number: before an only one, none was bad.
        if verdict.bad_step > step + 1 and verdict.bad_steps > 1:
            raise WindowError(
                f"what step {step} found is no longer known",
                got=f"{verdict.bad_steps} steps that were not finite, the last of them step {verdict.bad_step - 1}",
                do="ask each result before the next step",
            )
        return verdict if verdict.bad_step == step + 1 else None

    def _raise(self, verdict: StepStatus) -> NoReturn:
        error = self._blamed(verdict)
        # Told once the error is on its way: Python looks for signals behind calls, and between these two is none.
        self._raised_bad_steps = verdict.bad_steps
        raise error

    def _blamed(self, verdict: StepStatus) -> NonFiniteGradient:
        slot = self._layout.slots[verdict.bad_component]
        return NonFiniteGradient(
            slot.name, verdict.bad_index, verdict.bad_value, step=verdict.bad_step - 1, is_late=True
        )
