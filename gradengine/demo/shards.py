"""Tensor parallelism of the demo's model, which cuts and unites weights, and runs each shard on a thread."""

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

# Longer than the timeout between workers, so that an error names the late worker and not a shard that waits for it.
_TIMEOUT_SECONDS = 120.0


@final
@dataclass(frozen=True)
class TensorParallelRank:
    """A shard's place in its worker. Use it as a context, so that the other shards do not wait after its failure."""

    tp_rank: int
    exchange: Exchange | None  # carries a step's norm and check, None for one shard
    partials: list[Any]  # partial sums of all shards, one list for all of them
    barrier: threading.Barrier

    def all_reduce(self, partial: Array) -> Array:
        """Return the sum over all shards in the order of their ranks, with the same bytes on each.

        Raises:
            PeerLost: A different shard has failed, or is late.
        """
        self.partials[self.tp_rank] = partial
        self._meet()
        total: Array = reduce(np.add, self.partials)
        self._meet()  # waits until all shards have read the partial sums
        return total

    def _meet(self) -> None:
        try:
            self.barrier.wait()
        except threading.BrokenBarrierError:
            raise PeerLost("another shard of this worker's model left the group") from None

    def __enter__(self) -> TensorParallelRank:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # without a failure, other shards may still be in their last barrier
            self.barrier.abort()
        if self.exchange is not None:
            self.exchange.close()


def tensor_parallel_group(tp_size: int) -> list[TensorParallelRank]:
    """Return the shards of one worker, each for one thread."""
    exchanges = local_group(tp_size, timeout=_TIMEOUT_SECONDS) if tp_size > 1 else [None]
    partials, barrier = [None] * tp_size, threading.Barrier(tp_size, timeout=_TIMEOUT_SECONDS)
    return [TensorParallelRank(tp_rank, exchange, partials, barrier) for tp_rank, exchange in enumerate(exchanges)]


def run_threads(works: Sequence[Callable[[], T]]) -> list[T]:
    """Run each function on a thread and return the results in order.

    Each function must end soon after a different one has failed. A `with` block around its exchanges does this, since
    it ends the waits of the others.

    Raises:
        BaseException: The first failure that is not the loss of a peer. If there is none, the first failure.

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
    """Return a copy of a shard's part of the weights."""
    shards = _shards(settings, tp_rank)
    return {name: shards[name].extract_shard(weight, copy=True) for name, weight in weights.items()}


def united(settings: Settings, parts: Sequence[Mapping[str, Array]]) -> Weights:
    """Return the whole model's weights, or gradients, from the parts of all shards."""
    return {name: shard.merge_shards([part[name] for part in parts]) for name, shard in _shards(settings, 0).items()}


def _shards(settings: Settings, tp_rank: int) -> dict[str, Shard]:
    config = settings.model.sharded(tp_rank, settings.tensor_parallel)
    return {name: config.shard_of(name, shape) for name, shape in settings.model.weight_shapes.items()}
