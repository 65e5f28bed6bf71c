"""How a layout is cut: every chunk once, in backward order, evenly, and the same chunks whatever the cut."""

import itertools
import math
import re
from collections import Counter

import msgpack
import pytest
import strategies as draw
from hypothesis import example, given
from hypothesis import strategies as st

from gradengine.errors import CallerError
from gradengine.exchange import shares
from gradengine.exchange.shares import ReadyShares, rounds_of, shares_of
from gradengine.kernels.arena import CHUNK, PartialSums, chunks_of
from gradengine.kernels.host_device import HostDevice
from gradengine.layout import GradientLayout
from gradengine.layout.slots import ALIGNMENT

LEAST = 1 << 14  # elements of a share, where a bucket has more than one
SIZES = st.one_of(st.sampled_from(draw.SMALL_SIZES), st.integers(0, 1 << 21))
layouts = st.one_of(
    draw.layouts,
    st.dictionaries(draw.names(), st.tuples(SIZES), min_size=1, max_size=12).map(GradientLayout.of),
)
worlds = st.integers(1, 9)
buckets = st.one_of(st.sampled_from([4, 64, 1000, 1 << 20, 1 << 22, 1 << 23, 1 << 40]), st.integers(4, 1 << 24))
TINY = GradientLayout.of({f"layers.{k // 40}.t{k % 40}": (k % 4,) for k in range(5000)})
EMPTY = GradientLayout.of({f"layers.{k}.none": (0, k) for k in range(9)})
HUGE = GradientLayout.of({"one": (7,), "huge": (1 << 16, 1 << 14), "another": (0,)})
EVEN = GradientLayout.of({f"layers.{k}.w": (LEAST,) for k in range(8)})
TRANSFORMER = GradientLayout.of(
    {
        "embedding": (32000, 1024),
        **{f"layers.{k}.{i}": (rows, 1024) for k in range(8) for i, rows in enumerate((1024, 512, 2816, 2816, 1))},
        "head": (32000, 1024),
    }
)


def placed_chunks(layout):
    """Every chunk of every component by definition: its place, and its number among the partial sums."""
    sums = PartialSums([slot.size for slot in layout.slots], HostDevice().order())
    return {
        (slot.offset + start, slot.offset + stop, sums.first[position] + k)
        for position, slot in enumerate(layout.slots)
        for k, start, stop in chunks_of(slot.size)
    }


@given(layouts, worlds, buckets, st.booleans())
@example(TINY, 5, 1 << 23, False)
@example(TINY, 3, 4, False)
@example(EMPTY, 4, 1 << 23, False)
@example(HUGE, 7, 1 << 23, False)
@example(HUGE, 2, 1 << 40, True)
def test_a_cut(layout, world_size, bucket_bytes, is_star):
    cut = shares_of(layout, world_size, bucket_bytes, owner=world_size - 1 if is_star else None)
    assert [share.number for share in cut] == list(range(len(cut)))
    assert {share.owner for share in cut} <= set([world_size - 1] if is_star else range(world_size))

    chunks = [chunk for share in cut for chunk in share.chunks]
    assert len(chunks) == len(set(chunks))
    assert set(chunks) == placed_chunks(layout), "each in one share, whatever the cut"

    for share in cut:
        assert (share.chunks[0][0], share.chunks[-1][1]) == (share.start, share.stop)
        assert all(0 <= b[0] - a[1] < ALIGNMENT for a, b in itertools.pairwise(share.chunks)), "one range of the arena"
        assert share.size <= bucket_bytes // 4 or len(share.chunks) == 1
    places = sorted((share.start, share.stop) for share in cut)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(places))
    assert not places or 0 <= places[0][0] < places[-1][1] <= layout.arena_size

    assert [share.spans for share in cut] == sorted(share.spans for share in cut), "in backward order"
    for needed, bucket in itertools.groupby(cut, lambda share: share.spans):
        starts = [start for share in bucket for start, _, _ in share.chunks]
        *_, last = complete = layout.spans[:needed]
        assert all(any(span.start <= start < span.stop for span in complete) for start in starts)
        assert any(last.start <= start < last.stop for start in starts), "it waits for a span it has nothing of"


@pytest.mark.parametrize("bucket_bytes", [1 << 20, 1 << 22, 1 << 23])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("layout", [TRANSFORMER, HUGE], ids=["transformer", "huge"])
def test_in_a_mesh_all_ranks_own_about_equally_much(layout, world_size, bucket_bytes):
    owned = Counter()
    for share in shares_of(layout, world_size, bucket_bytes):
        owned[share.owner] += share.size
    assert max(owned.values()) <= 1.15 * layout.arena_size / world_size


@given(layouts, worlds)
def test_where_a_bucket_has_several_shares_none_is_small(layout, world_size):
    mesh, star = (shares_of(layout, world_size, 1 << 22, owner=owner) for owner in (None, 0))
    whole = {(share.start, share.stop) for share in star}  # a star's shares are the buckets
    assert all(share.size >= LEAST for share in mesh if (share.start, share.stop) not in whole)


def test_small_buckets_go_to_all_ranks_in_turn_and_small_spans_side_by_side_share_one():
    assert [share.owner for share in shares_of(EVEN, 4, 4 * LEAST)] == [0, 1, 2, 3] * 2
    assert [share.spans for share in shares_of(EVEN, 1, 16 * LEAST)] == [4, 8]
    assert len(shares_of(TINY, 5, 1 << 23)) <= 5
    assert shares_of(EMPTY, 3, 1 << 23) == ()


