"""The bytes that each algorithm sends to sum a gradient set over W workers, its time, and how much backward hides.

Each rank has one link with its bandwidth in both directions at once, and all links meet in a switch that is never full.
Spans are sent one by one. All algorithms move the fp32 arena, and agree on the step by one small gather at the end.
Ordered and star are limited by their hosts too: by a process's sockets and by its sum. NCCL moves the same shares from
GPU to GPU, and a ring is another library's: only the links limit these two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from gradengine.exchange.interface import DEFAULT_BUCKET_BYTES
from gradengine.exchange.linked import DEFAULT_SHARE_BYTES
from gradengine.layout import GradientLayout, Span
from gradengine.layout.cost import Bandwidth

__all__ = [
    "ALGORITHMS", "Network", "Overlap", "Traffic", "nccl", "ordered", "overlapped", "ready_shares", "ring",
    "span_bytes", "star", "weights_multiplied",
]  # fmt: skip

# Within what measured/results/cpu-2core-plan.json records of two shared cores; docs/plan.md has the ranges.
SOCKETS = Bandwidth.gigabytes(1.25)  # half of `rates.tcp`, which is both processes' sending
SUMMED = Bandwidth.gigabytes(10)  # `rates.sum`
_THERE_AND_BACK = 2  # messages one after the other: a part to its owner, and the sum back


@dataclass(frozen=True)
class Network:
    """The network between the workers."""

    bandwidth: Bandwidth  # of each rank's link, each way
    latency_seconds: float  # from sending a small message until it is received
    socket_bandwidth: Bandwidth = SOCKETS  # what one process moves through its sockets each way, however fast the link
    sum_bandwidth: Bandwidth = SUMMED  # of the parts that one process sums


@dataclass(frozen=True)
class Traffic:
    """Bytes, messages and seconds of one step's exchange."""

    span_seconds: tuple[float, ...]  # for each span, how long it holds the busiest link
    busiest_link_bytes: int = 0  # each way, on the link that carries most
    other_link_bytes: int = 0  # each way, on the link that carries least
    total_bytes: int = 0  # sent by all ranks
    messages: int = 0  # sent by the busiest rank, or by the server
    latency_steps: int = 0  # messages that wait for each other
    tail_seconds: float = 0.0  # from the last span's last byte to the end of the step

    @property
    def seconds(self) -> float:
        """Seconds of the whole exchange, if nothing hides it."""
        return sum(self.span_seconds) + self.tail_seconds


Algorithm: TypeAlias = Callable[[Sequence[int], int, Network], Traffic]  # bytes of each span, workers, network


def span_bytes(layout: GradientLayout) -> list[int]:
    """Bytes of each span as it is sent: fp32, padding included.

    >>> span_bytes(GradientLayout.of([(33,)]))
    [256]
    """
    return [4 * (span.stop - span.start) for span in layout.spans]


