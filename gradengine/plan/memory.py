"""Bytes that one rank keeps: weights, gradients, the fp32 arena, the optimizer's state, and what an exchange adds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gradengine.exchange.interface import DEFAULT_BUCKET_BYTES
from gradengine.exchange.server import BUCKETS_IN_FLIGHT
from gradengine.layout import GradientLayout

__all__ = ["DEVICES", "DTYPES", "OPTIMIZERS", "Memory", "coordinator_bytes", "memory_of"]

DEVICES = ("cpu", "cuda")
DTYPES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of an element
OPTIMIZERS: Mapping[str, int] = {"adamw": 8, "lion": 4, "momentum": 4, "sgd": 0}  # bytes of fp32 state for a weight


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, activations not counted.

    Attributes:
        weights: In the gradients' dtype, those that are not trained among them.
        gradients: As backward leaves them, in their dtype.
        arena: The fp32 sum of micro-batches and workers.
        master_weights: A copy of the trained weights in fp32, where they are kept in less.
        optimizer: Its state in fp32.
        host_mirror: Pinned host memory through which a GPU's arena is exchanged.
        coordinator: Host memory that rank 0 of a tcp:// group needs beyond the others'.
    """

    weights: int
    gradients: int
    arena: int
    master_weights: int
    optimizer: int
    host_mirror: int
    coordinator: int

    @property
    def on_device(self) -> int:
        """Bytes where the model is."""
        return self.weights + self.gradients + self.arena + self.master_weights + self.optimizer


def memory_of(
    layout: GradientLayout, dtype: str, optimizer: str, workers: int, *, frozen: int = 0, device: str = "cuda"
) -> Memory:
    """What one rank keeps.

    Args:
        layout: Its gradients.
        dtype: Of weights and gradients.
        optimizer: A key of `OPTIMIZERS`.
        workers: Ranks that exchange gradients.
        frozen: Elements of weights that are not trained.
        device: Where the model is.

    Example:
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


def coordinator_bytes(layout: GradientLayout, workers: int, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> int:
    """What a coordinator in rank 0's process keeps: for each other worker the buckets received and not yet summed.

    Sums are taken in rank 0's own arena (or its mirror), and leave from there.

    >>> coordinator_bytes(GradientLayout.of([(1 << 20,)]), workers=3)
    33554432
    """
    largest = max((4 * (span.stop - span.start) for span in layout.spans), default=0)
    return (workers - 1) * BUCKETS_IN_FLIGHT * min(largest, bucket_bytes)
