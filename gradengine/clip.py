"""Fused clipping: norm -> scale -> apply, in place, on state that is allocated once.

By default one global norm over everything; a plan may give blocks, components or named groups norms of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, final

from gradengine.buffer import Buffer, overlapping
from gradengine.errors import BufferRefused, CallerError, LayoutMismatch
from gradengine.kernels import ClipPlan, Decision, Kernels, SquaredSums, kernels_for
from gradengine.layout import LORA_COMPONENTS, Slot

__all__ = [
    "FusedClipState",
    "Groups",
    "MaxNorm",
    "clip_by_global_norm",
    "clip_gradients_fused",
    "clip_lora_gradients_fused",
    "clip_plan",
    "init_lora_fused_clip",
]

Groups: TypeAlias = str | Mapping[str, str] | Callable[[Slot], str] | None
MaxNorm: TypeAlias = float | Mapping[str, float] | None


@final
class FusedClipState:
    """What clipping needs besides the gradients: partial sums for each buffer, and the last norm and scale.

    Args:
        sizes: Elements of each buffer.
        device: Where the buffers lie; "cpu" in this version.

    Attributes:
        norm: The last global norm, before clipping; NaN until there is one.
        scale: The last clip scale.

    Example:
        >>> state = FusedClipState([2])
        >>> gradient = np.array([3, 4], np.float32)
        >>> clip_gradients_fused([gradient], 1.0, state)
        >>> state.norm, state.scale, gradient
        (5.0, 0.2, array([0.6, 0.8], dtype=float32))
    """

    def __init__(self, sizes: Sequence[int], device: str = "cpu") -> None:
        self.kernels: Kernels = kernels_for(device)
        self.sums = SquaredSums(sizes)
        self.norm = math.nan
        self.scale = 1.0


def clip_gradients_fused(
    buffers: Sequence[object], max_norm: float, state: FusedClipState, stream: object | None = None
) -> None:
    """Scale gradients in place so that their global norm is at most `max_norm`; norm and scale are left in `state`.

    A norm within the bound writes nothing. A norm that is NaN or Inf scales nothing: `state.norm` says so.

    Args:
        buffers: As many as `state` was made for, of those sizes; fp32, fp16 or bf16, writable, contiguous.
        max_norm: The bound, >= 0.
        state: From `FusedClipState`.
        stream: A GPU's stream; without meaning on the CPU.

    Raises:
        LayoutMismatch: Another number of buffers or another size.
        BufferRefused: A buffer cannot be written as it lies, or two overlap.
        CallerError: `max_norm` is negative or NaN, or a stream is given on the CPU.
    """
    if stream is not None:
        raise CallerError("the CPU has no streams", got=repr(stream), expected="stream=None")
    names = [f"buffers[{i}]" for i in range(len(buffers))]
    _clip(_writable(buffers, names, state), max_norm, state)


def clip_by_global_norm(arrays: Sequence[object] | Mapping[str, object], max_norm: float) -> float:
    """Clip arrays in place by their global norm, and return what the norm was.

    Args:
        arrays: A sequence, or a mapping by name; fp32, fp16 or bf16 on the CPU, writable, contiguous.
        max_norm: The bound, >= 0.

    Returns:
        The global norm before clipping, accumulated beyond fp32 whatever the arrays' dtype.

    Raises:
        BufferRefused: An array cannot be written as it lies, or two overlap.
        CallerError: `max_norm` is negative or NaN.

    Example:
        >>> gradient = np.array([0, 10], np.float32)
        >>> clip_by_global_norm([gradient], 1.0), gradient
        (10.0, array([0., 1.], dtype=float32))
    """
    named = arrays if isinstance(arrays, Mapping) else {f"arrays[{i}]": array for i, array in enumerate(arrays)}
    kernels = kernels_for("cpu")
    views = [kernels.writable_view(array, name) for name, array in named.items()]
    state = FusedClipState([view.size for view in views])
    _refuse_overlap(views, list(named))
    _clip(views, max_norm, state)
    return state.norm


def init_lora_fused_clip(workspace: object) -> FusedClipState:
    """Clip state for the six gradients of a LoRA block.

    Args:
        workspace: A mapping or an object with `lora_a_q lora_b_q lora_a_v lora_b_v input_norm post_attn_norm`; one
            that is empty, None or absent is skipped.

    Raises:
        LayoutMismatch: None of the six is there.

    Example:
        >>> workspace = {"lora_a_q": np.ones(4, np.float32), "lora_b_q": np.ones(0, np.float32)}
        >>> state = init_lora_fused_clip(workspace)
        >>> clip_lora_gradients_fused(workspace, 1.0, state)
        >>> state.norm, float(workspace["lora_a_q"][0])
        (2.0, 0.5)
    """
    kernels = kernels_for("cpu")
    return FusedClipState([kernels.view(array, name).size for name, array in _lora_buffers(workspace).items()])


def clip_lora_gradients_fused(workspace: object, max_norm: float, state: FusedClipState) -> None:
    """Clip the six gradients of a LoRA block in place by their common norm.

    Raises:
        LayoutMismatch: The workspace is not as it was when `state` was made.
        BufferRefused: A buffer cannot be written as it lies, or two overlap.
        CallerError: `max_norm` is negative or NaN.
    """
    named = _lora_buffers(workspace)
    _clip(_writable(list(named.values()), list(named), state), max_norm, state)


def clip_plan(slots: Sequence[Slot], max_norm: MaxNorm, groups: Groups = None) -> tuple[ClipPlan, tuple[str, ...]]:
    """Which slots share a norm, and each group's bound.

    Args:
        slots: The layout's slots.
        max_norm: One bound for every group, or one by group name; None or infinity clips nothing.
        groups: None for one global norm; "block" for one in each block (components outside share the group "rest");
            "component" for one in each component; or a mapping or function slot -> group name.

    Returns:
        The plan, and the groups' names in the order of its numbers.

    Raises:
        CallerError: A bound is negative or NaN, or a group has none.

    Example:
        >>> from gradengine.layout import GradientLayout
        >>> slots = GradientLayout.of({"layers.0.w": (1,), "layers.1.w": (1,), "head": (1,)}).slots
        >>> clip_plan(slots, 1.0, "block")
        (ClipPlan(groups=(0, 1, 2), max_norms=(1.0, 1.0, 1.0)), ('block 0', 'block 1', 'rest'))
    """
    labels = [_group_of(slot, groups) for slot in slots]
    names = tuple(dict.fromkeys(labels))
    bounds = tuple(_bound(max_norm, name) for name in names)
    return ClipPlan(tuple(names.index(label) for label in labels), bounds), names


def _group_of(slot: Slot, groups: Groups) -> str:
    if groups is None:
        return "all"
    if groups == "block":
        return "rest" if slot.block is None else f"block {slot.block}"
    if groups == "component":
        return slot.name
    if isinstance(groups, str):
        raise CallerError("unknown grouping", got=repr(groups), expected="None, 'block', 'component' or a mapping")
    if isinstance(groups, Mapping):
        if slot.name not in groups:
            raise CallerError(f"groups names no group for component '{slot.name}'", do="add it to the mapping")
        return groups[slot.name]
    return groups(slot)


def _bound(max_norm: MaxNorm, group: str) -> float:
    if isinstance(max_norm, Mapping):
        if group not in max_norm:
            raise CallerError(f"max_norm names no bound for group '{group}'", got=sorted(max_norm))
        max_norm = max_norm[group]
    return checked_max_norm(max_norm)


def checked_max_norm(max_norm: float | None) -> float:
    """The bound as a float; None means infinity.

    Raises:
        CallerError: It is negative, NaN or no number.

    Example:
        >>> checked_max_norm(None)
        inf
    """
    try:
        bound = math.inf if max_norm is None else float(max_norm)
    except (TypeError, ValueError, OverflowError):
        bound = math.nan
    if not bound >= 0:  # written so that NaN is refused
        expected = "a number >= 0, or None to clip nothing"
        raise CallerError("max_norm is out of range", got=repr(max_norm), expected=expected)
    return bound


def _clip(views: Sequence[Buffer], max_norm: float, state: FusedClipState) -> None:
    plan = ClipPlan((0,) * len(views), (checked_max_norm(max_norm),))
    decision = measure_and_decide(state.kernels, views, state.sums, plan)
    state.kernels.hand_back(views, [decision.factors[0]] * len(views), views)
    state.norm, state.scale = decision.norm, decision.scales[0]


def measure_and_decide(
    kernels: Kernels, views: Sequence[Buffer], sums: SquaredSums, plan: ClipPlan, divisor: float = 1.0
) -> Decision:
    """Norms, scales and factors of buffers that are complete: one read of each."""
    kernels.measure(views, sums, [(p, *chunk) for p in range(len(views)) for chunk in sums.chunks(p)])
    return kernels.decide(kernels.totals(sums), plan, divisor)


def _writable(buffers: Sequence[object], names: Sequence[str], state: FusedClipState) -> list[Buffer]:
    if len(buffers) != len(state.sums.sizes):
        raise LayoutMismatch(
            "another number of buffers than the clip state was made for",
            got=len(buffers),
            expected=len(state.sums.sizes),
        )
    views = [state.kernels.writable_view(buffer, name) for buffer, name in zip(buffers, names, strict=True)]
    for view, name, size in zip(views, names, state.sums.sizes, strict=True):
        if view.size != size:
            raise LayoutMismatch(
                f"{name} has another size than the clip state was made for", got=view.size, expected=size
            )
    _refuse_overlap(views, names)
    return views


def _refuse_overlap(views: Sequence[Buffer], names: Sequence[str]) -> None:
    pair = overlapping(views)
    if pair is not None:
        raise BufferRefused(
            f"'{names[pair[0]]}' and '{names[pair[1]]}' overlap in memory",
            do="pass each gradient once, or it would be counted and scaled twice",
        )


def _lora_buffers(workspace: object) -> dict[str, object]:
    kernels = kernels_for("cpu")
    present = {}
    for name in LORA_COMPONENTS:
        array = workspace.get(name) if isinstance(workspace, Mapping) else getattr(workspace, name, None)
        if array is not None and kernels.view(array, name).size:
            present[name] = array
    if not present:
        raise LayoutMismatch("the workspace has none of the LoRA gradients", expected=", ".join(LORA_COMPONENTS))
    return present
