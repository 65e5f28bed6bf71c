"""Which transport a plan recommends, and what it says of those that do not exist."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradengine import connect
from gradengine.errors import CallerError
from gradengine.plan.choice import choose, enough_micro_batches
from gradengine.plan.models import load_model
from gradengine.plan.prediction import Question, predict
from gradengine.plan.quantities import duration
from gradengine.plan.traffic import Overlap
from gradengine.tensor_parallel_cost import Bandwidth

TEN_GIGABITS = Bandwidth.gigabits(10)
QUESTION = Question(load_model("350m"), workers=4, bandwidth=TEN_GIGABITS, tp=2)


def overlaps(star, ordered, nccl):
    exposed = {"star": star, "ring": ordered, "ordered": ordered, "nccl": nccl}
    return {name: Overlap(10.0, seconds) for name, seconds in exposed.items()}


def chosen(compute, found, **more):
    return choose(1, compute, found, **more)


def test_one_worker_needs_no_exchange():
    plan = predict(dataclasses.replace(QUESTION, workers=1))
    assert plan.choice.transport == "none"
    assert "without exchange=" in plan.choice.reason
    assert plan.exchanges["star"][1].seconds == 0


def test_what_is_hidden_is_enough():
    choice = chosen(1.0, overlaps(0.02, 0.01, 0.01))
    assert (choice.transport, choice.remedies) == ("tcp://", ())
    assert choice.reason == "a step waits 20.0 ms for it, 2.0% of its time."


def test_where_a_step_waits_long_it_says_what_shortens_the_wait_today():
    """1 s of compute, 1 s of waiting: with 4 micro-batches it is a fifth."""
    choice = chosen(1.0, overlaps(1.0, 0.25, 0.24), faster_link=(TEN_GIGABITS, Overlap(2.0, 0.5)))
    micro_batches, link, library = choice.remedies
    assert "4 a step, not 1" in micro_batches
    assert "1.25 GB/s = 10 Gbit/s" in link
    assert "500 ms" in link
    assert "NCCL" in library
    assert "250 ms" in library
    assert choice.waits_of_step == 0.5


def test_a_ring_that_saves_nothing_is_not_advised():
    assert not any("library" in remedy for remedy in chosen(1.0, overlaps(1.0, 1.0, 1.0)).remedies)


def test_a_short_wait_needs_no_remedy():
    assert chosen(1.0, overlaps(0.24, 0.24, 0.24)).remedies == ()
    assert len(chosen(1.0, overlaps(0.26, 0.26, 0.26)).remedies) == 1


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
def test_so_many_micro_batches_make_a_fifth_and_one_less_makes_more(compute, waits):
    enough = enough_micro_batches(compute, waits)
    assert waits <= 0.2 * (1 + 1e-9) * (enough * compute + waits)
    assert waits >= 0.2 * (1 - 1e-9) * ((enough - 1) * compute + waits)


def test_the_plans_advice_holds_in_the_plan():
    waiting = predict(QUESTION)
    enough = enough_micro_batches(waiting.compute.seconds, waiting.exchanges["star"][1].exposed_seconds)
    assert f"{enough} a step, not 1" in waiting.choice.remedies[0]
    assert predict(dataclasses.replace(QUESTION, micro_batches=enough)).choice.waits_of_step <= 0.2
    assert predict(dataclasses.replace(QUESTION, micro_batches=enough - 1)).choice.waits_of_step > 0.2
    link = next(remedy for remedy in waiting.choice.remedies if remedy.startswith("A faster link"))
    faster = predict(dataclasses.replace(QUESTION, bandwidth=QUESTION.socket_bandwidth, tp_bandwidth=TEN_GIGABITS))
    assert f"wait {duration(faster.exchanges['star'][1].exposed_seconds)};" in link


def test_on_one_machine_processes_take_unix_sockets():
    here = {name: Overlap(1.0, seconds) for name, seconds in (("tcp://", 0.9), ("unix://", 0.5), ("threads", 0.1))}
    choice = chosen(0.5, here)
    assert (choice.transport, choice.waits_of_step) == ("unix://", 0.5)
    assert len(choice.remedies) == 1
    assert "4 a step, not 1" in choice.remedies[0]
    assert chosen(100.0, here).remedies == ()


def test_the_only_transport_recommended_exists():
    with connect(f"{predict(QUESTION).choice.transport}127.0.0.1:0", 0, 1) as exchange:
        assert exchange.world_size == 1
    for missing in ("mpi://", "nccl://"):
        with pytest.raises(CallerError):
            connect(missing, 0, 1)