def buckets_in(spans: Sequence[int], nbytes: int) -> int:
    """The number of buckets of at most `nbytes` that these spans are cut into.

    >>> buckets_in([1, 1025], 1024)
    3
    """
    return sum(-(-span // nbytes) for span in spans)


def ordered(spans: Sequence[int], workers: int, network: Network) -> Traffic:
    """This package's tcp://, and its other transports but for `served`: each rank owns a share of each bucket.

    A rank receives the others' parts of its shares, sums them in rank order, and sends each sum to all. One thread of a
    process does all that, so the times of its sockets and its sums add up.

    Example:
        >>> ordered([1000], 4, Network(Bandwidth.gigabytes(1), latency_seconds=0.0)).busiest_link_bytes
        1500
    """
    if workers == 1:
        return Traffic(span_seconds=(0.0,) * len(spans))
    way, steps = _around(workers), _THERE_AND_BACK + 1
    link = math.ceil(way.share * sum(spans))
    return Traffic(
        busiest_link_bytes=link,
        other_link_bytes=link,
        total_bytes=2 * (workers - 1) * sum(spans),
        messages=way.messages * buckets_in(spans, workers * DEFAULT_SHARE_BYTES),
        latency_steps=steps,
        span_seconds=_summed(spans, network, float(way.share), 1),
        tail_seconds=steps * network.latency_seconds,
    )


def star(spans: Sequence[int], workers: int, network: Network) -> Traffic:
    """tcp:// with `served=True`: all send to a server, which contributes nothing, and receive the sums from it.

    The server receives a bucket while it sends the sum of the one before, so that its link is full both ways.

    Example:
        >>> star([1000], 4, Network(Bandwidth.gigabytes(1), latency_seconds=0.0)).busiest_link_bytes
        4000
    """
    if workers == 1:
        return Traffic(span_seconds=(0.0,) * len(spans))
    steps = 2 * _THERE_AND_BACK
    last_bucket = min(spans[-1] % DEFAULT_BUCKET_BYTES or DEFAULT_BUCKET_BYTES, spans[-1])
    return Traffic(
        busiest_link_bytes=workers * sum(spans),
        other_link_bytes=sum(spans),
        total_bytes=2 * workers * sum(spans),
        messages=workers * buckets_in(spans, DEFAULT_BUCKET_BYTES),
        latency_steps=steps,
        span_seconds=_summed(spans, network, workers, workers),
        tail_seconds=workers * last_bucket / _rate(network) + steps * network.latency_seconds,
    )


def _summed(spans: Sequence[int], network: Network, carried: float, parts: int) -> tuple[float, ...]:
    """Seconds of each span, if a process sends `carried` times and sums `parts` times its bytes."""
    a_byte = carried / _rate(network) + parts / network.sum_bandwidth.bytes_per_second
    return tuple(a_byte * nbytes for nbytes in spans)


def _rate(network: Network) -> float:
    return min(network.bandwidth.bytes_per_second, network.socket_bandwidth.bytes_per_second)


class _Way(NamedTuple):
    """A way to sum a span: the share of its bytes that each link carries each way, and each rank's messages."""

    share: Fraction
    messages: int

    def seconds(self, nbytes: int, network: Network) -> float:
        return float(self.share) * nbytes / network.bandwidth.bytes_per_second


def _around(workers: int) -> _Way:
    messages = 2 * (workers - 1)
    return _Way(Fraction(messages, workers), messages)


def nccl(spans: Sequence[int], workers: int, network: Network) -> Traffic:
    """`process_group=` of a group with NCCL, which moves the shares of `ordered` from GPU to GPU.

    >>> nccl([1000], 4, Network(Bandwidth.gigabytes(1), latency_seconds=0.0)).seconds
    1.5e-06
    """
    way = _around(workers)
    return replace(ordered(spans, workers, network), span_seconds=tuple(way.seconds(n, network) for n in spans))


def ring(spans: Sequence[int], workers: int, network: Network) -> Traffic:
    """A ring, in which each rank sends to the next: W - 1 messages that add up, W - 1 with the sums, for each span.

    >>> ring([1000], 4, Network(Bandwidth.gigabytes(1), latency_seconds=0.0)).busiest_link_bytes
    1500
    """
    way, latency = _around(workers), network.latency_seconds
    if workers == 1:
        return Traffic(span_seconds=(0.0,) * len(spans))
    return Traffic(
        busiest_link_bytes=math.ceil(way.share * sum(spans)),
        other_link_bytes=math.ceil(way.share * sum(spans)),
        total_bytes=2 * (workers - 1) * sum(spans),
        messages=way.messages * len(spans),
        latency_steps=way.messages * len(spans) + 1,
        span_seconds=tuple(way.seconds(n, network) + way.messages * latency for n in spans),
        tail_seconds=latency,
    )


ALGORITHMS: dict[str, Algorithm] = {"ordered": ordered, "star": star, "ring": ring, "nccl": nccl}


@dataclass(frozen=True)
class Overlap:
    """Seconds of an exchange beside the backward of a step's last micro-batch."""

    seconds: float  # of the exchange, if nothing hid it
    exposed_seconds: float  # after the end of backward: what the step waits; on one machine for its engine, too

    @property
    def hidden_seconds(self) -> float:
        """Seconds that are hidden while backward runs."""
        return max(0.0, self.seconds - self.exposed_seconds)


def overlapped(
    shares: Sequence[float], backward_seconds: float, span_seconds: Sequence[float], tail_seconds: float
) -> Overlap:
    """The overlap if each span is sent once it is ready, after these shares of backward, and after the spans before it.

    >>> overlapped([0.5, 1.0], 4.0, [3.0, 1.0], 0.5)  # the second span waits for the first until 5.0
    Overlap(seconds=4.5, exposed_seconds=2.5)
    """
    free = 0.0
    for share, seconds in zip(shares, span_seconds, strict=True):
        free = max(free, share * backward_seconds) + seconds
    whole = sum(span_seconds) + tail_seconds
    return Overlap(whole, min(whole, max(0.0, free + tail_seconds - backward_seconds)))


def ready_shares(layout: GradientLayout, *, tied: bool = False) -> list[float]:
    """The share of backward after which each span is ready, in the order in which spans are sent.

    Weights stand for the time that backward takes with them. A tied LM head is ready at the end, when the embedding's
    part of its gradient is added.

    Example:
        >>> ready_shares(GradientLayout.of({"layers.0.w": (32,), "layers.1.w": (32,), "head": (64,)}))
        [0.5, 0.75, 1.0]
    """
    work = [weights_multiplied(span) for span in layout.spans]
    shares = [min(1.0, done / (sum(work) or 1)) for done in accumulate(work)]
    if tied:
        shares = [1.0 if span.key == "lm_head" else share for span, share in zip(layout.spans, shares, strict=True)]
    return [*shares[:-1], 1.0]


def weights_multiplied(span: Span) -> int:
    """Weights that take part in matrix products; a row of the embedding is only looked up."""
    return sum(slot.size for slot in span.slots if slot.name != "embedding")
