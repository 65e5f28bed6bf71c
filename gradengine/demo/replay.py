"""The first steps of a run once more, by another path: what the workers' weights are compared with.

Workers stream blocks into the exchange while backward runs; here micro-batches are added whole, in one process. With
one rank it takes them all, in order; with as many ranks as the run had workers, each is a thread with its shard, and
every addition is the workers' own.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from gradengine.demo.learner import Learner, layout_of
from gradengine.demo.reports import Replayed
from gradengine.demo.text import step_indexes
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
    report: Callable[[Report], None],
) -> None:
    """Replay, and report the weights under a name."""
    report(Replayed(name, replay(settings, texts, ranks, backwards=backwards)))


def replay(settings: Settings, texts: Texts, ranks: int, *, backwards: bool = False) -> Weights:
    """The weights after the run's first `compared_steps` steps, with all its micro-batches on `ranks` threads.

    Args:
        settings: Those of the run.
        texts: Those of the run.
        ranks: 1 to add all micro-batches in order; the run's `workers` to add as they did.
        backwards: Each rank takes its micro-batches of a step in reverse order.
    """
    with ThreadPoolExecutor(ranks) as pool:
        work = partial(_replay_rank, settings, texts, backwards)
        learners = list(pool.map(work, local_group(ranks)))
    return learners[0].weights


def _replay_rank(settings: Settings, texts: Texts, backwards: bool, exchange: Exchange) -> Learner:
    learner = Learner(settings, texts)
    with exchange:
        trainer = DistributedTrainer(learner, exchange, layout_of(settings), max_norm=settings.max_norm)
        for step in range(settings.compared_steps):
            shard = step_indexes(step, settings.micro_batches_in_all, exchange.rank, exchange.world_size)
            trainer.train_batch(reversed(shard) if backwards else shard)
    return learner
