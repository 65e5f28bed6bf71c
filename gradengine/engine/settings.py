"""An engine's settings, which are checked once and compared by the ranks."""

from __future__ import annotations

import hashlib
import math
from typing import Literal, TypeAlias, get_args

from gradengine.arguments import refuse_other_kind, refuse_unknown, truth_value
from gradengine.errors import CallerError, WindowError
from gradengine.kernels import ClipPlan
from gradengine.kernels.loss_scale import DynamicLossScale
from gradengine.kernels.spikes import SpikePolicy
from gradengine.layout import GradientLayout

OnNonFinite: TypeAlias = Literal["raise", "skip", "propagate", "drop_micro_batch"]
SharedSettings: TypeAlias = dict[str, str]  # name -> setting as text, the same on all ranks
Average: TypeAlias = Literal["weighted", "per_worker", "prescaled"]

_SHOWN = 100  # characters of a list of bounds


def shared_settings(
    plan: ClipPlan, on_non_finite: str, average: str, loss_scale: object, on_spike: object
) -> SharedSettings:
    """Return the settings that must be the same on all ranks. The ranks compare them when they join.

    Raises:
        CallerError: A setting is not one of the known words, or a dynamic loss scale is used without skipped steps.
    """
    refuse_unknown("on_non_finite", on_non_finite, get_args(OnNonFinite))
    if on_spike is not None:
        refuse_other_kind("on_spike", on_spike, SpikePolicy)
    do = "'weighted' is the mean, 'prescaled' is for a loss that was scaled before backward"
    refuse_unknown("average", average, get_args(Average), do=do)
    is_dynamic = isinstance(loss_scale, DynamicLossScale)
    if is_dynamic and on_non_finite != "skip":
        got, do = f"on_non_finite={on_non_finite!r}", 'build the engine with on_non_finite="skip"'
        raise CallerError("a dynamic loss scale works only if bad steps are skipped", got=got, do=do)
    return {
        "max_norm": shown_bounds(plan),
        "groups": hashlib.sha256(repr(plan.groups).encode()).hexdigest()[:12],
        "average": average,
        "on_non_finite": on_non_finite,
        "on_spike": str(on_spike),
        "loss_scale": f"by {loss_scale}" if is_dynamic else "a number",
    }


def shown_bounds(plan: ClipPlan) -> str:
    """Return the groups' bounds as text, equal only if all of them are equal."""
    text = repr(plan.max_norms)
    return text if len(text) < _SHOWN else f"{text:.{_SHOWN}} (xxh3 {plan.digest:016x})"


def is_last(room: int | None, what: str, count: int) -> bool:
    """Return whether the micro-batch after `count` is the window's last. Raise `WindowError` if the window is full."""
    if room is not None and count >= room:
        expected = f"step() after {room} micro-batches"
        raise WindowError(f"{what} is full", got=f"micro-batch {count + 1}", expected=expected)
    return count + 1 == room


def refuse_short(room: int | None, count: int, *, partial: bool) -> None:
    """Raise `WindowError` if the window lacks some of its micro-batches but not all, unless `partial` allows it."""
    if room is not None and 0 < count < room and not partial:
        raise WindowError(
            "the window is short",
            got=f"{count} micro-batches",
            expected=f"micro_batches={room}",
            do="add the rest, or call step(partial=True) for a short last window",
        )


def refuse_lone_part(
    layout: GradientLayout, tp_exchange: object, plan: ClipPlan, on_non_finite: str, on_spike: object
) -> None:
    """Raise `CallerError` if one part of a model would be clipped, skipped or lack a micro-batch by itself."""
    if layout.tp_size > 1 and on_non_finite == "drop_micro_batch":
        what, do = "a part of a model cannot drop a micro-batch by itself", "use on_non_finite='skip'"
        raise CallerError(what, got=f"part {layout.tp_rank} of {layout.tp_size}", do=do)
    clips, skips = any(bound < math.inf for bound in plan.max_norms), on_non_finite == "skip"
    if layout.tp_size > 1 and tp_exchange is None and (clips or skips or on_spike is not None):
        raise CallerError(
            "one part of a model cannot be clipped or skipped by itself",
            got=f"part {layout.tp_rank} of {layout.tp_size}, and no tp_exchange",
            expected="a tp_exchange over the ranks with the other parts",
            do="pass it, or max_norm=None, on_spike=None, and on_non_finite='raise' or 'propagate'",
        )


def refuse_bad_exchanges(exchange: object, tp_exchange: object) -> None:
    """Raise `CallerError` if either is not an exchange, or both are the same."""
    for name, group in (("exchange", exchange), ("tp_exchange", tp_exchange)):
        if group is not None and not hasattr(group, "bind"):
            raise CallerError(f"{name} is not an Exchange", got=type(group).__name__, do="pass connect(url, ...)")
    if exchange is not None and exchange is tp_exchange:
        raise CallerError(
            "exchange and tp_exchange are the same", expected="two exchanges, the second over the parts of a model"
        )


def measures_noise(layout: GradientLayout, on_non_finite: str, *, measure_noise: object) -> bool:
    """Return whether the gradient noise is measured. For a part of a model it is not, because the norm is the model's.

    Raises:
        CallerError: `measure_noise` is not a bool, or micro-batches, the first one too, may be dropped.
    """
    measures = truth_value("measure_noise", measure_noise)
    if measures and on_non_finite == "drop_micro_batch":
        what, do = "the gradient noise is not measured if micro-batches may be dropped", "use only one of the two"
        raise CallerError(what, got="measure_noise=True", do=do)
    return measures and layout.tp_size == 1
