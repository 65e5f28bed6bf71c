"""The demo's model in shards: the weights cut and put together again, and the group that a worker's shards form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import numpy as np

from gradengine.demo.all_reduce import ActivationAllReduce
from gradengine.demo.model import only_shard
from gradengine.exchange import local_group

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from typing_extensions import Self

    from gradengine.demo.model import AllReduce, Array, LlamaConfig
    from gradengine.demo.reports import Weights
    from gradengine.demo.settings import Settings
    from gradengine.exchange import Exchange
    from gradengine.shards import Shard

__all__ = ["WHOLE", "TensorParallelRank", "cut", "mirrored", "replicated_part", "tensor_parallel_group", "united"]

_PATIENCE_SECONDS = 120.0  # longer than a worker's for other workers: whoever waits for those is not to blame


@final
@dataclass(frozen=True)
class TensorParallelRank:
    """A shard's place in its worker, and the way to the other shards; leaving the `with` block ends both exchanges.

    Attributes:
        tp_rank: Which shard.
        activations: Adds up partial sums inside the model; None where there is one shard.
        gradients: For the norm and the verdict of a step; None where there is one shard.
    """

    tp_rank: int = 0
    activations: Exchange | None = None
    gradients: Exchange | None = None

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
    groups = (local_group(tp_size, timeout=_PATIENCE_SECONDS) for _ in ("activations", "gradients"))
    return [TensorParallelRank(*rank) for rank in zip(range(tp_size), *groups, strict=True)]


def cut(settings: Settings, weights: Mapping[str, Array], tp_rank: int) -> Weights:
    """A shard's part of the weights, in memory of its own."""
    shards = _shards(settings, tp_rank)
    return {name: shards[name].extract_shard(weight, copy=True) for name, weight in weights.items()}


def united(settings: Settings, parts: Sequence[Mapping[str, Array]]) -> Weights:
    """The whole model's weights, or gradients, from the parts of all shards."""
    return {
        name: shard.merge_shards([part[name] for part in parts]) for name, shard in _shards(settings, tp_rank=0).items()
    }


def replicated_part(settings: Settings, part: Mapping[str, Array]) -> Weights:
    """Of a shard's weights those that every shard holds whole."""
    shards = _shards(settings, tp_rank=0)
    return {name: weight for name, weight in part.items() if shards[name].partition == "replicated"}


def _shards(settings: Settings, tp_rank: int) -> dict[str, Shard]:
    config = settings.shard(tp_rank)
    return {name: config.shard_of(name, shape) for name, shape in settings.model.weight_shapes.items()}


def mirrored(weights: Mapping[str, Array], model: LlamaConfig) -> Weights:
    """The same function with heads and intermediate columns in reverse order, whose sums are thus rounded in another.

    Mirrored twice it is as it was.

    Example:
        >>> from gradengine.demo.model import LlamaConfig, initial_weights
        >>> model = LlamaConfig()
        >>> weights = initial_weights(model, seed=0)
        >>> again = mirrored(mirrored(weights, model), model)
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
