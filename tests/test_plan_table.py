"""A plan on terminals of any width."""

import dataclasses
import io
import json
import re

import pytest

pytest.importorskip("rich")

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gradengine.plan.machine import Rates
from gradengine.plan.models import NAMED, load_model
from gradengine.plan.prediction import Question, predict
from gradengine.plan.table import show, size
from gradengine.tensor_parallel_cost import Bandwidth

TEN_GIGABITS = Bandwidth.gigabits(10)
QUESTION = Question(load_model("350m"), workers=4, bandwidth=TEN_GIGABITS, tp=2)
RATES = Rates(2, tcp=4e9, unix=8e9, sum=20e9, copy=10e9, shared_memory=9e9)
HERE = Question(load_model("350m"), 3, machine=RATES)


def shown(question, width):
    console = Console(width=width, file=io.StringIO(), highlight=False)
    show(predict(question), console)
    return console.file.getvalue()


def squeezed(text):
    return " ".join(text.split())


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("changes", [{}, {"workers": 512, "tp": 4}, {"micro_batches": 1000, "latency_seconds": 0.5}])
def test_it_fits_the_terminal_and_cuts_nothing(width, name, changes):
    text = shown(dataclasses.replace(QUESTION, model=load_model(name), **changes), width)
    assert max(map(len, text.splitlines())) <= width
    assert "\u2026" not in text


def test_it_says_what_workers_and_ranks_are():
    assert "4 data-parallel (workers) x 2 tensor-parallel = 8 in all" in squeezed(shown(QUESTION, 120))


def test_it_says_what_was_assumed():
    text = squeezed(shown(QUESTION, 120))
    assert "1.25 GB/s = 10 Gbit/s" in text
    assert "assumed: each rank a GPU of 100 TFLOP/s (--tflops), with its all-reduces" in text
    assert "assumed: each rank a GPU of 100 TFLOP/s" in squeezed(shown(HERE, 120))
    on_cpus = dataclasses.replace(HERE, device="cpu", tflops=0.5)
    assert "assumed: each rank a CPU of 0.5 TFLOP/s" in squeezed(shown(on_cpus, 120))
    measured = dataclasses.replace(QUESTION, backward_seconds=0.5)
    assert "500 ms a micro-batch, measured by you" in squeezed(shown(measured, 120))


def test_planned_transports_are_marked_as_such():
    text = squeezed(shown(QUESTION, 120))
    assert "NCCL, nccl:// *" in text
    assert "ordered, tcp:// " in text
    assert "star, served=True " in text
    assert "* planned, not in this version" in text
    assert "On one machine connect() takes a faster link by itself" in text


def test_a_tied_head_is_pointed_out_with_what_to_do():
    tied = dataclasses.replace(load_model("1b"), embedding="tied")
    assert "GradientLayout.of" in shown(dataclasses.replace(QUESTION, model=tied), 120)
    assert "GradientLayout.of" not in shown(QUESTION, 120)


def test_a_file_may_be_called_anything(tmp_path):
    path = tmp_path / "[bold]x[;y].json"
    path.write_text(
        json.dumps(
            {
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "vocab_size": 256,
            }
        )
    )
    text = squeezed(shown(dataclasses.replace(QUESTION, model=load_model(str(path))), 200))
    assert "[bold]x[;y] ([bold]x[;y].json, taken as a Llama): " in text


def test_one_worker_has_no_rows():
    assert "exchange rows" in shown(QUESTION, 120)
    text = shown(dataclasses.replace(QUESTION, workers=1), 120)
    assert "rows" not in text
    assert "exposed" not in text
    assert "choose  no exchange: one worker" in text


def test_the_group_of_a_worker_says_what_travels_and_whether_that_is_part_of_the_compute():
    alone = squeezed(shown(dataclasses.replace(QUESTION, tp=1), 120))
    assert "nothing is sent (--tp: 4194304 bytes an all-reduce, 201326592 a forward)" in alone
    group = squeezed(shown(QUESTION, 120))
    assert "4194304 bytes an all-reduce, 201326592 a forward, as much backward" in group
    assert "carries 402.65 MB each way in a step, 324 ms, part of the compute" in group
    measured = squeezed(shown(dataclasses.replace(QUESTION, backward_seconds=5.0), 120))
    assert "324 ms, predicted" in measured
    assert "part of" not in measured


@given(st.integers(1, 10**14))
def test_sizes_are_what_they_say(nbytes):
    number, unit = size(nbytes).split()
    scale = {"byte": 1, "bytes": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}[unit]
    assert float(number.replace(",", "")) * scale == pytest.approx(nbytes, rel=0.006)


def test_where_a_step_waits_long_the_remedies_are_shown():
    text = squeezed(shown(QUESTION, 80))
    for remedy in predict(QUESTION).choice.remedies:
        assert f"- {remedy}" in text
    assert (
        "- " not in squeezed(shown(dataclasses.replace(QUESTION, micro_batches=1000, workers=2), 80)).split("choose")[1]
    )


def test_one_machine_shows_what_was_measured_and_no_links():
    text = squeezed(shown(HERE, 120))
    assert "cores 2; GB/s as measured: tcp 4, unix 8, sum 20, copy 10, shared memory 9" in text
    assert "choose unix://" in text
    assert "choose shared memory" in squeezed(shown(dataclasses.replace(HERE, device="cpu"), 120))
    without = dataclasses.replace(HERE, device="cpu", machine=dataclasses.replace(RATES, shared_memory=None))
    assert "shared memory" not in shown(without, 120)
    assert "planned" not in text
    assert "each way of each rank" not in text


def test_one_machine_whose_cores_compute_says_so_and_fits():
    measured = dataclasses.replace(HERE, device="cpu", tflops=0.05, tflops_measured=True)
    text = shown(measured, 80)
    assert "by this machine's 0.15 TFLOP/s, measured, which all workers share" in squeezed(text)
    assert "backward takes the same cores, and hides nothing" in squeezed(text)
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16"}, {"device": "cpu"}, {"workers": 1}])
def test_on_device_is_the_sum_of_the_rows_above_it(changes):
    rows = re.findall(
        r"^([a-z ]+?) +([\d,]+) +\S+ [kMG]B$", shown(dataclasses.replace(QUESTION, **changes), 80), re.MULTILINE
    )
    sizes = {name: int(nbytes.replace(",", "")) for name, nbytes in rows}
    above = list(sizes).index("on device")
    assert sizes["on device"] == sum(list(sizes.values())[:above])
    assert set(list(sizes)[above + 1 :]) <= {"exchange rows", "pinned rows"}


def test_only_a_gpu_has_pinned_rows():
    assert "pinned rows" in shown(QUESTION, 120)
    assert "pinned" not in shown(dataclasses.replace(QUESTION, device="cpu"), 120)
