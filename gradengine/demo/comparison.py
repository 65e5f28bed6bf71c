"""Shards against the model in one piece on one micro-batch, each part of the step by itself.

AdamW's first step has one length whatever the gradient's, so the weights after it do not tell a wrong clip scale; a
step of plain gradient descent does, and so do the gradients that the engine hands back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from gradengine.demo.model import initial_weights
from gradengine.demo.record import Compared, Heartbeat
from gradengine.demo.shards import TensorParallelRank, run_threads, tensor_parallel_group, united
from gradengine.demo.worker import Learner, result_of, trainer_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from gradengine.demo.model import Array
    from gradengine.demo.record import Report, Weights
    from gradengine.demo.settings import Settings, Texts

__all__ = ["compare", "distance", "report_comparison"]

_CLIPPED_TO = 0.01
"""Of its norm: every gradient is clipped, and by far. What is nothing but rounding is then below AdamW's epsilon too,
which would otherwise make whole steps of it."""

_DESCENT_RATE = 1 / _CLIPPED_TO  # the step is as long as the gradient was: far above the rounding of the weights

_LEAST_MEASURE = 1e-2
"""Of the largest gradient, what a component is measured by at least: w_q and w_k of one-byte sequences hold nothing but
rounding of what the others hold, and would be wrong by themselves in a model that is right."""


def report_comparison(settings: Settings, texts: Texts, report: Callable[[Report], None]) -> None:
    """Compare, and report how far they are apart."""
    report(compare(settings, texts, report))


def compare(settings: Settings, texts: Texts, report: Callable[[Report], None] = lambda _: None) -> Compared:
    """One forward, backward and optimizer step on the first micro-batch, by the shards and by the whole model.

    The gradient is clipped to a hundredth of its norm, whatever the run's bound; `report` is told that work goes on.
    """
    go_on = partial(report, Heartbeat())
    in_one_piece = replace(settings, tensor_parallel=1)
    max_norm = _CLIPPED_TO * _norm(Learner(in_one_piece, texts).forward_backward(0)[1].values())
    go_on()
    shards = _first_steps(replace(settings, max_norm=max_norm), texts, go_on)
    (whole,) = _first_steps(replace(in_one_piece, max_norm=max_norm), texts, go_on)
    return _compared(settings, shards, whole)


@dataclass(frozen=True)
class _FirstStep:
    """What a shard makes of the first micro-batch: `clipped` is what the engine hands back."""

    logits: Array
    gradients: Weights
    norm: float
    scale: float
    clipped: Weights
    descended: Weights
    weights: Weights


def _compared(settings: Settings, shards: list[_FirstStep], whole: _FirstStep) -> Compared:
    initial = initial_weights(settings.model, settings.seed)

    def all_shards(part: str) -> Weights:
        return united(settings, [getattr(shard, part) for shard in shards])

    return Compared(
        outputs=_largest([_relative(np.abs(shard.logits - whole.logits), whole.logits) for shard in shards]),
        gradients=_apart(all_shards("gradients"), whole.gradients),
        norm=_largest([abs(shard.norm / whole.norm - 1.0) for shard in shards]),
        scale=_largest([abs(shard.scale / whole.scale - 1.0) for shard in shards]),
        clipped=_apart(all_shards("clipped"), whole.clipped),
        descended=distance(all_shards("descended"), whole.descended, initial),
        weights=distance(all_shards("weights"), whole.weights, initial),
    )


def _first_steps(settings: Settings, texts: Texts, go_on: Callable[[], None]) -> list[_FirstStep]:
    group = tensor_parallel_group(settings.tensor_parallel)
    return run_threads([partial(_first_step, settings, texts, go_on, tp) for tp in group])


def _first_step(settings: Settings, texts: Texts, go_on: Callable[[], None], tp: TensorParallelRank) -> _FirstStep:
    with tp:
        learner = Learner(settings, texts, tp)
        initial = _copied(learner.weights)
        logits, (_, gradients) = learner.logits(0), learner.forward_backward(0)
        go_on()
        trainer = trainer_of(learner, settings, None, tp)
        trainer.train_batch([0])
        go_on()
    result = result_of(trainer)
    clipped = _copied(result.gradients)
    descended = {name: weight - _DESCENT_RATE * clipped[name] for name, weight in initial.items()}
    return _FirstStep(logits, gradients, float(result.norm), float(result.scale), clipped, descended, learner.weights)


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


def _apart(gradients: Weights, expected: Weights) -> float:
    """The largest difference of any component, in parts of what measures that component."""
    least = _LEAST_MEASURE * _largest([np.abs(gradient).max() for gradient in expected.values()])
    return _largest(
        [_relative(np.abs(gradients[name] - gradient), gradient, least) for name, gradient in expected.items()]
    )


def _relative(difference: Array, expected: Array, least: float = 0.0) -> float:
    return float(difference.max() / np.maximum(np.abs(expected).max(), least))


def _largest(figures: list[float]) -> float:
    """The largest, or NaN where any is NaN: Python's own `max` passes over it wherever it does not come first."""
    return float(np.max(figures))


def _norm(arrays: Iterable[Array]) -> float:
    return float(np.linalg.norm([np.linalg.norm(np.asarray(array, float)) for array in arrays]))


def _copied(weights: Mapping[str, Array]) -> Weights:
    return {name: weight.copy() for name, weight in weights.items()}
