"""Errors of a GPU's steps, which the host learns after the device's work: each is raised once, by a later call."""

from __future__ import annotations

import math
from typing import NoReturn, final

import numpy as np

from gradengine.errors import ExchangeError, GradientError, NonFiniteGradient, WindowError
from gradengine.kernels.status import StatusReadback, StepStatus
from gradengine.layout import GradientLayout

_PAYLOAD = (1 << 51) - 1  # of a NaN
_OTHER_STEP, _OTHER_SETTINGS, _NO_MICRO_BATCH, _FAULTS = 1, 2, 3, 4  # as tally.cu has them


@final
class DeferredErrors:
    """Asynchronous non-finite errors of one engine's steps, each raised once; without a readback there are none.

    Args:
        readback: Copies the status of the device's steps to the host.
        layout: The layout whose components the errors name.
        raises: Whether `raise_pending` raises; else it only takes what has arrived, so that more can be sent.
    """

    def __init__(self, readback: StatusReadback | None, layout: GradientLayout, *, raises: bool = True) -> None:
        self._readback, self._layout, self._raises = readback, layout, raises
        self.exist = readback is not None  # whether there can be any
        self._latest: StepStatus | None = None
        self._raised_bad_steps = self._raised_bad_weights = 0
        self._counted = 0  # steps, as the device will count them after all queued work

    def send(self) -> None:
        """Queue a copy of the status to the host, after the step that was queued."""
        if self._readback is not None:
            self._readback.send()

    def note_queued(self, step: int) -> int:
        """Note that the step of this number is about to be queued; returns the device's count of steps after it."""
        self._counted = step + 1
        return self._counted

    def count_from(self, step: int) -> None:
        """Set the device's count of steps before a graph's step is queued."""
        if self._readback is not None and self._counted != step:
            self._readback.count_from(step)
        self.note_queued(step)

    def drop(self, step: int) -> bool:
        """Drop a step; returns whether the device may have made it. The next replay sets the device's count again."""
        is_queued, self._counted = self._counted == step + 1, -1
        return is_queued

    def restart(self) -> None:
        """Forget every step so far: the next ones are counted from another number."""
        if self._readback is not None:
            self._readback.restart()
        self._latest, self._raised_bad_steps, self._raised_bad_weights, self._counted = None, 0, 0, -1

    def latest(self) -> StepStatus | None:
        """The newest status that has arrived; never waits."""
        found = self._readback.newest() if self._readback is not None else None
        if found is not None and (self._latest is None or found.step > self._latest.step):
            self._latest = found
        return self._latest

    def wait(self) -> None:
        """Wait for all of the device's work, after which the newest status is known."""
        if self._readback is not None:
            self._latest = self._readback.read()

    def raise_pending(self) -> None:
        """Raise the error of the last bad step, if its status has arrived and the error was not raised before."""
        status = self.latest()
        if status is not None and status.bad_weights > self._raised_bad_weights:
            self._raise_weight(status)
        # This status may be older than the one that check() has read since.
        if self._raises and status is not None and status.bad_steps > self._raised_bad_steps:
            self._raise(status)

    def of_step(self, step: int) -> NonFiniteGradient | None:
        """The error of one step, after waiting for the device; raises `WindowError` if a later step overwrote it."""
        status = self._of_step(step)
        if status is None:
            return None
        error = self._blamed(status)
        self._raised_bad_steps = status.bad_steps
        return error

    def raise_of_step(self, step: int) -> None:
        """Raise the error of one step: what `of_step` finds, or that its weight was bad."""
        status = self._of_step(step)
        now = self._readback.read() if self._readback is not None else None
        if now is not None and now.bad_weight_step == step + 1:
            self._raise_weight(now)
        if status is not None:
            self._raise(status)

    def _of_step(self, step: int) -> StepStatus | None:
        """The status of this step if it was bad, else None. The error of another bad step stays pending."""
        assert self._readback is not None  # noqa: S101  (a decision that the host does not know is a device's)
        status = self._readback.read()
        # The device keeps the last bad step and the number of bad steps: if that is 1, no earlier step was bad.
        if status.bad_step > step + 1 and status.bad_steps > 1:
            raise WindowError(
                f"whether step {step} was finite is no longer known",
                got=f"{status.bad_steps} steps that were not finite, the last of them step {status.bad_step - 1}",
                do="call result.check() or read result.non_finite before the next step",
            )
        return status if status.bad_step == step + 1 else None

    def _raise_weight(self, status: StepStatus) -> NoReturn:
        """Raise the error of a bad weight, also if gradients that are not finite pass."""
        error = _not_agreed(status) or WindowError(
            f"the weight of the window of step {status.bad_weight_step - 1} is out of range: zeros were handed back",
            got=f"{status.bad_weight:g} in all",
            expected="weights of 0 or of at least 2**-126, not all 0, that with the loss scale make 2**-126..2**126",
            do="skip that micro-batch, or set its weight to 0; read result.skipped before the optimizer steps",
        )
        self._raised_bad_weights = status.bad_weights
        raise error

    def _raise(self, status: StepStatus) -> NoReturn:
        error = self._blamed(status)
        # Only now: Python handles signals after calls, and between this line and the raise there is no call.
        self._raised_bad_steps = status.bad_steps
        raise error

    def _blamed(self, status: StepStatus) -> NonFiniteGradient:
        slot = self._layout.slots[status.bad_component]
        return NonFiniteGradient(slot.name, status.bad_index, status.bad_value, step=status.bad_step - 1, is_late=True)


def _not_agreed(status: StepStatus) -> GradientError | None:
    """The error of workers that sum on their GPUs and did not agree, naming the first such rank; None if they did."""
    told = int(np.float64(status.bad_weight).view(np.uint64)) & _PAYLOAD if math.isnan(status.bad_weight) else 0
    rank, fault = divmod(told, _FAULTS)
    where = f"step {status.bad_weight_step - 1} was skipped on all ranks"
    if fault == _OTHER_STEP:
        do = "a window was finished or dropped on some ranks only: restart all from one checkpoint"
        return ExchangeError(f"{where}: rank {rank} was in another step than rank 0", do=do)
    if fault == _OTHER_SETTINGS:
        what = f"{where}: rank {rank} had another loss scale, or other settings, than rank 0"
        return ExchangeError(what, do="set the same on all ranks")
    if fault == _NO_MICRO_BATCH:
        return WindowError(f"{where}: none of them had a micro-batch", do="add() gradients on one of them")
    return None
