"""Tensor parallelism for the demo's model: cut weights, the group of a worker's shards, and their all-reduce.

Each shard has a thread, its own exchange with the same shard of the other workers, and two with its worker's others.
"""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, final

import numpy as np

from gradengine.demo.model import only_shard
from gradengine.errors import PeerLost
from gradengine.exchange import Progress, local_group
from gradengine.layout import GradientLayout
from gradengine.reduction.all_gather import in_group

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import Self

    from gradengine.demo.model import AllReduce, Array, LlamaConfig
    from gradengine.demo.record import Weights
    from gradengine.demo.settings import Settings
    from gradengine.exchange import Exchange
    from gradengine.layout import Span
    from gradengine.layout.shards import Shard

__all__ = [
    "WHOLE", "ActivationAllReduce", "TensorParallelRank", "cut", "mirrored", "replicated_part", "run_threads",
    "tensor_parallel_group", "united",
]  # fmt: skip

T = TypeVar("T")

_TIMEOUT_SECONDS = 120.0  # longer than a worker's for other workers: whoever waits for those is not to blame
_ROOT_CAUSE_SECONDS = 2.5  # given to the other threads once one has failed; less than a pool gives its processes


@final
class ActivationAllReduce:
    """Adds up the ranks' fp32 arrays through any `Exchange`; every rank gets the same bytes.

    Args:
        exchange: Of the tensor-parallel group, not bound yet; closed by whoever made it.
        max_size: Elements of the largest array, the same on all ranks; a smaller one travels with zeros behind it.

    Raises:
        HandshakeRefused, PeerLost: The ranks do not come together.

    Example:
        >>> ActivationAllReduce(local_group(1)[0], max_size=4)(np.ones((1, 3), np.float32))
        array([[1., 1., 1.]], dtype=float32)
    """

    def __init__(self, exchange: Exchange, max_size: int) -> None:
        layout = GradientLayout.of({"partial_sums": (max_size,)})
        self._exchange, self._span, self._progress = exchange, layout.spans[0], Progress()
        self._arena = np.zeros(layout.arena_size, np.float32)
        with in_group("between the shards of a model"):
            exchange.bind(layout, self._arena, self._progress, _pass_over)

    def __call__(self, partial: Array) -> Array:
        """Replace a NumPy array of float32, of one shape on all ranks, by its sum over them, and return it.

        Raises:
            PeerLost, ProtocolError, DeadlineExceeded: The exchange failed; `partial` is as it was.
        """
        shared = self._arena[: partial.size].reshape(partial.shape)
        np.copyto(shared, partial)
        self._arena[partial.size :] = 0.0  # sums of earlier calls would grow there without bound
        with in_group("between the shards of a model"):
            self._exchange.start(self._span)
            self._exchange.wait()
        self._progress.next_step()
        np.copyto(partial, shared)
        return partial


def _pass_over(span: Span, upto: int) -> None:
    """Sums are used when all have landed."""


