"""What each algorithm sends to sum a gradient set over W workers, how long it takes, and what of it backward hides.

Each rank has one link that carries its bandwidth each way at once, and all links meet in a switch that is never full.
Spans go one after the other. All algorithms move the fp32 arena, and agree on the step by one small gather at the end.
The star alone is limited by its hosts: by the sockets and the sum of rank 0. The others are as fast as the links.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import NamedTuple, TypeAlias

from gradengine.exchange.interface import DEFAULT_BUCKET_BYTES
from gradengine.layout import GradientLayout, Span
from gradengine.tensor_parallel_cost import Bandwidth

__all__ = [
    "ALGORITHMS", "Network", "Overlap", "Traffic", "nccl", "overlapped", "ready_shares", "ring", "span_bytes", "star",
    "weights_multiplied",
]  # fmt: skip

# Within what bench/results/cpu-2core-plan.json records of two shared cores; docs/plan.md has the ranges.
SOCKETS = Bandwidth.gigabytes(2)  # half of `rates.tcp`, which is both processes' sending
SUMMED = Bandwidth.gigabytes(20)  # `rates.check` and `rates.add`
_AGREEMENT = 2  # messages one after the other: what a rank knows goes to the coordinator, what all know comes back


@dataclass(frozen=True)
class Network:
    """What connects the workers."""

    bandwidth: Bandwidth  # of each rank's link, each way
    latency_seconds: float  # from sending a small message to having it
    socket_bandwidth: Bandwidth = SOCKETS  # what one process moves through its sockets each way, however fast the link
    sum_bandwidth: Bandwidth = SUMMED  # what one thread of rank 0 checks for NaN and Inf, or adds to the sum


@dataclass(frozen=True)
class Traffic:
    """Bytes, messages and seconds of one step's exchange."""

    span_seconds: tuple[float, ...]  # for each span, how long it holds the busiest link
    busiest_link_bytes: int = 0  # each way, on the link that carries most
    other_link_bytes: int = 0  # each way, on the link that carries least
    total_bytes: int = 0  # sent by all ranks
    messages: int = 0  # sent by the busiest rank
    latency_steps: int = 0  # messages that wait for each other
    tail_seconds: float = 0.0  # from the last span's last byte to the end of the step

    @property
    def seconds(self) -> float:
        """Of the whole exchange, where nothing hides it."""
        return sum(self.span_seconds) + self.tail_seconds


Algorithm: TypeAlias = Callable[[Sequence[int], int, Network], Traffic]  # bytes of each span, workers, network


def span_bytes(layout: GradientLayout) -> list[int]:
    """Bytes of each span as it travels: fp32, padding included.

    >>> span_bytes(GradientLayout.of([(33,)]))
    [256]
    """
    return [4 * (span.stop - span.start) for span in layout.spans]


