"""One copy of the model with its optimizer: the local trainer that the demo makes distributed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, final

import numpy as np

from gradengine.demo.adamw import AdamW, warmup_cosine
from gradengine.demo.model import GradientStream, forward_backward, initial_weights, loss, stream_gradients
from gradengine.demo.text import evaluation_batches, micro_batch
from gradengine.layout import GradientLayout

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from gradengine.demo.reports import Weights
    from gradengine.demo.settings import Settings, Texts

__all__ = ["Learner", "layout_of"]

_EVALUATION_BATCHES = 24


def layout_of(settings: Settings) -> GradientLayout:
    """The layout of the model's gradients, in the order in which its backward finishes them."""
    model = settings.model
    return GradientLayout.transformer(
        model.num_blocks, model.hidden_size, model.kv_hidden_size, model.intermediate_size, model.vocab_size
    )


@final
class Learner:
    """The model's weights, and what moves them; a `LocalTrainer` whose micro-batches are their global indexes.

    Equal settings and texts give equal learners, so workers begin alike without a word to each other.
    """

    def __init__(self, settings: Settings, texts: Texts) -> None:
        self._settings, self._texts = settings, texts
        self.weights: Weights = initial_weights(settings.model, settings.seed)
        schedule = partial(warmup_cosine, warmup_steps=settings.steps // 20, total_steps=settings.steps)
        self._optimizer = AdamW(self.weights, settings.learning_rate, schedule=schedule)

    def stream_backward(self, index: int) -> tuple[float, GradientStream]:
        """The loss of micro-batch `index`, and its gradients as backward finishes them."""
        value, stream = stream_gradients(self.weights, self._micro_batch(index), self._settings.model)
        return float(value), stream

    def forward_backward(self, index: int) -> tuple[float, Weights]:
        """The loss of micro-batch `index`, and all its gradients."""
        return forward_backward(self.weights, self._micro_batch(index), self._settings.model)

    def apply_gradients(self, gradients: Mapping[str, object]) -> None:
        """One step of the optimizer."""
        self._optimizer.step(gradients)

    def held_out_loss(self) -> float:
        """Mean cross-entropy of the held-out text in nats per byte, on the same windows every time."""
        model = self._settings.model
        batches = evaluation_batches(
            self._texts.held_out, self._settings.batch_size, model.sequence_length, _EVALUATION_BATCHES
        )
        return float(np.mean([loss(self.weights, batch, model) for batch in batches]))

    def _micro_batch(self, index: int) -> npt.NDArray[np.uint8]:
        settings = self._settings
        return micro_batch(self._texts.train, index, settings.batch_size, settings.model.sequence_length, settings.seed)
