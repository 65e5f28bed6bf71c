"""How long a micro-batch takes on one rank, and when backward has finished each span of the layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from gradengine.layout import GradientLayout, Span
from gradengine.plan.models import Model

__all__ = ["Compute", "assumed", "measured", "ready_shares"]

_LOOKED_UP = "embedding"  # a row of it is read, and its gradient added up: nothing is multiplied


@dataclass(frozen=True)
class Compute:
    """Seconds of one micro-batch on one rank, all-reduces of tensor parallelism included.

    Attributes:
        forward_seconds: Its forward.
        backward_seconds: Its backward, twice the forward's arithmetic.
        source: Where the figures are from, as the table says it.
    """

    forward_seconds: float
    backward_seconds: float
    source: str

    @property
    def seconds(self) -> float:
        """Of both.

        >>> measured(0.5).seconds
        0.75
        """
        return self.forward_seconds + self.backward_seconds


def assumed(
    model: Model, layout: GradientLayout, tokens: int, sequence_length: int, tflops: float, tp_seconds: float
) -> Compute:
    """From arithmetic: 2 operations a weight and token forward, 4 backward, and those of attention's scores.

    Args:
        model: The whole model.
        layout: One rank's part of it.
        tokens: Of a micro-batch.
        sequence_length: S: scores and their sum are 4 S operations a token, block and hidden element, over all ranks.
        tflops: 10^12 operations a second that a rank achieves.
        tp_seconds: All-reduces of one micro-batch, forward and backward.

    Example:
        >>> model = Model("tiny", "", 64, 1, 1, 1, 128, 256)
        >>> round(assumed(model, model.layout(), 100, 1, tflops=1e-6, tp_seconds=0).backward_seconds, 1)
        23.1
    """
    multiplied = sum(slot.size for slot in layout.slots if slot.name != _LOOKED_UP)
    scores = 4 * sequence_length * model.hidden_size * model.num_blocks / layout.tp_size
    forward = tokens * (2 * multiplied + scores) / (1e12 * tflops)
    source = f"assumed: {tflops:g} TFLOP/s a rank" + (", with its all-reduces" if tp_seconds else "")
    return Compute(forward + tp_seconds / 2, 2 * forward + tp_seconds / 2, source)


def measured(backward_seconds: float) -> Compute:
    """From a measured backward; a forward takes half as long.

    >>> measured(0.5).forward_seconds
    0.25
    """
    return Compute(backward_seconds / 2, backward_seconds, "measured by you")


def ready_shares(layout: GradientLayout, *, tied: bool = False) -> list[float]:
    """After which share of backward each span is ready, in the order in which spans leave.

    Elements stand for the time that backward takes with them: each weight is multiplied as often. An embedding's are
    only looked up. A tied LM head is ready at the end, when the embedding's part of its gradient is added.

    Example:
        >>> ready_shares(GradientLayout.of({"layers.0.w": (32,), "layers.1.w": (32,), "head": (64,)}))
        [0.5, 0.75, 1.0]
    """
    work = [_work(span) for span in layout.spans]
    total = sum(work) or 1
    shares = [min(1.0, done / total) for done in accumulate(work)]
    if tied:
        shares = [1.0 if span.key == "lm_head" else share for span, share in zip(layout.spans, shares, strict=True)]
    return _ending_at_one(shares)


def _work(span: Span) -> int:
    return 0 if span.key == _LOOKED_UP else sum(slot.size for slot in span.slots)


def _ending_at_one(shares: Sequence[float]) -> list[float]:
    return [*shares[:-1], 1.0]
