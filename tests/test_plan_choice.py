"""Which transport a plan recommends, and what it says of those that do not exist."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradengine import connect
from gradengine.errors import CallerError
from gradengine.plan.choice import TRANSPORTS, choose, duration, three_digits
from gradengine.plan.models import load_model
from gradengine.plan.overlap import Overlap
from gradengine.plan.prediction import Question, predict
from gradengine.plan.traffic import ALGORITHMS
from gradengine.tensor_parallel_cost import Bandwidth

TEN_GIGABITS = Bandwidth.gigabits(10)
QUESTION = Question(load_model("350m"), workers=4, bandwidth=TEN_GIGABITS, tp=2)


def overlaps(star, ordered, nccl):
    return {name: Overlap(10.0, exposed) for name, exposed in (("star", star), ("ordered", ordered), ("nccl", nccl))}


def test_one_worker_needs_no_exchange():
    plan = predict(dataclasses.replace(QUESTION, workers=1))
    assert plan.choice.transport == "none"
    assert "without exchange=" in plan.choice.reason
    assert plan.exchanges["star"][1].seconds == 0


def test_what_is_hidden_is_enough():
    choice = choose(4, 1.0, overlaps(0.02, 0.01, 0.01))
    assert (choice.transport, choice.needed, choice.saves_seconds) == ("tcp://", None, 0.0)
    assert choice.reason == "a step waits 20.0 ms for it, 2.0 % of its time."


def test_where_more_is_needed_it_says_what_and_that_it_does_not_exist():
    choice = choose(8, 1.0, overlaps(1.0, 0.25, 0.24))
    assert (choice.transport, choice.needed) == ("tcp://", "mpi://")
    assert choice.saves_seconds == 0.75
    assert choice.of_step == 0.375
    assert "1.60 times as fast" in choice.reason
    assert "does not exist in this version" in choice.reason


def test_nccl_is_named_where_it_is_faster_than_the_ordered_sum_by_more_than_a_twentieth():
    assert choose(8, 1.0, overlaps(9.0, 2.0, 0.5)).needed == "nccl://"


def test_the_only_transport_recommended_exists():
    with connect(f"{predict(QUESTION).choice.transport}127.0.0.1:0", 0, 1) as exchange:
        assert exchange.world_size == 1
    for missing in ("mpi://", "nccl://"):
        with pytest.raises(CallerError):
            connect(missing, 0, 1)


def test_every_algorithm_has_its_transport_or_none():
    assert set(TRANSPORTS) == set(ALGORITHMS)


seconds = st.floats(0, 1e6)


@given(st.integers(2, 100), st.floats(1e-6, 1e6), seconds, seconds, seconds)
def test_more_is_needed_only_where_it_shortens_the_step_by_more_than_a_twentieth(workers, compute, star, ordered, nccl):
    choice = choose(workers, compute, overlaps(star, ordered, nccl))
    best = star - min(ordered, nccl)
    if choice.needed is None:
        assert choice.saves_seconds == choice.of_step == 0
        assert best <= 0.05 * (compute + star) + 0.05 * (compute + min(ordered, nccl)) + 1e-9 * star
    else:
        assert choice.needed in ("mpi://", "nccl://")
        assert choice.of_step > 0.05
        assert choice.saves_seconds <= best * (1 + 1e-9)


@given(st.floats(1e-9, 99))
def test_three_digits_are_right_to_half_of_the_last(number):
    assert float(three_digits(number)) == pytest.approx(number, rel=0.006, abs=0.0051)


@given(st.floats(1e-7, 1e5))
def test_durations_are_what_they_say(number):
    shown, unit = duration(number).split()
    assert float(shown) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[unit] == pytest.approx(number, rel=0.006, abs=6e-9)
