"""Which transport a plan recommends, and what it says of those that do not exist."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradengine import connect
from gradengine.errors import CallerError
from gradengine.plan.choice import TRANSPORTS, Step, choose
from gradengine.plan.models import load_model
from gradengine.plan.overlap import Overlap
from gradengine.plan.prediction import Question, predict
from gradengine.plan.quantities import duration
from gradengine.plan.traffic import ALGORITHMS
from gradengine.tensor_parallel_cost import Bandwidth

TEN_GIGABITS = Bandwidth.gigabits(10)
QUESTION = Question(load_model("350m"), workers=4, bandwidth=TEN_GIGABITS, tp=2)


def overlaps(star, ordered, nccl):
    exposed = {"star": star, "ring": ordered, "ordered": ordered, "nccl": nccl}
    return {name: Overlap(10.0, seconds) for name, seconds in exposed.items()}


def chosen(workers, compute, found, **more):
    return choose(Step(workers, 1, compute), found, **more)


def test_one_worker_needs_no_exchange():
    plan = predict(dataclasses.replace(QUESTION, workers=1))
    assert plan.choice.transport == "none"
    assert "without exchange=" in plan.choice.reason
    assert plan.exchanges["star"][1].seconds == 0


def test_what_is_hidden_is_enough():
    choice = chosen(4, 1.0, overlaps(0.02, 0.01, 0.01))
    assert (choice.transport, choice.needed, choice.saves_seconds) == ("tcp://", None, 0.0)
    assert choice.reason == "a step waits 20.0 ms for it, 2.0 % of its time."


def test_where_more_is_needed_it_says_what_and_that_it_does_not_exist():
    choice = chosen(8, 1.0, overlaps(1.0, 0.25, 0.24))
    assert (choice.transport, choice.needed) == ("tcp://", "mpi://")
    assert choice.saves_seconds == 0.75
    assert choice.of_step == 0.375
    assert "1.6 times as fast" in choice.remedies[-1]
    assert "does not exist in this version" in choice.remedies[-1]


def test_what_is_far_faster_is_said_to_two_digits():
    choice = chosen(8, 1.0, overlaps(1000.0, 1.0327, 1.0327))
    assert "490 times as fast" in choice.remedies[-1]
    assert "492" not in " ".join(choice.remedies)


def test_where_a_step_waits_long_it_says_what_shortens_the_wait_today():
    """1 s of compute, 1 s of waiting: with 4 micro-batches it is a fifth."""
    choice = chosen(8, 1.0, overlaps(1.0, 0.25, 0.24), faster_link=(TEN_GIGABITS, Overlap(2.0, 0.5)))
    micro_batches, link, library, later = choice.remedies
    assert "4 a step, not 1" in micro_batches
    assert "1.25 GB/s = 10 Gbit/s" in link
    assert "500 ms" in link
    assert "NCCL" in library
    assert "250 ms" in library
    assert later.startswith("Later: mpi://")
    assert choice.waits_of_step == 0.5


def test_a_link_that_is_faster_than_the_sockets_is_said_to_be_no_remedy():
    assert any(remedy.startswith("No faster link") for remedy in chosen(8, 1.0, overlaps(1.0, 0.2, 0.2)).remedies)


def test_a_ring_that_saves_nothing_is_not_advised():
    assert not any("library" in remedy for remedy in chosen(2, 1.0, overlaps(1.0, 1.0, 1.0)).remedies)


def test_a_short_wait_needs_no_remedy():
    assert chosen(8, 1.0, overlaps(0.24, 0.24, 0.24)).remedies == ()
    assert len(chosen(8, 1.0, overlaps(0.26, 0.26, 0.26)).remedies) == 2


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
def test_so_many_micro_batches_make_a_fifth_and_one_less_makes_more(compute, waits):
    enough = Step(2, 1, compute).enough_micro_batches(waits)
    assert waits <= 0.2 * (1 + 1e-9) * (enough * compute + waits)
    assert waits >= 0.2 * (1 - 1e-9) * ((enough - 1) * compute + waits)


def test_the_plans_advice_holds_in_the_plan():
    waiting = predict(QUESTION)
    enough = Step(4, 1, waiting.compute.seconds).enough_micro_batches(waiting.exchanges["star"][1].exposed_seconds)
    assert f"{enough} a step, not 1" in waiting.choice.remedies[0]
    assert predict(dataclasses.replace(QUESTION, micro_batches=enough)).choice.waits_of_step <= 0.2
    assert predict(dataclasses.replace(QUESTION, micro_batches=enough - 1)).choice.waits_of_step > 0.2
    link = next(remedy for remedy in waiting.choice.remedies if remedy.startswith("A faster link"))
    faster = predict(dataclasses.replace(QUESTION, bandwidth=QUESTION.socket_bandwidth, tp_bandwidth=TEN_GIGABITS))
    assert f"wait {duration(faster.exchanges['star'][1].exposed_seconds)}." in link


def test_on_one_machine_processes_take_unix_sockets():
    here = {name: Overlap(1.0, seconds) for name, seconds in (("tcp://", 0.9), ("unix://", 0.5), ("threads", 0.1))}
    choice = chosen(2, 0.5, here)
    assert (choice.transport, choice.waits_of_step, choice.needed) == ("unix://", 0.5, None)
    assert len(choice.remedies) == 1
    assert "4 a step, not 1" in choice.remedies[0]
    assert chosen(2, 100.0, here).remedies == ()


def test_nccl_is_named_where_it_is_faster_than_the_ordered_sum_by_more_than_a_twentieth():
    assert chosen(8, 1.0, overlaps(9.0, 2.0, 0.5)).needed == "nccl://"


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
    choice = chosen(workers, compute, overlaps(star, ordered, nccl))
    best = star - min(ordered, nccl)
    if choice.needed is None:
        assert choice.saves_seconds == choice.of_step == 0
        assert best <= 0.05 * (compute + star) + 0.05 * (compute + min(ordered, nccl)) + 1e-9 * star
    else:
        assert choice.needed in ("mpi://", "nccl://")
        assert choice.of_step > 0.05
        assert choice.saves_seconds <= best * (1 + 1e-9)
