"""AdamW (Loshchilov & Hutter, 2019, "Decoupled Weight Decay Regularization") in NumPy.

Elementwise throughout, so equal weights and gradients give equal weights on every worker, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from gradengine.demo.model import Array


class AdamW:
    """The optimizer.

    Step t does, for each weight w with gradient g and rate r:

        m = b1 m + (1 - b1) g                      v = b2 v + (1 - b2) g^2
        w = w - r weight_decay w                   (matrices only, since weights of norms need not be small)
        w = w - r m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + epsilon)

    Example:
        >>> weights = {"w": np.ones((1, 2), np.float32)}
        >>> AdamW(weights, weight_decay=0.0).step({"w": np.array([[3.0, -3.0]], np.float32)}, rate=0.5)
        >>> weights["w"]
        array([[0.5, 1.5]], dtype=float32)
    """

    def __init__(
        self,
        weights: Mapping[str, Array],
        betas: tuple[float, float] = (0.9, 0.95),
        epsilon: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        self.betas, self.epsilon, self.weight_decay, self.step_count = betas, epsilon, weight_decay, 0
        self._weights = dict(weights)
        self._moments = {name: (np.zeros_like(weight), np.zeros_like(weight)) for name, weight in weights.items()}

    def step(self, gradients: Mapping[str, Array], rate: float) -> None:
        """Update all weights in place from their gradients. The gradients do not change."""
        self.step_count += 1
        beta1, beta2 = self.betas
        # Corrections need no pass, since r m / c1 / (sqrt(v / c2) + e) = m (r sqrt(c2) / c1) / (sqrt(v) + e sqrt(c2)).
        root_correction = math.sqrt(1.0 - beta2**self.step_count)
        corrected = rate * root_correction / (1.0 - beta1**self.step_count)
        for name, weight in self._weights.items():
            gradient, (first, second) = gradients[name], self._moments[name]
            first[...] = beta1 * first + (1.0 - beta1) * gradient
            second[...] = beta2 * second + (1.0 - beta2) * (gradient * gradient)
            kept = 1.0 - rate * self.weight_decay if weight.ndim > 1 else 1.0
            weight[...] = kept * weight - corrected * first / (np.sqrt(second) + self.epsilon * root_correction)


def warmup_cosine(step: int, warmup_steps: int, total_steps: int, final: float = 0.1) -> float:
    """Return the factor on the rate, which rises linearly over `warmup_steps`, then falls by a half cosine to `final`.

    Steps count from 0. The factor is 1 at step `warmup_steps - 1`, and `final` from step `total_steps` on.

    Example:
        >>> [round(warmup_cosine(step, 2, 6), 2) for step in range(7)]
        [0.5, 1.0, 1.0, 0.87, 0.55, 0.23, 0.1]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress))
