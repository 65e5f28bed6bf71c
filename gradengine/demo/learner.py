"""One copy of the model with its optimizer: the local trainer that the demo makes distributed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, final

import numpy as np

from gradengine.demo.adamw import AdamW, warmup_cosine
from gradengine.demo.model import GradientStream, forward, forward_backward, initial_weights, loss, stream_gradients
from gradengine.demo.shards import WHOLE, TensorParallelRank, cut
from gradengine.demo.text import evaluation_batches, micro_batch
from gradengine.errors import WindowError
from gradengine.layout import GradientLayout

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from gradengine.demo.model import Array
    from gradengine.demo.reports import Weights
    from gradengine.demo.settings import Settings, Texts
    from gradengine.result import StepResult
    from gradengine.trainer import DistributedTrainer

__all__ = ["Learner", "layout_of", "result_of"]

_EVALUATION_BATCHES = 24


def layout_of(settings: Settings, tp_rank: int = 0) -> GradientLayout:
    """The layout of a shard's gradients, in the order in which its backward finishes them."""
    model = settings.model
    return GradientLayout.transformer(
        model.num_blocks,
        model.hidden_size,
        model.kv_hidden_size,
        model.intermediate_size,
        model.vocab_size,
        tensor_parallel=settings.shard(tp_rank),
    )


def result_of(trainer: DistributedTrainer) -> StepResult:
    """What the trainer's last step handed back.

    Raises:
        WindowError: It has made no step.
    """
    if trainer.last_result is None:
        raise WindowError("the trainer has no result", got="no step made", expected="at least 1")
    return trainer.last_result


@final
class Learner:
    """The weights of a shard, and what moves them; a `LocalTrainer` whose micro-batches are their global indexes.

    Equal settings and texts give equal learners, so workers begin alike without a word to each other.

    Args:
        settings: Those of the run.
        texts: Those of the run.
        rank: Which shard, and the way to the others: all of them must do the same at the same time.
        initial: The whole model's first weights; by default drawn from the run's seed.
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

    def stream_backward(self, index: int) -> tuple[float, GradientStream]:
        """The loss of micro-batch `index`, and its gradients as backward finishes them."""
        tokens, model = self._micro_batch(index), self._settings.model
        value, stream = stream_gradients(self.weights, tokens, model, all_reduce=self._all_reduce)
        return float(value), stream

    def forward_backward(self, index: int) -> tuple[float, Weights]:
        """The loss of micro-batch `index`, and all its gradients."""
        tokens, model = self._micro_batch(index), self._settings.model
        return forward_backward(self.weights, tokens, model, all_reduce=self._all_reduce)

    def logits(self, index: int) -> Array:
        """What the model says to micro-batch `index`: (B, T, V)."""
        tokens, model = self._micro_batch(index), self._settings.model
        return forward(self.weights, tokens[:, :-1], model, all_reduce=self._all_reduce)[0]

    def apply_gradients(self, gradients: Mapping[str, object]) -> None:
        """One step of the optimizer."""
        self._optimizer.step(gradients)

    def held_out_loss(self) -> float:
        """Mean cross-entropy of the held-out text in nats per byte, on the same windows every time."""
        model = self._settings.model
        batches = evaluation_batches(
            self._texts.held_out, self._settings.batch_size, model.sequence_length, _EVALUATION_BATCHES
        )
        return float(np.mean([loss(self.weights, batch, model, all_reduce=self._all_reduce) for batch in batches]))

    def _micro_batch(self, index: int) -> npt.NDArray[np.uint8]:
        settings = self._settings
        return micro_batch(self._texts.train, index, settings.batch_size, settings.model.sequence_length, settings.seed)
