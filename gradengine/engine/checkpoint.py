"""A saved engine: a flat dict of NumPy arrays, which numpy.savez, torch.save and safetensors take as it is.

It holds the open window's sums, and what must be the same in the engine that loads them: step, layout, settings, and
the window's worker. What can be computed again (squared sums, the norm) is not saved; held gradients are folded first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np

from gradengine.accumulate.window import SavedWindow, checked_weight
from gradengine.arguments import MOST, checked_rank, refuse_other_kind, said, whole_number
from gradengine.arrays.buffer import Array
from gradengine.engine.settings import Settings
from gradengine.errors import CallerError, LayoutMismatch, renamed
from gradengine.exchange.handshake import differing_rows
from gradengine.layout import GradientLayout
from gradengine.layout.layout import layout_from_table
from gradengine.reduction.reducer import Worker

_VERSION = 1
_NUMBER: Final = ()  # the shape of one
_BYTES: Final = None  # as many as there are
#: What is saved: its dtype, and its shape unless that depends on the layout.
_FIELDS: Mapping[str, tuple[str, tuple[int, ...] | None]] = {
    "version": ("int64", _NUMBER),
    "step": ("int64", _NUMBER),  # the number of the open step
    "layout": ("uint8", _BYTES),  # `GradientLayout.table()`
    "micro_batches": ("int64", _NUMBER),  # of a window; 0: not known
    "average": ("uint8", _BYTES),  # UTF-8
    "loss_scale": ("float64", _NUMBER),
    "loss_scale_tracker": ("int64", _NUMBER),  # finite steps in a row that a dynamic one has seen
    "rank": ("int64", _NUMBER),
    "world_size": ("int64", _NUMBER),
    "says_nothing": ("bool", _NUMBER),  # add(None) said that nothing comes
    "micro_batch_weights": ("float32", _BYTES),  # of each micro-batch so far
    "counts": ("int64", _BYTES),  # micro-batches of each component so far
    "used": ("bool", _BYTES),  # which components got a gradient
    "filled": ("bool", _BYTES),  # which have their sum in `sums`
    "sums": ("float32", _BYTES),  # the arena; empty where nothing is filled
}


@final
@dataclass(frozen=True)
class Checkpoint:
    """The content of a saved state, checked."""

    step: int
    worker: Worker  # who saved it
    loss_scale: tuple[float, int]  # and the finite steps in a row that a dynamic one has seen
    window: SavedWindow

    @property
    def whose(self) -> Worker | None:
        """The worker that saved the open window, which no other can resume; None if no window is open."""
        return self.worker if self.window.is_open else None


def saved_state(checkpoint: Checkpoint, layout: GradientLayout, settings: Settings) -> dict[str, Array]:
    """The state as a flat dict of arrays, none of which shares memory with the engine."""
    window, (rank, world_size) = checkpoint.window, checkpoint.worker
    values = {
        "version": _VERSION,
        "step": checkpoint.step,
        "layout": bytearray(layout.table()),
        "micro_batches": settings.micro_batches or 0,
        "average": bytearray(settings.average.encode()),
        "loss_scale": checkpoint.loss_scale[0],
        "loss_scale_tracker": checkpoint.loss_scale[1],
        "rank": rank,
        "world_size": world_size,
        "says_nothing": window.says_nothing,
        "micro_batch_weights": window.weights,
        "counts": window.counts,
        "used": window.used,
        "filled": window.filled,
        "sums": window.sums,
    }
    return {name: np.asarray(values[name], dtype) for name, (dtype, _) in _FIELDS.items()}


def checkpoint_of(state: Mapping[str, Any], layout: GradientLayout, settings: Settings) -> Checkpoint:
    """The content of a saved state, for an engine of this layout and settings; its arrays may be any that NumPy reads.

    Raises:
        LayoutMismatch: The state is of another layout; the rows that differ are shown.
        CallerError: The state is of other `micro_batches` or `average`, of a later version, or not a saved state.
    """
    refuse_other_kind("state", state, Mapping, do="pass what state_dict() returned")
    _refuse_other_names(state)
    found = {name: _array(state, name) for name in _FIELDS}
    _refuse_other_layout(found["layout"].tobytes(), layout)
    _refuse_other_setting("micro_batches", found["micro_batches"].item() or None, settings.micro_batches)
    average = found["average"].tobytes().decode(errors="replace")
    if average == "sum":
        do = "write np.frombuffer(b'prescaled', np.uint8) to state['average'], and load it with that average"
        raise renamed(average, do)
    _refuse_other_setting("average", average, settings.average)
    worker = checked_rank(found["rank"].item(), found["world_size"].item())
    step = whole_number("step", found["step"].item(), 0, MOST // 2)
    tracker = whole_number("loss_scale_tracker", found["loss_scale_tracker"].item(), 0, (1 << 31) - 1)
    return Checkpoint(step, worker, (found["loss_scale"].item(), tracker), _window(found, layout, settings))


def _refuse_other_names(state: Mapping[str, Any]) -> None:
    names, version = set(state), _array(state, "version").item() if "version" in state else None
    if version not in {None, _VERSION}:
        do = "load it with the version of gradengine that saved it, or a later one"
        raise CallerError("the saved state is of another version", got=version, expected=_VERSION, do=do)
    lacking, unknown = sorted(set(_FIELDS) - names), [name for name in state if name not in _FIELDS]
    if lacking or unknown:
        what = f"a saved state lacks '{lacking[0]}'" if lacking else f"a saved state has an unknown {said(unknown[0])}"
        raise CallerError(what, expected=", ".join(_FIELDS), do="pass all that state_dict() returned, and nothing else")


def _array(state: Mapping[str, Any], name: str) -> Array:
    dtype, shape = _FIELDS[name]
    try:
        array = np.asarray(state[name])
    except Exception as fault:  # noqa: BLE001  (a file that was cut off, a tensor on a GPU: others' errors)
        raise CallerError(f"'{name}' of a saved state cannot be read", got=said(fault), expected="an array") from None
    if array.dtype != np.dtype(dtype) or (array.ndim != 1 if shape is None else array.shape != shape):
        raise _other_array(name, array, f"{dtype} of {'one dimension' if shape is None else f'shape {shape}'}")
    return array


def _other_array(name: str, array: Array, expected: str) -> CallerError:
    return CallerError(
        f"'{name}' of a saved state is another array", got=f"{array.dtype} of shape {array.shape}", expected=expected
    )


def _refuse_other_layout(table: bytes, layout: GradientLayout) -> None:
    mine = layout.table()
    if table != mine:
        layout_from_table(table)  # or that it is none
        raise LayoutMismatch(
            f"the saved state (there) is of another layout than the engine (here):\n{differing_rows(mine, table)}",
            do="build the layout from the same model, its components in the same order",
        )


def _refuse_other_setting(name: str, saved: object, here: object) -> None:
    if saved != here:
        do = f"build the engine with {name}={saved!r}"
        raise CallerError(f"the saved state is of another {name}", got=said(saved), expected=said(here), do=do)


def _window(found: Mapping[str, Array], layout: GradientLayout, settings: Settings) -> SavedWindow:
    counts, used, filled, sums = (found[name] for name in ("counts", "used", "filled", "sums"))
    slots = len(layout.slots)
    sizes = {"counts": slots, "used": slots, "filled": slots, "sums": layout.arena_size if filled.any() else 0}
    for name, size in sizes.items():
        if found[name].size != size:
            raise _other_array(name, found[name], f"{size} elements")
    weights = np.array([checked_weight(weight) for weight in found["micro_batch_weights"].tolist()], "f4")
    says_nothing, room = bool(found["says_nothing"]), settings.micro_batches
    is_counted = counts.min() >= 0 and counts.max() == weights.size and (room is None or weights.size <= room)
    if not is_counted or (says_nothing and weights.size):
        raise CallerError(
            "the weights and counts of a saved state contradict each other",
            got=f"{weights.size} weights, and {counts.min()} to {counts.max()} micro-batches of a component",
            expected="a weight for each micro-batch" + ("" if room is None else f", of {room} at most"),
        )
    return SavedWindow(says_nothing, weights, counts, used, filled, sums)
