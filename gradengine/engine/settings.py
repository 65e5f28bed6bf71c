"""An engine's options: typed once for all that build an engine, checked once, and compared over the workers."""

from __future__ import annotations

import hashlib
import math
from typing import Literal, TypeAlias, TypedDict, final

from gradengine.arguments import as_float, has, out_of_range, refuse_unknown, said, truth_value, whole_number
from gradengine.clip import Groups, MaxNorm
from gradengine.errors import CallerError, WindowError
from gradengine.exchange.linked import Exchange
from gradengine.kernels import ClipPlan, DeviceLike
from gradengine.kernels.loss_scale import DynamicLossScale
from gradengine.layout import GradientLayout
from gradengine.reduction.tensor_parallel_group import Replicated

_OF_AN_EXCHANGE = ("rank", "world_size", "bind", "start", "wait", "gather", "close")

OnNonFinite: TypeAlias = Literal["raise", "skip", "pass"]
Average: TypeAlias = Literal["weighted", "per_worker", "sum"]


class EngineOptions(TypedDict, total=False):
    """The options of `GradientEngine` besides layout and exchange, for functions that pass them on."""

    device: DeviceLike
    max_norm: MaxNorm
    on_non_finite: OnNonFinite
    micro_batches: int | None
    hold: int
    groups: Groups
    average: Average
    loss_scale: float | DynamicLossScale
    copy_strided: bool
    tp_exchange: Exchange | None
    replicated: Replicated


@final
class Settings:
    """An engine's settings, checked."""

    def __init__(
        self,
        plan: ClipPlan,
        on_non_finite: OnNonFinite,
        average: Average,
        micro_batches: int | None,
        loss_scale: float | DynamicLossScale,
    ) -> None:
        refuse_unknown("on_non_finite", on_non_finite, ("raise", "skip", "pass"))
        refuse_unknown("average", average, ("weighted", "per_worker", "sum"), do="the mean is 'weighted'")
        self.plan = plan
        self.micro_batches = None if micro_batches is None else whole_number("micro_batches", micro_batches, 1)
        # Zeros also where it raises: a GPU's error is raised by a later call, after the gradients were handed back.
        self.on_non_finite = on_non_finite
        self.raises, self.zero_if_bad = on_non_finite == "raise", on_non_finite != "pass"
        self.average, self.is_mean = average, average != "sum"
        #: Settings that must be the same on all workers; each step compares them.
        self.shared = {
            "max_norm": repr(plan.max_norms),
            "groups": hashlib.sha256(repr(plan.groups).encode()).hexdigest()[:12],
            "average": average,
            "on_non_finite": on_non_finite,
        }
        self.dynamic: DynamicLossScale | None = None
        if isinstance(loss_scale, DynamicLossScale) and on_non_finite != "skip":
            do = 'build the engine with on_non_finite="skip"'
            raise CallerError("a dynamic loss scale skips steps", got=f"on_non_finite={on_non_finite!r}", do=do)
        self.loss_scale = 1.0 if isinstance(loss_scale, DynamicLossScale) else loss_scale
        self.dynamic = loss_scale if isinstance(loss_scale, DynamicLossScale) else None
        if self.dynamic is not None:
            self.shared["loss_scale"] = f"by {self.dynamic}"

    @property
    def loss_scale(self) -> float:
        """What the loss was multiplied by."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        if self.dynamic is not None:
            raise CallerError("a dynamic loss scale follows the steps' verdicts and is not set", got=said(value))
        self._loss_scale = checked_loss_scale(value)
        self.shared["loss_scale"] = repr(self._loss_scale)

    def is_last(self, what: str, count: int) -> bool:
        """Whether the micro-batch after `count` is the window's last; raises `WindowError` if the window is full."""
        room = self.micro_batches
        if room is not None and count >= room:
            expected = f"step() after {room} micro-batches"
            raise WindowError(f"{what} is full", got=f"micro-batch {count + 1}", expected=expected)
        return count + 1 == room

    def refuse_short(self, count: int, *, partial: bool) -> None:
        """Raise `WindowError` if the window has some of its micro-batches and lacks others, unless that is said."""
        room = self.micro_batches
        if room is not None and 0 < count < room and not truth_value("partial", partial):
            raise WindowError(
                "the window is short",
                got=f"{count} micro-batches",
                expected=f"micro_batches={room}",
                do="add the rest, or call step(partial=True) for a short last window",
            )

    def refuse_lone_part(self, layout: GradientLayout) -> None:
        """Raise `CallerError` if one part of a model would be clipped or skipped without the other parts."""
        clips, skips = any(bound < math.inf for bound in self.plan.max_norms), self.zero_if_bad and not self.raises
        if layout.tp_size > 1 and (clips or skips):
            raise CallerError(
                "one part of a model cannot be clipped or skipped by itself",
                got=f"part {layout.tp_rank} of {layout.tp_size}, and no tp_exchange",
                expected="tp_exchange=, over the ranks with the other parts",
                do="or build the engine with max_norm=None and on_non_finite='raise' or 'pass'",
            )


def refuse_bad_exchanges(exchange: object, tp_exchange: object) -> None:
    """Raise `CallerError` if either is not an exchange, or both are the same."""
    for name, group in (("exchange", exchange), ("tp_exchange", tp_exchange)):
        if group is not None and not all(has(group, each) for each in _OF_AN_EXCHANGE):
            raise CallerError(f"{name} is not an Exchange", got=type(group).__name__, do="pass connect(url, ...)")
    if exchange is not None and exchange is tp_exchange:
        raise CallerError(
            "exchange and tp_exchange are the same", expected="a group over the workers, and one over the parts"
        )


def checked_loss_scale(value: float) -> float:
    """The loss scale as a float; raises `CallerError` unless it is a number in 2**-126..2**126."""
    scale = as_float(value)
    if not 2.0**-126 <= scale <= 2.0**126:  # NaN is refused too
        do = "pass scaler.get_scale() or a DynamicLossScale" if math.isnan(scale) else None
        raise out_of_range("loss_scale", value, "2**-126..2**126", do=do)
    return scale
