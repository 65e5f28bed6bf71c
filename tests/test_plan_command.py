"""`gradengine plan` as a user meets it: the figures it prints, the JSON, the plot, and what it refuses."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from test_plan_prediction import SCHEMA, assert_fits
from typer.testing import CliRunner

from gradengine.cli import app
from gradengine.errors import CallerError
from gradengine.plan.command import Device, Dtype, Optimizer
from gradengine.plan.memory import DEVICES, DTYPES, OPTIMIZERS

ROOT = Path(__file__).parent.parent


def invoke(*arguments, columns=120):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)], env={"COLUMNS": str(columns)})


def planned(*arguments, columns=120):
    done = invoke(*arguments, columns=columns)
    assert done.exit_code == 0, done.output
    return done.output


def squeezed(text):
    return " ".join(text.split())


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("tp", [1, 2])
def test_350m_prints_the_two_known_numbers_and_the_known_arena(columns, tp):
    output = planned("--model", "350m", "--workers", 2, "--tp", tp, "--bandwidth", "10 Gbit/s", columns=columns)
    assert re.search(r"\b4194304\b", output)
    assert re.search(r"\b201326592\b", output)
    assert ("1,594,036,224" in output) == (tp == 1)


@pytest.mark.parametrize("more", [[], ["--backward-seconds", "0.5"], ["--workers", "1"]])
def test_json_is_what_the_page_says(tmp_path, more):
    path = tmp_path / "deep" / "plan.json"
    planned("--model", "350m", "--tp", 2, "--bandwidth", "10 Gbit/s", "--json", path, *more)
    found = json.loads(path.read_text())
    assert_fits(found, SCHEMA)
    assert found["format"] == 1
    assert found["tensor_parallel"]["bytes_per_all_reduce"] == 4194304
    assert found["tensor_parallel"]["bytes_per_step"] == 201326592


def test_json_and_terminal_agree(tmp_path):
    path = tmp_path / "plan.json"
    output = squeezed(planned("--model", "7b", "--workers", 8, "--bandwidth", "100 Gbit/s", "--json", path))
    found = json.loads(path.read_text())
    assert found["choice"]["reason"] in output
    for nbytes in (found["memory_bytes_per_rank"]["arena"], found["exchange"]["star"]["busiest_link_bytes"]):
        assert f"{nbytes:,}" in output


def test_a_config_file_is_planned(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"vocab_size": 256, "num_key_value_heads": 2}))
    output = squeezed(planned("--model", tmp_path / "config.json", "--bandwidth", "1 Gbit/s"))
    assert "config (config.json, taken as a Llama): 106,816 weights" in output


def test_help_says_what_workers_are():
    shown = squeezed(invoke("--help").output)
    assert "N x T ranks in all" in shown
    for option in ("--tp-bandwidth", "--latency-us", "--backward-seconds", "--vocab-parallel", "--json", "--plot"):
        assert option in shown


def test_an_existing_json_is_replaced(tmp_path):
    path = tmp_path / "plan.json"
    for model in ("7b", "350m"):
        planned("--model", model, "--bandwidth", "1 GB/s", "--json", path)
    assert json.loads(path.read_text())["model"]["name"] == "350m"


# ---- the plot ----


@pytest.mark.parametrize("arguments", [["--workers", "1"], ["--workers", "3", "--tp", "4"], ["--workers", "100000"]])
def test_a_plot_is_drawn(tmp_path, arguments):
    planned("--model", "350m", "--bandwidth", "10 Gbit/s", "--plot", tmp_path / "new" / "plan.png", *arguments)
    assert (tmp_path / "new" / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_only_a_plot_imports_matplotlib():
    code = (
        "import sys; from typer.testing import CliRunner; from gradengine.cli import app;"
        "done = CliRunner().invoke(app, ['plan', '--model', '350m', '--bandwidth', '1 GB/s']);"
        "print(done.exit_code, 'matplotlib' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert shown.stdout.split() == ["0", "False"]


# ---- refusals ----


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--bandwidth", "10"], "differ by 8"),
        (["--bandwidth", "10 gb/s"], "bits or bytes"),
        (["--bandwidth", "1e-300 GB/s"], "bandwidth is out of range"),
        (["--bandwidth", "1 GB/s", "--tp-bandwidth", "5"], "differ by 8"),
        (["--bandwidth", "1 GB/s", "--tp", "3"], "16 / 3"),
        (["--bandwidth", "1 GB/s", "--tflops", "nan"], "tflops is out of range: got nan"),
        (["--bandwidth", "1 GB/s", "--tflops", "0"], "tflops is out of range"),
        (["--bandwidth", "1 GB/s", "--latency-us", "nan"], "latency_seconds is out of range"),
        (["--bandwidth", "1 GB/s", "--latency-us", "1e300"], "latency_seconds is out of range"),
        (["--bandwidth", "1 GB/s", "--backward-seconds", "-1"], "backward_seconds is out of range"),
        (["--bandwidth", "1 GB/s", "--workers", str(10**12)], "workers is out of range"),
        (["--bandwidth", "1 GB/s", "--sequence-length", str(10**12)], "sequence_length is out of range"),
        (["--bandwidth", "1 GB/s", "--model", "3b"], "there is no model '3b'"),
        (["--bandwidth", "1 GB/s", "--plot", "x.nothing"], "cannot plot"),
        (["--bandwidth", "1 GB/s", "--json", "/dev/null/x.json"], "cannot write"),
    ],
)
def test_mistakes_are_errors_of_the_caller(arguments, named):
    done = invoke(*(["--model", "350m"] if "--model" not in arguments else []), *arguments)
    assert isinstance(done.exception, CallerError), done.output
    assert named in str(done.exception)


def test_a_mistake_writes_nothing(tmp_path):
    done = invoke("--model", "350m", "--tp", 3, "--bandwidth", "1 GB/s", "--plot", tmp_path / "p.png")
    assert isinstance(done.exception, CallerError)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments", [["--workers", "0"], ["--tp", "0"], ["--dtype", "int8"], ["--optimizer", "none"], ["--device", "tpu"]]
)
def test_options_out_of_range_are_mistakes_of_usage(arguments):
    assert invoke("--model", "350m", "--bandwidth", "1 GB/s", *arguments).exit_code == 2


def test_model_and_bandwidth_are_asked_for():
    assert invoke("--bandwidth", "1 GB/s").exit_code == 2
    assert invoke("--model", "350m").exit_code == 2


def test_the_commands_choices_are_those_that_are_known():
    for choices, known in ((Dtype, DTYPES), (Optimizer, OPTIMIZERS), (Device, DEVICES)):
        assert [choice.value for choice in choices] == list(known)
