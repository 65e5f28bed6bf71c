"""Cut a layout for an all-reduce, into buckets in backward order, each cut into shares that one rank sums for all.

A share is a run of whole chunks of the partial sums. Chunks depend on the layout alone. So the bits of the norm do not
depend on the bucket size, the number of ranks or the owners.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias, final

from gradengine.errors import CallerError
from gradengine.kernels.arena import chunks_of
from gradengine.layout import GradientLayout, Span
from gradengine.layout.slots import ALIGNMENT

PlacedChunk: TypeAlias = tuple[int, int, int]  # start and stop in the arena, and index among the layout's partial sums

MOST_BUCKET_BYTES = 1 << 30  # A share of this size and one more chunk fits a message of less than 4 GiB.
MOST_SHARES = 1 << 18  # Each share has six tags, and every MPI library allows tags below 2**21.
_LEAST_SHARE = 1 << 14  # elements (64 KB); messages of smaller shares cost more time than their balance saves


class Share(NamedTuple):
    """A range of the arena that one rank, the owner, sums for all ranks. `start` and `stop` count elements."""

    number: int  # position in backward order
    owner: int  # rank, or the world size for the server
    start: int
    stop: int
    chunks: tuple[PlacedChunk, ...]  # chunks in arena order, with only padding between them
    spans: int  # number of leading spans, in backward order, that must be complete before the share can be sent

    @property
    def size(self) -> int:
        """The number of elements, with the padding between chunks."""
        return self.stop - self.start


def shares_of(
    layout: GradientLayout, world_size: int, bucket_bytes: int, *, owner: int | None = None
) -> tuple[Share, ...]:
    """Return the layout's shares in backward order.

    Args:
        layout: The layout of the arena that is reduced.
        world_size: Ranks in the group.
        bucket_bytes: The most bytes of a bucket. A bucket of one chunk may have more.
        owner: The owner of all shares, a rank or the server, whose number is the world size. None gives each rank
            about an equal share of each bucket.

    Raises:
        CallerError: The buckets are so small that there would be too many shares.

    Example:
        >>> [(share.owner, share.start, share.stop) for share in shares_of(GradientLayout.of([(1 << 19,)]), 2, 1 << 21)]
        [(0, 0, 262144), (1, 262144, 524288)]
    """
    shares: list[Share] = []
    for first, (spans, bucket) in enumerate(_buckets(layout, bucket_bytes // 4)):
        parts = _cut(bucket, world_size if owner is None else 1)
        # The first owner changes with each bucket, so that all ranks own small buckets and the largest shares in turn.
        for k, part in enumerate(parts, start=first):
            rank = k % world_size if owner is None else owner
            shares.append(Share(len(shares), rank, part[0][0], part[-1][1], tuple(part), spans))
    if len(shares) > MOST_SHARES:
        what = f"buckets of {bucket_bytes} bytes over all ranks cut this layout into too many shares"
        raise CallerError(what, got=len(shares), expected=f"at most {MOST_SHARES}", do="use larger buckets")
    return tuple(shares)


def rounds_of(shares: Sequence[Share]) -> list[list[Share]]:
    """Return rounds of shares that may be summed in one go.

    The shares of a round are consecutive, are ready together, and have different owners.

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
    """The shares of a step that can be sent, in the same order on all ranks for any order of spans.

    Attributes:
        started: The keys of the spans that are complete.
        count: The number of leading shares that can be sent.
    """

    def __init__(self, layout: GradientLayout, shares: Sequence[Share]) -> None:
        self._spans, self._shares = layout.spans, shares
        self.started: set[int | str] = set()
        self._leading = self.count = 0

    def restart(self) -> None:
        """Begin the next step, in which no span is complete yet."""
        self.started.clear()
        self._leading = self.count = 0

    def complete(self, span: Span) -> Sequence[Share]:
        """Record that a span is complete, and return the shares that can now be sent."""
        self.started.add(span.key)
        while self._leading < len(self._spans) and self._spans[self._leading].key in self.started:
            self._leading += 1
        first = self.count
        while self.count < len(self._shares) and self._shares[self.count].spans <= self._leading:
            self.count += 1
        return self._shares[first : self.count]


def _buckets(layout: GradientLayout, size: int) -> list[tuple[int, list[PlacedChunk]]]:
    """Return for each bucket the number of leading spans that it needs, and its chunks in arena order.

    A bucket is a part of one span, or several small adjacent spans.
    """
    buckets: list[tuple[int, list[PlacedChunk]]] = []
    for number, chunks in _chunks_of_spans(layout):
        if buckets:
            first, second = sorted((buckets[-1][1], chunks))
            is_beside = second[0][0] - first[-1][1] < ALIGNMENT  # Only padding is between them.
            if is_beside and second[-1][1] - first[0][0] <= size:
                buckets[-1] = number, first + second
                continue
        runs = _runs(chunks, lambda first, chunk: chunk[1] - first[0] > size)
        buckets += [(number, run) for run in runs]
    return buckets


def _chunks_of_spans(layout: GradientLayout) -> Iterator[tuple[int, list[PlacedChunk]]]:
    """Yield the position in backward order, from 1, and the chunks in arena order of each span with elements."""
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


def _runs(chunks: Sequence[PlacedChunk], ends: Callable[[PlacedChunk, PlacedChunk], bool]) -> list[list[PlacedChunk]]:
    """Cut chunks into runs. `ends(first, chunk)` returns whether the run from `first` on ends before `chunk`."""
    runs = [[chunks[0]]]
    for chunk in chunks[1:]:
        if ends(runs[-1][0], chunk):
            runs.append([])
        runs[-1].append(chunk)
    return runs


def _cut(bucket: Sequence[PlacedChunk], most: int) -> list[list[PlacedChunk]]:
    """Return at most `most` runs of about equal size. Each chunk belongs to the run that contains its middle."""
    start, stop = bucket[0][0], bucket[-1][1]
    count = max(1, min(most, (stop - start) // _LEAST_SHARE))

    def ends(first: PlacedChunk, chunk: PlacedChunk) -> bool:
        last, run = ((sum(each[:2]) - 2 * start) * count // (2 * (stop - start)) for each in (first, chunk))
        return run > last and min(chunk[0] - first[0], stop - chunk[0]) >= _LEAST_SHARE

    return _runs(bucket, ends)
