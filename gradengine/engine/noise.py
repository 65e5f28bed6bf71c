"""The gradient noise scale of a step, from the squared norms of a small and of a large batch.

The formula is that of McCandlish and others, 2018, "An Empirical Model of Large-Batch Training" (arXiv:1812.06162),
section 2.2 and appendix A.1. The mean gradient g of a batch of size B has E|g|² = |G|² + S / B. G is the true gradient,
and S the trace of the covariance of the gradients of one unit of weight. A unit is a micro-batch or a token, for
example. Batches of two sizes give two equations for S and |G|². The noise scale is S / |G|².
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from gradengine.accumulate.window import FirstFold
from gradengine.reduction.stats import StepStats


class Batch(NamedTuple):
    """A batch's size in units of weight, and the squared norm of its mean gradient."""

    size: float
    square: float


def noise_of(small: Batch, large: Batch) -> tuple[float, float] | None:
    """Return unbiased estimates of S and |G|², of any sign, or None if the sizes are equal or a norm is not finite.

    >>> noise_of(Batch(1, 5.0), Batch(4, 2.0))
    (4.0, 1.0)
    """
    if small.size == large.size:
        return None
    noise = (small.square - large.square) / (1 / small.size - 1 / large.size)
    signal = (large.size * large.square - small.size * small.square) / (large.size - small.size)
    return (noise, signal) if math.isfinite(noise) and math.isfinite(signal) else None


@final
@dataclass(frozen=True, eq=False)
class StepNoise:
    """The values from which the noise of a step is computed on demand.

    Attributes:
        stats: The step's stats, with those of each rank if ranks agreed on the host.
        first: The first fold of this rank's window, if it was measured in passing and is not the whole window.
        average: The engine's `average`.
        workers: The number of ranks.
        loss_scale: The step's loss scale; a dynamic one on a GPU is an array there.
    """

    stats: StepStats
    first: FirstFold | None
    average: str
    workers: int
    loss_scale: Any

    def metrics(self, norm: float, first: float | None) -> dict[str, float]:
        """Return the metrics of each way to estimate the noise that is possible. On a GPU this waits for the step.

        Args:
            norm: The norm that the step reported.
            first: The squared norm of the first fold's sum; None if it is not known.
        """
        found: dict[str, float] = {}
        for way, (small, large) in self._batches(norm, first).items():
            known = noise_of(small, large)
            if known is not None:
                noise, signal = known
                scale = noise / signal if signal else noise * math.inf
                found |= {f"noise/{way}": noise, f"signal/{way}": signal, f"noise_scale/{way}": scale}
        return found

    def _batches(self, norm: float, first: float | None) -> dict[str, tuple[Batch, Batch]]:
        """Return the small and the large batch of each way."""
        stats, is_mean_of_means, scale = self.stats, self.average == "per_worker", float(self.loss_scale)
        ranks, total, small = [one for one in stats.by_rank if one.weight], float(stats.weight), {}
        size = len(ranks) ** 2 / sum(1 / one.weight for one in ranks) if is_mean_of_means and ranks else total
        squares = [one.square / (one.weight * scale) ** 2 for one in ranks if one.square is not None]
        if len(squares) == len(ranks) > 1:
            shares = [1 / len(ranks) if is_mean_of_means else one.weight / total for one in ranks]
            square = sum(share * square for share, square in zip(shares, squares, strict=True))
            small["ranks"] = Batch(size / len(ranks), square)
        # Ranks that sum on their GPUs have no weights of other ranks, so the size of a mean of means is unknown.
        if first is not None and self.first is not None and not (is_mean_of_means and stats.on_device is not None):
            small["micro_batches"] = Batch(self.first.weight, first / (self.first.weight * scale) ** 2)
        if not small:
            return {}
        mean = norm * self.workers / total if self.average == "prescaled" else norm
        return {way: (batch, Batch(size, mean * mean)) for way, batch in small.items()}
