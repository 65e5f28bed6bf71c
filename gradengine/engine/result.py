"""The result of a step, and the errors that steps on a GPU report late.

On a GPU the numbers are 0-d device arrays, which the next step overwrites. Only reading one (`float(result.norm)`)
waits for the device. Taking one from the result makes the current streams wait for the step, whatever device and stream
the step was queued on.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeAlias, final

import numpy as np

from gradengine.accumulate import PerBlockGradientAccumulator
from gradengine.arguments import truth_value
from gradengine.engine.noise import StepNoise
from gradengine.errors import CallerError, ExchangeError, GradientError, NonFiniteGradient, WindowError, not_copied
from gradengine.exchange.exchange import Sums
from gradengine.kernels import ClipPlan, Decision
from gradengine.kernels.status import StatusReadback, StepStatus
from gradengine.layout import GradientLayout
from gradengine.reduction.stats import StepStats

_PAYLOAD = (1 << 51) - 1  # bits of a NaN's payload
# tally.cu has the same numbers.
_OTHER_STEP, _OTHER_SCALE, _NO_MICRO_BATCH, _OTHER_BOUNDS, _FAULTS = 1, 2, 3, 4, 5


@dataclass(frozen=True, eq=False, repr=False)
class StepResult:
    """The result of a step.

    Attributes:
        step: The step's number, counted from 0.
        deferred: Whether the step has `sums`, to be multiplied by `factor`, instead of `gradients`.
    """

    __reduce_ex__ = not_copied("copy what you need: float(result.norm), result.gradients[name].copy()")

    step: int
    deferred: bool
    _stats: StepStats
    _decision: Decision
    _non_finite: NonFiniteGradient | None  # None if only the device has it
    _sums: Sums | None  # None without other ranks
    _loss_scale: Any  # None unless it is dynamic
    _arrays: Mapping[str, Any]
    _accumulator: PerBlockGradientAccumulator
    _changes: int  # writes to the arena before the step was over
    _group_names: Sequence[str]
    _late: DeferredErrors | None  # None on the CPU
    _has_policy: bool  # whether the engine has `on_spike`
    _noise: StepNoise | None  # None unless it is measured

    @property
    def norm(self) -> Any:
        """The global norm of the result before clipping.

        It is the norm of the averaged gradient, or with `average="prescaled"` of the mean of the ranks' sums.
        """
        return self._ready._decision.norm

    @property
    def scale(self) -> Any:
        """The clip scale. With several groups it is the smallest of all groups."""
        return self._ready._decision.scale

    @property
    def factor(self) -> Any:
        """The fp32 factor that averages, unscales and clips the sum in one multiplication.

        After a deferred step the sum is still to be multiplied by it. With several groups it is the first group's.
        """
        return self._ready._decision.factor

    @property
    def inverse_factor(self) -> Any:
        """1 / factor, in fp32, for optimizers that divide, such as torch's fused ones by `grad_scale`."""
        return self._ready._decision.inverse

    @property
    def skipped(self) -> Any:
        """Whether the step is skipped, with zero gradients, because the gradient was not finite or its norm a spike.

        On a GPU this is a 0-d array of 0.0 or 1.0, which torch's fused optimizers accept as `found_inf`.
        """
        return self._ready._decision.skipped

    @property
    def spiked(self) -> Any:
        """Whether the norm was a spike for the engine's `on_spike`. On a GPU this is a 0-d array of 0.0 or 1.0."""
        return self._ready._decision.spiked

    @property
    def spike_bound(self) -> Any:
        """The norm above which the step would have been a spike; infinity while `on_spike` has no bound."""
        return self._ready._decision.spike_bound

    @property
    def group_norms(self) -> Mapping[str, Any]:
        """The norm of each clip group, by name."""
        return dict(zip(self._group_names, self._ready._decision.group_norms, strict=True))

    @property
    def group_scales(self) -> Mapping[str, Any]:
        """The clip scale of each clip group, by name."""
        return dict(zip(self._group_names, self._ready._decision.scales, strict=True))

    @property
    def block_norms(self) -> Sequence[Any]:
        """The norm of each block, in layout order."""
        return self._ready._decision.block_norms

    @property
    def component_norms(self) -> Sequence[Any]:
        """The norm of each component, in layout order."""
        return self._ready._decision.component_norms

    @property
    def weight(self) -> Any:
        """The total weight of all ranks' micro-batches, as a float, or as a GPU array if the ranks sum on their GPUs.

        The micro-batches of a tensor-parallel group count once.
        """
        return self._ready._stats.weight

    @property
    def micro_batches(self) -> Any:
        """The number of all ranks' micro-batches, as an int, or as a GPU array if the ranks sum on their GPUs."""
        return self._ready._stats.micro_batches

    @property
    def dropped(self) -> Any:
        """The number of all ranks' micro-batches that `on_non_finite="drop_micro_batch"` has left out.

        `micro_batches` counts them, and `weight` does not. It is an int on the CPU, or if the step waits for ranks on
        the host. Otherwise `dropped` and `weight` are GPU arrays, which the next `add` overwrites.
        """
        return self._ready._stats.dropped

    @property
    def stop(self) -> Any:
        """Whether a rank called `engine.stop_after_step()`. A request is reported once, in the same step on all ranks.

        It is a bool. If the ranks sum on their GPUs, it is a 0-d array of 0.0 or 1.0. Reading it waits for the step.
        """
        return self._ready._stats.stop

    @property
    def unused(self) -> frozenset[str]:
        """The names of components without a gradient in any micro-batch of any rank, on any part of the model.

        Their gradients in the result are zeros, but torch would have None. If the ranks sum on their GPUs and this
        rank had no gradient for a component, this waits for the step.
        """
        slots = self._accumulator.layout.slots
        unused = np.flatnonzero(self._stats.unused_by_all())
        return frozenset(slots[position].name for position in unused.tolist())

    def metrics(self, *, blocks: bool = False) -> dict[str, float]:
        """Return the numbers to log as a flat dict name -> float. On a GPU this waits for the step.

        Args:
            blocks: Add the norm of each block, and of each component outside the blocks, as "grad_norm/layers.0".

        Returns:
            "grad_norm" and "clip_scale" are `norm` and `scale`. "clipped" and "skipped" are 1.0 or 0.0. "weight",
            "micro_batches" and "dropped" are totals of all ranks. "exchange_seconds" is the time from the first span
            sent to the last sum received. "exchange_hidden_seconds" is the part of it in which `step` did not wait.
            Both are 0.0 without an exchange. A dynamic loss scale adds the step's "loss_scale". Several groups add
            "group_norm/<name>" for each. `on_spike` adds "spiked" (1.0 or 0.0) and "spike_bound". `measure_noise` adds
            "noise/<way>", "signal/<way>" and "noise_scale/<way>" for the known ways of "ranks" and "micro_batches" (see
            docs/reference/metrics.md). The way "micro_batches" is left out after the next `add`, which overwrites it.

        Example:
            >>> from gradengine import GradientEngine, GradientLayout
            >>> engine = GradientEngine(GradientLayout.of({"w": (2,)}), max_norm=1.0)
            >>> engine.add({"w": np.array([3, 4], np.float32)})
            >>> metrics = engine.step().metrics()
            >>> metrics["grad_norm"], metrics["clip_scale"], metrics["clipped"]
            (5.0, 0.2, 1.0)
        """
        return self._accumulator.kernels.device.relaxed(self._read_metrics, truth_value("blocks", blocks))

    def _read_metrics(self, blocks: bool) -> dict[str, float]:
        scale, sums = float(self.scale), self._sums
        total, waited = (sums.total, sums.waited) if sums else (0.0, 0.0)
        found = {
            "grad_norm": float(self.norm),
            "clip_scale": scale,
            "clipped": float(scale < 1),
            "skipped": float(self.skipped),
            "weight": float(self.weight),
            "micro_batches": float(self.micro_batches),
            "dropped": float(self.dropped),
            "exchange_seconds": total,
            "exchange_hidden_seconds": max(0.0, total - waited),
        }
        if self._loss_scale is not None:
            found["loss_scale"] = float(self._loss_scale)
        if self._has_policy:
            found |= {"spiked": float(self.spiked), "spike_bound": float(self.spike_bound)}
        if self._noise is not None:
            first = self._noise.first if self.is_current else None
            square = None if first is None else self._accumulator.square_of(first)
            found |= self._noise.metrics(found["grad_norm"], square)
        if len(self._group_names) > 1:
            found |= {f"group_norm/{name}": float(norm) for name, norm in self.group_norms.items()}
        if blocks:
            layout = self._accumulator.layout
            norms = zip(layout.slots, self.component_norms, strict=True)
            parts = dict(zip([block.name for block in layout.blocks], self.block_norms, strict=True))
            parts |= {slot.name: norm for slot, norm in norms if slot.block is None}
            found |= {f"grad_norm/{name}": float(norm) for name, norm in parts.items()}
        return found

    @property
    def is_current(self) -> bool:
        """Whether the gradients are still those of this step. False after an `add`, `step` or replay of the engine."""
        return self._accumulator.state.changes == self._changes

    @property
    def gradients(self) -> Mapping[str, Any]:
        """Name -> fp32 array of the component's shape, averaged, unscaled and clipped.

        The arrays are views of the arena, valid until the next `add`. The norm may miss values written after it. With
        `out` they are the given destinations. `copy.deepcopy` and `pickle` make a plain dict of copies.

        Raises:
            CallerError: The step was deferred, so that it has sums, which an optimizer must not use as gradients.
        """
        if self.deferred:
            raise CallerError(
                f"step {self.step} was deferred and has no gradients",
                got="sums over the window, neither averaged nor clipped",
                do="multiply result.sums by result.factor (torch: step_fused does it), or call step(deferred=False)",
            )
        return self._ready._arrays

    @property
    def sums(self) -> Mapping[str, Any]:
        """Name -> fp32 view of the window's weighted sum in the arena, after a deferred step.

        `sums[name] * factor` is the gradient. If `skipped` is set, there is none. Valid until the next `add`.

        Raises:
            CallerError: The step was not deferred, so that its sums are already scaled.
        """
        if not self.deferred:
            raise CallerError(
                f"step {self.step} has scaled its gradients already",
                do="use result.gradients, or call engine.step(deferred=True)",
            )
        return self._ready._arrays

    @property
    def non_finite(self) -> NonFiniteGradient | None:
        """The error that describes a gradient that was not finite; None if the gradient was finite.

        On a GPU this waits for the device, which keeps only the newest of these errors.

        Raises:
            WindowError: On a GPU, a later step's error may have replaced this step's.
        """
        if self._late is not None and self._decision.bad is None:
            return self._late.of_step(self.step)
        return self._non_finite

    def check(self) -> None:
        """Raise the error of a gradient that was not finite immediately. On a GPU this waits for the device.

        Raises:
            NonFiniteGradient: The gradient held NaN or Inf.
            WindowError: On a GPU, the step's weight was invalid, or a later step's error may have replaced this step's.
            ExchangeError: The ranks sum on their GPUs and did not agree.
        """
        if self._late is not None and self._decision.bad is None:
            self._late.raise_of_step(self.step)
        elif self._non_finite is not None:
            raise copy.copy(self._non_finite)  # a copy, so that the result does not keep the caller's traceback

    def __repr__(self) -> str:
        return f"StepResult(step={self.step}, deferred={self.deferred}, {self.metrics()})"

    def of_replay(self, step: int, stop: bool) -> StepResult:
        """Return the result of a later step with this result's arrays, since a graph's replay writes the same memory.

        `stop` is that of a lone engine. If the ranks sum on their GPUs, an array there holds it.
        """
        stats = self._stats
        if stats.ask_device is None and stats.stop is not stop:
            stats = replace(stats, stop=stop)
        return replace(self, step=step, _stats=stats, _changes=self._accumulator.state.changes)

    @property
    def _ready(self) -> StepResult:
        """This result, after the current streams have been made to wait for the step."""
        self._accumulator.arena.follow()
        return self


