"""The first steps of a run once more, by another path: what the workers' weights are compared with.

Workers stream blocks into the exchange while backward runs; here micro-batches are added whole, in one process. With
one rank it takes them all, in order; with as many ranks as the run had workers, each is a thread for each of its shards
with its share, and every addition is the workers' own.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from gradengine.demo.learner import Learner, layout_of
from gradengine.demo.model import initial_weights
from gradengine.demo.reports import Replayed
from gradengine.demo.shards import TensorParallelRank, mirrored, tensor_parallel_group, united
from gradengine.demo.signs_of_life import with_signs_of_life
from gradengine.demo.text import step_indexes
from gradengine.demo.together import together
from gradengine.exchange import Exchange, local_group
from gradengine.trainer import DistributedTrainer

if TYPE_CHECKING:
    from collections.abc import Callable

    from gradengine.demo.reports import Report, Weights
    from gradengine.demo.settings import Settings, Texts

__all__ = ["replay", "report_replay"]


def report_replay(
    name: str,
    settings: Settings,
    texts: Texts,
    ranks: int,
    *,
    backwards: bool = False,
    mirror: bool = False,
    report: Callable[[Report], None],
) -> None:
    """Replay, and report the weights under a name."""
    report(Replayed(name, replay(settings, texts, ranks, backwards=backwards, mirror=mirror, report=report)))


def replay(
    settings: Settings,
    texts: Texts,
    ranks: int,
    *,
    backwards: bool = False,
    mirror: bool = False,
    report: Callable[[Report], None] | None = None,
) -> Weights:
    """The weights after the run's first `compared_steps` steps, with all its micro-batches on `ranks` workers.

    Args:
        settings: Those of the run; with `tensor_parallel` 1 the model stays in one piece.
        texts: Those of the run.
        ranks: 1 to add all micro-batches in order; the run's `workers` to add as they did.
        backwards: Each rank takes its micro-batches of a step in reverse order.
        mirror: The model adds up its heads and intermediate columns in reverse order.
        report: Is told now and then that the work goes on.
    """
    model = settings.model
    initial = initial_weights(model, settings.seed)
    if mirror:
        initial = mirrored(initial, model)
    groups = [local_group(ranks) for _ in range(settings.tensor_parallel)]
    works = [
        partial(_replay_shard, settings, texts, backwards, initial, exchange, tp, report or _say_nothing)
        for exchanges in zip(*groups, strict=True)
        for exchange, tp in zip(exchanges, tensor_parallel_group(settings.tensor_parallel), strict=True)
    ]
    weights = united(settings, together(works)[: settings.tensor_parallel])
    return mirrored(weights, model) if mirror else weights


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
        layout = layout_of(settings, tp.tp_rank)
        trainer = DistributedTrainer(learner, exchange, layout, max_norm=settings.max_norm, tp_exchange=tp.gradients)
        for step in with_signs_of_life(range(settings.compared_steps), report):
            share = step_indexes(step, settings.micro_batches_in_all, exchange.rank, exchange.world_size)
            trainer.train_batch(with_signs_of_life(reversed(share) if backwards else share, report))
    return learner.weights


def _say_nothing(report: Report) -> None:
    """Nobody waits."""
