"""Conversion between pytrees of JAX arrays and an engine's components.

A result's arrays are views of the engine's arena, which the next `add` overwrites, and JAX computes asynchronously. A
view is safe if everything computed from it is ready before the next `add`. Otherwise take a copy
(`GradientTree.tree(..., copy=True)`). In the usual loop everything is ready, because `add` waits for the next
gradients. These depend on the new parameters, which depend on the old gradients. But nothing waits for other values
computed from the gradients, such as a metric or the update of a parameter that the loss does not use. Call
`jax.block_until_ready` on all such values before the next `add`. A jitted function returns new memory, even if its
arguments are donated. `jnp.asarray`, `jax.device_put`, `.astype` to the same dtype and even
`jax.dlpack.from_dlpack(view, copy=True)` may return the view's memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp

from gradengine.accumulate.gradients import and_more, in_slot_order
from gradengine.arguments import said, truth_value
from gradengine.errors import BufferRefused, LayoutMismatch
from gradengine.layout import GradientLayout

Leaves: TypeAlias = dict[str, Any]


@final
class GradientTree:
    """Conversion between a pytree of gradients and the components of a layout.

    Args:
        tree: The parameters, their gradients, or their `jax.eval_shape`, in nested dicts, lists, tuples, NamedTuples or
            any type registered with JAX. A leaf is a component, named by its path, such as "layers.0.wq". None is not
            a leaf, and stays None.

    Attributes:
        layout: The layout, in the order of the tree's leaves.

    Raises:
        LayoutMismatch: Two paths give one name, a leaf is not an array, or the tree has no leaf.
        BufferRefused: A leaf is not float32, float16 or bfloat16.

    Example:
        >>> from gradengine import GradientEngine
        >>> parameters = {"layers": [{"w": jnp.ones((2, 3))}], "head": jnp.ones(3, jnp.bfloat16), "frozen": None}
        >>> gradient_tree = GradientTree(parameters)
        >>> [slot.name for slot in gradient_tree.layout.slots]
        ['head', 'layers.0.w']
        >>> engine = GradientEngine(gradient_tree.layout, max_norm=None)
        >>> engine.add(gradient_tree.gradients(parameters))
        >>> gradient_tree.tree(engine.step().gradients)["layers"][0]["w"].shape
        (2, 3)
    """

    def __init__(self, tree: Any) -> None:
        leaves, self._structure = flattened(tree)
        self.layout = GradientLayout.of({name: leaf for name, leaf in leaves.items() if leaf is not None})
        self._shapes = {slot.name: slot.shape for slot in self.layout.slots}
        self._leaves = dict.fromkeys(leaves)  # the arrays themselves are not kept

    def gradients(self, tree: Any) -> dict[str, Any]:
        """Return the leaves of a tree by component name, for `engine.add`, without a copy or a wait.

        Args:
            tree: A tree of the same structure. None stands for a component without a gradient.

        Raises:
            LayoutMismatch: A leaf is missing, unexpected or of the wrong shape, or the tree has different containers.
        """
        leaves, structure = flattened(tree)
        if structure != self._structure:
            raise self._other_structure(leaves, structure)
        for name, leaf in leaves.items():
            got, expected = getattr(leaf, "shape", type(leaf).__name__), self._shapes.get(name, "None")
            if leaf is not None and got != expected:
                raise LayoutMismatch(f"component '{name}' has the wrong shape", got=got, expected=expected)
        return {name: leaves[name] for name in self._shapes}

    def tree(self, gradients: Mapping[str, Any] | Sequence[Any], *, copy: bool = False) -> Any:
        """Return a result's gradients as a tree of JAX arrays on the engine's device.

        Args:
            gradients: `result.gradients` (fp32 views of the arena, or the destinations of `step(out=...)`), or a
                deferred step's `result.sums`.
            copy: False for views of the same memory, to be read before the next `add` (see this module's docstring).
                True for copies, which are complete when this call returns.

        Raises:
            LayoutMismatch: A component is missing or unknown.
            BufferRefused: JAX cannot read the memory in place; `copy=True` can.
        """
        ordered = in_slot_order(self.layout.slots, gradients, "the tree")
        arrays = dict(zip(self._shapes, ordered, strict=True))
        read = _copied if truth_value("copy", copy) else viewed
        taken = {name: None if array is None else read(name, array) for name, array in arrays.items()}
        return self._structure.unflatten([taken.get(name) for name in self._leaves])

    def _other_structure(self, leaves: Leaves, structure: Any) -> LayoutMismatch:
        if missing := [name for name in self._leaves if name not in leaves]:
            what, do = f"the tree lacks leaf '{missing[0]}'{and_more(missing)}", "pass None for a missing gradient"
            return LayoutMismatch(what, do=do)
        if unexpected := [name for name in leaves if name not in self._leaves]:
            return LayoutMismatch(f"the tree has an unexpected leaf '{unexpected[0]}'{and_more(unexpected)}")
        what = "the tree has the wrong containers"
        return LayoutMismatch(what, got=str(structure), expected=str(self._structure))


def flattened(tree: Any) -> tuple[Leaves, Any]:
    """Return a tree's leaves by name, None included, and its structure."""
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is None)
    leaves: Leaves = {}
    for path, leaf in pairs:
        name = ".".join(map(_part, path)) if path else "gradient"  # a lone array has no path
        if name in leaves:
            got, do = f"{jax.tree_util.keystr(path)} for the second", "rename one of them"
            raise LayoutMismatch(f"two paths of the tree give one name, '{name}'", got=got, do=do)
        leaves[name] = leaf
    return leaves, structure


def _part(key: Any) -> str:
    """Return a path entry (a dict's key, an index or an attribute) as text."""
    named = (getattr(key, attribute) for attribute in ("key", "idx", "name") if hasattr(key, attribute))
    return str(next(named, key))


def viewed(name: str, array: Any) -> Any:
    """Return a JAX array in the same memory, or raise `BufferRefused` if JAX cannot read it in place."""
    try:
        return jax.dlpack.from_dlpack(array)
    except Exception as refusal:  # noqa: BLE001  (a framework's own code, and its own errors)
        raise BufferRefused(
            f"JAX cannot read component '{name}' in place ({said(refusal)})",
            got=type(array).__name__,
            do="call tree(..., copy=True)",
        ) from None


def _copied(_: str, array: Any) -> Any:
    return jnp.array(array, copy=True).block_until_ready()
