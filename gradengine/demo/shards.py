"""Tensor parallelism of the demo's model: weights cut and united, and a worker's shards, a thread for each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeVar, final

import numpy as np

from gradengine.demo.model import Array, Weights
from gradengine.demo.settings import Settings
from gradengine.errors import PeerLost
from gradengine.exchange import Exchange, local_group
from gradengine.layout.shards import Shard

T = TypeVar("T")

_TIMEOUT_SECONDS = 120.0  # longer than a worker's for other workers: whoever waits for those is not to blame


@final
@dataclass(frozen=True)
class TensorParallelRank:
    """A shard's place in its worker: use it as a context, so that after its failure the others do not wait."""

    tp_rank: int
    exchange: Exchange | None  # for the norm and the verdict of a step; None where there is one shard
    partials: list[Any]  # of all shards, whose list this is
    barrier: threading.Barrier

    def all_reduce(self, partial: Array) -> Array:
        """The sum over all shards in the order of their ranks: the same bytes for each.

        Raises:
            PeerLost: Another shard has failed, or is late.
        """
        self.partials[self.tp_rank] = partial
        self._meet()
        total: Array = reduce(np.add, self.partials)
        self._meet()  # until all have read this one's
        return total

    def _meet(self) -> None:
        try:
            self.barrier.wait()
        except threading.BrokenBarrierError:
            raise PeerLost("another shard of this worker's model left the group") from None

    def __enter__(self) -> TensorParallelRank:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # else others may be about to leave their last meeting
            self.barrier.abort()
        if self.exchange is not None:
            self.exchange.close()


def tensor_parallel_group(tp_size: int) -> list[TensorParallelRank]:
    """The shards of one worker, each for a thread of its own."""
    exchanges = local_group(tp_size, timeout=_TIMEOUT_SECONDS) if tp_size > 1 else [None]
    partials, barrier = [None] * tp_size, threading.Barrier(tp_size, timeout=_TIMEOUT_SECONDS)
    return [TensorParallelRank(tp_rank, exchange, partials, barrier) for tp_rank, exchange in enumerate(exchanges)]


def run_threads(works: Sequence[Callable[[], T]]) -> list[T]:
    """Run each on a thread of its own; return the results in order.

    Each must end soon after another has failed: use a `with` block around its exchanges, which ends the others' waits.

    Raises:
        BaseException: The first failure that is not the loss of a peer; if there is none, the first failure.

    Example:
        >>> run_threads([lambda: 1, lambda: 2])
        [1, 2]
    """
    with ThreadPoolExecutor(len(works)) as pool:
        futures = [pool.submit(work) for work in works]
    failures = [fault for future in futures if (fault := future.exception()) is not None]
    if failures:
        raise next((fault for fault in failures if not isinstance(fault, PeerLost)), failures[0])
    return [future.result() for future in futures]


def cut(settings: Settings, weights: Mapping[str, Array], tp_rank: int) -> Weights:
    """A shard's part of the weights, in memory of its own."""
    shards = _shards(settings, tp_rank)
    return {name: shards[name].extract_shard(weight, copy=True) for name, weight in weights.items()}


def united(settings: Settings, parts: Sequence[Mapping[str, Array]]) -> Weights:
    """The whole model's weights, or gradients, from the parts of all shards."""
    return {name: shard.merge_shards([part[name] for part in parts]) for name, shard in _shards(settings, 0).items()}


def _shards(settings: Settings, tp_rank: int) -> dict[str, Shard]:
    config = settings.model.sharded(tp_rank, settings.tensor_parallel)
    return {name: config.shard_of(name, shape) for name, shape in settings.model.weight_shapes.items()}
