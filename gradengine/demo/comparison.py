"""Shards against the model in one piece on one micro-batch, each part of the step by itself.

AdamW's first step has one length whatever the gradient's, so the weights after it do not tell a wrong clip scale; the
gradients that the engine hands back do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from gradengine.demo.model import Array, Weights, initial_weights
from gradengine.demo.record import Report
from gradengine.demo.settings import Settings
from gradengine.demo.shards import TensorParallelRank, run_threads, tensor_parallel_group, united
from gradengine.demo.text import Texts
from gradengine.demo.worker import Learner, result_of, trainer_of

__all__ = ["LIMITS", "compare", "distance"]

LIMITS = {"outputs": 1e-5, "gradients": 1e-5, "norm": 1e-6, "clip scale": 1e-6, "clipped": 1e-5, "AdamW step": 1e-2}
"""How far shards may be from the model in one piece. fp32 rounds at 6e-8, sums of hundreds of terms and what a softmax
makes of them at about 1e-6; a missing all-reduce changes a third of the largest element. The norm is summed in fp64,
and the scale is a bound divided by it. AdamW's first step is as long where a gradient is nothing but rounding as where
it is large: it says no more than that no weight was left behind."""

_MAX_NORM = 0.01
"""Every gradient is clipped, and by far. What is nothing but rounding is then below AdamW's epsilon too, which would
otherwise make whole steps of it."""

_LEAST_MEASURE = 1e-2
"""Of the largest gradient, what a component is measured by at least: w_q and w_k of one-byte sequences hold nothing but
rounding of what the others hold, and would be wrong by themselves in a model that is right."""


def compare(settings: Settings, texts: Texts, report: Report) -> None:
    """Make one step on the first micro-batch, by the shards and by the whole model; report how far they are apart.

    Figures are relative, by the names of `LIMITS`; one that is not a number stays so.
    """
    settings = replace(settings, max_norm=_MAX_NORM)
    shards, (whole,) = (_first_steps(each, texts, report) for each in (settings, replace(settings, tensor_parallel=1)))
    initial = initial_weights(settings.model, settings.seed)
    logits = [_relative(shard.logits - whole.logits, whole.logits) for shard in shards]
    figures = {
        "outputs": logits,
        "gradients": _apart(united(settings, [shard.gradients for shard in shards]), whole.gradients),
        "norm": [abs(shard.norm / whole.norm - 1.0) for shard in shards],
        "clip scale": [abs(shard.scale / whole.scale - 1.0) for shard in shards],
        "clipped": _apart(united(settings, [shard.clipped for shard in shards]), whole.clipped),
        "AdamW step": [distance(united(settings, [shard.weights for shard in shards]), whole.weights, initial)],
    }
    # Python's own `max` passes over a NaN wherever it does not come first.
    report(("shards", {name: float(np.max(apart)) for name, apart in figures.items()}))


@dataclass(frozen=True)
class _FirstStep:
    """What a shard makes of the first micro-batch: `clipped` is what the engine hands back."""

    logits: Array
    gradients: Weights
    norm: float
    scale: float
    clipped: Weights
    weights: Weights


def _first_steps(settings: Settings, texts: Texts, report: Report) -> list[_FirstStep]:
    group = tensor_parallel_group(settings.tensor_parallel)
    return run_threads([partial(_first_step, settings, texts, report, tp) for tp in group])


def _first_step(settings: Settings, texts: Texts, report: Report, tp: TensorParallelRank) -> _FirstStep:
    with tp:
        learner = Learner(settings, texts, tp, report)
        logits, (_, gradients) = learner.logits(0), learner.forward_backward(0)
        trainer = trainer_of(learner, settings, None, tp)
        trainer.train_batch([0])
    result = result_of(trainer)
    clipped = {name: gradient.copy() for name, gradient in result.gradients.items()}
    return _FirstStep(logits, gradients, float(result.norm), float(result.scale), clipped, learner.weights)


def distance(weights: Weights, others: Weights, initial: Weights) -> float:
    """How far two sets of weights are apart, in parts of how far `others` have come from `initial` (L2).

    Infinite where these have not moved: there is nothing to measure by, and whoever asks for a limit shall not pass.

    Example:
        >>> start, end = {"w": np.zeros(2, np.float32)}, {"w": np.array([3, 4], np.float32)}
        >>> distance({"w": np.array([3, 4.5], np.float32)}, end, start)
        0.1
    """
    way = _norm(others[name].astype(float) - initial[name] for name in others)
    return _norm(weights[name].astype(float) - others[name] for name in weights) / way if way else math.inf


def _norm(arrays: Iterable[Array]) -> float:
    return float(np.linalg.norm([np.linalg.norm(array) for array in arrays]))


def _apart(gradients: Mapping[str, Array], expected: Mapping[str, Array]) -> list[float]:
    """The largest difference of each component, in parts of what measures it."""
    least = _LEAST_MEASURE * max(float(np.abs(gradient).max()) for gradient in expected.values())
    return [_relative(gradients[name] - gradient, gradient, least) for name, gradient in expected.items()]


def _relative(difference: Array, expected: Array, least: float = 0.0) -> float:
    return float(np.abs(difference).max() / max(np.abs(expected).max(), least))
