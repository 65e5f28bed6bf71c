"""Interface to JAX, with gradients as pytrees, an engine inside an optax optimizer, and clipping.

Only this package imports JAX, and no other package imports it. Import it with `from gradengine.jax import ...`. The
engine accepts JAX arrays without it. Only `multi_steps` imports optax. Call an engine outside of `jax.jit`.
"""

from gradengine.jax.clipping import clip_by_global_norm
from gradengine.jax.multi_steps import MultiStepsState, multi_steps
from gradengine.jax.tree import GradientTree

__all__ = ["GradientTree", "MultiStepsState", "clip_by_global_norm", "multi_steps"]
