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

    def gather(self, data):
        return [data if part is None else part for part in self._parts]


def group_of(*parts):
    group = AllReduce()
    group.exchange = Gathering(*parts)
    return group


def packed(weight=1.0, micro_batches=1, totals=(4.0, 9.0), unused=b"\0\0", settings=None, place=""):
    return tally_of(weight, micro_batches, np.asarray(totals, "<f8").tobytes(), unused, settings or {}, place=place)


def tally_of(*facts, place=""):
    return msgpack.packb([f"tally of {place}", facts])


UNREADABLE = r"(rank 1's stats|what rank 1 tells) (cannot be|are invalid|has no name|has too many|is nested)"
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


@pytest.mark.parametrize("other", [[4.0, 9.0 * (1 + 1e-6)], [4.0 * (1 - 1e-6), 9.0]])
def test_squares_may_differ_by_their_rounding(other):
    assert agree(group_of(None, packed(totals=other)), MINE).totals.tolist() == [4.0, 9.0]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_squares_that_are_not_finite_agree_with_themselves(value):
    mine = StepStats(1.0, 1, np.array([4.0, value]), NONE)
    tally = agree(group_of(None, packed(totals=[4.0, value])), mine)
    assert repr(tally.totals.tolist()) == repr([4.0, value])


@pytest.mark.parametrize("other", [[4.0, 9.001], [4.0, math.nan], [math.inf, 9.0], [0.0, 9.0], [4.0, -9.0]])
def test_other_sums_than_rank_0s_are_an_error(other):
    with pytest.raises(ExchangeError, match=r"rank 2 holds other sums than rank 0.*restart from a checkpoint"):
        agree(group_of(packed(), None, packed(totals=other)), MINE)


@pytest.mark.parametrize(
    "part",
    [
        b"",
        b"\xc1",
        msgpack.packb(7),
        msgpack.packb(["tally of ", 7]),
        tally_of(1.0, 1),
        tally_of(1.0, 1, b"", b"", 0),
        tally_of(1.0, 1, bytes(16), {}),
        tally_of(1.0, 1, bytes(16), "no", {}),
        msgpack.packb({"weight": 1}),
        tally_of(1.0, 1, bytes(16), bytes(2), {}, 7),
        tally_of("heavy", 1, bytes(16), bytes(2), {}),
        tally_of(None, 1, bytes(16), bytes(2), {}),
        tally_of(1.0, math.inf, bytes(16), bytes(2), {}),
        tally_of(1.0, math.nan, bytes(16), bytes(2), {}),
        tally_of(1.0, 1, "text", bytes(2), {}),
        tally_of(1.0, 1, [4.0, 9.0], bytes(2), {}),
        tally_of(1.0, 1, bytes(15), bytes(2), {}),
        tally_of(1.0, 1, msgpack.ExtType(5, bytes(16)), bytes(2), {}),
    ],
)
def test_tally_that_cannot_be_read(part):
    with pytest.raises(ProtocolError, match=UNREADABLE):
        agree(group_of(None, part), MINE)


@given(st.binary(max_size=60))
def test_random_tally_is_a_protocol_error(part):
    with pytest.raises(ProtocolError, match=UNREADABLE):
        agree(group_of(None, part), MINE)


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (packed(weight=-1.0), "weight -1.0"),
        (packed(weight=math.nan, micro_batches=0), "weight nan"),
        (packed(weight=math.inf), "weight inf"),
        (packed(micro_batches=0), "0 micro-batches"),
        (packed(totals=[4.0]), "1 components, .* expected .* 2 components"),
        (packed(totals=[4.0, 9.0, 1.0]), "3 components"),
        (packed(unused=bytes(3)), "2 components, 3 flags"),
    ],
)
def test_tally_that_cannot_be(part, says):
    with pytest.raises(ProtocolError, match=f"rank 1's stats are invalid: .*{says}"):
        agree(group_of(None, part), MINE)


@pytest.mark.parametrize("weight", [0.0, math.nan])
def test_weights_that_lay_on_a_device_may_be_none(weight):
    """Every rank learns of them, and refuses the step."""
    assert repr(agree(group_of(None, packed(weight=weight)), MINE).weight) == repr(MINE.weight + weight)


def test_a_rank_at_another_step_is_named():
    """A window that some ranks finished and others dropped: their next tallies would be of two windows."""
    mine = StepStats(1.0, 1, np.array([4.0, 9.0]), NONE, place="step 7")
    message = "rank 1 is out of sync with rank 0: got its tally of step 6, expected its tally of step 7; .*checkpoint"
    with pytest.raises(ExchangeError, match=message):
        agree(group_of(None, packed(place="step 6")), mine)


@pytest.mark.parametrize(("theirs", "says"), [({"average": "per_worker"}, "per_worker"), ({}, "got nothing")])
def test_settings_that_differ_are_named(theirs, says):
    mine = StepStats(1.0, 1, np.array([4.0]), NONE[:1], {"average": "weighted"})
    other, own = (packed(totals=[4.0], unused=b"\0", settings=each) for each in (theirs, mine.settings))
    with pytest.raises(
        ExchangeError, match=rf"rank 1 has another average than rank 0: got .*{says.split()[-1]}.*weighted"
    ):
        agree(group_of(own, other), mine)


@pytest.mark.parametrize(
    ("mine", "theirs", "both"), [((1, 1), (1, 0), [True, False]), ((0, 1), (1, 0), [False, False])]
)
def test_what_any_rank_used_is_not_unused(mine, theirs, both):
    own = StepStats(1.0, 1, np.array([4.0, 9.0]), np.array(mine, np.bool_))
    for parts in ((None, packed(unused=bytes(theirs))), (packed(unused=bytes(theirs)), None)):
        assert agree(group_of(*parts), own).unused.tolist() == both