#: The functions of `GradientEngine.on_step`, each with a unique key.
Observers: TypeAlias = dict[object, Callable[[StepResult], object]]


@final
class DeferredErrors:
    """Errors for gradients that are not finite in one GPU's steps. They arrive late, and each is raised once.

    Args:
        readback: Copies the status of the device's steps to the host.
        layout: The layout whose components the errors name.
        raises: Whether `raise_pending` raises. Otherwise it only takes the status that has arrived.
    """

    def __init__(self, readback: StatusReadback, layout: GradientLayout, *, raises: bool) -> None:
        self._readback, self._layout, self._raises = readback, layout, raises
        self.send = readback.send  #: queues a copy of the status to the host, after the step that was queued
        self._latest: StepStatus | None = None
        self._raised_bad_steps = self._raised_bad_weights = 0
        self._counted = 0  # the device's count of steps after all queued work

    @staticmethod
    def of(accumulator: PerBlockGradientAccumulator, plan: ClipPlan, *, raises: bool) -> DeferredErrors | None:
        """Return the late errors of this accumulator's steps; None on the CPU."""
        readback = accumulator.kernels.status_readback(accumulator.arena, plan)
        return None if readback is None else DeferredErrors(readback, accumulator.layout, raises=raises)

    def note_queued(self, step: int) -> int:
        """Note that the step of this number is about to be queued. Return the device's count of steps after it."""
        self._counted = step + 1
        return self._counted

    def count_from(self, step: int) -> None:
        """Set the device's count of steps before a graph's step is queued."""
        if self._counted != step:
            self._readback.count_from(step)
        self.note_queued(step)

    def drop(self, step: int) -> bool:
        """Drop a step. Return whether the device may have made it. The next replay sets the device's count again."""
        is_queued, self._counted = self._counted == step + 1, -1
        return is_queued

    def restart(self) -> None:
        """Forget every step so far, because the next ones are counted from a different number."""
        self._readback.restart()
        self._latest, self._raised_bad_steps, self._raised_bad_weights, self._counted = None, 0, 0, -1

    def latest(self) -> StepStatus | None:
        """Return the newest status that has arrived, without a wait."""
        found = self._readback.newest()
        if found is not None and (self._latest is None or found.step > self._latest.step):
            self._latest = found
        return self._latest

    def wait(self) -> None:
        """Wait for all of the device's work and read the newest status."""
        self._latest = self._readback.read()

    def raise_pending(self) -> None:
        """Raise the error of the last bad step, if its status has arrived and the error was not raised before."""
        status = self.latest()
        if status is None:
            return
        if status.bad_weights > self._raised_bad_weights:
            self._raise_weight(status)
        # This status may be older than the one that check() has read in the meantime.
        if self._raises and status.bad_steps > self._raised_bad_steps:
            self._raise(status)

    def of_step(self, step: int) -> NonFiniteGradient | None:
        """Wait for the device and return the error of one step. Raise `WindowError` if a later step overwrote it."""
        status = self._read_of(step)
        if status.bad_step != step + 1:  # The error of a different step stays pending.
            return None
        error = self._blamed(status)
        self._raised_bad_steps = status.bad_steps
        return error

    def raise_of_step(self, step: int) -> None:
        """Raise the error of one step, for its weight or for the gradient that `of_step` finds."""
        status = self._read_of(step)
        if status.bad_weight_step == step + 1:
            self._raise_weight(status)
        if status.bad_step == step + 1:
            self._raise(status)

    def _read_of(self, step: int) -> StepStatus:
        status = self._readback.read()
        # The device keeps the last bad step and the number of bad steps. If that number is 1, no earlier step was bad.
        if status.bad_step > step + 1 and status.bad_steps > 1:
            raise WindowError(
                f"whether step {step} was finite is no longer known",
                got=f"{status.bad_steps} steps that were not finite, the last of them step {status.bad_step - 1}",
                do="call result.check() or read result.non_finite before the next step",
            )
        return status

    def _raise_weight(self, status: StepStatus) -> NoReturn:
        """Raise the error of an invalid weight, even if gradients that are not finite are allowed."""
        error = _not_agreed(status) or WindowError(
            f"step {status.bad_weight_step - 1} gave zeros, because the weight of its window is out of range",
            got=f"{status.bad_weight:g} in all",
            expected="2**-126..2**126, times the loss scale",
            do="use weights nearer to 1",
        )
        self._raised_bad_weights = status.bad_weights
        raise error

    def _raise(self, status: StepStatus) -> NoReturn:
        error = self._blamed(status)
        # Python handles signals after calls, and there is no call between this line and the raise.
        self._raised_bad_steps = status.bad_steps
        raise error

    def _blamed(self, status: StepStatus) -> NonFiniteGradient:
        slot = self._layout.slots[status.bad_component]
        return NonFiniteGradient(slot.name, status.bad_index, status.bad_value, step=status.bad_step - 1, is_late=True)


def _not_agreed(status: StepStatus) -> GradientError | None:
    """Return the error of ranks that sum on their GPUs and did not agree, with the first such rank, or None."""
    told = int(np.float64(status.bad_weight).view(np.uint64)) & _PAYLOAD if math.isnan(status.bad_weight) else 0
    rank, fault = divmod(told, _FAULTS)
    where = f"step {status.bad_weight_step - 1} was skipped on all ranks"
    if fault == _OTHER_STEP:
        do = "restart all ranks from one checkpoint"
        return ExchangeError(f"{where}: rank {rank} was in another step than rank 0", do=do)
    if fault in {_OTHER_SCALE, _OTHER_BOUNDS}:
        setting = "loss scale" if fault == _OTHER_SCALE else "max_norm"
        what = f"{where}: rank {rank} had a different {setting} than rank 0"
        return ExchangeError(what, do="set the same on all ranks")
    if fault == _NO_MICRO_BATCH:
        return WindowError(f"{where}: none of them had a micro-batch", do="add() gradients on one of them")
    return None
