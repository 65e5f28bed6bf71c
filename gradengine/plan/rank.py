"""One rank: the bytes that it keeps, the seconds of its micro-batch, and when backward has finished each span."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from gradengine.exchange.interface import DEFAULT_BUCKET_BYTES
from gradengine.exchange.server import BUCKETS_IN_FLIGHT
from gradengine.layout import GradientLayout, Span
from gradengine.plan.models import Model

__all__ = ["Compute", "Memory", "assumed", "coordinator_bytes", "measured", "memory_of", "ready_shares"]

DEVICES = ("cpu", "cuda")
DTYPES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of an element
OPTIMIZERS: Mapping[str, int] = {"adamw": 8, "lion": 4, "momentum": 4, "sgd": 0}  # bytes of fp32 state for a weight


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, activations not counted."""

    weights: int  # in the gradients' dtype, those that are not trained among them
    gradients: int  # as backward leaves them, in their dtype
    arena: int  # the fp32 sum of micro-batches and workers
    master_weights: int  # a copy of the trained weights in fp32, where they are kept in less
    optimizer: int  # its state in fp32
    host_mirror: int  # pinned host memory through which a GPU's arena is exchanged
    coordinator: int  # host memory that rank 0 of a tcp:// group needs beyond the others'

    @property
    def on_device(self) -> int:
        """Bytes where the model is."""
        return self.weights + self.gradients + self.arena + self.master_weights + self.optimizer


def memory_of(
    layout: GradientLayout, dtype: str, optimizer: str, workers: int, *, frozen: int = 0, device: str = "cuda"
) -> Memory:
    """What one rank keeps; `frozen` counts elements of weights that are not trained.

    >>> layout = GradientLayout.transformer(24, 1024, 256, 4096, 32768, embedding=False)
    >>> memory_of(layout, "bfloat16", "adamw", workers=1).on_device / layout.num_elements
    20.0
    """
    elements, width = layout.num_elements, DTYPES[dtype]
    return Memory(
        weights=width * (elements + frozen),
        gradients=width * elements,
        arena=layout.nbytes,
        master_weights=4 * elements if width < 4 else 0,
        optimizer=OPTIMIZERS[optimizer] * elements,
        host_mirror=layout.nbytes if workers > 1 and device == "cuda" else 0,
        coordinator=coordinator_bytes(layout, workers),
    )


def coordinator_bytes(layout: GradientLayout, workers: int) -> int:
    """What a coordinator in rank 0's process keeps: for each other worker the buckets received and not yet summed.

    Sums are taken in rank 0's own arena (or its mirror), and leave from there.

    >>> coordinator_bytes(GradientLayout.of([(1 << 20,)]), workers=3)
    33554432
    """
    largest = max((4 * (span.stop - span.start) for span in layout.spans), default=0)
    return (workers - 1) * BUCKETS_IN_FLIGHT * min(largest, DEFAULT_BUCKET_BYTES)


@dataclass(frozen=True)
class Compute:
    """Seconds of one micro-batch on one rank, all-reduces of tensor parallelism included."""

    forward_seconds: float  # its forward
    backward_seconds: float  # its backward, twice the forward's arithmetic
    source: str  # where the figures are from, as the table says it

    @property
    def seconds(self) -> float:
        """Of both."""
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
    weights = sum(_multiplied(span) for span in layout.spans)
    scores = 4 * sequence_length * model.hidden_size * model.num_blocks / layout.tp_size
    forward = tokens * (2 * weights + scores) / (1e12 * tflops)
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

    Elements stand for the time that backward takes with them: each weight is multiplied as often. A tied LM head is
    ready at the end, when the embedding's part of its gradient is added.

    Example:
        >>> ready_shares(GradientLayout.of({"layers.0.w": (32,), "layers.1.w": (32,), "head": (64,)}))
        [0.5, 0.75, 1.0]
    """
    work = [_multiplied(span) for span in layout.spans]
    total = sum(work) or 1
    shares = [min(1.0, done / total) for done in accumulate(work)]
    if tied:
        shares = [1.0 if span.key == "lm_head" else share for span, share in zip(layout.spans, shares, strict=True)]
    return [*shares[:-1], 1.0]


def _multiplied(span: Span) -> int:
    """Weights that take part in matrix products; a row of the embedding is only looked up."""
    return sum(slot.size for slot in span.slots if slot.name != "embedding")
