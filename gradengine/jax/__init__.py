"""JAX interface: pytrees of gradients to and from an engine, an engine inside an optax optimizer, clipping.

The only room that imports JAX, and not imported by any other: `from gradengine.jax import ...`; the engine takes JAX
arrays without it. optax is imported by `multi_steps` alone. An engine is called outside of `jax.jit`.
"""

from gradengine.jax.clipping import clip_by_global_norm
from gradengine.jax.multi_steps import MultiStepsState, multi_steps
from gradengine.jax.tree import GradientTree

__all__ = ["GradientTree", "MultiStepsState", "clip_by_global_norm", "multi_steps"]