def buckets_in(spans: Sequence[int]) -> int:
    """Messages in which one rank sends all spans.

    >>> buckets_in([1, DEFAULT_BUCKET_BYTES + 1])
    3
    """
    return sum(-(-nbytes // DEFAULT_BUCKET_BYTES) for nbytes in spans)


def star(spans: Sequence[int], workers: int, network: Network) -> Traffic:
    """tcp:// of this package: all send to rank 0, which sums in rank order and sends the sums back.

    Rank 0 receives a bucket while it sends the sum of the one before, so that its link is full both ways. Its sums are
    added to that, not hidden by it: it is a reading thread that sums, and nobody reads for it meanwhile.

    Example:
        >>> star([1000], 4, Network(Bandwidth.gigabytes(1), latency_seconds=0.0)).busiest_link_bytes
        3000
    """
    if workers == 1:
        return Traffic(span_seconds=(0.0,) * len(spans))
    others, steps = workers - 1, 2 + _AGREEMENT
    rate = min(network.bandwidth.bytes_per_second, network.socket_bandwidth.bytes_per_second)
    summed = (2 * workers - 1) / network.sum_bandwidth.bytes_per_second  # W are checked, all but the first are added
    last_bucket = min(spans[-1] % DEFAULT_BUCKET_BYTES or DEFAULT_BUCKET_BYTES, spans[-1])
    return Traffic(
        busiest_link_bytes=others * sum(spans),
        other_link_bytes=sum(spans),
        total_bytes=2 * others * sum(spans),
        messages=others * buckets_in(spans),
        latency_steps=steps,
        span_seconds=tuple(others * nbytes / rate + summed * nbytes for nbytes in spans),
        tail_seconds=others * last_bucket / rate + steps * network.latency_seconds,
    )


class _Way(NamedTuple):
    """One way to sum a span: the share of its bytes that the busiest link carries each way, and messages."""

    share: Fraction
    latency_steps: int
    messages: int

    def seconds(self, nbytes: int, network: Network) -> float:
        transfer = float(self.share) * nbytes / network.bandwidth.bytes_per_second
        return transfer + self.latency_steps * network.latency_seconds


def _around(workers: int) -> _Way:
    messages = 2 * (workers - 1)
    return _Way(Fraction(messages, workers), messages, messages)


def ring(spans: Sequence[int], workers: int, network: Network) -> Traffic:
    """Each rank sends to the next: W - 1 messages that add up, W - 1 that hand the sums round, for each span.

    >>> ring([1000], 4, Network(Bandwidth.gigabytes(1), latency_seconds=0.0)).busiest_link_bytes
    1500
    """
    return _fastest(spans, workers, network, [_around(workers)])


def nccl(spans: Sequence[int], workers: int, network: Network) -> Traffic:
    """For each span the faster of a ring and a double binary tree, which is about how NCCL chooses.

    The two trees carry half of the span each (Sanders, Speck and Traeff 2009), 2 ceil(log2 W) messages up and down. A
    rank that is within one and a leaf of the other sends half a span to its parent in both and to its two children in
    one: 4 messages, twice the span.
    """
    halves = min(workers, 4)  # of 2 ranks each is a root and a leaf, of 3 none is within
    tree = _Way(Fraction(halves, 2), 2 * (workers - 1).bit_length(), halves)
    return _fastest(spans, workers, network, [_around(workers), tree])


def _fastest(spans: Sequence[int], workers: int, network: Network, ways: Sequence[_Way]) -> Traffic:
    """Each span goes the faster of these ways; only the links limit it."""
    if workers == 1:
        return Traffic(span_seconds=(0.0,) * len(spans))
    taken = [min((way.seconds(nbytes, network), way) for way in ways) for nbytes in spans]
    return Traffic(
        busiest_link_bytes=math.ceil(sum(way.share * nbytes for (_, way), nbytes in zip(taken, spans, strict=True))),
        other_link_bytes=math.ceil(_around(workers).share * sum(spans)),
        total_bytes=2 * (workers - 1) * sum(spans),
        messages=sum(way.messages for _, way in taken),
        latency_steps=sum(way.latency_steps for _, way in taken) + _AGREEMENT,
        span_seconds=tuple(seconds for seconds, _ in taken),
        tail_seconds=_AGREEMENT * network.latency_seconds,
    )


# Ordered: each rank gets its part of a span from all (alltoall), sums it in rank order and gives it to all (allgather).
# The bytes and messages are a ring's; the order of the sum, and so its bits, are those of the star.
ALGORITHMS: dict[str, Algorithm] = {"star": star, "ring": ring, "ordered": ring, "nccl": nccl}


@dataclass(frozen=True)
class Overlap:
    """Seconds of an exchange beside the backward of a step's last micro-batch."""

    seconds: float  # of the exchange, if nothing hid it
    exposed_seconds: float  # after the end of backward: what the step waits; on one machine for its engine, too

    @property
    def hidden_seconds(self) -> float:
        """While backward runs."""
        return max(0.0, self.seconds - self.exposed_seconds)


def overlapped(
    shares: Sequence[float], backward_seconds: float, span_seconds: Sequence[float], tail_seconds: float
) -> Overlap:
    """Send each span when it is ready, after these shares of backward, and the ones before it have gone.

    >>> overlapped([0.5, 1.0], 4.0, [3.0, 1.0], 0.5)  # the second span waits for the first until 5.0
    Overlap(seconds=4.5, exposed_seconds=2.5)
    """
    free = 0.0
    for share, seconds in zip(shares, span_seconds, strict=True):
        free = max(free, share * backward_seconds) + seconds
    whole = sum(span_seconds) + tail_seconds
    return Overlap(whole, min(whole, max(0.0, free + tail_seconds - backward_seconds)))


def ready_shares(layout: GradientLayout, *, tied: bool = False) -> list[float]:
    """After which share of backward each span is ready, in the order in which spans leave.

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