@pytest.mark.parametrize(("layout", "ranks", "bucket_bytes"), [(EVEN, 4, 4 * LEAST), (TRANSFORMER, 3, 1 << 20)])
def test_rounds_have_each_owner_once_and_are_ready_together(layout, ranks, bucket_bytes):
    shares = shares_of(layout, ranks, bucket_bytes)
    rounds = rounds_of(shares)
    assert [share for each in rounds for share in each] == [*shares]
    for each in rounds:
        assert len({share.owner for share in each}) == len(each)
        assert len({share.spans for share in each}) == 1


def test_more_shares_than_there_are_tags_are_refused(monkeypatch):
    assert len(shares_of(GradientLayout.of({"w": (8 * CHUNK,)}), 2, 4)) == 8, "one for each chunk, not each element"
    monkeypatch.setattr(shares, "MOST_SHARES", 7)
    with pytest.raises(CallerError, match="got 8, expected at most 7"):
        shares_of(GradientLayout.of({"w": (8 * CHUNK,)}), 2, 4)


@given(st.data(), draw.uneven_layouts(CHUNK), st.sampled_from([4, 300, 1 << 22]))
def test_all_ranks_send_in_one_order_whatever_the_order_of_spans(data, layout, bucket_bytes):
    cut = shares_of(layout, 2, bucket_bytes)
    ready, sent, complete = ReadyShares(layout, cut), [], set()
    assert not ready.started
    for span in data.draw(st.permutations(layout.spans)):
        sent += ready.complete(span)
        complete.add(span.key)
        leading = [*itertools.takewhile(lambda span: span.key in complete, layout.spans)]
        assert sent == [share for share in cut if share.spans <= len(leading)]
        assert (ready.count, len(ready.started)) == (len(sent), len(complete))
    assert sent == [*cut]
    ready.restart()
    assert (ready.count, ready.started) == (0, set())


# ---- the page ----


def spans_by_the_page(rows):
    """Each span's chunks by its key, by docs/specs/wire.md from the rows of a layout's table."""
    stems, blocks, at, spans = {}, {}, 0, {}
    for name, _, block, *_ in rows:
        if block is not None:
            number = re.search("[0-9]+$", re.split("[._]", block)[-1])[0]
            stem = stems.setdefault(block.removesuffix(number), len(stems))
            blocks.setdefault((stem, int(number)), []).append(name)
    members = {place: blocks[key] for place, key in enumerate(sorted(blocks))}
    members |= {name: [name] for name, _, block, *_ in rows if block is None}
    sizes = {name: math.prod(shape) for name, shape, *_ in rows}
    for key, names in members.items():
        spans[key] = []
        for name in names:
            stop = at + sizes[name]
            spans[key] += [(start, min(start + 262144, stop)) for start in range(at, stop, 262144)]
            at = -(-stop // 32) * 32
    return spans


def buckets_by_the_page(spans, most):
    """The chunks of each bucket, of spans in backward order."""
    cut = []
    for chunks in spans:
        if cut:
            both = sorted(cut[-1] + chunks)
            gap = max(chunks[0][0] - cut[-1][-1][1], cut[-1][0][0] - chunks[-1][1])
            if gap < 32 and both[-1][1] - both[0][0] <= most:
                cut[-1] = both
                continue
        cut.append([chunks[0]])
        for chunk in chunks[1:]:
            if chunk[1] - cut[-1][0][0] > most:
                cut.append([])
            cut[-1].append(chunk)
    return cut


def shares_by_the_page(chunks, world_size):
    """The chunks of each share of a bucket, without a server."""
    start, stop = chunks[0][0], chunks[-1][1]
    count, cut = max(1, min(world_size, (stop - start) // 16384)), [[chunks[0]]]
    for chunk in chunks[1:]:
        first = cut[-1][0]
        place, before = ((sum(each) - 2 * start) * count // (2 * (stop - start)) for each in (chunk, first))
        if place > before and min(chunk[0] - first[0], stop - chunk[0]) >= 16384:
            cut.append([])
        cut[-1].append(chunk)
    return cut


@given(layouts, worlds, buckets, st.booleans())
@example(TINY, 5, 1 << 23, False)
@example(TRANSFORMER, 3, 1 << 22, False)
@example(HUGE, 7, 1 << 23, True)
def test_docs_wire_md_says_how_a_layout_is_cut(layout, world_size, bucket_bytes, is_served):
    """Without any code of ours."""
    rows, order = msgpack.unpackb(layout.table())
    size = bucket_bytes if is_served else bucket_bytes * world_size
    cut = buckets_by_the_page(filter(None, map(spans_by_the_page(rows).get, order)), size // 4)
    told = [
        (world_size if is_served else (b + k) % world_size, chunks)
        for b, bucket in enumerate(cut)
        for k, chunks in enumerate([bucket] if is_served else shares_by_the_page(bucket, world_size))
    ]
    found = shares_of(layout, world_size, size, owner=world_size if is_served else None)
    assert told == [(share.owner, [chunk[:2] for chunk in share.chunks]) for share in found]
    assert [(chunks[0][0], chunks[-1][1]) for _, chunks in told] == [(share.start, share.stop) for share in found]
