"""What all transports share: buckets, what may leave when, and the search for what is not finite."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transports import LARGE, SMALL

from gradengine.errors import CallerError, WindowError
from gradengine.exchange import local_group
from gradengine.exchange.interface import (
    Exchange,
    NonFiniteValue,
    Outbox,
    Progress,
    buckets_of,
    checked_seconds,
    find_non_finite,
    refuse_bad_arena,
    wire_key,
)


@pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("bucket_bytes", [1000, 1003, 65536, 1 << 30])
def test_buckets_tile_the_spans_in_backward_order(layout, bucket_bytes):
    buckets = buckets_of(layout, bucket_bytes)
    for span in layout.spans:
        own = [bucket for bucket in buckets if bucket.span is span]
        assert [bucket.start for bucket in own[1:]] == [bucket.stop for bucket in own[:-1]]
        assert not own or (own[0].start, own[-1].stop) == (span.start, span.stop)
        assert all(0 < bucket.stop - bucket.start <= bucket_bytes // 4 for bucket in own)
    keys = [bucket.span.key for bucket in buckets]
    assert list(dict.fromkeys(keys)) == [span.key for span in layout.spans if span.stop > span.start]


def test_no_bucket_where_there_is_no_element():
    assert "nothing" not in {bucket.span.key for bucket in buckets_of(SMALL, 64)}


@pytest.mark.parametrize("bucket_bytes", [3, 0, -4])
def test_bucket_without_an_element_is_refused(bucket_bytes):
    with pytest.raises(
        CallerError, match=f"bucket_bytes is out of range: got {bucket_bytes}, expected a whole number >= 4"
    ):
        buckets_of(SMALL, bucket_bytes)


def test_buckets_have_names_of_their_own():
    places = [wire_key(bucket) for bucket in buckets_of(SMALL, 64)]
    assert len(set(places)) == len(places)


@given(st.randoms(use_true_random=False), st.integers(0, 20), st.sampled_from([4, 64, 1000, 1 << 20]))
def test_outbox_lets_each_bucket_go_once_in_order(rng, sent, bucket_bytes):
    buckets = buckets_of(SMALL, bucket_bytes)
    sent = min(sent, len(buckets))
    outbox, left, started = Outbox(buckets, sent), [], set()
    for span in rng.sample(SMALL.spans, len(SMALL.spans)):
        started.add(span.key)
        left += outbox.start(span)
        assert all(buckets[i].span.key in started for i in left)
        following = sent + len(left)
        assert following == len(buckets) or buckets[following].span.key not in started, "held back without need"
    assert left == list(range(sent, len(buckets)))


def test_outbox_refuses_a_second_start():
    outbox = Outbox(buckets_of(SMALL, 64), 0)
    for span in random.Random(0).sample(SMALL.spans, len(SMALL.spans)):
        outbox.start(span)
        with pytest.raises(WindowError, match=f"{span.called} has been started already"):
            outbox.start(span)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("index", [0, 511, 512, 999])
def test_first_non_finite_value_is_found(value, index):
    contribution = np.ones(1000, np.float32)
    contribution[index] = value
    contribution[-1] = np.nan if index < 999 else value
    (found,) = find_non_finite(2, contribution, 5000)
    assert repr(found) == repr(NonFiniteValue(2, 5000 + index, float(value)))


@pytest.mark.parametrize("value", [np.finfo(np.float32).max, -np.finfo(np.float32).max, 1e-45, 0.0])
def test_finite_extremes_are_finite(value):
    assert find_non_finite(0, np.full(2000, value, np.float32), 0) == []


def test_next_step_forgets_the_last():
    progress = Progress(step=3, summed=7, partially_written=True, bad=[NonFiniteValue(0, 0, np.inf)])
    progress.next_step()
    assert progress == Progress(step=4)


def test_sizes_are_integers_of_any_kind_and_times_are_numbers():
    assert type(checked_seconds("timeout", np.float32(2))) is float
    exchanges = local_group(np.int64(2), timeout=np.float32(5), bucket_bytes=np.int64(64))
    assert [(exchange.rank, exchange.world_size) for exchange in exchanges] == [(0, 2), (1, 2)]


@pytest.mark.parametrize(
    "arena",
    [
        np.zeros(SMALL.arena_size + 1, np.float32),
        np.zeros(SMALL.arena_size, np.float64),
        np.zeros((1, SMALL.arena_size), np.float32),
        np.zeros(2 * SMALL.arena_size, np.float32)[::2],
    ],
)
def test_bad_arena_is_refused(arena):
    with pytest.raises(CallerError, match="arena does not fit the layout"):
        refuse_bad_arena(SMALL, arena)


def test_an_exchange_says_what_it_lacks():
    with pytest.raises(TypeError, match="abstract"):
        Exchange()
