"""Clipping of a tree of immutable arrays by its global norm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from gradengine.arrays.device import device_of
from gradengine.clip import checked_max_norm
from gradengine.jax.tree import Leaves, flattened
from gradengine.kernels import ClipPlan, Decision, decide, kernels_for


def clip_by_global_norm(tree: Any, max_norm: float | None) -> tuple[Any, float]:
    """Clip a tree of gradients by its global norm. Call it outside of jit, because it waits for the norm.

    As in `optax.clip_by_global_norm` there is no epsilon. The differences are:

    - The norm is returned. It is computed in fp64 if fp32 would lose precision. optax computes it in the leaves' dtype,
      and fp16 overflows at a norm of 256.
    - Each element is multiplied once. optax divides, then multiplies.
    - A norm of NaN or Inf scales nothing. With optax the result is NaN or zeros.

    Args:
        tree: Arrays in fp32, fp16 or bf16, on one device or replicated. None leaves stay. An empty tree has norm 0.
        max_norm: The bound, above 0. None clips nothing.

    Returns:
        The clipped tree and the norm before clipping. The tree is new, in the leaves' dtypes. Each element is
        multiplied once in fp32 and rounded once (by JAX, whose CPU backend flushes subnormals to zero). If there is
        nothing to clip, it is the same tree.

    Raises:
        CallerError: `max_norm` is 0, negative or NaN.
        BufferRefused: A leaf is traced, deleted, sharded over several devices, or of an unsupported dtype.
        LayoutMismatch: Two paths give one name.

    Example:
        >>> tree, norm = clip_by_global_norm({"w": jnp.array([0.0, 8.0]), "b": [jnp.array(6.0), None]}, 5.0)
        >>> norm, tree["w"].tolist(), tree["b"]
        (10.0, [0.0, 4.0], [Array(3., dtype=float32), None])
    """
    bound = checked_max_norm(max_norm)
    decision = _decide({name: leaf for name, leaf in flattened(tree)[0].items() if leaf is not None}, bound)
    if decision.factor == 1:
        return tree, decision.norm
    return jax.tree.map(lambda leaf: _scaled(leaf, decision.factor), tree), decision.norm


def _decide(leaves: Leaves, bound: float) -> Decision:
    """Return norm and factor on the host, so that a factor of 1 needs no new tree."""
    kernels = kernels_for(_device_of(leaves.values()))
    views = kernels.device.views(list(leaves.values()), list(leaves))
    arena = kernels.arena(views)
    kernels.measure(arena)
    return decide(kernels.totals(arena), ClipPlan((0,) * len(views), (bound,)), 1.0)


def _device_of(leaves: Iterable[Any]) -> str:
    """Return the first leaf's device, or "cpu" for a traced or sharded one, which `host_buffer` rejects."""
    leaf = next(iter(leaves), None)
    if isinstance(leaf, jax.core.Tracer) or not isinstance(leaf, jax.Array):
        return "cpu"
    sharding: Any = leaf.sharding
    return "cpu" if {device.platform for device in sharding.device_set} == {"cpu"} else device_of(leaf)


_scaled: Any = jax.jit(lambda leaf, factor: (leaf.astype(jnp.float32) * factor).astype(leaf.dtype))
