"""JAX interface: pytrees of gradients into and out of an engine, and clipping of immutable arrays.

Not imported by any other file; the engine takes JAX arrays without it.

A result's arrays are views of the engine's arena, which the next `add` overwrites, and JAX computes asynchronously. A
view is safe if everything computed from it is ready before the next `add`; else take a copy
(`GradientTree.tree(..., copy=True)`). In the usual loop it is ready: `add` waits for the next gradients, which depend
on the new parameters, and those on the old gradients. It is not if something else is computed from the gradients that
nothing waits for: a metric, or the update of a parameter that the loss does not use. Then call `jax.block_until_ready`
on all of it before the next `add`. A jitted function returns new memory, also if its arguments are donated;
`jnp.asarray`, `jax.device_put`, `.astype` to the same dtype and even `jax.dlpack.from_dlpack(view, copy=True)` may
return the view's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, final

import jax
import jax.numpy as jnp
import numpy as np

from gradengine.accumulate.gradients import and_more, in_slot_order
from gradengine.arguments import as_text, has, said, truth_value
from gradengine.arrays.device import device_of
from gradengine.clip import checked_max_norm
from gradengine.errors import BufferRefused, LayoutMismatch
from gradengine.kernels import ClipPlan, Decision, decide, kernels_for
from gradengine.layout import GradientLayout
from gradengine.layout.components import DEEPEST, MOST_ITEMS

__all__ = ["GradientTree", "clip_by_global_norm"]

Leaves: TypeAlias = dict[str, Any]


@final
class GradientTree:
    """Conversion between a pytree of gradients and the components of a layout.

    Args:
        tree: The parameters, their gradients, or their `jax.eval_shape`: nested dicts, lists, tuples, NamedTuples or
            any type registered with JAX. A leaf is a component, named by its path: "layers.0.wq". None is not a leaf,
            and stays None.

    Attributes:
        layout: The layout, in the order of the tree's leaves.

    Raises:
        LayoutMismatch: Two paths give one name, a leaf is not an array, or there is none.
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
        leaves, self._structure = _flattened(tree)
        self.layout = GradientLayout.of({name: leaf for name, leaf in leaves.items() if leaf is not None})
        self._shapes = {slot.name: slot.shape for slot in self.layout.slots}
        self._leaves = dict.fromkeys(leaves)  # the arrays themselves are not kept

    def gradients(self, tree: Any) -> dict[str, Any]:
        """The leaves by component name, as `engine.add` takes them; no copy and no wait.

        Args:
            tree: A tree of the same structure. None stands for a component without a gradient.

        Raises:
            LayoutMismatch: A leaf is missing, unexpected or of another shape, or the tree has other containers.
        """
        leaves, structure = _flattened(tree)
        if structure != self._structure:
            raise self._other_structure(leaves, structure)
        for name, leaf in leaves.items():
            self._refuse_other_shape(name, leaf)
        return {name: leaves[name] for name in self._shapes}

    def tree(self, gradients: Mapping[str, Any] | Sequence[Any], *, copy: bool = False) -> Any:
        """A result's gradients as a tree of JAX arrays on the engine's device.

        Args:
            gradients: `result.gradients`: fp32 views of the arena, or the destinations of `step(out=...)`. Or
                `result.sums` of a deferred step.
            copy: False for views of the same memory, to be read before the next `add` (see this module's docstring).
                True for copies, which are complete when this returns.

        Raises:
            LayoutMismatch: A component is missing or unknown.
            BufferRefused: JAX cannot read the memory in place; `copy=True` can.
        """
        ordered = in_slot_order(self.layout.slots, gradients, "the tree")
        arrays = dict(zip(self._shapes, ordered, strict=True))
        read = _copied if truth_value("copy", copy) else _viewed
        taken = {name: None if array is None else read(name, array) for name, array in arrays.items()}
        return self._structure.unflatten([taken.get(name) for name in self._leaves])

    def _other_structure(self, leaves: Leaves, structure: Any) -> LayoutMismatch:
        missing = [name for name in self._leaves if name not in leaves]
        unexpected = [name for name in leaves if name not in self._leaves]
        if missing:
            got = f"'{unexpected[0]}'{and_more(unexpected)}, which it should not have" if unexpected else None
            return LayoutMismatch(
                f"the tree lacks leaf '{missing[0]}'{and_more(missing)}",
                got=got,
                do="None stands for a component without a gradient",
            )
        if unexpected:
            return LayoutMismatch(f"the tree has an unexpected leaf '{unexpected[0]}'{and_more(unexpected)}")
        containers = {"got": str(structure), "expected": str(self._structure)}
        return LayoutMismatch("the tree has its leaves in other containers", **containers)

    def _refuse_other_shape(self, name: str, leaf: Any) -> None:
        if leaf is None:
            return
        got = getattr(leaf, "shape", type(leaf).__name__)
        if name not in self._shapes:
            raise LayoutMismatch(f"the tree has an unexpected leaf '{name}'", got=f"shape {got}", expected="None")
        if got != self._shapes[name]:
            raise LayoutMismatch(f"component '{name}' has another shape", got=got, expected=self._shapes[name])


