"""What each rank of the demo does: its micro-batches through a `DistributedTrainer`, and a word about each step."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, final

from gradengine.demo.learner import Learner, layout_of
from gradengine.demo.reports import Evaluated, Finished, Kept, Listening, Report, Stepped
from gradengine.demo.text import step_indexes
from gradengine.exchange import Exchange, GradientServer, LocalExchange, connect, local_group
from gradengine.trainer import DistributedTrainer, weights_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gradengine.demo.model import GradientStream
    from gradengine.demo.reports import Weights
    from gradengine.demo.settings import Settings, Texts
    from gradengine.exchange.channel import Address

__all__ = ["train_as_rank_0", "train_as_threads", "train_at"]

_PATIENCE_SECONDS = (
    60.0  # a step takes a twentieth of a second; a worker that is stopped shall not stop the others long
)


def train_as_rank_0(
    settings: Settings, texts: Texts, address: Address, token: str, report: Callable[[Report], None]
) -> None:
    """Open the door for the other ranks, say where it is, and train."""
    server = GradientServer(settings.workers, address, token=token, timeout=_PATIENCE_SECONDS)
    report(Listening(server.url))
    train(settings, texts, LocalExchange(server.group, 0, on_close=server.close), report)


def train_at(
    settings: Settings, texts: Texts, rank: int, url: str, token: str, report: Callable[[Report], None]
) -> None:
    """Train as a rank that connects to rank 0."""
    train(settings, texts, connect(url, rank, settings.workers, token=token, timeout=_PATIENCE_SECONDS), report)


def train_as_threads(settings: Settings, texts: Texts, report: Callable[[Report], None]) -> None:
    """Train all ranks on threads of this process."""
    with ThreadPoolExecutor(settings.workers) as pool:
        list(
            pool.map(
                partial(train, settings, texts, report=report), local_group(settings.workers, timeout=_PATIENCE_SECONDS)
            )
        )


def train(settings: Settings, texts: Texts, exchange: Exchange, report: Callable[[Report], None]) -> None:
    """Make all steps as one rank."""
    with exchange:
        worker = _Worker(settings, texts, exchange, report)
        for step in range(1, settings.steps + 1):
            worker.make_step(step)
        report(Finished(exchange.rank, weights_digest(worker.learner.weights)))


@final
class _Worker:
    """A rank at work; as a `LocalTrainer` it is its learner with a stopwatch."""

    def __init__(self, settings: Settings, texts: Texts, exchange: Exchange, report: Callable[[Report], None]) -> None:
        self._settings, self._report = settings, report
        self._backward_over = self._exchange_seconds = 0.0
        self.learner = Learner(settings, texts)
        self._trainer = DistributedTrainer(
            self, exchange, layout_of(settings), max_norm=settings.max_norm, micro_batches=settings.micro_batches
        )

    def make_step(self, step: int) -> None:
        """One optimizer step, counted from 1, and what there is to say about it."""
        trainer = self._trainer
        shard = step_indexes(step - 1, self._settings.micro_batches_in_all, trainer.rank, trainer.world_size)
        loss = trainer.train_batch(shard)
        norm = trainer.last_result.norm if trainer.last_result else 0.0
        self._report(Stepped(trainer.rank, step, loss, norm, self._exchange_seconds))
        self._report_weights(step)

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

    def _report_weights(self, step: int) -> None:
        rank, weights = self._trainer.rank, self.learner.weights
        if step == self._settings.compared_steps:
            self._report(Kept(rank, weights_digest(weights), weights if rank == 0 else None))
        if rank == 0 and self._settings.is_evaluated(step):
            self._report(Evaluated(step, self.learner.held_out_loss()))
