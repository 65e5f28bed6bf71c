"""The same stats on all ranks, or an error that says whose is wrong."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradengine.errors import ExchangeError, ProtocolError
from gradengine.exchange.gather import packed
from gradengine.reduction.stats import StepStats, agree, stats_of_all

TOTALS = np.array([4.0, 9.0])
NONE = np.zeros(2, np.bool_)  # unused
MINE = StepStats(1.0, 1, TOTALS, NONE)
TERMS = {"loss_scale": "2.0", "max_norm": "(1.0,)"}
PLACE = 7, TERMS


def group_of(*parts):
    """An exchange that is nothing but its gather: the parts of the other ranks are given, None for the own one."""
    return SimpleNamespace(all_gather=lambda data: [data if part is None else part for part in parts])


def told(weight=1.0, count=1, unused=b"\0\0", step=7, totals=b"", **more):
    last = [{"stop": False, "dropped": 0, "square": None, **more}[name] for name in ("stop", "dropped", "square")]
    terms = {name: term for name, term in more.items() if name in TERMS}
    facts = [{**TERMS, "window": "", **terms}, weight, count, unused, totals, *last]
    return packed(f"stats of step {step}", facts)


@given(st.lists(st.floats(2.0**-30, 2.0**30), min_size=1, max_size=5))
def test_weights_and_counts_are_summed_in_rank_order_the_same_on_every_rank(weights):
    parts = [told(weight, rank + 1) for rank, weight in enumerate(weights)]
    found = []
    for rank, weight in enumerate(weights):
        own = [None if other == rank else part for other, part in enumerate(parts)]
        found.append(agree(group_of(*own), StepStats(weight, rank + 1, TOTALS, NONE), *PLACE))
    total = 0.0
    for weight in weights:
        total += weight
    counts = {(each.weight, each.micro_batches, each.workers) for each in found}
    assert counts == {(total, sum(range(1, len(weights) + 1)), len(weights))}
    assert all(each.totals is TOTALS for each in found), "squared sums are everybody's own"


IMPOSSIBLE = [*(told(weight) for weight in (-1.0, 0.0, math.nan, math.inf)), told(count=0), told(count=-1)]
IMPOSSIBLE += [told(0.0, 1), told(1.0, 0), told(1, 1), told(count=True), told(unused="00"), told(stop=1)]
IMPOSSIBLE += [packed("stats of step 7", ["terms", 1.0, 1, bytes(2), b"", False, 0, None])]
SHORT = packed("stats of step 7", [{**TERMS, "window": ""}, 1.0, 1, bytes(2), b"", False, 0])
IMPOSSIBLE += [told(square=1), told(square=b""), SHORT]
IMPOSSIBLE += [told(0.0, 1, dropped=2), told(0.0, 1, dropped=-1), told(1.0, 1, dropped=1), told(dropped=0.0)]
IMPOSSIBLE += [told(unused=bytes(3)), told(totals=bytes(16)), packed("stats of step 7", None)]


@pytest.mark.parametrize("part", IMPOSSIBLE, ids=range(len(IMPOSSIBLE)))
def test_stats_that_cannot_be(part):
    with pytest.raises(ProtocolError, match="rank 1"):
        agree(group_of(None, part), MINE, *PLACE)


@pytest.mark.parametrize("part", [told(step=6), packed("finding in step 7", None)])
def test_a_rank_at_another_step_or_in_another_call_is_named_on_all_ranks(part):
    """A window that some ranks finished and others dropped: their next stats would be of two windows."""
    with pytest.raises(ExchangeError, match="rank 1 is out of sync with rank 0"):
        agree(group_of(None, part, told()), MINE, *PLACE)
    with pytest.raises(ExchangeError, match="rank 1 is out of sync with rank 0"):
        agree(group_of(told(), None, told()), MINE, 6, TERMS)


@given(st.binary(max_size=60))
def test_random_bytes_are_an_exchange_error(part):
    with pytest.raises(ExchangeError, match="rank 1"):
        agree(group_of(None, part), MINE, *PLACE)


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("other", ["", "4.0", 2.0, None])
def test_other_terms_are_named(name, other):
    with pytest.raises(
        ExchangeError, match=rf"rank 1 has a different {name} than rank 0: .*expected {re.escape(TERMS[name])}"
    ):
        agree(group_of(None, told(**{name: other})), MINE, *PLACE)
    without = {key: value for key, value in TERMS.items() if key != name}
    lacking = packed("stats of step 7", [{**without, "window": ""}, 1.0, 1, bytes(2), b"", False, 0, None])
    with pytest.raises(ExchangeError, match=f"rank 1 has a different {name} than rank 0"):
        agree(group_of(None, lacking), MINE, *PLACE)


def test_parts_of_a_model_tell_their_squared_sums_and_what_their_windows_were():
    sent = []
    keeps = SimpleNamespace(all_gather=lambda data: sent.append(data) or [data])
    for window in ("2 micro-batches", "3 micro-batches"):
        (alone,), _ = stats_of_all(keeps, MINE, *PLACE, window)
        assert alone.totals.tolist() == TOTALS.tolist()
    other = StepStats(1.0, 1, np.array([1.0, np.inf]), NONE)
    stats_of_all(keeps, other, *PLACE, "2 micro-batches")
    (_, theirs), _ = stats_of_all(group_of(None, sent[2]), MINE, *PLACE, "2 micro-batches")
    assert theirs.totals.tolist() == [1.0, np.inf]
    with pytest.raises(ExchangeError, match=r"rank 1 has a different window .*: got 3 micro-batches, expected 2"):
        stats_of_all(group_of(None, sent[1]), MINE, *PLACE, "2 micro-batches")


@pytest.mark.parametrize("asks", [(False, False), (True, False), (False, True)])
def test_a_request_to_stop_of_any_rank_is_one_of_all(asks):
    own = StepStats(1.0, 1, TOTALS, NONE, stop=asks[0])
    assert agree(group_of(None, told(stop=asks[1])), own, *PLACE).stop is any(asks)


@pytest.mark.parametrize(
    ("mine", "theirs", "both"), [((1, 1), (1, 0), [True, False]), ((0, 1), (1, 0), [False, False])]
)
def test_what_any_rank_used_is_not_unused(mine, theirs, both):
    own = StepStats(1.0, 1, TOTALS, np.array(mine, np.bool_))
    for parts in ((None, told(unused=bytes(theirs))), (told(unused=bytes(theirs)), None)):
        assert agree(group_of(*parts), own, *PLACE).unused.tolist() == both


def test_each_rank_has_what_all_of_them_told():
    own = StepStats(2.0, 1, TOTALS, NONE, square=5.0)
    for parts in ((None, told(3.0, square=7.0), told(0.0, 0)), (None, told(3.0), told(1.0, square=math.nan))):
        found = agree(group_of(*parts), own, *PLACE).by_rank
        assert [each.weight for each in found] == [2.0, 3.0, found[2].weight]
        assert str([each.square for each in found]) in {"[5.0, 7.0, None]", "[5.0, None, nan]"}