def clip_by_global_norm(tree: Any, max_norm: float | None) -> tuple[Any, float]:
    """Clip a tree of gradients by its global norm; outside of jit, because it waits for the norm.

    Like `optax.clip_by_global_norm` it has no epsilon. Unlike there, the norm is computed in fp64 where fp32 would lose
    precision (there in the leaves' dtype: fp16 overflows at a norm of 256) and returned, each element is multiplied
    once (there divided, then multiplied), and a norm of NaN or Inf scales nothing (there it makes NaN or zeros).

    Args:
        tree: Arrays in fp32, fp16 or bf16, on one device. None leaves stay; an empty tree has norm 0.
        max_norm: The bound, above 0; None clips nothing.

    Returns:
        A new tree in the leaves' dtypes, each element multiplied once in fp32 and rounded once (by JAX, whose CPU
        backend flushes subnormals to zero), or the tree itself if there is nothing to clip; and the norm before.

    Raises:
        CallerError: `max_norm` is 0, negative or NaN.
        BufferRefused: A leaf is traced, deleted, sharded over several devices, or of another dtype.
        LayoutMismatch: Two paths give one name.

    Example:
        >>> tree, norm = clip_by_global_norm({"w": jnp.array([0.0, 8.0]), "b": [jnp.array(6.0), None]}, 5.0)
        >>> norm, tree["w"].tolist(), tree["b"]
        (10.0, [0.0, 4.0], [Array(3., dtype=float32), None])
    """
    bound = checked_max_norm(max_norm)
    decision = _decide({name: leaf for name, leaf in _flattened(tree)[0].items() if leaf is not None}, bound)
    if decision.factor == 1:
        return tree, decision.norm
    return jax.tree.map(lambda leaf: _scaled(leaf, decision.factor), tree), decision.norm


def _decide(leaves: Leaves, bound: float) -> Decision:
    """Norm and factor on the host, so that a factor of 1 needs no new tree."""
    kernels = kernels_for(_device_of(leaves.values()))
    for name, leaf in leaves.items():
        if not isinstance(leaf, (jax.Array, np.ndarray, np.generic)):  # JAX could not scale what the kernels measure
            raise BufferRefused(f"component '{name}' is neither a JAX nor a NumPy array", got=type(leaf).__name__)
    views = kernels.device.views(list(leaves.values()), list(leaves))
    arena = kernels.arena(views)
    kernels.measure(arena)
    return decide(kernels.totals(arena), ClipPlan((0,) * len(views), (bound,)), 1.0)


def _device_of(leaves: Iterable[Any]) -> str:
    """The first leaf's device; "cpu" for a traced or sharded one, which `host_buffer` refuses."""
    leaf = next(iter(leaves), None)
    if isinstance(leaf, jax.core.Tracer) or not isinstance(leaf, jax.Array):
        return "cpu"
    sharding: Any = leaf.sharding
    return "cpu" if {device.platform for device in sharding.device_set} == {"cpu"} else device_of(leaf)


_scaled: Any = jax.jit(lambda leaf, factor: (leaf.astype(jnp.float32) * factor).astype(leaf.dtype))


def _flattened(tree: Any) -> tuple[Leaves, Any]:
    """A tree's leaves by name, None included, and its structure."""
    _refuse_unbounded(tree)
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is None)
    leaves: Leaves = {}
    for path, leaf in pairs:
        name = ".".join(map(_part, path)) if path else "gradient"  # a lone array has no path
        if name in leaves:
            got, do = f"{jax.tree_util.keystr(path)} for the second", "rename one; a path's parts are joined by dots"
            raise LayoutMismatch(f"two paths of the tree give one name, '{name}'", got=got, do=do)
        leaves[name] = leaf
    return leaves, structure


def _refuse_unbounded(tree: Any) -> None:
    """Raise `LayoutMismatch` for containers that are recursive or too many: JAX would crash the process."""
    level = [tree]
    for _ in range(DEEPEST + 1):
        containers = [node for node in level if isinstance(node, (dict, list, tuple))]
        items = ((node.values() if isinstance(node, dict) else node) for node in containers)
        level = list(itertools.islice(itertools.chain.from_iterable(items), MOST_ITEMS + 1))
        if len(level) > MOST_ITEMS:
            raise LayoutMismatch("a tree is too large", got=f"more than {MOST_ITEMS} nodes", expected="fewer")
        if not level:
            return
    raise LayoutMismatch("a tree is nested too deep", expected=f"at most {DEEPEST} levels")


def _part(key: Any) -> str:
    """A path entry as text: a dict's key, an index, an attribute."""
    named = (getattr(key, attribute) for attribute in ("key", "idx", "name") if hasattr(key, attribute))
    return as_text(next(named, key))


def _viewed(name: str, array: Any) -> Any:
    try:
        return jax.dlpack.from_dlpack(array)
    except Exception as refusal:  # noqa: BLE001  (a framework's own code, and its own errors)
        raise BufferRefused(
            f"JAX cannot read component '{name}' in place ({said(refusal)})",
            got=type(array).__name__,
            do="call tree(..., copy=True)",
        ) from None


def _copied(name: str, array: Any) -> Any:
    if not any(has(array, protocol) for protocol in ("__dlpack__", "__array__", "__jax_array__")):
        raise BufferRefused(f"component '{name}' is not an array", got=said(array))
    try:
        return jnp.array(array, copy=True).block_until_ready()
    except Exception as refusal:  # noqa: BLE001  (a framework's own code, and its own errors)
        raise BufferRefused(f"JAX cannot copy component '{name}' ({said(refusal)})", got=said(array)) from None
