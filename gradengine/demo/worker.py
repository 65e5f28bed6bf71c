"""What each rank of the demo does: a model with its optimizer, made distributed by a `DistributedTrainer`.

`replay` makes a run's first steps by another path: whole micro-batches, added in one process, where workers stream
blocks into the exchange while backward runs.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, TypeVar, final

import numpy as np

from gradengine.demo.adamw import AdamW, warmup_cosine
from gradengine.demo.model import GradientStream, forward, forward_backward, initial_weights, loss, stream_gradients
from gradengine.demo.record import Evaluated, Finished, Heartbeat, Listening, Replayed, Report, Stepped
from gradengine.demo.shards import (
    WHOLE,
    TensorParallelRank,
    cut,
    mirrored,
    replicated_part,
    run_threads,
    tensor_parallel_group,
    united,
)  # fmt: skip
from gradengine.demo.text import evaluation_batches, micro_batch, step_indexes
from gradengine.errors import WindowError
from gradengine.exchange import Exchange, GradientServer, LocalExchange, connect, local_group
from gradengine.layout import GradientLayout
from gradengine.trainer import DistributedTrainer, weights_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from gradengine.demo.model import Array
    from gradengine.demo.record import Weights
    from gradengine.demo.settings import Settings, Texts
    from gradengine.exchange.channel import Address
    from gradengine.result import StepResult

__all__ = [
    "Learner", "layout_of", "replay", "report_replay", "result_of", "train_as_rank_0", "train_as_threads", "train_at",
    "trainer_of", "with_heartbeat",
]  # fmt: skip

T = TypeVar("T")

_TIMEOUT_SECONDS = 60.0  # a step takes a twentieth of a second; a worker that is stopped shall not stop the others long
_HEARTBEAT_SECONDS = 1.0  # steps of the demo's own model are shorter, and add nothing to what is reported of them
_EVALUATION_BATCHES = 24


def layout_of(settings: Settings, tp_rank: int = 0) -> GradientLayout:
    """The layout of a shard's gradients, in the order in which its backward finishes them."""
    model = settings.model
    sizes = (model.hidden_size, model.kv_hidden_size, model.intermediate_size, model.vocab_size)
    return GradientLayout.transformer(model.num_blocks, *sizes, tensor_parallel=settings.shard(tp_rank))


def result_of(trainer: DistributedTrainer) -> StepResult:
    """What the trainer's last step handed back; WindowError if it has made none."""
    if trainer.last_result is None:
        raise WindowError("the trainer has no result", got="no step made", expected="at least 1")
    return trainer.last_result


def with_heartbeat(items: Iterable[T], report: Callable[[Report], None]) -> Iterator[T]:
    """The items one by one, and between them a report where a second has passed without one.

    Example:
        >>> list(with_heartbeat([3, 4], print))
        [3, 4]
    """
    last = monotonic()
    for item in items:
        if monotonic() - last >= _HEARTBEAT_SECONDS:
            report(Heartbeat())
            last = monotonic()
        yield item


def _say_nothing(report: Report) -> None:
    """Nobody listens."""


