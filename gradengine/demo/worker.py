"""The work of each rank of the demo, a model with its optimizer, which a `DistributedTrainer` makes distributed.

Workers stream blocks into the exchange while backward runs. A replay repeats a run's first steps in a different way. It
adds whole micro-batches in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, final

import numpy as np

from gradengine.demo.adamw import AdamW, warmup_cosine
from gradengine.demo.model import Array, GradientStream, Weights, forward_backward, initial_weights, stream_gradients
from gradengine.demo.settings import Settings, Transport
from gradengine.demo.shards import TensorParallelRank, cut, run_threads, tensor_parallel_group, united
from gradengine.demo.text import Texts, Tokens, micro_batch
from gradengine.engine.trainer import DistributedTrainer, weights_digest
from gradengine.exchange import Exchange, connect, local_group
from gradengine.layout import GradientLayout

_TIMEOUT_SECONDS = 60.0  # a step takes a twentieth of a second, and a stopped worker stops the others this long
_EVALUATION_BATCHES = 24


@dataclass(frozen=True)
class Listening:
    """Rank 0's report that it listens, with a URL for each shard."""

    urls: tuple[str, ...]


@dataclass(frozen=True)
class Step:
    """The report that all ranks made step `number`, counted from 1."""

    number: int
    loss: float  # mean of all micro-batches
    norm: float  # norm before clipping
    exchange_seconds: float  # seconds that rank 0 waited for the exchange after backward
    held_out: float | None = None  # loss of the held-out text, None if it was not taken


@dataclass(frozen=True)
class Finished:
    """The result of a rank at its end, its shards united."""

    rank: int
    digest: str  # digest of the rank's last weights
    compared: Weights  # rank 0's weights after the compared steps, empty for other ranks


# Called with one of the above, with `(name, result)`, or with None as a sign of life.
Report: TypeAlias = Callable[[Any], None]


