"""AdamW (Loshchilov & Hutter, 2019, "Decoupled Weight Decay Regularization") in array code, in place.

Elementwise throughout, so equal weights and gradients give equal weights on every worker, bit for bit.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gradengine.demo.model import Array

__all__ = ["AdamW", "warmup_cosine"]


class AdamW:
    """The optimizer, with all its memory allocated here: two moments per weight, two scratch buffers for the largest.

    Step t does, for each weight w with gradient g and rate r = learning_rate * schedule(t - 1):

        m = b1 m + (1 - b1) g                      v = b2 v + (1 - b2) g^2
        w = w - r weight_decay w                   matrices only: norms have no reason to be small
        w = w - r m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + epsilon)

    The schedule is the factor on the rate by step number from 0; constant 1 if None.

    Example:
        >>> weights = {"w": np.ones((1, 2), np.float32)}
        >>> AdamW(weights, learning_rate=0.5, weight_decay=0.0).step({"w": np.array([[3.0, -3.0]], np.float32)})
        >>> weights["w"]
        array([[0.5, 1.5]], dtype=float32)
    """

    def __init__(
        self,
        weights: Mapping[str, Array],
        learning_rate: float = 6e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        epsilon: float = 1e-8,
        weight_decay: float = 0.1,
        schedule: Callable[[int], float] | None = None,
    ) -> None:
        self.learning_rate, self.betas, self.epsilon = learning_rate, betas, epsilon
        self.weight_decay, self.schedule = weight_decay, schedule
        self.step_count = 0
        self._weights = dict(weights)
        self._first = {name: np.zeros_like(weight) for name, weight in weights.items()}
        self._second = {name: np.zeros_like(weight) for name, weight in weights.items()}
        self._scratch = self._views_of_largest(), self._views_of_largest()

    def _views_of_largest(self) -> dict[str, Array]:
        """One buffer as large as the largest weight of each dtype, seen in the shape of every weight."""
        sizes: dict[str, int] = {}
        for weight in self._weights.values():
            sizes[weight.dtype.str] = max(weight.size, sizes.get(weight.dtype.str, 0))
        buffers = {dtype: np.empty(size, dtype) for dtype, size in sizes.items()}
        return {
            name: buffers[weight.dtype.str][: weight.size].reshape(weight.shape)
            for name, weight in self._weights.items()
        }

    def step(self, gradients: Mapping[str, Array]) -> None:
        """Update all weights in place from their gradients, which are only read."""
        factor = 1.0 if self.schedule is None else self.schedule(self.step_count)
        self.step_count += 1
        for name, weight in self._weights.items():
            self._update(name, weight, gradients[name], self.learning_rate * factor)

    def _update(self, name: str, weight: Array, gradient: Array, rate: float) -> None:
        beta1, beta2 = self.betas
        first, second, update, root = (held[name] for held in (self._first, self._second, *self._scratch))
        _blend(first, gradient, beta1, update)
        np.multiply(gradient, gradient, out=root)
        _blend(second, root, beta2, update)
        # r m / c1 / (sqrt(v / c2) + e) is m (r sqrt(c2) / c1) / (sqrt(v) + e sqrt(c2)): corrections cost no pass.
        root_correction = math.sqrt(1.0 - beta2**self.step_count)
        np.sqrt(second, out=root)
        root += self.epsilon * root_correction
        np.multiply(first, rate * root_correction / (1.0 - beta1**self.step_count), out=update)
        update /= root
        if weight.ndim > 1:
            weight *= 1.0 - rate * self.weight_decay
        weight -= update


def _blend(moment: Array, value: Array, beta: float, scratch: Array) -> None:
    """Moment = beta moment + (1 - beta) value, in place."""
    np.multiply(value, 1.0 - beta, out=scratch)
    moment *= beta
    moment += scratch


def warmup_cosine(step: int, warmup_steps: int, total_steps: int, final: float = 0.1) -> float:
    """Return the factor on the rate: up in a line over the first `warmup_steps`, then down a half cosine to `final`.

    Steps count from 0; the factor is 1 at step `warmup_steps - 1`, and `final` from step `total_steps` on.

    Example:
        >>> [round(warmup_cosine(step, 2, 6), 2) for step in range(7)]
        [0.5, 1.0, 1.0, 0.87, 0.55, 0.23, 0.1]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress))
