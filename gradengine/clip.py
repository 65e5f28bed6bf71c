"""Fused clipping (norm -> scale -> apply), in place, on state that is allocated once.

By default there is one global norm. A plan may give each block, component or named group its own norm. On a GPU norm
and scale stay in device memory, and the host does not wait. A clip makes three launches, which a CUDA graph may record.
`clip_by_global_norm` also copies the norm, so that the next call does not overwrite it. The clip scale is decided in
`kernels/decision.py` (on a GPU in `finalise.cu`). The kernels' `hand_back` multiplies.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, final

from gradengine.arguments import as_float, listed, out_of_range, refuse_other_kind, said, whole_number
from gradengine.arrays.buffer import Buffer, overlapping
from gradengine.arrays.device import device_of
from gradengine.arrays.frameworks import note_written
from gradengine.arrays.known import KnownArrays, facts_of
from gradengine.errors import BufferRefused, CallerError, LayoutMismatch, not_copied
from gradengine.kernels import Arena, ClipPlan, Decision, DeviceLike, Kernels, kernels_for
from gradengine.layout import LORA_COMPONENTS, Slot
from gradengine.layout.components import named_components

Groups: TypeAlias = str | Mapping[str, str] | Callable[[Slot], str] | None
MaxNorm: TypeAlias = float | Mapping[str, float | None] | None

_NAMES_SHOWN = 9
_REMEMBERED = 8  # sets of arrays, and of sizes, that are cached for each thread
_MOST_ELEMENTS = 1 << 40  # elements of one buffer, 4 TB in fp32


@final
class FusedClipState:
    """The memory for clipping, with partial sums for each buffer and the last norm and scale.

    One thread at a time may use it.

    Args:
        sizes: Elements of each buffer.
        device: The buffers' device, as "cpu", "cuda", "cuda:1", a torch.device, or kernels.

    Attributes:
        norm: The last global norm, before clipping, or NaN before the first clip. On a GPU it is a 0-d device array,
            which the next clip overwrites. Reading it (`float(state.norm)`) waits for the device, on any stream.
        scale: The last clip scale, or 1 before the first clip. On a GPU it is also a 0-d array.

    Raises:
        CallerError: A size is not a whole number >= 0.
        DeviceUnavailable: The device cannot be used here.

    Example:
        >>> state = FusedClipState([2])
        >>> gradient = np.array([3, 4], np.float32)
        >>> clip_gradients_fused([gradient], 1.0, state)
        >>> state.norm, state.scale, gradient
        (5.0, 0.2, array([0.6, 0.8], dtype=float32))
    """

    __reduce_ex__ = not_copied("make a new one of the same sizes")

    def __init__(self, sizes: Sequence[int], device: DeviceLike = "cpu") -> None:
        self.kernels = kernels_for(device)
        counts = [whole_number("a buffer's size", size, 0, _MOST_ELEMENTS) for size in listed("sizes", sizes)]
        self.partials = self.kernels.partial_sums(counts)
        self._last: Decision | None = None

    @property
    def norm(self) -> Any:
        """The last global norm."""
        if self._last is None:
            return math.nan
        self.partials.order.follow()
        return self._last.norm

    @property
    def scale(self) -> Any:
        """The last clip scale."""
        if self._last is None:
            return 1.0
        self.partials.order.follow()
        return self._last.scale


def clip_gradients_fused(
    buffers: Sequence[object], max_norm: float | None, state: FusedClipState, stream: object | None = None
) -> None:
    """Scale gradients in place so that their global norm is at most `max_norm`, and keep norm and scale in `state`.

    Nothing is written if the norm is within the bound, or if it is NaN or Inf, which `state.norm` shows. If a call is
    interrupted, for example by Ctrl-C, some gradients are scaled and others are not. Compute the gradients again.

    Args:
        buffers: The gradients, in fp32, fp16 or bf16, writable and contiguous. Their number and sizes are those that
            `state` was made for.
        max_norm: The bound, above 0. None clips nothing.
        state: The clip state.
        stream: A GPU's stream (CuPy's, torch's, or a handle), by default the current CuPy stream.

    Raises:
        LayoutMismatch: The number of buffers or a size is wrong.
        BufferRefused: A buffer cannot be written in place, or two overlap.
        CallerError: `max_norm` is 0, negative or NaN, or a stream is given on the CPU.
    """
    refuse_other_kind("state", state, FusedClipState)
    _refuse_lone_array(buffers)
    with state.kernels.device.on(stream):
        _clip_named({f"buffers[{i}]": given for i, given in enumerate(listed("buffers", buffers))}, max_norm, state)


def clip_by_global_norm(arrays: Sequence[object] | Mapping[str, object], max_norm: float | None) -> Any:
    """Clip arrays in place by their global norm, and return the norm before clipping.

    Args:
        arrays: A sequence, or a mapping by name, of arrays in fp32, fp16 or bf16, all on one device, writable and
            contiguous. Containers may be nested, as in a layout.
        max_norm: The bound, above 0. None clips nothing.

    Returns:
        The global norm before clipping, with a relative error of at most 1e-6 for every dtype. On a GPU it is a 0-d
        device array, to be read on the streams that are current at the call. Only the first call with arrays of these
        sizes waits for the device.

    Raises:
        BufferRefused: An array cannot be written in place, or two overlap.
        LayoutMismatch: A name within a container is not a str.
        CallerError: `max_norm` is 0, negative or NaN.

    Example:
        >>> gradient = np.array([0, 10], np.float32)
        >>> clip_by_global_norm([gradient], 1.0), gradient
        (10.0, array([0., 1.], dtype=float32))
    """
    _refuse_lone_array(arrays)
    given = list(arrays.values()) if isinstance(arrays, Mapping) else listed("arrays", arrays)
    for name in arrays if isinstance(arrays, Mapping) else ():
        refuse_other_kind("a gradient's name", name, str)
    names: Sequence[str | int] = list(arrays) if isinstance(arrays, Mapping) else range(len(given))
    if any(issubclass(kind, (list, tuple, Mapping)) for kind in set(map(type, given))):
        flat = named_components(dict(zip(_shown(names), given, strict=True)))
        names, given = [name for name, _ in flat], [array for _, array in flat]
    kernels = kernels_for(device_of(next(iter(given), None)))

    def checked(views: Sequence[Buffer]) -> tuple[Arena, FusedClipState]:
        _refuse_overlap(views, _shown(names))
        state = _remembered.state_of(tuple(view.size for view in views), kernels)
        return Arena(tuple(views), state.partials), state

    facts = facts_of(given, kernels.device.array_type, written=True)
    arena, state = _remembered.arrays.of(facts, lambda: kernels.device.writable_views(given, _shown(names)), checked)
    kernels.device.wait_for(arena.in_place.producers)
    decision = _clip(arena, max_norm, state)
    note_written(given)
    return decision.kept_norm()  # a copy, because the next clip overwrites the state's norm


def _shown(names: Sequence[str | int]) -> list[str]:
    return [name if isinstance(name, str) else f"arrays[{name}]" for name in names]


class _Remembered(threading.local):
    """A thread's clip states by sizes, which cost memory and a wait on a GPU, and the last arrays that it clipped."""

    def __init__(self) -> None:
        self.state_of = functools.lru_cache(maxsize=_REMEMBERED)(FusedClipState)
        self.arrays: KnownArrays[tuple[Arena, FusedClipState]] = KnownArrays(_REMEMBERED)