@final
class Learner:
    """A shard's weights and optimizer. It is a `LocalTrainer` whose micro-batches are their global indexes.

    Equal settings and texts give equal learners, so workers start equal without any communication. The shards of a
    model must make the same calls in the same order. Each forward reports a sign of life.
    """

    def __init__(self, settings: Settings, texts: Texts, tp: TensorParallelRank, report: Report) -> None:
        self._settings, self._texts, self._report = settings, texts, report
        self._model = (settings.model, tp.all_reduce)
        self.weights = cut(settings, initial_weights(settings.model, settings.seed), tp.tp_rank)
        self._optimizer = AdamW(self.weights)

    def stream_backward(self, index: int) -> tuple[float, GradientStream]:
        """Return the loss of micro-batch `index`, a step's last, and its gradients as backward finishes them."""
        return stream_gradients(self.weights, self._micro_batch(index), *self._model)

    def forward_backward(self, index: int) -> tuple[float, Weights]:
        """Return the loss of micro-batch `index`, and all its gradients."""
        return forward_backward(self.weights, self._micro_batch(index), *self._model)

    def apply_gradients(self, gradients: Mapping[str, Array]) -> None:
        """Make a step of the optimizer."""
        steps = self._settings.steps
        factor = warmup_cosine(self._optimizer.step_count, warmup_steps=steps // 20, total_steps=steps)
        self._optimizer.step(gradients, self._settings.learning_rate * factor)

    def held_out_loss(self) -> float:
        """Return the mean cross-entropy of the held-out text in nats per byte, on the same windows every time."""
        batches = (self._micro_batch(index, self._texts.held_out) for index in range(_EVALUATION_BATCHES))
        return float(np.mean([stream_gradients(self.weights, batch, *self._model)[0] for batch in batches]))

    def _micro_batch(self, index: int, text: bytes | None = None) -> Tokens:
        self._report(None)
        settings = self._settings
        sizes = (settings.batch_size, settings.model.sequence_length)
        return micro_batch(self._texts.train if text is None else text, index, *sizes, settings.seed)


def layout_of(settings: Settings, tp_rank: int) -> GradientLayout:
    """Return the layout of a shard's gradients, in the order in which its backward finishes them."""
    model = settings.model
    sizes = (model.hidden_size, model.num_kv_heads * model.head_size, model.intermediate_size, model.vocab_size)
    return GradientLayout.transformer(
        model.num_blocks, *sizes, tensor_parallel=model.sharded(tp_rank, settings.tensor_parallel)
    )


def train_at(settings: Settings, texts: Texts, rank: int, urls: Sequence[str], secret: str, report: Report) -> None:
    """Train as a rank of separate processes. Rank 0 listens at a URL for each shard, and reports the URLs."""
    group = partial(connect, rank=rank, world_size=settings.workers, secret=secret, timeout=_TIMEOUT_SECONDS)
    with ExitStack() as stack:
        exchanges = [stack.enter_context(group(url)) for url in urls]
        if rank == 0:
            report(Listening(tuple(str(exchange.url) for exchange in exchanges)))
        _train(settings, texts, [exchanges], report)


def train_as_threads(settings: Settings, texts: Texts, report: Report) -> None:
    """Train all ranks on threads of this process."""
    groups = [local_group(settings.workers, timeout=_TIMEOUT_SECONDS) for _ in range(settings.tensor_parallel)]
    _train(settings, texts, list(zip(*groups, strict=True)), report)


def join_launched(transport: Transport) -> Exchange:
    """Return the exchange of this rank with the others that a launcher has started."""
    return connect("mpi://" if transport is Transport.MPI else None, timeout=_TIMEOUT_SECONDS)


def train_launched(settings: Settings, texts: Texts, exchange: Exchange, report: Report) -> None:
    """Train as the exchange's rank, close the exchange, and report every rank's result, of other ranks the digest."""
    (tp,) = tensor_parallel_group(1)
    with exchange:
        end = _finished(settings, exchange.rank, [_make_steps(settings, texts, exchange, tp, report)])
        digests = exchange.all_gather(end.digest.encode())
    for rank, digest in enumerate(digests):
        report(end if rank == end.rank else Finished(rank, digest.decode(), {}))


def replay(name: str, settings: Settings, texts: Texts, report: Report) -> None:
    """Replay on threads, and report under `name` the weights with which rank 0 ended."""

    def note(what: object) -> None:
        report((name, what.compared) if isinstance(what, Finished) and what.rank == 0 else None)

    train_as_threads(settings, texts, note)


def _train(settings: Settings, texts: Texts, workers: Sequence[Sequence[Exchange]], report: Report) -> None:
    """Train the workers of this process, each passed as the exchanges of its shards."""

    def train(exchange: Exchange, tp: TensorParallelRank) -> tuple[Weights, Weights]:
        with exchange, tp:
            return _make_steps(settings, texts, exchange, tp, report)

    works = [
        partial(train, exchange, tp)
        for exchanges in workers
        for exchange, tp in zip(exchanges, tensor_parallel_group(settings.tensor_parallel), strict=True)
    ]
    found, size = run_threads(works), settings.tensor_parallel
    for number, exchanges in enumerate(workers):
        report(_finished(settings, exchanges[0].rank, found[number * size : (number + 1) * size]))


def _make_steps(
    settings: Settings, texts: Texts, exchange: Exchange, tp: TensorParallelRank, report: Report
) -> tuple[Weights, Weights]:
    """Make all steps as one shard of one rank. Return its parts of the last and of the compared weights."""
    learner = Learner(settings, texts, tp, report)
    trainer = DistributedTrainer(
        learner, exchange, layout_of(settings, tp.tp_rank), max_norm=settings.max_norm, tp_exchange=tp.exchange,
        micro_batches=None if settings.is_replay else settings.micro_batches,  # a known number lets the last one stream
    )  # fmt: skip
    for number in range(1, 1 + (settings.compared_steps if settings.is_replay else settings.steps)):
        loss = trainer.train_batch(settings.share(number, exchange.rank))
        if exchange.rank == 0:
            held_out = learner.held_out_loss() if settings.is_evaluated(number) else None
            if tp.tp_rank == 0 and (made := trainer.last_result) is not None:
                told = made.metrics()
                waited = told["exchange_seconds"] - told["exchange_hidden_seconds"]
                report(Step(number, loss, told["grad_norm"], waited, held_out))
        if number == settings.compared_steps:
            compared = {name: weight.copy() for name, weight in learner.weights.items()}
    return learner.weights, compared


def _finished(settings: Settings, rank: int, shards: Sequence[tuple[Weights, Weights]]) -> Finished:
    weights, compared = (united(settings, parts) for parts in zip(*shards, strict=True))
    return Finished(rank, weights_digest(weights), compared if rank == 0 else {})
