"""The saved state of an engine, a flat dict of NumPy arrays that numpy.savez, torch.save and safetensors accept.

The state holds the open window's sums. It also holds the step, and the layout, settings and rank that must be the
same in the engine that loads it. Squared sums and the norm are computed again, and held gradients are folded first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from gradengine.accumulate.window import SavedWindow, checked_weight, ordered_sum
from gradengine.arguments import MOST, checked_rank, out_of_range, refuse_other_kind, said, whole_number
from gradengine.arrays.buffer import Array
from gradengine.engine.settings import SharedSettings
from gradengine.errors import CallerError, LayoutMismatch
from gradengine.exchange.handshake import differing_rows
from gradengine.kernels.spikes import Norms
from gradengine.layout import GradientLayout
from gradengine.layout.layout import layout_from_table
from gradengine.reduction.reducer import Worker
from gradengine.reduction.stats import Scale


class Content(NamedTuple):
    """The saved values of an engine, except those that must be the same in the engine that loads them."""

    step: int
    worker: Worker
    loss_scale: Scale
    max_norms: Sequence[float]  # each group's bound
    norms: Norms  # running norm of a spike policy; zeros without one
    window: SavedWindow


_VERSION = 2
_WINDOW = "counted_weight", "dropped", "says_nothing", "counts", "used", "filled", "sums"
_NORMS = {"norm_mean": 2.0**256, "norm_variance": 2.0**512, "norm_steps": 2**62}  # upper bounds
_NUMBER: Final = ()  # shape of a number
_BYTES: Final = None  # one dimension of any length
#: Name -> dtype and shape of each saved array. The shape is None if it depends on the layout.
_FIELDS: Mapping[str, tuple[str, tuple[int, ...] | None]] = {
    "version": ("int64", _NUMBER),
    "step": ("int64", _NUMBER),  # number of the open step
    "layout": ("uint8", _BYTES),  # `GradientLayout.table()`
    "micro_batches": ("int64", _NUMBER),  # number in a window; 0 if not known
    "average": ("uint8", _BYTES),  # UTF-8
    "groups": ("uint8", _BYTES),  # digest of the components' groups
    "max_norms": ("float64", _BYTES),  # each group's bound
    "loss_scale": ("float64", _NUMBER),
    "loss_scale_tracker": ("int64", _NUMBER),  # finite steps in a row, for a dynamic loss scale
    "norm_mean": ("float64", _NUMBER),  # mean of earlier norms, for a spike policy
    "norm_variance": ("float64", _NUMBER),
    "norm_steps": ("int64", _NUMBER),
    "rank": ("int64", _NUMBER),
    "world_size": ("int64", _NUMBER),
    "counted_weight": ("float64", _NUMBER),  # total weight of micro-batches that were not dropped
    "dropped": ("int64", _NUMBER),  # number of dropped micro-batches
    "says_nothing": ("bool", _NUMBER),  # whether add(None) was called
    "micro_batch_weights": ("float32", _BYTES),  # weight of each micro-batch
    "counts": ("int64", _BYTES),  # number of micro-batches of each component
    "used": ("bool", _BYTES),  # components with a gradient
    "filled": ("bool", _BYTES),  # components with a sum in `sums`
    "sums": ("float32", _BYTES),  # the arena; empty if nothing is filled
}


def saved_state(
    content: Content, layout: GradientLayout, micro_batches: int | None, shared: SharedSettings
) -> dict[str, Array]:
    """Return the state of an engine of this layout and settings, in arrays that share no memory with the engine."""
    window = content.window
    values = {
        "version": _VERSION,
        "step": content.step,
        "layout": bytearray(layout.table()),
        "micro_batches": micro_batches or 0,
        **{name: bytearray(shared[name].encode()) for name in ("average", "groups")},
        "max_norms": content.max_norms,
        "micro_batch_weights": window.weights,
        **dict(zip(("loss_scale", "loss_scale_tracker"), content.loss_scale, strict=True)),
        **dict(zip(_NORMS, content.norms, strict=True)),
        **dict(zip(("rank", "world_size"), content.worker, strict=True)),
        **{name: getattr(window, name) for name in _WINDOW},
    }
    return {name: np.asarray(values[name], dtype) for name, (dtype, _) in _FIELDS.items()}


def loaded_state(
    state: Mapping[str, Any], layout: GradientLayout, micro_batches: int | None, shared: SharedSettings
) -> Content:
    """Return the content of a saved state, for an engine of this layout and settings.

    Args:
        state: The dict that `saved_state` returned, with any arrays that NumPy reads.
        layout: The engine's layout.
        micro_batches: The engine's number of micro-batches in a window, if known.
        shared: The engine's settings that ranks compare.

    Raises:
        LayoutMismatch: The state has a different layout. The error shows the rows that differ.
        CallerError: `micro_batches`, `average`, `groups` or the version differ, or this is not a state.
    """
    refuse_other_kind("state", state, Mapping, do="pass the dict that state_dict() returned")
    _refuse_other_names(state)
    found = {name: _array(state, name) for name in _FIELDS}
    _refuse_other_layout(found["layout"].tobytes(), layout)
    _refuse_other_setting("micro_batches", found["micro_batches"].item() or None, micro_batches)
    for name in ("average", "groups"):
        _refuse_other_setting(name, found[name].tobytes().decode(errors="replace"), shared[name])
    if found["dropped"] and shared["on_non_finite"] != "drop_micro_batch":
        _refuse_other_setting("on_non_finite", "drop_micro_batch", shared["on_non_finite"])
    worker = checked_rank(found["rank"].item(), found["world_size"].item())
    step = whole_number("step", found["step"].item(), 0, MOST // 2)
    tracker = whole_number("loss_scale_tracker", found["loss_scale_tracker"].item(), 0, (1 << 31) - 1)
    norms = Norms(*(found[name].item() for name in _NORMS))
    for name, number in zip(_NORMS, norms, strict=True):
        if not 0 <= number <= _NORMS[name]:  # NaN is refused too.
            raise out_of_range(name, number, f"0..{_NORMS[name]:g}")
    scale = found["loss_scale"].item(), tracker
    return Content(step, worker, scale, found["max_norms"].tolist(), norms, _window(found, layout, micro_batches))


def _refuse_other_names(state: Mapping[str, Any]) -> None:
    names, version = set(state), _array(state, "version").item() if "version" in state else None
    if version not in {None, _VERSION}:
        do = "load it with the version of gradengine that saved it"
        raise CallerError("the saved state has the wrong version", got=version, expected=_VERSION, do=do)
    lacking, unknown = sorted(set(_FIELDS) - names), [name for name in state if name not in _FIELDS]
    if lacking or unknown:
        what = f"a saved state lacks '{lacking[0]}'" if lacking else f"a saved state has an unknown {said(unknown[0])}"
        raise CallerError(what, expected=", ".join(_FIELDS), do="pass the whole dict that state_dict() returned")


def _array(state: Mapping[str, Any], name: str) -> Array:
    dtype, shape = _FIELDS[name]
    array = np.asarray(state[name])
    if array.dtype != np.dtype(dtype) or (array.ndim != 1 if shape is None else array.shape != shape):
        raise _other_array(name, array, f"{dtype} of {'one dimension' if shape is None else f'shape {shape}'}")
    return array


def _other_array(name: str, array: Array, expected: str) -> CallerError:
    return CallerError(
        f"'{name}' of a saved state is a wrong array", got=f"{array.dtype} of shape {array.shape}", expected=expected
    )


def _refuse_other_layout(table: bytes, layout: GradientLayout) -> None:
    mine = layout.table()
    if table != mine:
        layout_from_table(table)  # raises if the table is not valid
        raise LayoutMismatch(
            f"the saved state (there) and the engine (here) have different layouts:\n{differing_rows(mine, table)}",
            do="build the layout from the same model, with its components in the same order",
        )


def _refuse_other_setting(name: str, saved: object, here: object) -> None:
    if saved != here:
        do = f"build the engine with the same {name}"
        raise CallerError(f"the saved state has a different {name}", got=said(saved), expected=said(here), do=do)


def _window(found: Mapping[str, Array], layout: GradientLayout, room: int | None) -> SavedWindow:
    counts, used, filled, sums = (found[name] for name in ("counts", "used", "filled", "sums"))
    slots = len(layout.slots)
    sizes = {"counts": slots, "used": slots, "filled": slots, "sums": layout.arena_size if filled.any() else 0}
    for name, size in sizes.items():
        if found[name].size != size:
            raise _other_array(name, found[name], f"{size} elements")
    weights = np.array([checked_weight(weight) for weight in found["micro_batch_weights"].tolist()], "f4")
    says_nothing = bool(found["says_nothing"])
    is_counted = counts.min() >= 0 and counts.max() == weights.size and (room is None or weights.size <= room)
    if not is_counted or (says_nothing and weights.size):
        raise CallerError(
            "the weights and counts of a saved state contradict each other",
            got=f"{weights.size} weights, and {counts.min()} to {counts.max()} micro-batches per component",
            expected="a weight for each micro-batch" + ("" if room is None else f", of {room} at most"),
        )
    counted_weight, dropped = found["counted_weight"].item(), found["dropped"].item()
    total = ordered_sum(weights.tolist())
    ends = {0: counted_weight == total, weights.size: counted_weight == 0}
    # Both can be equal, because a weight may be too small to change their sum.
    is_weighed = ends.get(dropped, 0 < counted_weight <= total)
    if not 0 <= dropped <= weights.size or not is_weighed:
        what = "'counted_weight' and 'dropped' of a saved state contradict its micro-batches"
        raise CallerError(what, got=f"weight {counted_weight:g}, and {dropped} of {weights.size} dropped")
    return SavedWindow(says_nothing, weights, counts, used, filled, sums, counted_weight, dropped)