@final
class Learner:
    """The weights of a shard, and what moves them; a `LocalTrainer` whose micro-batches are their global indexes.

    Equal settings and texts give equal learners, so workers begin alike without a word to each other. The shards of a
    model must do the same at the same time. `initial` is the whole model's, by default drawn from the run's seed.
    """

    def __init__(
        self, settings: Settings, texts: Texts, rank: TensorParallelRank = WHOLE, initial: Weights | None = None
    ) -> None:
        self._settings, self._texts = settings, texts
        whole = initial_weights(settings.model, settings.seed) if initial is None else initial
        self.weights: Weights = cut(settings, whole, rank.tp_rank)
        self._all_reduce = rank.all_reduce(settings.activation_size)
        schedule = partial(warmup_cosine, warmup_steps=settings.steps // 20, total_steps=settings.steps)
        self._optimizer = AdamW(self.weights, settings.learning_rate, schedule=schedule)
        self._backward_over = self.exchange_seconds = 0.0

    def stream_backward(self, index: int) -> tuple[float, GradientStream]:
        """The loss of micro-batch `index`, a step's last, and its gradients as backward finishes them."""
        tokens, model = self._micro_batch(index), self._settings.model
        value, stream = stream_gradients(self.weights, tokens, model, all_reduce=self._all_reduce)
        return float(value), self._timed(stream)

    def _timed(self, stream: GradientStream) -> GradientStream:
        yield from stream
        self._backward_over = time.perf_counter()

    def forward_backward(self, index: int) -> tuple[float, Weights]:
        """The loss of micro-batch `index`, and all its gradients."""
        return forward_backward(
            self.weights, self._micro_batch(index), self._settings.model, all_reduce=self._all_reduce
        )

    def logits(self, index: int) -> Array:
        """What the model says to micro-batch `index`: (B, T, V)."""
        tokens, model = self._micro_batch(index), self._settings.model
        return forward(self.weights, tokens[:, :-1], model, all_reduce=self._all_reduce)[0]

    def apply_gradients(self, gradients: Mapping[str, object]) -> None:
        """One step of the optimizer; what passed since the end of `stream_backward` was the exchange and the clip."""
        self.exchange_seconds = time.perf_counter() - self._backward_over
        self._optimizer.step(gradients)

    def held_out_loss(self) -> float:
        """Mean cross-entropy of the held-out text in nats per byte, on the same windows every time."""
        settings, model = self._settings, self._settings.model
        batches = evaluation_batches(
            self._texts.held_out, settings.batch_size, model.sequence_length, _EVALUATION_BATCHES
        )
        return float(np.mean([loss(self.weights, batch, model, all_reduce=self._all_reduce) for batch in batches]))

    def _micro_batch(self, index: int) -> npt.NDArray[np.uint8]:
        settings = self._settings
        return micro_batch(self._texts.train, index, settings.batch_size, settings.model.sequence_length, settings.seed)


def train_as_rank_0(
    settings: Settings, texts: Texts, addresses: Sequence[Address], token: str, report: Callable[[Report], None]
) -> None:
    """Listen for the other ranks, at one address for each shard, say where, and train."""
    with ExitStack() as stack:
        servers = [
            stack.enter_context(GradientServer(settings.workers, address, token=token, timeout=_TIMEOUT_SECONDS))
            for address in addresses
        ]
        report(Listening(tuple(server.url for server in servers)))
        exchanges = [LocalExchange(server.group, 0, on_close=server.close) for server in servers]
        _train_all(settings, texts, [exchanges], report)


def train_at(
    settings: Settings, texts: Texts, rank: int, urls: Sequence[str], token: str, report: Callable[[Report], None]
) -> None:
    """Train as a rank that connects to rank 0."""
    exchanges = [connect(url, rank, settings.workers, token=token, timeout=_TIMEOUT_SECONDS) for url in urls]
    _train_all(settings, texts, [exchanges], report)


def train_as_threads(settings: Settings, texts: Texts, report: Callable[[Report], None]) -> None:
    """Train all ranks on threads of this process."""
    groups = [local_group(settings.workers, timeout=_TIMEOUT_SECONDS) for _ in range(settings.tensor_parallel)]
    _train_all(settings, texts, list(zip(*groups, strict=True)), report)


def _train_all(
    settings: Settings, texts: Texts, workers: Sequence[Sequence[Exchange]], report: Callable[[Report], None]
) -> None:
    """Train the workers of this process, each given as the exchanges of its shards."""
    works = []
    for exchanges in workers:
        group = tensor_parallel_group(settings.tensor_parallel)
        works += [partial(_train, settings, texts, *pair, report) for pair in zip(exchanges, group, strict=True)]
    shards = run_threads(works)
    for number, exchanges in enumerate(workers):
        size = settings.tensor_parallel
        _report_end(settings, exchanges[0].rank, shards[number * size : (number + 1) * size], report)


def _train(
    settings: Settings, texts: Texts, exchange: Exchange, tp: TensorParallelRank, report: Callable[[Report], None]
) -> tuple[Weights, Weights]:
    """Make all steps as one shard of one rank; return its weights at the end, and after the compared steps."""
    say = report if tp.tp_rank == 0 else _say_nothing  # all shards of a rank know the same
    kept: Weights = {}
    with exchange, tp:
        learner = Learner(settings, texts, tp)
        trainer = trainer_of(learner, settings, exchange, tp, settings.micro_batches)
        for step in range(1, settings.steps + 1):
            _make_step(settings, learner, trainer, step, say)
            if step == settings.compared_steps:
                kept = {name: weight.copy() for name, weight in learner.weights.items()}
    return learner.weights, kept


def _make_step(
    settings: Settings, learner: Learner, trainer: DistributedTrainer, step: int, say: Callable[[Report], None]
) -> None:
    """One optimizer step, counted from 1, and its reports."""
    share = step_indexes(step - 1, settings.micro_batches_in_all, trainer.rank, trainer.world_size)
    loss = trainer.train_batch(with_heartbeat(share, say))
    say(Stepped(trainer.rank, step, loss, result_of(trainer).norm, learner.exchange_seconds))
    if trainer.is_coordinator and settings.is_evaluated(step):
        say(Evaluated(step, learner.held_out_loss()))


def _report_end(
    settings: Settings, rank: int, shards: Sequence[tuple[Weights, Weights]], report: Callable[[Report], None]
) -> None:
    """Unite the shards of a rank and report what all of them hold."""
    weights, kept = zip(*shards, strict=True)
    replicated = tuple(weights_digest(replicated_part(settings, part)) for part in weights)
    compared = united(settings, kept) if settings.compared_steps <= settings.steps else None
    report(
        Finished(
            rank,
            weights_digest(united(settings, weights)),
            replicated,
            None if compared is None else weights_digest(compared),
            compared if rank == 0 else None,
        )
    )


def trainer_of(
    learner: Learner,
    settings: Settings,
    exchange: Exchange | None,
    tp: TensorParallelRank,
    micro_batches: int | None = None,
) -> DistributedTrainer:
    """The trainer of a shard of a rank; the last of a known number of micro-batches is streamed."""
    layout, max_norm = layout_of(settings, tp.tp_rank), settings.max_norm
    return DistributedTrainer(
        learner, exchange, layout, max_norm=max_norm, micro_batches=micro_batches, tp_exchange=tp.gradients
    )


def report_replay(name: str, run: Callable[..., Weights], report: Callable[[Report], None]) -> None:
    """Run a `replay`, all of whose arguments but `report` are given, and report the weights under a name."""
    report(Replayed(name, run(report=report)))


def replay(
    settings: Settings,
    texts: Texts,
    ranks: int,
    *,
    backwards: bool = False,
    staging: bool = False,
    report: Callable[[Report], None] = _say_nothing,
) -> Weights:
    """The weights after the run's first `compared_steps` steps, with all its micro-batches on `ranks` threads.

    One rank adds all micro-batches in order, the run's `workers` add as they did. Ranks that go `backwards` take their
    micro-batches of a step in reverse order; a model with a `staging` adds up its heads and columns so.
    """
    model = settings.model
    initial = initial_weights(model, settings.seed)
    if staging:
        initial = mirrored(initial, model)
    groups = [local_group(ranks) for _ in range(settings.tensor_parallel)]
    works = [
        partial(_replay_shard, settings, texts, backwards, initial, exchange, tp, report)
        for exchanges in zip(*groups, strict=True)
        for exchange, tp in zip(exchanges, tensor_parallel_group(settings.tensor_parallel), strict=True)
    ]
    weights = united(settings, run_threads(works)[: settings.tensor_parallel])
    return mirrored(weights, model) if staging else weights


def _replay_shard(
    settings: Settings,
    texts: Texts,
    backwards: bool,
    initial: Weights,
    exchange: Exchange,
    tp: TensorParallelRank,
    report: Callable[[Report], None],
) -> Weights:
    with exchange, tp:
        learner = Learner(settings, texts, tp, initial)
        trainer = trainer_of(learner, settings, exchange, tp)
        for step in with_heartbeat(range(settings.compared_steps), report):
            share = step_indexes(step, settings.micro_batches_in_all, exchange.rank, exchange.world_size)
            trainer.train_batch(with_heartbeat(reversed(share) if backwards else share, report))
    return learner.weights
