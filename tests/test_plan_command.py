"""`gradengine plan` as a user meets it: the figures it prints, the JSON, the plot, and what it refuses."""

import dataclasses
import io
import json
import re

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from gradengine.commands.cli import app
from gradengine.errors import CallerError
from gradengine.layout.cost import Bandwidth
from gradengine.plan import command
from gradengine.plan.machine import Rates
from gradengine.plan.models import load_model
from gradengine.plan.plot import drawn, worker_counts
from gradengine.plan.prediction import Question, predict
from gradengine.plan.table import show, size

RATES = Rates(2, tcp=4e9, unix=8e9, sum=20e9, copy=10e9, shared_memory=9e9)
QUESTION = Question(load_model("350m"), workers=4, bandwidth=Bandwidth.gigabits(10), tp=2)
HERE = Question(load_model("350m"), 3, machine=RATES, device="cpu")


def invoke(*arguments):
    model = [] if "--model" in arguments else ["--model", "350m"]
    return CliRunner().invoke(app, ["plan", *model, *map(str, arguments)], env={"COLUMNS": "120"})


def planned(*arguments):
    done = invoke(*arguments)
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def test_350m_prints_the_known_numbers_and_writes_them(tmp_path):
    json_path, plot_path = tmp_path / "plan.json", tmp_path / "plan.png"
    for model in ("7b", "350m"):  # the second replaces the first
        output = planned(
            "--model", model, "--workers", 8, "--bandwidth", "10 Gbit/s", "--json", json_path, "--plot", plot_path
        )
    found = json.loads(json_path.read_text())
    assert found["model"]["name"] == "350m"
    assert (found["format"], found["question"]["latency_seconds"]) == (3, pytest.approx(5e-5))
    for known in ("4194304", "201326592", "1,594,036,224", "nothing is sent"):
        assert known in output
    assert found["choice"]["reason"] in output
    assert size(found["exchange"]["ordered"]["busiest_link_bytes"]) in output
    assert plot_path.read_bytes().startswith(b"\x89PNG")
    assert output.endswith(f"plot {plot_path}")


def test_json_to_stdout_is_json_alone_and_has_all_that_was_asked():
    options = {
        "workers": 3, "tp": 2, "sequence_length": 8, "batch_size": 5, "micro_batches": 7, "dtype": "bfloat16",
        "optimizer": "sgd", "tflops": 9.0, "device": "cpu", "vocab_parallel": True,
    }  # fmt: skip
    given = [
        word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value) if word is not True
    ]
    asked = [*given, "--bandwidth", "1 GB/s", "--tp-bandwidth", "2 GB/s", "--latency-us", 30, "--tp-latency-us", 20]
    found = json.loads(planned(*asked, "--json", "-"))["question"]
    assert options == {name: found[name] for name in options}
    seconds = {"latency_seconds": pytest.approx(3e-5), "tp_latency_seconds": pytest.approx(2e-5)}
    assert seconds == {name: found[name] for name in seconds}
    rates = {"": 1e9, "tp_": 2e9, "socket_": 1.25e9, "sum_": 1e10}  # the last two are the defaults
    assert rates == {name: found[f"{name}bandwidth_bytes_per_second"] for name in rates}