_remembered = _Remembered()


def init_lora_fused_clip(workspace: object, device: DeviceLike | None = None) -> FusedClipState:
    """Return a clip state for the six gradients of a LoRA block.

    Args:
        workspace: A mapping or an object with `lora_a_q lora_b_q lora_a_v lora_b_v input_norm post_attn_norm`. A
            gradient that is empty, None or absent is skipped.
        device: The gradients' device, by default that of the first one.

    Raises:
        LayoutMismatch: All six are absent or empty.
        DeviceUnavailable: The device cannot be used here.

    Example:
        >>> workspace = {"lora_a_q": np.ones(4, np.float32), "lora_b_q": np.ones(0, np.float32)}
        >>> state = init_lora_fused_clip(workspace)
        >>> clip_lora_gradients_fused(workspace, 1.0, state)
        >>> state.norm, float(workspace["lora_a_q"][0])
        (2.0, 0.5)
    """
    given = [array for name in LORA_COMPONENTS if (array := _component(workspace, name)) is not None]
    kernels = kernels_for(device_of(next(iter(given), None)) if device is None else device)
    present = _lora_buffers(workspace, kernels)
    return FusedClipState([view.size for view in kernels.device.views(list(present.values()), list(present))], kernels)


def clip_lora_gradients_fused(workspace: object, max_norm: float | None, state: FusedClipState) -> None:
    """Clip the six gradients of a LoRA block in place by their common norm.

    Raises:
        LayoutMismatch: The gradients' number or sizes are not those that `state` was made for.
        BufferRefused: A buffer cannot be written in place, or two overlap.
        CallerError: `max_norm` is 0, negative or NaN.
    """
    refuse_other_kind("state", state, FusedClipState)
    _clip_named(_lora_buffers(workspace, state.kernels), max_norm, state)


