"""What a step hands back, and what was found on the way.

On a GPU the numbers are 0-d arrays there: reading one (`float(result.norm)`) is the only wait for the device, and the
next step writes them anew. Whoever takes one from the result may read it on the streams that are current then, whatever
device and stream the step was queued on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, SupportsIndex, final

from gradengine.errors import CallerError, NonFiniteGradient, not_copied
from gradengine.kernels import Decision
from gradengine.reduction.stats import StepStats

__all__ = ["StepResult", "result_of"]


@dataclass(frozen=True)
class StepResult:
    """What a step hands back.

    Attributes:
        norm: Global norm of the averaged gradient, before clipping.
        scale: Clip scale; with several groups the smallest of theirs.
        factor: What the sum was multiplied by, in fp32: average, loss unscale and clip in one. After a deferred step
            what it is still to be multiplied by; with several groups the first one's.
        inverse_factor: 1 / factor, in fp32: for optimizers that divide, such as torch's fused ones by `grad_scale`.
        weight: Weight of all micro-batches of all workers.
        micro_batches: Micro-batches of all workers.
        unused: Names of the components that no micro-batch of any worker had a gradient for, and on no part of the
            model: their gradients here are zeros, where torch would have None.
        skipped: True where the gradient was not finite and the step is to be skipped; the gradients are zero then. On a
            GPU 0.0 or 1.0, as torch's fused optimizers take it for `found_inf`.
        group_norms: Each clip group's norm.
        group_scales: Each clip group's scale.
        block_norms: Each block's norm.
        component_norms: Each component's norm, in layout order.
        deferred: Whether the step left `sums`, still to be multiplied by `factor`, and no `gradients`.
        step: The step's number, counted from 0.
        find_non_finite: What finds `non_finite` of a step by its number.
        raise_non_finite: What raises it.
        find_current: What finds `is_current`.
        follow: Has whoever reads next on a GPU come behind the step.
    """

    _arrays: Mapping[str, Any] | None = field(repr=False)
    norm: Any
    scale: Any
    factor: Any
    inverse_factor: Any
    weight: float
    micro_batches: int
    unused: frozenset[str]
    skipped: Any
    group_norms: Mapping[str, Any]
    group_scales: Mapping[str, Any]
    block_norms: Sequence[Any]
    component_norms: Sequence[Any]
    deferred: bool
    step: int
    find_non_finite: Callable[[int], NonFiniteGradient | None] = field(repr=False)
    raise_non_finite: Callable[[int], None] = field(repr=False)
    find_current: Callable[[], bool] = field(repr=False)
    follow: Callable[[], None] = field(repr=False)

    @property
    def is_current(self) -> bool:
        """Whether the gradients are still this step's: no longer after an `add`, step or replay of its engine."""
        return self.find_current()

    @property
    def gradients(self) -> Mapping[str, Any]:
        """Name -> fp32 array of the component's shape, averaged, unscaled and clipped.

        A view of the arena, good until the next `add`; or the destinations of `out`, those given. `copy.deepcopy` and
        `pickle` make a plain dict of copies.

        Raises:
            CallerError: The step was deferred, so that an optimizer would be given sums.
        """
        if self.deferred:
            raise CallerError(
                f"step {self.step} was deferred and has no gradients",
                got="sums over the window, neither averaged nor clipped",
                do="take result.sums and multiply them by result.factor (torch: step_fused does), or step() undeferred",
            )
        return self._kept_arrays()

    @property
    def sums(self) -> Mapping[str, Any]:
        """Name -> fp32 view of the arena that a deferred step left: the window's weighted sum.

        `sums[name] * factor` is the gradient; with `skipped` set there is none. Good until the next `add`.

        Raises:
            CallerError: The step was not deferred: its sums are scaled already.
        """
        if not self.deferred:
            raise CallerError(
                f"step {self.step} has scaled its gradients already",
                do="take result.gradients, or call engine.step(deferred=True)",
            )
        return self._kept_arrays()

    @property
    def non_finite(self) -> NonFiniteGradient | None:
        """What was found where the gradient was not finite, and None where it was.

        On a GPU a wait for the device, which keeps the last one that it found.

        Raises:
            WindowError: On a GPU, where a later step was not finite and perhaps an earlier one as well.
        """
        return self.find_non_finite(self.step)

    def check(self) -> None:
        """Raise the error of a gradient that was not finite, now rather than late; on a GPU a wait for the device.

        Raises:
            NonFiniteGradient: The gradient held NaN or Inf.
            WindowError: On a GPU, as for `non_finite`.
        """
        self.raise_non_finite(self.step)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refused, for `copy` and `pickle` alike: its gradients are views of an arena, or the caller's own arrays.

        Raises:
            CallerError: Always.
        """
        raise not_copied("a StepResult", "copy what you need: float(result.norm), result.gradients[name].copy()")

    def of_replay(self, step: int, find_current: Callable[[], bool]) -> StepResult:
        """The same arrays as the result of another step."""
        return self._with(step=step, find_current=find_current)

    def without_arrays(self) -> StepResult:
        """The same result, which keeps none of its gradients alive."""
        return self._with(_arrays=None)

    def _with(self, **changes: object) -> StepResult:
        result = object.__new__(StepResult)
        result.__dict__.update(self.__dict__, **changes)  # replace() would read each field
        return result

    def _kept_arrays(self) -> Mapping[str, Any]:
        arrays = self._arrays
        if arrays is None:
            raise CallerError(
                f"the gradients of step {self.step} are not kept here",
                do="they are in the destinations that were given as out",
            )
        return arrays


@final
class _OnDevice:
    """A field that lies on the device: taking it puts what is read next behind the step."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, result: StepResult | None, owner: type[StepResult]) -> Any:
        if result is None:
            return self
        result.follow()
        return result.__dict__[self._name]

    def __set__(self, result: StepResult, value: Any) -> None:
        result.__dict__[self._name] = value


_ON_DEVICE = (
    *("_arrays", "norm", "scale", "factor", "inverse_factor", "skipped"),
    *("group_norms", "group_scales", "block_norms", "component_norms"),
)
for _name in _ON_DEVICE:
    setattr(StepResult, _name, _OnDevice(_name))


def result_of(
    tally: StepStats,
    decision: Decision,
    group_names: Sequence[str],
    unused: Iterable[str],
    arrays: Mapping[str, Any],
    deferred: bool,
    step: int,
    find_non_finite: Callable[[int], NonFiniteGradient | None],
    raise_non_finite: Callable[[int], None],
    find_current: Callable[[], bool],
    follow: Callable[[], None],
) -> StepResult:
    """A step's result, from what the workers counted and what K2 decided."""
    return StepResult(
        _arrays=arrays,
        norm=decision.norm,
        scale=decision.scale,
        factor=decision.factor,
        inverse_factor=decision.inverse,
        weight=tally.weight,
        micro_batches=tally.micro_batches,
        unused=frozenset(unused),
        skipped=decision.skipped,
        group_norms=dict(zip(group_names, decision.group_norms, strict=True)),
        group_scales=dict(zip(group_names, decision.scales, strict=True)),
        block_norms=decision.block_norms,
        component_norms=decision.component_norms,
        deferred=deferred,
        step=step,
        find_non_finite=find_non_finite,
        raise_non_finite=raise_non_finite,
        find_current=find_current,
        follow=follow,
    )
