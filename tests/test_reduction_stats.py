"""The same stats on all ranks, or an error that says whose is wrong."""

from __future__ import annotations

import math

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradengine.errors import ExchangeError, ProtocolError
from gradengine.reduction.all_reduce import AllReduce
from gradengine.reduction.stats import StepStats, agree


class Gathering:
    """An exchange that is nothing but its gather: the parts of the other ranks are given."""

    def __init__(self, *parts):
        self._parts = parts

    def all_gather(self, data):
        return [data if part is None else part for part in self._parts]


def group_of(*parts):
    group = AllReduce()
    group.exchange = Gathering(*parts)
    return group


def packed(weight=1.0, micro_batches=1, totals=(4.0, 9.0), unused=b"\0\0", settings=None, place=""):
    return tally_of(weight, micro_batches, np.asarray(totals, "<f8").tobytes(), unused, settings or {}, place=place)


def tally_of(*facts, place=""):
    return msgpack.packb([f"tally of {place}", facts])


NONE = np.zeros(2, np.bool_)  # unused
MINE = StepStats(1.0, 1, np.array([4.0, 9.0]), NONE)


def test_weights_and_counts_are_summed_and_rank_0s_squares_are_used():
    squares = [4.0, math.nextafter(9.0, 10)]
    tally = agree(group_of(packed(0.5, 2, squares), None, packed(2.25, 3)), MINE)
    assert (tally.weight, tally.micro_batches) == (3.75, 6)
    assert tally.totals.tolist() == squares


@given(st.lists(st.floats(2.0**-30, 2.0**30), min_size=1, max_size=5))
def test_every_rank_gets_the_same_tally(weights):
    parts = [packed(weight) for weight in weights]
    tallies = []
    for rank, weight in enumerate(weights):
        own = [None if other == rank else part for other, part in enumerate(parts)]
        tallies.append(agree(group_of(*own), StepStats(weight, 1, np.array([4.0, 9.0]), NONE)))
    total = 0.0
    for weight in weights:
        total += weight
    assert {(tally.weight, tally.totals.tobytes()) for tally in tallies} == {(total, MINE.totals.tobytes())}


@pytest.mark.parametrize("value", [9.0, 9.0 * (1 + 1e-6), 9.0 * (1 - 1e-6), math.nan, math.inf])
def test_squares_may_differ_by_their_rounding_and_what_is_not_finite_agrees_with_itself(value):
    mine = MINE if math.isfinite(value) else StepStats(1.0, 1, np.array([4.0, value]), NONE)
    tally = agree(group_of(None, packed(totals=[4.0, value])), mine)
    assert repr(tally.totals.tolist()) == repr(mine.totals.tolist())


@pytest.mark.parametrize("other", [[4.0, 9.001], [4.0, math.nan], [math.inf, 9.0], [0.0, 9.0], [4.0, -9.0]])
def test_other_sums_than_rank_0s_are_an_error(other):
    with pytest.raises(ExchangeError, match="rank 2 holds other sums"):
        agree(group_of(packed(), None, packed(totals=other)), MINE)


IMPOSSIBLE = [
    *((1.0, 1), (1.0, 1, b"", b"", 0), (1.0, 1, bytes(16), {}), (1.0, 1, bytes(16), "no", {})),
    *((1.0, 1, bytes(16), bytes(2), {}, 7), ("heavy", 1, bytes(16), bytes(2), {}), (None, 1, bytes(16), bytes(2), {})),
    *((1.0, math.inf, bytes(16), bytes(2), {}), (1.0, math.nan, bytes(16), bytes(2), {}), (1.0, 1, "x", bytes(2), {})),
    *((1.0, 1, [4.0, 9.0], bytes(2), {}), (1.0, 1, bytes(15), bytes(2), {})),
    (1.0, 1, msgpack.ExtType(5, bytes(16)), bytes(2), {}),
]
UNREADABLE = [
    *(b"", b"\xc1", msgpack.packb(7), msgpack.packb(["tally of ", 7]), msgpack.packb({"weight": 1})),
    *(tally_of(*facts) for facts in IMPOSSIBLE),
    *(
        packed(weight=-1.0),
        packed(weight=0.0),
        packed(weight=math.nan),
        packed(weight=math.inf),
        packed(micro_batches=0),
    ),
    *(packed(totals=[4.0]), packed(totals=[4.0, 9.0, 1.0]), packed(unused=bytes(3)), packed(micro_batches=-1)),
]


@pytest.mark.parametrize("part", UNREADABLE, ids=range(len(UNREADABLE)))
def test_stats_that_cannot_be_read_or_cannot_be(part):
    with pytest.raises(ProtocolError, match="rank 1"):
        agree(group_of(None, part), MINE)


@given(st.binary(max_size=60))
def test_random_stats_are_a_protocol_error(part):
    with pytest.raises(ProtocolError, match="rank 1"):
        agree(group_of(None, part), MINE)


@pytest.mark.parametrize(
    ("place", "settings", "word"),
    [
        ("step 6", {"average": "weighted"}, "step 6"),
        ("step 7", {"average": "per_worker"}, "average"),
        ("step 7", {}, "average"),
    ],
)
def test_a_rank_at_another_step_or_with_other_settings_is_named(place, settings, word):
    """A window that some ranks finished and others dropped: their next tallies would be of two windows."""
    mine = StepStats(1.0, 1, np.array([4.0, 9.0]), NONE, {"average": "weighted"}, "7")
    with pytest.raises(ExchangeError, match=r"rank 1 .*(out of sync|average)"):
        agree(group_of(None, packed(place=place, settings=settings)), mine)


@pytest.mark.parametrize(
    ("mine", "theirs", "both"), [((1, 1), (1, 0), [True, False]), ((0, 1), (1, 0), [False, False])]
)
def test_what_any_rank_used_is_not_unused(mine, theirs, both):
    own = StepStats(1.0, 1, np.array([4.0, 9.0]), np.array(mine, np.bool_))
    for parts in ((None, packed(unused=bytes(theirs))), (packed(unused=bytes(theirs)), None)):
        assert agree(group_of(*parts), own).unused.tolist() == both