def clip_plan(slots: Sequence[Slot], max_norm: MaxNorm, groups: Groups = None) -> tuple[ClipPlan, tuple[str, ...]]:
    """Return the plan of the slots that share a norm and of each group's bound, and the groups' names in its order.

    `groups` is None for one global norm, "block" for one in each block (components outside share the group "rest"),
    "component" for one in each component, a mapping component name -> group name, or a function slot -> group name.
    `max_norm` is one bound, or one by group name. Raises `CallerError` if a bound is 0, negative or NaN, or is missing.

    >>> from gradengine.layout import GradientLayout
    >>> slots = GradientLayout.of({"layers.0.w": (1,), "layers.1.w": (1,), "head": (1,)}).slots
    >>> clip_plan(slots, 1.0, "block")
    (ClipPlan(groups=(0, 1, 2), max_norms=(1.0, 1.0, 1.0), blocks=(0, 1, None)), ('block 0', 'block 1', 'rest'))
    """
    labels = [_group_of(slot, groups) for slot in slots]
    names = {name: number for number, name in enumerate(dict.fromkeys(labels))}
    bounds = bounds_of_groups(max_norm, names)
    blocks = tuple(slot.block for slot in slots)
    return ClipPlan(tuple(names[label] for label in labels), bounds, blocks), tuple(names)


def bounds_of_groups(max_norm: MaxNorm, names: Iterable[str]) -> tuple[float, ...]:
    """Return each group's bound, infinity for None. Raises `CallerError` if one is missing or unknown, 0 or NaN."""
    bounds = {name: _bound(max_norm, name) for name in names}
    unknown = [name for name in max_norm if name not in bounds] if isinstance(max_norm, Mapping) else []
    if unknown:
        expected = ", ".join(map(str, itertools.islice(bounds, _NAMES_SHOWN)))
        raise CallerError(f"max_norm has a bound for {said(unknown[0])}, which is not a group", expected=expected)
    return tuple(bounds.values())


