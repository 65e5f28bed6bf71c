"""The picture of a plan shows what the plan says."""

import dataclasses

import pytest

pytest.importorskip("matplotlib")

from hypothesis import given
from hypothesis import strategies as st

from gradengine.plan.machine import Rates
from gradengine.plan.models import load_model
from gradengine.plan.plot import drawn, worker_counts
from gradengine.plan.prediction import Question, predict
from gradengine.tensor_parallel_cost import Bandwidth

TEN_GIGABITS = Bandwidth.gigabits(10)
QUESTION = Question(load_model("350m"), workers=4, bandwidth=TEN_GIGABITS, tp=2)


def lines_of(plan):
    return {line.get_label(): line for line in drawn(plan).axes[0].get_lines()}


def test_each_line_is_an_algorithm_and_goes_through_the_plans_own_figure():
    plan = predict(QUESTION)
    lines = lines_of(plan)
    labels = {"ordered": "ordered: tcp://, mpi://", "star": "star: served=True", "ring": "ring (other libraries)"}
    for name, label in labels.items():
        counts, seconds = lines[label].get_data()
        at = dict(zip(counts, seconds, strict=True))
        assert at[4] == pytest.approx(plan.exchanges[name][1].seconds)
        assert list(counts) == worker_counts(4)


def test_backward_is_a_line_of_its_own():
    plan = predict(dataclasses.replace(QUESTION, backward_seconds=0.5))
    flat = [line for line in lines_of(plan).values() if set(line.get_ydata()) == {0.5}]
    assert len(flat) == 1
    words = [text.get_text() for text in drawn(plan).axes[0].texts]
    assert "backward of the last micro-batch" in words
    assert " this plan" in words


def test_one_worker_is_beyond_the_picture():
    words = [text.get_text() for text in drawn(predict(dataclasses.replace(QUESTION, workers=1))).axes[0].texts]
    assert " this plan" not in words


def test_one_machine_has_a_line_for_each_transport():
    rates = Rates(2, 4e9, 8e9, sum=20e9, copy=10e9, shared_memory=9e9)
    plan = predict(Question(load_model("350m"), 3, machine=rates, device="cpu"))
    lines = lines_of(plan)
    for name in ("tcp://", "unix://", "shared memory", "threads", "served"):
        at = dict(zip(*lines[{"served": "tcp://, served"}.get(name, name)].get_data(), strict=True))
        assert at[3] == pytest.approx(plan.exchanges[name][1].seconds)
    assert drawn(plan).axes[0].get_title() == "350m: exchange of a step within one machine"


def test_the_title_names_model_group_and_bandwidth_in_both_units():
    title = drawn(predict(QUESTION)).axes[0].get_title()
    assert title == "350m, tensor parallel over 2: exchange of a step over links of 1.25 GB/s = 10 Gbit/s"


@given(st.integers(1, 1 << 20))
def test_worker_counts_rise_hold_the_plans_and_stay_few(workers):
    counts = worker_counts(workers)
    assert counts == sorted(set(counts))
    assert counts[0] == 2
    assert counts[-1] == max(8, 2 * workers)
    assert max(2, workers) in counts
    assert len(counts) <= 26


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_it_is_saved_in_the_kind_that_its_name_says(tmp_path, kind):
    drawn(predict(QUESTION)).savefig(tmp_path / f"plan.{kind}")
    begins = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[kind]
    assert (tmp_path / f"plan.{kind}").read_bytes().startswith(begins)
