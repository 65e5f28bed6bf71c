"""What a step hands back, and the errors that a GPU's steps report late.

On a GPU the numbers are 0-d device arrays: reading one (`float(result.norm)`) is the only wait for the device, and the
next step overwrites them. Taking one from the result makes the current streams wait for the step, whatever device and
stream the step was queued on.
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

_PAYLOAD = (1 << 51) - 1  # of a NaN
_OTHER_STEP, _OTHER_SCALE, _NO_MICRO_BATCH, _OTHER_BOUNDS, _FAULTS = 1, 2, 3, 4, 5  # as tally.cu has them


@dataclass(frozen=True, eq=False, repr=False)
class StepResult:
    """What a step hands back.

    Attributes:
        step: The step's number, counted from 0.
        deferred: Whether the step left `sums`, to be multiplied by `factor`, in place of `gradients`.
    """

    __reduce_ex__ = not_copied("copy what you need: float(result.norm), result.gradients[name].copy()")

    step: int
    deferred: bool
    _stats: StepStats
    _decision: Decision
    _non_finite: NonFiniteGradient | None  # if the host knows of one
    _sums: Sums | None  # over workers, if there are others
    _loss_scale: Any  # if it is a dynamic one, otherwise None
    _arrays: Mapping[str, Any]
    _accumulator: PerBlockGradientAccumulator
    _changes: int  # of the arena, when the step was over
    _group_names: Sequence[str]
    _late: DeferredErrors | None  # on a GPU
    _has_policy: bool  # for spikes
    _noise: StepNoise | None  # if it is measured

    @property
    def norm(self) -> Any:
        """Global norm of the averaged gradient (of the sum, with `average="prescaled"`), before clipping."""
        return self._ready._decision.norm

    @property
    def scale(self) -> Any:
        """Clip scale; with several groups the smallest of theirs."""
        return self._ready._decision.scale

    @property
    def factor(self) -> Any:
        """What the sum was multiplied by, in fp32: average, loss unscale and clip in one.

        After a deferred step: what the sum is still to be multiplied by. With several groups: the first group's.
        """
        return self._ready._decision.factor

    @property
    def inverse_factor(self) -> Any:
        """1 / factor, in fp32: for optimizers that divide, such as torch's fused ones by `grad_scale`."""
        return self._ready._decision.inverse

    @property
    def skipped(self) -> Any:
        """True if the gradient was not finite, or its norm a spike, and the step is to be skipped with zero gradients.

        On a GPU a 0-d array of 0.0 or 1.0, as torch's fused optimizers take it for `found_inf`.
        """
        return self._ready._decision.skipped

    @property
    def spiked(self) -> Any:
        """True if the norm was a spike for the engine's `on_spike`; on a GPU a 0-d array of 0.0 or 1.0."""
        return self._ready._decision.spiked

    @property
    def spike_bound(self) -> Any:
        """The norm above which the step would have been a spike: infinity while `on_spike` has no bound."""
        return self._ready._decision.spike_bound

    @property
    def group_norms(self) -> Mapping[str, Any]:
        """Each clip group's norm."""
        return dict(zip(self._group_names, self._ready._decision.group_norms, strict=True))

    @property
    def group_scales(self) -> Mapping[str, Any]:
        """Each clip group's scale."""
        return dict(zip(self._group_names, self._ready._decision.scales, strict=True))

    @property
    def block_norms(self) -> Sequence[Any]:
        """Each block's norm."""
        return self._ready._decision.block_norms

    @property
    def component_norms(self) -> Sequence[Any]:
        """Each component's norm, in layout order."""
        return self._ready._decision.component_norms

    @property
    def weight(self) -> Any:
        """Weight of all micro-batches of all workers: a float, or an array on the GPU if workers sum there."""
        return self._ready._stats.weight

    @property
    def micro_batches(self) -> Any:
        """Micro-batches of all workers: an int, or an array on the GPU if workers sum there."""
        return self._ready._stats.micro_batches

    @property
    def dropped(self) -> Any:
        """Micro-batches of all workers that were not finite and left out, if `on_non_finite` is "drop_micro_batch".

        `micro_batches` counts them too, and `weight` does not. An int; on a GPU an array there, unless it waits anyway:
        the next `add` overwrites it, and `weight`.
        """
        return self._ready._stats.dropped

    @property
    def stop(self) -> Any:
        """Whether a rank has called `engine.stop_after_step()`: true in the same step on all ranks, once a request.

        A bool. If workers sum on their GPUs, a 0-d array there of 0.0 or 1.0: reading it waits for the step.
        """
        return self._ready._stats.stop

    @property
    def unused(self) -> frozenset[str]:
        """Names of the components without a gradient in any micro-batch of any worker, on any part of the model.

        Their gradients in the result are zeros, where torch would have None. If workers sum on their GPUs and this one
        had no gradient for a component, this waits for the step.
        """
        slots = self._accumulator.layout.slots
        unused = np.flatnonzero(self._stats.unused_by_all())
        return frozenset(slots[position].name for position in unused.tolist())

    def metrics(self, *, blocks: bool = False) -> dict[str, float]:
        """The numbers to log, as a flat dict name -> float. On a GPU this waits for the step.

        Args:
            blocks: Add the norm of each block, and of each component outside the blocks, as "grad_norm/layers.0".

        Returns:
            "grad_norm" and "clip_scale" as `norm` and `scale`; "clipped" and "skipped", 1.0 or 0.0; "weight",
            "micro_batches" and "dropped" of all workers; "exchange_seconds" from the first span sent until the last sum
            was received, and "exchange_hidden_seconds", the part of that time for which `step` did not wait: both 0.0
            without an exchange. With a dynamic loss scale also "loss_scale", the step's own; with several groups
            "group_norm/<name>" for each; with `on_spike` "spiked", 1.0 or 0.0, and "spike_bound". With `measure_noise`
            "noise/<way>", "signal/<way>" and "noise_scale/<way>" for the ways "ranks" and "micro_batches" that are
            known: see docs/metrics.md. The latter is left out after the next `add`, which overwrites its sums.

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
        """Whether the gradients are still this step's: no longer after an `add`, `step` or replay of the engine."""
        return self._accumulator.state.changes == self._changes

    @property
    def gradients(self) -> Mapping[str, Any]:
        """Name -> fp32 array of the component's shape, averaged, unscaled and clipped.

        Views of the arena, valid until the next `add`: what is written into them after it may miss in the norm. With
        `out`: the destinations that were given. `copy.deepcopy` and `pickle` make a plain dict of copies.

        Raises:
            CallerError: The step was deferred: it left sums, which an optimizer must not take for gradients.
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
        """Name -> fp32 view of the arena after a deferred step: the window's weighted sum.

        `sums[name] * factor` is the gradient; with `skipped` set there is none. Valid until the next `add`.

        Raises:
            CallerError: The step was not deferred: its sums are scaled already.
        """
        if not self.deferred:
            raise CallerError(
                f"step {self.step} has scaled its gradients already",
                do="take result.gradients, or call engine.step(deferred=True)",
            )
        return self._ready._arrays

    @property
    def non_finite(self) -> NonFiniteGradient | None:
        """The error that describes a gradient that was not finite; None if the gradient was finite.

        On a GPU this waits for the device, which keeps only the newest of these errors.

        Raises:
            WindowError: On a GPU, where a later step's error may have replaced this step's.
        """
        if self._late is not None and self._decision.bad is None:
            return self._late.of_step(self.step)
        return self._non_finite

    def check(self) -> None:
        """Raise the error of a gradient that was not finite now, not late; on a GPU this waits for the device.

        Raises:
            NonFiniteGradient: The gradient held NaN or Inf.
            WindowError: On a GPU, as for `non_finite`.
        """
        if self._late is not None and self._decision.bad is None:
            self._late.raise_of_step(self.step)
        elif self._non_finite is not None:
            raise copy.copy(self._non_finite)  # a copy: else the result would keep the caller's traceback

    def __repr__(self) -> str:
        return f"StepResult(step={self.step}, deferred={self.deferred}, {self.metrics()})"

    def of_replay(self, step: int, stop: bool) -> StepResult:
        """A result of another step, with this result's arrays: a graph's replay writes the same memory.

        `stop` is that of a lone engine: where workers sum on their GPUs there is an array of it.
        """
        stats = self._stats
        if stats.ask_device is None and stats.stop is not stop:
            stats = replace(stats, stop=stop)
        return replace(self, step=step, _stats=stats, _changes=self._accumulator.state.changes)

    @property
    def _ready(self) -> StepResult:
        """This result, once the current streams have been made to wait for the step."""
        self._accumulator.arena.follow()
        return self


#: The functions of `GradientEngine.on_step`, each by a key of its own.
Observers: TypeAlias = dict[object, Callable[[StepResult], object]]


@final
class DeferredErrors:
    """Non-finite errors of one GPU's steps, which arrive late; each is raised once.

    Args:
        readback: Copies the status of the device's steps to the host.
        layout: The layout whose components the errors name.
        raises: Whether `raise_pending` raises; otherwise it only takes what has arrived, so that more can be sent.
    """

    def __init__(self, readback: StatusReadback, layout: GradientLayout, *, raises: bool) -> None:
        self._readback, self._layout, self._raises = readback, layout, raises
        self.send = readback.send  #: queues a copy of the status to the host, after the step that was queued
        self._latest: StepStatus | None = None
        self._raised_bad_steps = self._raised_bad_weights = 0
        self._counted = 0  # steps, as the device will count them after all queued work

    @staticmethod
    def of(accumulator: PerBlockGradientAccumulator, plan: ClipPlan, *, raises: bool) -> DeferredErrors | None:
        """Return those of the steps of this accumulator's device; None on the CPU."""
        readback = accumulator.kernels.status_readback(accumulator.arena, plan)
        return None if readback is None else DeferredErrors(readback, accumulator.layout, raises=raises)

    def note_queued(self, step: int) -> int:
        """Note that the step of this number is about to be queued; returns the device's count of steps after it."""
        self._counted = step + 1
        return self._counted

    def count_from(self, step: int) -> None:
        """Set the device's count of steps before a graph's step is queued."""
        if self._counted != step:
            self._readback.count_from(step)
        self.note_queued(step)

    def drop(self, step: int) -> bool:
        """Drop a step; returns whether the device may have made it. The next replay sets the device's count again."""
        is_queued, self._counted = self._counted == step + 1, -1
        return is_queued

    def restart(self) -> None:
        """Forget every step so far: the next ones are counted from another number."""
        self._readback.restart()
        self._latest, self._raised_bad_steps, self._raised_bad_weights, self._counted = None, 0, 0, -1

    def latest(self) -> StepStatus | None:
        """The newest status that has arrived; never waits."""
        found = self._readback.newest()
        if found is not None and (self._latest is None or found.step > self._latest.step):
            self._latest = found
        return self._latest

    def wait(self) -> None:
        """Wait for all of the device's work, after which the newest status is known."""
        self._latest = self._readback.read()

    def raise_pending(self) -> None:
        """Raise the error of the last bad step, if its status has arrived and the error was not raised before."""
        status = self.latest()
        if status is None:
            return
        if status.bad_weights > self._raised_bad_weights:
            self._raise_weight(status)
        # This status may be older than the one that check() has read since.
        if self._raises and status.bad_steps > self._raised_bad_steps:
            self._raise(status)

    def of_step(self, step: int) -> NonFiniteGradient | None:
        """The error of one step, after waiting for the device; raises `WindowError` if a later step overwrote it."""
        status = self._read_of(step)
        if status.bad_step != step + 1:  # that of another step stays pending
            return None
        error = self._blamed(status)
        self._raised_bad_steps = status.bad_steps
        return error

    def raise_of_step(self, step: int) -> None:
        """Raise the error of one step: what `of_step` finds, or that its weight was bad."""
        status = self._read_of(step)
        if status.bad_weight_step == step + 1:
            self._raise_weight(status)
        if status.bad_step == step + 1:
            self._raise(status)

    def _read_of(self, step: int) -> StepStatus:
        status = self._readback.read()
        # The device keeps the last bad step and the number of bad steps: if that is 1, no earlier step was bad.
        if status.bad_step > step + 1 and status.bad_steps > 1:
            raise WindowError(
                f"whether step {step} was finite is no longer known",
                got=f"{status.bad_steps} steps that were not finite, the last of them step {status.bad_step - 1}",
                do="call result.check() or read result.non_finite before the next step",
            )
        return status

    def _raise_weight(self, status: StepStatus) -> NoReturn:
        """Raise the error of a bad weight, also if gradients that are not finite pass."""
        error = _not_agreed(status) or WindowError(
            f"the weight of the window of step {status.bad_weight_step - 1} is out of range: zeros were handed back",
            got=f"{status.bad_weight:g} in all",
            expected="2**-126..2**126, times the loss scale",
            do="use weights nearer to 1",
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
    if fault in {_OTHER_SCALE, _OTHER_BOUNDS}:
        setting = "loss scale" if fault == _OTHER_SCALE else "max_norm"
        what = f"{where}: rank {rank} had another {setting} than rank 0"
        return ExchangeError(what, do="set the same on all ranks")
    if fault == _NO_MICRO_BATCH:
        return WindowError(f"{where}: none of them had a micro-batch", do="add() gradients on one of them")
    return None
