"""What each rank of the demo does: a model with its optimizer, made distributed by a `DistributedTrainer`.

A replay makes a run's first steps by another path: whole micro-batches, added in one process, where workers stream
blocks into the exchange while backward runs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import final

import numpy as np

from gradengine.demo.adamw import AdamW, warmup_cosine
from gradengine.demo.model import (
    Array,
    GradientStream,
    Weights,
    forward,
    forward_backward,
    initial_weights,
    loss,
    stream_gradients,
)
from gradengine.demo.record import Finished, Listening, Report, Step
from gradengine.demo.settings import Settings
from gradengine.demo.shards import (
    TensorParallelRank,
    cut,
    replicated_part,
    run_threads,
    tensor_parallel_group,
    united,
)
from gradengine.demo.text import Texts, Tokens, evaluation_batches, micro_batch
from gradengine.errors import WindowError
from gradengine.exchange import Exchange, connect, local_group
from gradengine.layout import GradientLayout
from gradengine.result import StepResult
from gradengine.trainer import DistributedTrainer, weights_digest

__all__ = ["Learner", "layout_of", "replay", "result_of", "train_as_threads", "train_at", "trainer_of"]

_TIMEOUT_SECONDS = 60.0  # a step takes a twentieth of a second; a worker that is stopped shall not stop the others long
_EVALUATION_BATCHES = 24


@final
class Learner:
    """The weights of a shard, and what moves them; a `LocalTrainer` whose micro-batches are their global indexes.

    Equal settings and texts give equal learners, so workers begin alike without a word to each other. The shards of a
    model must do the same at the same time. Each forward is reported as a sign of life.
    """

    def __init__(self, settings: Settings, texts: Texts, tp: TensorParallelRank, report: Report) -> None:
        self._settings, self._texts, self._report = settings, texts, report
        self._model = (settings.model, tp.all_reduce)
        self.weights = cut(settings, _in_order(settings, initial_weights(settings.model, settings.seed)), tp.tp_rank)
        schedule = partial(warmup_cosine, warmup_steps=settings.steps // 20, total_steps=settings.steps)
        self._optimizer = AdamW(self.weights, settings.learning_rate, schedule=schedule)
        self._backward_over = self.exchange_seconds = 0.0

    def stream_backward(self, index: int) -> tuple[float, GradientStream]:
        """The loss of micro-batch `index`, a step's last, and its gradients as backward finishes them."""
        value, stream = stream_gradients(self.weights, self._micro_batch(index), *self._model)
        return value, self._timed(stream)

    def _timed(self, stream: GradientStream) -> GradientStream:
        yield from stream
        self._backward_over = time.perf_counter()

    def forward_backward(self, index: int) -> tuple[float, Weights]:
        """The loss of micro-batch `index`, and all its gradients."""
        return forward_backward(self.weights, self._micro_batch(index), *self._model)

    def logits(self, index: int) -> Array:
        """What the model says to micro-batch `index`: (N, V)."""
        return forward(self.weights, self._micro_batch(index)[:, :-1], *self._model)[0]

    def apply_gradients(self, gradients: Mapping[str, Array]) -> None:
        """One step of the optimizer; what passed since the end of `stream_backward` was the exchange and the clip."""
        self.exchange_seconds = time.perf_counter() - self._backward_over
        self._optimizer.step(gradients)

    def held_out_loss(self) -> float:
        """Mean cross-entropy of the held-out text in nats per byte, on the same windows every time."""
        sizes = (self._settings.batch_size, self._settings.model.sequence_length)
        losses = []
        for batch in evaluation_batches(self._texts.held_out, *sizes, _EVALUATION_BATCHES):
            self._report(None)
            losses.append(loss(self.weights, batch, *self._model))
        return float(np.mean(losses))

    def _micro_batch(self, index: int) -> Tokens:
        self._report(None)
        settings = self._settings
        return micro_batch(self._texts.train, index, settings.batch_size, settings.model.sequence_length, settings.seed)


def _in_order(settings: Settings, weights: Weights) -> Weights:
    """Where a run goes backwards, the same function with intermediate columns in reverse order; twice it is as before.

    Its sums over them are thus rounded in another order: with one micro-batch a step there is no other order to change.
    """
    if not settings.backwards:
        return weights
    flips = {"gate": np.fliplr, "up": np.fliplr, "down": np.flipud}
    return {
        n: np.ascontiguousarray(flips.get(n.rpartition(".")[2], np.asarray)(weight)) for n, weight in weights.items()
    }


