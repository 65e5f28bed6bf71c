"""Tensor parallelism on one micro-batch: what all shards say together, held against the model in one piece.

Every part of the step is compared by itself. AdamW's first step has one length whatever the gradient's, so the weights
after it do not tell a wrong clip scale; a step of plain gradient descent beside it does, and so do the gradients that
the engine hands back.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from gradengine.demo.learner import Learner, layout_of, result_of
from gradengine.demo.model import initial_weights
from gradengine.demo.proofs import distance
from gradengine.demo.reports import Advanced, Compared
from gradengine.demo.shards import TensorParallelRank, tensor_parallel_group, united
from gradengine.demo.together import together
from gradengine.trainer import DistributedTrainer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gradengine.demo.model import Array
    from gradengine.demo.reports import Report, Weights
    from gradengine.demo.settings import Settings, Texts

__all__ = ["compare", "report_comparison"]

_CLIPPED_TO = 0.01
"""Of its norm: every model's gradient is clipped, and by far. What is nothing but rounding is then below AdamW's
epsilon too, which would otherwise make whole steps of it."""

_DESCENT_RATE = 1 / _CLIPPED_TO  # the step is as long as the gradient was: far above the rounding of the weights

_LEAST_MEASURE = 1e-2
"""Of the largest gradient, what a component is measured by at least. Some components hold nothing but rounding of what
the others hold: w_q and w_k where a sequence has one byte, and attention nothing to choose from. Measured by themselves
they would be wrong in a model that is right."""


def report_comparison(settings: Settings, texts: Texts, report: Callable[[Report], None]) -> None:
    """Compare, and report how far they are apart."""
    report(compare(settings, texts, report))


def compare(settings: Settings, texts: Texts, report: Callable[[Report], None] | None = None) -> Compared:
    """One forward, backward and optimizer step on the first micro-batch, by the shards and by the whole model.

    Args:
        settings: Those of the run; but the gradient is clipped to a hundredth of its norm, whatever the run's bound.
        texts: Those of the run.
        report: Is told after each part that the work goes on.
    """
    go_on = partial(report, Advanced()) if report else _say_nothing
    in_one_piece = replace(settings, tensor_parallel=1)
    max_norm = _CLIPPED_TO * _norm(Learner(in_one_piece, texts).forward_backward(0)[1])
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
    return Compared(
        outputs=_largest([_relative(np.abs(shard.logits - whole.logits), whole.logits) for shard in shards]),
        gradients=_apart(united(settings, [shard.gradients for shard in shards]), whole.gradients),
        norm=_largest([abs(shard.norm / whole.norm - 1.0) for shard in shards]),
        scale=_largest([abs(shard.scale / whole.scale - 1.0) for shard in shards]),
        clipped=_apart(united(settings, [shard.clipped for shard in shards]), whole.clipped),
        descended=distance(united(settings, [shard.descended for shard in shards]), whole.descended, initial),
        weights=distance(united(settings, [shard.weights for shard in shards]), whole.weights, initial),
    )


def _first_steps(settings: Settings, texts: Texts, go_on: Callable[[], None]) -> list[_FirstStep]:
    """Of each shard."""
    return together(
        [partial(_first_step, settings, texts, go_on, tp) for tp in tensor_parallel_group(settings.tensor_parallel)]
    )


def _first_step(settings: Settings, texts: Texts, go_on: Callable[[], None], tp: TensorParallelRank) -> _FirstStep:
    with tp:
        learner = Learner(settings, texts, tp)
        initial = _copied(learner.weights)
        logits, (_, gradients) = learner.logits(0), learner.forward_backward(0)
        go_on()
        layout = layout_of(settings, tp.tp_rank)
        trainer = DistributedTrainer(learner, None, layout, max_norm=settings.max_norm, tp_exchange=tp.gradients)
        trainer.train_batch([0])
        go_on()
    result = result_of(trainer)
    clipped = _copied(result.gradients)
    descended = {name: weight - _DESCENT_RATE * clipped[name] for name, weight in initial.items()}
    return _FirstStep(logits, gradients, float(result.norm), float(result.scale), clipped, descended, learner.weights)


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


def _norm(gradients: Weights) -> float:
    return float(np.linalg.norm([np.linalg.norm(gradient.astype(float)) for gradient in gradients.values()]))


def _copied(weights: Mapping[str, Array]) -> Weights:
    return {name: weight.copy() for name, weight in weights.items()}


def _say_nothing() -> None:
    """Nobody waits."""