@final
@dataclass(frozen=True)
class TensorParallelRank:
    """A shard's place in its worker; leaving the `with` block closes both exchanges with the other shards."""

    tp_rank: int = 0  # which shard
    activations: Exchange | None = None  # adds up partial sums inside the model; None where there is one shard
    gradients: Exchange | None = None  # for the norm and the verdict of a step; None where there is one shard

    def all_reduce(self, max_size: int) -> AllReduce:
        """What adds up this group's partial sums; returns when all shards have come here."""
        return only_shard if self.activations is None else ActivationAllReduce(self.activations, max_size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for exchange in (self.activations, self.gradients):
            if exchange is not None:
                exchange.close()


WHOLE = TensorParallelRank()
"""The only shard of a model in one piece."""


def tensor_parallel_group(tp_size: int) -> list[TensorParallelRank]:
    """The shards of one worker, each for a thread of its own."""
    if tp_size == 1:
        return [WHOLE]
    groups = (local_group(tp_size, timeout=_TIMEOUT_SECONDS) for _ in ("activations", "gradients"))
    return [TensorParallelRank(*rank) for rank in zip(range(tp_size), *groups, strict=True)]


def run_threads(works: Sequence[Callable[[], T]]) -> list[T]:
    """Run each on a thread of its own, a single one on this thread; return the results in order.

    Each must end soon after another has failed: by a `with` block around its exchanges, which ends what the others wait
    for. One that does not is left behind after some seconds.

    Raises:
        BaseException: The first failure that is not the loss of a peer; the first of all where there is no such.

    Example:
        >>> run_threads([lambda: 1, lambda: 2])
        [1, 2]
    """
    if len(works) == 1:
        return [works[0]()]
    failures: list[BaseException] = []
    futures = [_started(work, failures) for work in works]
    wait(futures, return_when=FIRST_EXCEPTION)
    if failures:
        wait(futures, timeout=_ROOT_CAUSE_SECONDS)
        raise next((failure for failure in failures if not isinstance(failure, PeerLost)), failures[0])
    return [future.result() for future in futures]


def _started(work: Callable[[], T], failures: list[BaseException]) -> Future[T]:
    future: Future[T] = Future()
    # A thread of a pool would be joined at the end of the process, whatever it waits for.
    threading.Thread(target=_do, args=(work, future, failures), daemon=True).start()
    return future


def _do(work: Callable[[], T], future: Future[T], failures: list[BaseException]) -> None:
    try:
        future.set_result(work())
    except BaseException as fault:  # noqa: BLE001  (raised again by the thread that waits)
        failures.append(fault)
        future.set_exception(fault)


def cut(settings: Settings, weights: Mapping[str, Array], tp_rank: int) -> Weights:
    """A shard's part of the weights, in memory of its own."""
    shards = _shards(settings, tp_rank)
    return {name: shards[name].extract_shard(weight, copy=True) for name, weight in weights.items()}


def united(settings: Settings, parts: Sequence[Mapping[str, Array]]) -> Weights:
    """The whole model's weights, or gradients, from the parts of all shards."""
    shards = _shards(settings, tp_rank=0)
    return {name: shard.merge_shards([part[name] for part in parts]) for name, shard in shards.items()}


def replicated_part(settings: Settings, part: Mapping[str, Array]) -> Weights:
    """Of a shard's weights those that every shard holds whole."""
    shards = _shards(settings, tp_rank=0)
    return {name: weight for name, weight in part.items() if shards[name].partition == "replicated"}


def _shards(settings: Settings, tp_rank: int) -> dict[str, Shard]:
    config = settings.shard(tp_rank)
    return {name: config.shard_of(name, shape) for name, shape in settings.model.weight_shapes.items()}


def mirrored(weights: Mapping[str, Array], model: LlamaConfig) -> Weights:
    """The same function with heads and intermediate columns in reverse order, whose sums are thus rounded in another.

    Example:
        >>> from gradengine.demo.model import LlamaConfig, initial_weights
        >>> weights = initial_weights(LlamaConfig(), seed=0)
        >>> again = mirrored(mirrored(weights, LlamaConfig()), LlamaConfig())
        >>> all(np.array_equal(again[name], weights[name]) for name in weights)
        True
    """
    return {name: _mirrored(name.rpartition(".")[2], weight, model.head_size) for name, weight in weights.items()}


def _mirrored(component: str, weight: Array, head_size: int) -> Array:
    if component in {"w_q", "w_k", "w_v"}:
        heads = weight.reshape(len(weight), -1, head_size)[:, ::-1]  # RoPE turns pairs: no head is mirrored in itself
        return np.ascontiguousarray(heads.reshape(weight.shape))
    if component == "w_o":
        return _mirrored("w_q", weight.T, head_size).T.copy()
    if component in {"gate", "up"}:
        return np.ascontiguousarray(weight[:, ::-1])
    return np.ascontiguousarray(weight[::-1]) if component == "down" else weight.copy()
