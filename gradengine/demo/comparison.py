"""Contract C-TP-001 on one micro-batch: what all shards say together, held against the model in one piece."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from gradengine.demo.learner import Learner, layout_of
from gradengine.demo.model import initial_weights
from gradengine.demo.proofs import distance
from gradengine.demo.reports import Compared
from gradengine.demo.shards import TensorParallelRank, tensor_parallel_group, united
from gradengine.demo.together import together
from gradengine.trainer import DistributedTrainer

if TYPE_CHECKING:
    from collections.abc import Callable

    from gradengine.demo.model import Array
    from gradengine.demo.reports import Report, Weights
    from gradengine.demo.settings import Settings, Texts

__all__ = ["compare", "report_comparison"]


def report_comparison(settings: Settings, texts: Texts, report: Callable[[Report], None]) -> None:
    """Compare, and report how far they are apart."""
    report(compare(settings, texts))


def compare(settings: Settings, texts: Texts) -> Compared:
    """One forward, backward and optimizer step on the first micro-batch, by the shards and by the whole model."""
    shards = _first_steps(settings, texts)
    (whole,) = _first_steps(replace(settings, tensor_parallel=1), texts)
    gradients = united(settings, [shard.gradients for shard in shards])
    weights = united(settings, [shard.weights for shard in shards])
    return Compared(
        outputs=max(_apart(shard.logits, whole.logits) for shard in shards),
        gradients=max(_apart(gradients[name], whole.gradients[name]) for name in gradients),
        norm=max(abs(shard.norm / whole.norm - 1.0) for shard in shards),
        weights=distance(weights, whole.weights, initial_weights(settings.model, settings.seed)),
    )


@dataclass(frozen=True)
class _FirstStep:
    logits: Array
    gradients: Weights
    norm: float
    weights: Weights


def _first_steps(settings: Settings, texts: Texts) -> list[_FirstStep]:
    """Of each shard."""
    return together(
        [partial(_first_step, settings, texts, tp) for tp in tensor_parallel_group(settings.tensor_parallel)]
    )


def _first_step(settings: Settings, texts: Texts, tp: TensorParallelRank) -> _FirstStep:
    with tp:
        learner = Learner(settings, texts, tp)
        logits, (_, gradients) = learner.logits(0), learner.forward_backward(0)
        layout = layout_of(settings, tp.tp_rank)
        trainer = DistributedTrainer(learner, None, layout, max_norm=settings.max_norm, tp_exchange=tp.gradients)
        trainer.train_batch([0])
    norm = trainer.last_result.norm if trainer.last_result else 0.0
    return _FirstStep(logits, gradients, norm, learner.weights)


def _apart(array: Array, expected: Array) -> float:
    return float(np.abs(array - expected).max() / np.abs(expected).max())
