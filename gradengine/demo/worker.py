"""What each rank of the demo does: its micro-batches through a `DistributedTrainer`, and a word about each step.

A rank is a worker with a whole model. Where that is cut into shards, each shard has a thread, its own exchange with the
same shard of the other workers, and two with the other shards of its worker.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, final

from gradengine.demo.learner import Learner, layout_of, result_of
from gradengine.demo.reports import Evaluated, Finished, Kept, Listening, Report, Stepped
from gradengine.demo.shards import TensorParallelRank, replicated_part, tensor_parallel_group, united
from gradengine.demo.signs_of_life import with_signs_of_life
from gradengine.demo.text import step_indexes
from gradengine.demo.together import together
from gradengine.exchange import Exchange, GradientServer, LocalExchange, connect, local_group
from gradengine.trainer import DistributedTrainer, weights_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gradengine.demo.model import GradientStream
    from gradengine.demo.reports import Weights
    from gradengine.demo.settings import Settings, Texts
    from gradengine.exchange.channel import Address

__all__ = ["train_as_rank_0", "train_as_threads", "train_at"]

# A step takes a twentieth of a second; a worker that is stopped shall not stop the others long.
_PATIENCE_SECONDS = 60.0


def train_as_rank_0(
    settings: Settings, texts: Texts, addresses: Sequence[Address], token: str, report: Callable[[Report], None]
) -> None:
    """Open the doors for the other ranks, one for each shard, say where they are, and train."""
    with ExitStack() as stack:
        servers = [
            stack.enter_context(GradientServer(settings.workers, address, token=token, timeout=_PATIENCE_SECONDS))
            for address in addresses
        ]
        report(Listening(tuple(server.url for server in servers)))
        exchanges = [LocalExchange(server.group, 0, on_close=server.close) for server in servers]
        _train_all(settings, texts, [exchanges], report)


def train_at(
    settings: Settings, texts: Texts, rank: int, urls: Sequence[str], token: str, report: Callable[[Report], None]
) -> None:
    """Train as a rank that connects to rank 0."""
    exchanges = [connect(url, rank, settings.workers, token=token, timeout=_PATIENCE_SECONDS) for url in urls]
    _train_all(settings, texts, [exchanges], report)


def train_as_threads(settings: Settings, texts: Texts, report: Callable[[Report], None]) -> None:
    """Train all ranks on threads of this process."""
    groups = [local_group(settings.workers, timeout=_PATIENCE_SECONDS) for _ in range(settings.tensor_parallel)]
    _train_all(settings, texts, list(zip(*groups, strict=True)), report)


def _train_all(
    settings: Settings, texts: Texts, workers: Sequence[Sequence[Exchange]], report: Callable[[Report], None]
) -> None:
    """Train the workers of this process, each given as the exchanges of its shards."""
    works = []
    for exchanges in workers:
        group = tensor_parallel_group(settings.tensor_parallel)
        works += [partial(_train, settings, texts, *pair, report) for pair in zip(exchanges, group, strict=True)]
    shards = together(works)
    for number, exchanges in enumerate(workers):
        size = settings.tensor_parallel
        _report_end(settings, exchanges[0].rank, shards[number * size : (number + 1) * size], report)


def _train(
    settings: Settings, texts: Texts, exchange: Exchange, tp: TensorParallelRank, report: Callable[[Report], None]
) -> _Worker:
    """Make all steps as one shard of one rank."""
    with exchange, tp:
        worker = _Worker(settings, texts, exchange, tp, report)
        for step in range(1, settings.steps + 1):
            worker.make_step(step)
    return worker


def _report_end(settings: Settings, rank: int, shards: Sequence[_Worker], report: Callable[[Report], None]) -> None:
    """Unite the shards of a rank and report what all of them hold."""
    if settings.compared_steps <= settings.steps:
        kept = united(settings, [shard.kept for shard in shards])
        report(Kept(rank, weights_digest(kept), kept if rank == 0 else None))
    weights = [shard.learner.weights for shard in shards]
    replicated = tuple(weights_digest(replicated_part(settings, part)) for part in weights)
    report(Finished(rank, weights_digest(united(settings, weights)), replicated))


@final
class _Worker:
    """A rank's shard at work; as a `LocalTrainer` it is its learner with a stopwatch."""

    def __init__(
        self,
        settings: Settings,
        texts: Texts,
        exchange: Exchange,
        tp: TensorParallelRank,
        report: Callable[[Report], None],
    ) -> None:
        self._settings, self._report, self._tp_rank = settings, report, tp.tp_rank
        self._backward_over = self._exchange_seconds = 0.0
        self.learner = Learner(settings, texts, tp)
        self.kept: Weights = {}
        self._trainer = DistributedTrainer(
            self,
            exchange,
            layout_of(settings, tp.tp_rank),
            max_norm=settings.max_norm,
            micro_batches=settings.micro_batches,
            tp_exchange=tp.gradients,
        )

    def make_step(self, step: int) -> None:
        """One optimizer step, counted from 1, and what there is to say about it."""
        trainer = self._trainer
        shard = step_indexes(step - 1, self._settings.micro_batches_in_all, trainer.rank, trainer.world_size)
        loss = trainer.train_batch(with_signs_of_life(shard, self._say))
        self._say(Stepped(trainer.rank, step, loss, result_of(trainer).norm, self._exchange_seconds))
        if step == self._settings.compared_steps:
            self.kept = {name: weight.copy() for name, weight in self.learner.weights.items()}
        if trainer.is_coordinator and self._settings.is_evaluated(step):
            self._say(Evaluated(step, self.learner.held_out_loss()))

    def forward_backward(self, index: int) -> tuple[float, Weights]:
        """See `LocalTrainer`."""
        return self.learner.forward_backward(index)

    def stream_backward(self, index: int) -> tuple[float, GradientStream]:
        """See `LocalTrainer`: a step's last micro-batch, whose blocks leave while backward still runs."""
        loss, stream = self.learner.stream_backward(index)
        return loss, self._until_over(stream)

    def apply_gradients(self, gradients: Mapping[str, object]) -> None:
        """See `LocalTrainer`."""
        self._exchange_seconds = time.perf_counter() - self._backward_over
        self.learner.apply_gradients(gradients)

    def _until_over(self, stream: GradientStream) -> GradientStream:
        yield from stream
        self._backward_over = time.perf_counter()

    def _say(self, report: Report) -> None:
        """All shards of a rank know the same; the first one says it."""
        if self._tp_rank == 0:
            self._report(report)