def layout_of(settings: Settings, tp_rank: int) -> GradientLayout:
    """The layout of a shard's gradients, in the order in which its backward finishes them."""
    model = settings.model
    sizes = (model.hidden_size, model.num_kv_heads * model.head_size, model.intermediate_size, model.vocab_size)
    return GradientLayout.transformer(model.num_blocks, *sizes, tensor_parallel=settings.shard(tp_rank))


def trainer_of(
    learner: Learner, settings: Settings, exchange: Exchange | None, tp: TensorParallelRank
) -> DistributedTrainer:
    """The trainer of a shard of a rank; but in a replay it streams the last micro-batch of each step."""
    return DistributedTrainer(
        learner,
        exchange,
        layout_of(settings, tp.tp_rank),
        max_norm=settings.max_norm,
        micro_batches=None if settings.is_replay else settings.micro_batches,
        tp_exchange=tp.exchange,
    )


def result_of(trainer: DistributedTrainer) -> StepResult:
    """What the trainer's last step handed back; WindowError if it has made none."""
    if trainer.last_result is None:
        raise WindowError("the trainer has no result", got="no step made", expected="at least 1")
    return trainer.last_result


def train_at(settings: Settings, texts: Texts, rank: int, urls: Sequence[str], token: str, report: Report) -> None:
    """Train as a rank of its own process; rank 0 listens, for each shard at a url, and says where."""
    group = partial(connect, rank=rank, world_size=settings.workers, token=token, timeout=_TIMEOUT_SECONDS)
    with ExitStack() as stack:
        exchanges = [stack.enter_context(group(url)) for url in urls]
        if rank == 0:
            report(Listening(tuple(str(exchange.url) for exchange in exchanges)))
        _train(settings, texts, [exchanges], report)


def train_as_threads(settings: Settings, texts: Texts, report: Report) -> None:
    """Train all ranks on threads of this process."""
    groups = [local_group(settings.workers, timeout=_TIMEOUT_SECONDS) for _ in range(settings.tensor_parallel)]
    _train(settings, texts, list(zip(*groups, strict=True)), report)


def replay(name: str, settings: Settings, texts: Texts, report: Report) -> None:
    """Replay on threads, and report the weights after the compared steps under a name."""

    def say(found: object) -> None:
        report((name, found.compared_weights) if isinstance(found, Finished) and found.rank == 0 else None)

    train_as_threads(settings, texts, say)


def _train(settings: Settings, texts: Texts, workers: Sequence[Sequence[Exchange]], report: Report) -> None:
    """Train the workers of this process, each given as the exchanges of its shards."""
    works = [
        partial(_train_shard, settings, texts, exchange, tp, report)
        for exchanges in workers
        for exchange, tp in zip(exchanges, tensor_parallel_group(settings.tensor_parallel), strict=True)
    ]
    found, size = run_threads(works), settings.tensor_parallel
    for number, exchanges in enumerate(workers):
        report(_finished(settings, exchanges[0].rank, found[number * size : (number + 1) * size]))


def _train_shard(
    settings: Settings, texts: Texts, exchange: Exchange, tp: TensorParallelRank, report: Report
) -> tuple[Weights, Weights]:
    """Make all steps as one shard of one rank; return its weights at the end, and after the compared steps."""
    with exchange, tp:
        learner = Learner(settings, texts, tp, report)
        trainer = trainer_of(learner, settings, exchange, tp)
        for number in range(1, 1 + (settings.compared_steps if settings.is_replay else settings.steps)):
            loss = trainer.train_batch(settings.share(number, exchange.rank))
            if exchange.rank == 0:
                held_out = learner.held_out_loss() if settings.is_evaluated(number) else None
                if tp.tp_rank == 0:
                    report(Step(number, loss, result_of(trainer).norm, learner.exchange_seconds, held_out))
            if number == settings.compared_steps:
                kept = {name: weight.copy() for name, weight in learner.weights.items()}
    return learner.weights, kept


def _finished(settings: Settings, rank: int, shards: Sequence[tuple[Weights, Weights]]) -> Finished:
    """Unite the shards of a rank."""
    weights, kept = zip(*shards, strict=True)
    compared = _in_order(settings, united(settings, kept))
    return Finished(
        rank,
        weights_digest(united(settings, weights)),
        tuple(weights_digest(replicated_part(settings, part)) for part in weights),
        weights_digest(compared),
        compared if rank == 0 else None,
    )
