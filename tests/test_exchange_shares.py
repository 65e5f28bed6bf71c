"""How a layout is cut: every chunk once, in backward order, evenly, and the same chunks whatever the cut."""

import itertools
from collections import Counter

import pytest
import strategies as draw
from hypothesis import example, given
from hypothesis import strategies as st

from gradengine.errors import CallerError, WindowError
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


@pytest.mark.parametrize("bucket_bytes", [3, 0, -4, "8", None, 4.5])
def test_a_bucket_without_an_element_or_an_owner_outside_of_the_group_is_refused(bucket_bytes):
    with pytest.raises(CallerError, match="bucket_bytes"):
        shares_of(EVEN, 2, bucket_bytes)
    with pytest.raises(CallerError, match="owner"):
        shares_of(EVEN, 2, 1 << 22, owner=3)


def test_more_shares_than_there_are_tags_are_refused(monkeypatch):
    assert len(shares_of(GradientLayout.of({"w": (8 * CHUNK,)}), 2, 4)) == 8, "one for each chunk, not each element"
    monkeypatch.setattr(shares, "MOST_SHARES", 7)
    with pytest.raises(CallerError, match="got 8, expected at most 7"):
        shares_of(GradientLayout.of({"w": (8 * CHUNK,)}), 2, 4)


@given(st.data(), draw.uneven_layouts(CHUNK), st.sampled_from([4, 300, 1 << 22]))
def test_all_ranks_send_in_one_order_whatever_the_order_of_spans(data, layout, bucket_bytes):
    cut = shares_of(layout, 2, bucket_bytes)
    ready, sent, complete = ReadyShares(layout, cut), [], set()
    assert ready.is_untouched
    for span in data.draw(st.permutations(layout.spans)):
        sent += ready.complete(span)
        complete.add(span.key)
        leading = [*itertools.takewhile(lambda span: span.key in complete, layout.spans)]
        assert sent == [share for share in cut if share.spans <= len(leading)]
        assert (ready.count, ready.is_untouched) == (len(sent), False)
    assert sent == [*cut]
    with pytest.raises(WindowError, match="started already"):
        ready.complete(layout.spans[0])
    ready.restart()
    assert (ready.count, ready.is_untouched) == (0, True)
