"""What each algorithm sends to sum one gradient set over W workers: bytes of each link, messages, seconds of each span.

Each rank has one link that carries its bandwidth each way at once, and all links meet in a switch that is never full.
Spans go one after the other. All algorithms move the fp32 arena, and agree on the step by one small gather at the end.
The star alone is limited by its hosts: by the sockets and the sum of rank 0. The others are as fast as the links.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from gradengine.exchange.interface import DEFAULT_BUCKET_BYTES
from gradengine.layout import GradientLayout
from gradengine.tensor_parallel_cost import Bandwidth

__all__ = [
    "ALGORITHMS",
    "SOCKETS",
    "SUMMED",
    "Algorithm",
    "Network",
    "Traffic",
    "nccl",
    "no_traffic",
    "ordered",
    "ring",
    "span_bytes",
    "star",
    "sum_seconds",
    "tree_latency_steps",
]

# Within what bench/results/cpu-2core-plan.json records of two shared cores; docs/plan.md has the ranges.
SOCKETS = Bandwidth.gigabytes(2)  # half of `rates.tcp`, which is both processes' sending
SUMMED = Bandwidth.gigabytes(20)  # `rates.check` and `rates.add`
_AGREEMENT = 2  # messages one after the other: what a rank knows goes to the coordinator, what all know comes back


@dataclass(frozen=True)
class Network:
    """What connects the workers.

    Attributes:
        bandwidth: Of each rank's link, each way.
        latency_seconds: From sending a small message to having it.
        socket_bandwidth: What one process moves through its sockets each way, however fast the link is.
        sum_bandwidth: What one thread of rank 0 looks at, or adds to the sum.
    """

    bandwidth: Bandwidth
    latency_seconds: float
    socket_bandwidth: Bandwidth = SOCKETS
    sum_bandwidth: Bandwidth = SUMMED

    @property
    def through_sockets(self) -> float:
        """Bytes a second each way of a process that uses sockets."""
        return min(self.bandwidth.bytes_per_second, self.socket_bandwidth.bytes_per_second)


@dataclass(frozen=True)
class Traffic:
    """One algorithm's.

    Attributes:
        algorithm: "star", "ring", "ordered" or "nccl".
        busiest_link_bytes: Each way in a step, on the link that carries most.
        other_link_bytes: Each way, on the link that carries least.
        total_bytes: Sent by all ranks.
        messages: Sent by the busiest rank.
        latency_steps: Messages that wait for each other.
        span_seconds: For each span, how long it holds the busiest link.
        tail_seconds: From the last span's last byte to the end of the step.
    """

    algorithm: str
    busiest_link_bytes: int
    other_link_bytes: int
    total_bytes: int
    messages: int
    latency_steps: int
    span_seconds: tuple[float, ...]
    tail_seconds: float

    @property
    def seconds(self) -> float:
        """Of the whole exchange, where nothing hides it."""
        return sum(self.span_seconds) + self.tail_seconds


Algorithm: TypeAlias = Callable[[Sequence[int], int, Network], Traffic]  # bytes of each span, workers, network


def no_traffic(algorithm: str, spans: Sequence[int]) -> Traffic:
    """One worker's.

    >>> no_traffic("star", [1000]).seconds
    0.0
    """
    return Traffic(algorithm, 0, 0, 0, 0, 0, (0.0,) * len(spans), 0.0)


def span_bytes(layout: GradientLayout) -> list[int]:
    """Bytes of each span as it travels: fp32, padding included.

    >>> span_bytes(GradientLayout.of([(33,)]))
    [256]
    """
    return [4 * (span.stop - span.start) for span in layout.spans]


def star(spans: Sequence[int], workers: int, network: Network) -> Traffic:
    """tcp:// of this package: all send to rank 0, which sums in rank order and sends the sums back.

    Rank 0 receives a bucket while it sends the sum of the one before, so that its link is full both ways. Its sums are
    added to that, not hidden by it: it is a reading thread that sums, and nobody reads for it meanwhile.

    Example:
        >>> star([1000], 4, Network(Bandwidth.gigabytes(1), latency_seconds=0.0)).busiest_link_bytes
        3000
    """
    if workers == 1:
        return no_traffic("star", spans)
    others, rate = workers - 1, network.through_sockets
    last_bucket = min(spans[-1] % DEFAULT_BUCKET_BYTES or DEFAULT_BUCKET_BYTES, spans[-1])
    steps = 2 + _AGREEMENT
    return Traffic(
        "star",
        busiest_link_bytes=others * sum(spans),
        other_link_bytes=sum(spans),
        total_bytes=2 * others * sum(spans),
        messages=others * sum(-(-nbytes // DEFAULT_BUCKET_BYTES) for nbytes in spans),
        latency_steps=steps,
        span_seconds=tuple(others * n / rate + sum_seconds(n, workers, network.sum_bandwidth) for n in spans),
        tail_seconds=others * last_bucket / rate + steps * network.latency_seconds,
    )


def sum_seconds(nbytes: int, workers: int, bandwidth: Bandwidth) -> float:
    """Of one thread that looks for NaN and Inf in every contribution, and adds all but the first.

    >>> sum_seconds(10**9, workers=3, bandwidth=Bandwidth.gigabytes(20))
    0.25
    """
    return (2 * workers - 1) * nbytes / bandwidth.bytes_per_second


def ring(spans: Sequence[int], workers: int, network: Network) -> Traffic:
    """Each rank sends to the next: W - 1 messages that add up, W - 1 that hand the sums round, for each span.

    Example:
        >>> ring([1000], 4, Network(Bandwidth.gigabytes(1), latency_seconds=0.0)).busiest_link_bytes
        1500
    """
    return _even("ring", spans, workers, network)


def ordered(spans: Sequence[int], workers: int, network: Network) -> Traffic:
    """Each rank gets its part of a span from all (alltoall), sums it in rank order and gives it to all (allgather).

    The bytes and messages are a ring's; the order of the sum, and so its bits, are those of the star.
    """
    return _even("ordered", spans, workers, network)


def nccl(spans: Sequence[int], workers: int, network: Network) -> Traffic:
    """For each span the faster of a ring and a double binary tree, which is about how NCCL chooses.

    The two trees carry half of the span each (Sanders, Speck and Traeff 2009). A rank that is within one and a leaf of
    the other sends half a span to its parent in both and to its two children in one: 4 messages, twice the span. 2
    ceil(log2 W) messages wait for each other.
    """
    if workers == 1:
        return no_traffic("nccl", spans)
    around, halves = 2 * (workers - 1), min(workers, 4)  # of 2 ranks each is a root and a leaf, of 3 none is within
    by_ring = _Way(around / workers, around, around)
    by_tree = _Way(halves / 2, tree_latency_steps(workers), halves)
    ways = [min((way.seconds(nbytes, network), way) for way in (by_ring, by_tree)) for nbytes in spans]
    chosen = [way for _, way in ways]
    carried = [math.ceil(way.share * nbytes) for way, nbytes in zip(chosen, spans, strict=True)]
    return Traffic(
        "nccl",
        busiest_link_bytes=sum(carried),
        other_link_bytes=min(sum(carried), -(-around * sum(spans) // workers)),
        total_bytes=around * sum(spans),
        messages=sum(way.messages for way in chosen),
        latency_steps=sum(way.steps for way in chosen) + _AGREEMENT,
        span_seconds=tuple(seconds for seconds, _ in ways),
        tail_seconds=_AGREEMENT * network.latency_seconds,
    )


def tree_latency_steps(workers: int) -> int:
    """Messages that wait for each other in a tree: up and down.

    >>> [tree_latency_steps(workers) for workers in (1, 2, 3, 64)]
    [0, 2, 4, 12]
    """
    return 2 * (workers - 1).bit_length()


ALGORITHMS: dict[str, Algorithm] = {"star": star, "ring": ring, "ordered": ordered, "nccl": nccl}


@dataclass(frozen=True, order=True)
class _Way:
    """One way to sum a span: the share of its bytes that the busiest link carries each way, and messages."""

    share: float
    steps: int
    messages: int

    def seconds(self, nbytes: int, network: Network) -> float:
        return self.share * nbytes / network.bandwidth.bytes_per_second + self.steps * network.latency_seconds


def _even(name: str, spans: Sequence[int], workers: int, network: Network) -> Traffic:
    """Every link carries 2 (W - 1) / W of each span."""
    if workers == 1:
        return no_traffic(name, spans)
    around, rate = 2 * (workers - 1), network.bandwidth.bytes_per_second
    each_way = -(-around * sum(spans) // workers)
    messages = around * len(spans)
    return Traffic(
        name,
        busiest_link_bytes=each_way,
        other_link_bytes=each_way,
        total_bytes=around * sum(spans),
        messages=messages,
        latency_steps=messages + _AGREEMENT,
        span_seconds=tuple(around / workers * nbytes / rate + around * network.latency_seconds for nbytes in spans),
        tail_seconds=_AGREEMENT * network.latency_seconds,
    )