def _group_of(slot: Slot, groups: Groups) -> str:
    if groups is None:
        return "all"
    if isinstance(groups, str) and groups == "block":
        return "rest" if slot.block is None else f"block {slot.block}"
    if isinstance(groups, str) and groups == "component":
        return slot.name
    if isinstance(groups, Mapping):
        if slot.name not in groups:
            raise CallerError(f"groups names no group for component '{slot.name}'", do="add it to the mapping")
        group = groups[slot.name]
    elif callable(groups):
        group = groups(slot)
    else:
        expected = "None, 'block', 'component', a mapping or a function"
        raise CallerError("groups is unknown", got=said(groups), expected=expected)
    if not isinstance(group, str):
        raise CallerError(f"the group of component '{slot.name}' is not a str", got=said(group), expected="its name")
    return group


def _bound(max_norm: MaxNorm, group: str) -> float:
    if isinstance(max_norm, Mapping):
        if group not in max_norm:
            named = ", ".join(str(said(name)) for name in itertools.islice(max_norm, _NAMES_SHOWN))
            raise CallerError(
                f"max_norm names no bound for group '{group}'", got=f"{len(max_norm)} bounds: {named or 'none'}"
            )
        max_norm = max_norm[group]
    return checked_max_norm(max_norm)


def checked_max_norm(max_norm: float | None) -> float:
    """Return the bound as a float, infinity for None. Raises `CallerError` if it is not a number above 0."""
    bound = math.inf if max_norm is None else as_float(max_norm)
    if not bound > 0:  # NaN takes this branch too
        # HF Trainer and Lightning read 0 as "no clipping". A bound of 0 would stop training without an error.
        do = "pass None to switch clipping off" if bound == 0 else None
        raise out_of_range("max_norm", max_norm, "a number above 0, or None to clip nothing", do=do)
    return bound


def _clip(arena: Arena, max_norm: float | None, state: FusedClipState) -> Decision:
    kernels = state.kernels
    plan = ClipPlan((0,) * len(arena.targets), (checked_max_norm(max_norm),))
    kernels.measure(arena)
    decision = kernels.finalise(arena, plan, 1.0, zero_if_bad=False)
    kernels.hand_back(arena, decision, plan)
    state._last = decision
    return decision


def _clip_named(buffers: Mapping[str, object], max_norm: float | None, state: FusedClipState) -> None:
    names, given, sizes = list(buffers), list(buffers.values()), state.partials.sizes
    if len(given) != len(sizes):
        what = "the number of buffers is not that of the clip state"
        raise LayoutMismatch(what, got=len(given), expected=len(sizes))
    views = state.kernels.device.writable_views(given, names)
    for view, name, size in zip(views, names, sizes, strict=True):
        if view.size != size:
            what = f"{name} has the wrong size for the clip state"
            raise LayoutMismatch(what, got=view.size, expected=size)
    _refuse_overlap(views, names)
    _clip(Arena(tuple(views), state.partials), max_norm, state)
    note_written(given)


def _refuse_overlap(views: Sequence[Buffer], names: Sequence[str]) -> None:
    pair = overlapping(views)
    if pair is not None:
        raise BufferRefused(
            f"'{names[pair[0]]}' and '{names[pair[1]]}' overlap in memory",
            do="pass each gradient once",
        )


def _refuse_lone_array(arrays: object) -> None:
    """Raise `CallerError` for a single array, whose elements would be taken for 0-d arrays."""
    if hasattr(arrays, "shape") or not isinstance(arrays, (Mapping, Iterable)):
        raise CallerError(
            "gradients must be given in a list, or by name",
            got=type(arrays).__name__,
            expected="a sequence of arrays, or a mapping",
            do="pass one array as [array]",
        )


def _lora_buffers(workspace: object, kernels: Kernels) -> dict[str, object]:
    present = {}
    for name in LORA_COMPONENTS:
        array = _component(workspace, name)
        if array is not None and kernels.device.view(array, name).size:
            present[name] = array
    if not present:
        raise LayoutMismatch("the workspace has none of the LoRA gradients", expected=", ".join(LORA_COMPONENTS))
    return present


def _component(workspace: object, name: str) -> object:
    return workspace.get(name) if isinstance(workspace, Mapping) else getattr(workspace, name, None)
