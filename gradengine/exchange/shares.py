"""Cuts a layout for an all-reduce: into buckets in backward order, each cut into shares that one rank sums for all.

A share is a run of whole chunks of the partial sums. Chunks depend on the layout alone, so the norm's bits depend
neither on the bucket size nor on the number of ranks nor on who owns what.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

from gradengine.arguments import checked_rank, refuse_other_kind, whole_number
from gradengine.errors import CallerError, WindowError
from gradengine.kernels.arena import chunks_of
from gradengine.layout import GradientLayout, Span
from gradengine.layout.slots import ALIGNMENT

PlacedChunk: TypeAlias = tuple[int, int, int]  # start and stop in the arena, index among the layout's partial sums

MOST_SHARES = 1 << 18  # six tags each: below 2**21, which every MPI library has
_LEAST_SHARE = 1 << 14  # elements, 64 KB: of smaller shares messages cost more than the balance between owners gains


@dataclass(frozen=True)
class Share:
    """A range of the arena that one rank, the owner, sums for all ranks; `start` and `stop` count elements."""

    number: int  # in backward order
    owner: int  # the rank; the world size is the server's
    start: int
    stop: int
    chunks: tuple[PlacedChunk, ...]  # in arena order; between them there is padding only
    spans: int  # how many leading spans, in backward order, must be complete before the share can be sent

    @property
    def size(self) -> int:
        """Elements, padding between chunks included."""
        return self.stop - self.start


def shares_of(
    layout: GradientLayout, world_size: int, bucket_bytes: int, *, owner: int | None = None
) -> tuple[Share, ...]:
    """The layout's shares in backward order.

    Args:
        layout: The layout of the arena that is reduced.
        world_size: Ranks in the group.
        bucket_bytes: Buckets have at most so many bytes, or one chunk.
        owner: The owner of all shares: a rank, or the server, whose number is the world size; None gives each rank
            about an equal share of each bucket.

    Raises:
        CallerError: An argument is out of range, or the buckets are so small that there would be too many shares.

    Example:
        >>> [(share.owner, share.start, share.stop) for share in shares_of(GradientLayout.of([(1 << 19,)]), 2, 1 << 21)]
        [(0, 0, 262144), (1, 262144, 524288)]
    """
    refuse_other_kind("layout", layout, GradientLayout)
    _, ranks = checked_rank(0, world_size)
    hub = whole_number("owner", 0 if owner is None else owner, 0, ranks)
    size = whole_number("bucket_bytes", bucket_bytes, 4) // 4
    shares: list[Share] = []
    for first, (spans, bucket) in enumerate(_buckets(layout, size)):
        parts = _cut(bucket, ranks if owner is None else 1)
        # Another rank begins each bucket: small buckets, and the largest share of each, go to all ranks in turn.
        for k, part in enumerate(parts, start=first):
            rank = k % ranks if owner is None else hub
            shares.append(Share(len(shares), rank, part[0][0], part[-1][1], tuple(part), spans))
    if len(shares) > MOST_SHARES:
        what = f"buckets of {bucket_bytes} bytes over all ranks cut this layout into too many shares"
        raise CallerError(what, got=len(shares), expected=f"at most {MOST_SHARES}", do="use larger buckets")
    return tuple(shares)


def rounds_of(shares: Sequence[Share]) -> list[list[Share]]:
    """Shares that may be summed in one go: in each round side by side, ready together, and of other owners each.

    Example:
        >>> [len(one) for one in rounds_of(shares_of(GradientLayout.of([(1 << 20,)]), 2, 1 << 21))]
        [2, 2]
    """
    rounds: list[list[Share]] = []
    for share in shares:
        last = rounds[-1] if rounds else []
        if not last or last[0].spans != share.spans or share.owner in [each.owner for each in last]:
            rounds.append([])
        rounds[-1].append(share)
    return rounds


@final
class ReadyShares:
    """The shares of a step that can be sent, in the same order on all ranks, in whatever order spans complete.

    Attributes:
        started: The keys of the spans that are complete.
        count: How many leading shares can be sent.
    """

    def __init__(self, layout: GradientLayout, shares: Sequence[Share]) -> None:
        self._spans, self._shares = layout.spans, shares
        self.started: set[int | str] = set()
        self._leading = self.count = 0

    def restart(self) -> None:
        """Begin another step, in which no span is complete."""
        self.started.clear()
        self._leading = self.count = 0

    def refuse_started(self, spans: Sequence[Span]) -> Sequence[Span]:
        """Return these spans; raises `WindowError` if one of them is complete, or given twice."""
        keys = [getattr(span, "key", None) for span in spans]
        for span in spans:
            refuse_other_kind("span", span, Span)
            if span.key in self.started or keys.count(span.key) > 1:
                raise WindowError(f"{span.called} has been started already", do="start each span once in a step")
        return spans

    def complete(self, span: Span) -> Sequence[Share]:
        """Note that a span is complete, and return the shares that can now be sent."""
        self.started.add(span.key)
        while self._leading < len(self._spans) and self._spans[self._leading].key in self.started:
            self._leading += 1
        first = self.count
        while self.count < len(self._shares) and self._shares[self.count].spans <= self._leading:
            self.count += 1
        return self._shares[first : self.count]


def _buckets(layout: GradientLayout, size: int) -> Iterator[tuple[int, list[PlacedChunk]]]:
    """The chunks of each bucket in arena order, and how many leading spans must be complete for it.

    A bucket is a part of one span, or several small spans side by side.
    """
    bucket: list[PlacedChunk] = []
    start = stop = spans = 0
    for number, chunks in _chunks_of_spans(layout):
        first, last = chunks[0][0], chunks[-1][1]
        is_beside = 0 <= first - stop < ALIGNMENT or 0 <= start - last < ALIGNMENT  # only padding is between them
        if bucket and is_beside and max(stop, last) - min(start, first) <= size:
            bucket += chunks
            start, stop, spans = min(start, first), max(stop, last), number
            continue
        if bucket:
            yield spans, sorted(bucket)
        *full, bucket = _split(chunks, size)
        for part in full:
            yield number, part
        start, stop, spans = bucket[0][0], last, number
    if bucket:
        yield spans, sorted(bucket)


def _chunks_of_spans(layout: GradientLayout) -> Iterator[tuple[int, list[PlacedChunk]]]:
    """Each span that has elements: its place in backward order, counted from 1, and its chunks in arena order."""
    counts = [len(chunks_of(slot.size)) for slot in layout.slots]
    first = dict(zip([slot.name for slot in layout.slots], itertools.accumulate(counts, initial=0), strict=False))
    for number, span in enumerate(layout.spans, start=1):
        chunks = [
            (slot.offset + start, slot.offset + stop, index)
            for slot in span.slots
            for index, start, stop in chunks_of(slot.size, first[slot.name])
        ]
        if chunks:
            yield number, chunks


def _split(chunks: Sequence[PlacedChunk], size: int) -> list[list[PlacedChunk]]:
    """Runs of at most `size` elements of the arena, or of one chunk."""
    runs = [[chunks[0]]]
    for chunk in chunks[1:]:
        if chunk[1] - runs[-1][0][0] > size:
            runs.append([])
        runs[-1].append(chunk)
    return runs


def _cut(bucket: Sequence[PlacedChunk], most: int) -> list[list[PlacedChunk]]:
    """At most so many runs of about equal size: each chunk goes to the run in which its middle is."""
    start, stop = bucket[0][0], bucket[-1][1]
    count = max(1, min(most, (stop - start) // _LEAST_SHARE))

    def run_of(chunk: PlacedChunk) -> int:
        return (chunk[0] + chunk[1] - 2 * start) * count // (2 * (stop - start))

    runs = [[bucket[0]]]
    for chunk in bucket[1:]:
        is_large = min(chunk[0] - runs[-1][0][0], stop - chunk[0]) >= _LEAST_SHARE
        if is_large and run_of(chunk) > run_of(runs[-1][0]):
            runs.append([])
        runs[-1].append(chunk)
    return runs