def test_a_config_file_is_planned_whatever_it_is_called(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    path = tmp_path / "[bold]x.json"
    path.write_text(json.dumps(sizes | {"vocab_size": 256, "num_key_value_heads": 2}))
    assert "[bold]x ([bold]x.json, taken as a Llama): 106,816" in planned("--model", path, "--bandwidth", "1 Gbit/s")


# ---- one machine ----


@pytest.fixture
def measured(monkeypatch):
    monkeypatch.setattr(command, "measure_rates", lambda: RATES)
    monkeypatch.setattr(command, "measure_tflops", lambda: 0.3)


@pytest.mark.usefixtures("measured")
def test_one_machine_and_its_compute_are_measured_and_its_workers_share_it():
    found = json.loads(planned("--one-machine", "--workers", 3, "--json", "-"))
    assert found["question"]["machine"] == vars(RATES)
    assert found["choice"]["transport"] == "shared memory"
    assert (found["question"]["device"], found["question"]["tflops"]) == ("cpu", pytest.approx(0.1))
    assert found["question"]["tflops_measured"] is True
    output = planned("--one-machine", "--workers", 3)
    assert "0.3 TFLOP/s, measured" in output
    assert "cores 2; GB/s as measured: tcp 4, unix 8, sum 20, copy 10, shared memory 9" in output


@pytest.mark.parametrize("given", [["--tflops", "0.5"], ["--backward-seconds", "2"]])
@pytest.mark.usefixtures("measured")
def test_what_is_given_of_one_machine_is_not_measured(monkeypatch, given):
    monkeypatch.setattr(command, "measure_tflops", lambda: pytest.fail("it was measured"))
    assert json.loads(planned("--one-machine", "--json", "-", *given))["question"]["tflops_measured"] is False


# ---- the table ----


def shown(question, width=120):
    console = Console(width=width, file=io.StringIO(), highlight=False)
    show(predict(question), console)
    return console.file.getvalue()


@pytest.mark.parametrize("question", [QUESTION, HERE], ids=["links", "one machine"])
@pytest.mark.parametrize("width", [60, 120])
def test_it_fits_the_terminal_cuts_nothing_and_shows_every_remedy(question, width):
    text = shown(question, width)
    assert max(map(len, text.splitlines())) <= width
    assert "\u2026" not in text
    squeezed = " ".join(text.split())
    if question is QUESTION:
        assert "4 data-parallel (workers) x 2 tensor-parallel = 8 in all" in squeezed
        assert "carries 402.65 MB each way in a step, 324 ms" in squeezed
    for remedy in predict(question).choice.remedies:
        assert f"- {remedy}" in squeezed


@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16"}, {"device": "cpu"}, {"workers": 1}])
def test_on_device_is_the_sum_of_the_rows_above_it(changes):
    text = shown(dataclasses.replace(QUESTION, **changes), 80)
    rows = re.findall(r"^([a-z ]+?) +([\d,]+) +\S+ [kMG]B$", text, re.MULTILINE)
    sizes = {name: int(nbytes.replace(",", "")) for name, nbytes in rows}
    above = list(sizes).index("on device")
    assert sizes["on device"] == sum(list(sizes.values())[:above])
    below = {1: set()}.get(changes.get("workers"), {"exchange rows", "pinned rows"})
    assert set(list(sizes)[above + 1 :]) == below - ({"pinned rows"} if changes.get("device") == "cpu" else set())


def test_a_tied_head_is_pointed_out():
    tied = dataclasses.replace(load_model("1b"), embedding="tied")
    assert "GradientLayout.of" in shown(dataclasses.replace(QUESTION, model=tied))
    assert "GradientLayout.of" not in shown(QUESTION)


@given(st.integers(1, 10**14))
def test_sizes_are_what_they_say(nbytes):
    number, unit = size(nbytes).split()
    scale = {"byte": 1, "bytes": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}[unit]
    assert float(number.replace(",", "")) * scale == pytest.approx(nbytes, rel=0.006)


# ---- the plot ----


@pytest.mark.parametrize("question", [QUESTION, HERE], ids=["links", "one machine"])
def test_each_line_is_an_algorithm_and_goes_through_the_plans_own_figure(question):
    plan = predict(dataclasses.replace(question, backward_seconds=5.0))
    axes = drawn(plan).axes[0]
    lines = [dict(zip(*line.get_data(), strict=True)) for line in axes.get_lines()]
    for _, overlap in plan.exchanges.values():
        assert any(line.get(question.workers) == pytest.approx(overlap.seconds) for line in lines)
    assert [line for line in axes.get_lines() if set(line.get_ydata()) == {5.0}]


@given(st.integers(1, 1 << 20))
def test_worker_counts_rise_hold_the_plans_and_stay_few(workers):
    counts = worker_counts(workers)
    assert counts == sorted(set(counts))
    assert (counts[0], counts[-1]) == (2, max(8, 2 * workers))
    assert max(2, workers) in counts
    assert len(counts) <= 26


# ---- refusals ----

BANDWIDTH = ["--bandwidth", "1 GB/s"]
ONE_MACHINE = ["--one-machine"]
MISTAKES = [
    (["--bandwidth", "10"], "--bandwidth"),
    (["--bandwidth", "1e-300 GB/s"], "--bandwidth is out of range"),
    ([*BANDWIDTH, "--tp-bandwidth", "5"], "--tp-bandwidth"),
    ([*BANDWIDTH, "--socket-bandwidth", "3"], "--socket-bandwidth"),
    ([*BANDWIDTH, "--sum-bandwidth", "fast"], "--sum-bandwidth"),
    ([*BANDWIDTH, "--tp", "3"], "heads cannot be divided by --tp: got 16 / 3"),
    ([*BANDWIDTH, "--tp", "8"], "key-value heads cannot be divided by --tp: got 4 / 8"),
    ([*BANDWIDTH, *ONE_MACHINE], "exclude each other"),
    ([*ONE_MACHINE, "--tp", "2"], "--tp is out of range"),
    ([*ONE_MACHINE, "--device", "cuda"], "--one-machine does not measure a GPU"),
    ([*ONE_MACHINE, "--model", "3b"], "'3b'"),
    ([*ONE_MACHINE, "--plot", "x.y"], "cannot plot"),
    ([], "--bandwidth or --one-machine is needed"),
    ([*BANDWIDTH, "--tflops", "nan"], "--tflops"),
    ([*BANDWIDTH, "--latency-us", "1e300"], "--latency-us"),
    ([*BANDWIDTH, "--tp-latency-us", "-1"], "--tp-latency-us"),
    ([*BANDWIDTH, "--tp", "2", "--backward-seconds", "0.01"], "--backward-seconds is shorter"),
    ([*BANDWIDTH, "--dtype", "int8"], "unknown --dtype"),
    ([*BANDWIDTH, "--optimizer", "none"], "unknown --optimizer"),
    ([*BANDWIDTH, "--device", "tpu"], "unknown --device"),
    ([*BANDWIDTH, "--workers", str(10**12)], "--workers"),
    ([*BANDWIDTH, "--json", "/dev/null/x.json"], "--json FILE"),
    ([*BANDWIDTH, "--json", "/dev"], "--json FILE"),
    ([*BANDWIDTH, "--json", "/dev/full"], "--json FILE"),
    ([*BANDWIDTH, "--plot", "/dev/null/x.png"], "--plot FILE"),
    ([*BANDWIDTH, "--json", "x.json", "--plot", "no/such/x.png"], "--plot FILE"),
    ([*BANDWIDTH, "--json", "a.png", "--plot", "./a.png"], "--json and --plot are one file"),
    ([*BANDWIDTH, "--json", "x.json", "--plot", "x.nothing"], "cannot plot"),
]


def test_mistakes_are_errors_of_the_caller_before_anything_is_measured_or_written(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "measure_rates", lambda: pytest.fail("it was measured"))
    for arguments, named in MISTAKES:
        done = invoke(*arguments)
        assert isinstance(done.exception, CallerError), done.output
        assert named in str(done.exception)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["--workers", "0"], ["--tp", "0"], ["--workers", "two"]])
def test_options_out_of_range_are_mistakes_of_usage(arguments):
    assert invoke(*BANDWIDTH, *arguments).exit_code == 2
