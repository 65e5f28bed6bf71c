"""The bytes and seconds of each transport to sum a gradient set over W workers, and the part that backward hides.

Each rank has one link, which has its bandwidth in both directions. All links meet in a switch that is never full. Spans
of the fp32 arena are sent one by one. The latency of messages that wait for each other is not counted. A part, its sum
and the end of the step take three times a link's latency.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from gradengine.layout import GradientLayout, Span
from gradengine.layout.cost import Bandwidth

TCP, SERVED, NCCL = "tcp://", "served=True", "process_group="  # as they are passed to `connect`
# 100 MB between two ranks take 84.5 ms over tcp://, sums included (docs/project/benchmarks.md).
SOCKETS = Bandwidth.gigabytes(1.2)


@dataclass(frozen=True)
class Traffic:
    """Bytes and seconds of one step's exchange."""

    busiest_link_bytes: int  # bytes each way on the busiest link
    total_bytes: int  # bytes that all ranks send, and the server
    seconds: float  # seconds of the whole exchange, if backward hides none
    exposed_seconds: float  # seconds that the step waits after the end of backward


def traffic_of(layout: GradientLayout, workers: int, rate: float, ready: Sequence[float], *, served: bool) -> Traffic:
    """Return the traffic over two or more workers.

    Each rank sums a share of each span. It receives the other parts, and sends the sum to all. A server receives and
    sends whole sets. A span is sent when it is ready and the spans before it are sent.

    Args:
        layout: Layout of one rank's gradients.
        workers: Data-parallel workers, at least 2.
        rate: Bytes a second of each link, each way.
        ready: Time at which each span is ready, as `ready_seconds` returns it.
        served: Whether a server sums.

    Example:
        >>> layout = GradientLayout.of([(32,)])
        >>> [traffic_of(layout, 4, 1e9, [0.0], served=served).busiest_link_bytes for served in (False, True)]
        [192, 512]
    """
    carried = workers if served else 2 * (workers - 1) / workers
    seconds = [4 * (span.stop - span.start) * carried / rate for span in layout.spans]
    free = -math.inf
    for begin, taken in zip(ready, seconds, strict=True):
        free = max(free, begin) + taken
    link, total = math.ceil(carried * layout.nbytes), 2 * (workers - (not served)) * layout.nbytes
    return Traffic(link, total, sum(seconds), free)


def ready_seconds(layout: GradientLayout, backward_seconds: float, *, tied: bool = False) -> list[float]:
    """Return when each span is ready, in seconds from the end of backward (<= 0), in the order of sending.

    The time of backward is taken as proportional to the number of weights. A tied LM head is ready at the end, when the
    embedding's part of its gradient is added.

    Example:
        >>> ready_seconds(GradientLayout.of({"layers.0.w": (32,), "layers.1.w": (32,), "head": (64,)}), 4.0)
        [-2.0, -1.0, 0.0]
    """
    work = [weights_multiplied(span) for span in layout.spans]
    left = [1 - done / (sum(work) or 1) for done in accumulate(work)]
    waits = (tied and span.key == "lm_head" for span in layout.spans)
    ready = [0.0 if wait else min(0.0, -share * backward_seconds) for wait, share in zip(waits, left, strict=True)]
    return [*ready[:-1], 0.0]


def weights_multiplied(span: Span) -> int:
    """Return the number of weights in matrix products. Rows of the embedding are only looked up."""
    return sum(slot.size for slot in span.slots if slot.name != "embedding")
