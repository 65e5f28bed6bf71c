"""`gradengine plan` as a user meets it: the figures it prints, the JSON, the plot, and what it refuses."""

import json
import os
import re
import shlex
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
from gradengine.plan import command
from gradengine.plan.machine import Rates
from gradengine.plan.table import size

RATES = Rates(2, tcp=4e9, unix=8e9, sum=20e9, copy=10e9, shared_memory=9e9)
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
    assert ("nothing is sent" in squeezed(output)) == (tp == 1)


@pytest.mark.parametrize("more", [[], ["--backward-seconds", "0.5"], ["--workers", "1"]])
def test_json_is_what_the_page_says(tmp_path, more):
    path = tmp_path / "deep" / "plan.json"
    planned("--model", "350m", "--tp", 2, "--bandwidth", "10 Gbit/s", "--json", path, *more)
    found = json.loads(path.read_text())
    assert_fits(found, SCHEMA)
    assert found["format"] == 2
    assert found["tensor_parallel"]["bytes_per_all_reduce"] == 4194304
    assert found["tensor_parallel"]["bytes_per_step"] == 201326592


def test_json_and_terminal_agree(tmp_path):
    path = tmp_path / "plan.json"
    output = squeezed(planned("--model", "7b", "--workers", 8, "--bandwidth", "100 Gbit/s", "--json", path))
    found = json.loads(path.read_text())
    assert found["choice"]["reason"] in output
    assert f"{found['memory_bytes_per_rank']['arena']:,}" in output
    assert size(found["exchange"]["ordered"]["busiest_link_bytes"]) in output


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


def test_json_to_stdout_is_json_alone(tmp_path):
    output = planned("--model", "350m", "--bandwidth", "1 GB/s", "--json", "-")
    assert_fits(json.loads(output), SCHEMA)
    assert list(tmp_path.iterdir()) == []


# ---- one machine ----


def test_one_machine_is_measured_and_predicted(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "measure_rates", lambda: RATES)
    monkeypatch.setattr(command, "measure_tflops", lambda: 0.3)
    path = tmp_path / "plan.json"
    output = squeezed(planned("--model", "350m", "--one-machine", "--workers", 3, "--json", path))
    found = json.loads(path.read_text())
    nbytes = 1594036224
    assert found["exchange"]["tcp://"]["seconds"] == pytest.approx(4 * nbytes / 4e9 + 3 * nbytes / 20e9)
    assert found["question"]["machine"] == vars(RATES)
    assert found["choice"]["transport"] == "shared memory"
    assert "choose shared memory: a step waits" in output
    assert "connect() takes it by itself where all ranks are on one host." in output


@pytest.fixture
def measured(monkeypatch):
    """A machine of which all was measured: seconds of the step's compute, of its wait, and its JSON."""
    monkeypatch.setattr(command, "measure_rates", lambda: RATES)
    monkeypatch.setattr(command, "measure_tflops", lambda: 0.3)

    def plan(*arguments):
        output = planned("--model", "350m", "--one-machine", "--json", "-", *arguments)
        found = json.loads(output)
        return found["compute"], found["exchange"]["unix://"], found["question"]

    return plan


def test_compute_of_one_machine_is_measured_as_its_exchange_is_and_shared_by_its_workers(measured):
    (two, _, question), (four, _, _) = (measured("--workers", workers) for workers in (2, 4))
    assert (question["device"], question["tflops"], question["tflops_measured"]) == ("cpu", 0.15, True)
    assert two["source"] == "by this machine's 0.3 TFLOP/s, measured, which all workers share"
    at_one, _, _ = measured("--workers", 2, "--tflops", 1)
    assert two["seconds_per_step"] == pytest.approx(at_one["seconds_per_step"] / 0.15)
    assert four["seconds_per_step"] == pytest.approx(2 * two["seconds_per_step"])


def test_backward_on_the_cores_that_exchange_hides_nothing_and_on_a_gpu_it_does(measured):
    _, exchange, _ = measured("--workers", 2)
    assert exchange["hidden_seconds"] == 0
    assert exchange["exposed_seconds"] > exchange["seconds"]
    _, elsewhere, _ = measured("--workers", 2, "--device", "cuda", "--backward-seconds", 60)
    assert elsewhere["hidden_seconds"] > 0
    assert elsewhere["seconds"] == exchange["seconds"]


@pytest.mark.parametrize("given", [["--tflops", "0.5"], ["--backward-seconds", "2"]])
def test_what_is_given_of_one_machine_is_not_measured(measured, monkeypatch, given):
    monkeypatch.setattr(command, "measure_tflops", lambda: pytest.fail("it was measured"))
    compute, _, question = measured(*given)
    assert question["tflops_measured"] is False
    assert "measured, which" not in compute["source"]


def test_the_speed_of_a_gpu_is_asked_for_and_not_assumed_beside_what_was_measured(monkeypatch):
    monkeypatch.setattr(command, "measure_rates", lambda: pytest.fail("it was measured"))
    fault = invoke("--model", "350m", "--one-machine", "--device", "cuda").exception
    assert isinstance(fault, CallerError)
    assert str(fault) == (
        "--one-machine does not measure a GPU: expected --tflops or --backward-seconds;"
        " pass what your GPU achieves, or --device cpu"
    )


def test_the_examples_of_the_pages_wait_for_less_than_a_fifth_of_a_step():
    lines = [
        line
        for page in ("README.md", "docs/plan.md")
        for line in re.findall(r"^\| know what .*`gradengine plan (.*)`|^gradengine plan (.*?)(?:  #.*)?$",
                               (ROOT / page).read_text(), re.MULTILINE)
    ]  # fmt: skip
    assert len(lines) == 2
    for line in lines:
        found = json.loads(planned(*shlex.split("".join(line)), "--json", "-"))
        assert 0.1 < found["choice"]["waits_of_step"] < 0.2


@pytest.mark.parametrize("mistake", [["--tp", "2"], ["--bandwidth", "1 GB/s"], ["--model", "3b"], ["--plot", "x.y"]])
def test_a_mistake_is_told_before_the_machine_is_measured(monkeypatch, mistake):
    monkeypatch.setattr(command, "measure_rates", lambda: pytest.fail("it was measured"))
    model = [] if "--model" in mistake else ["--model", "350m"]
    assert isinstance(invoke(*model, "--one-machine", *mistake).exception, CallerError)


# ---- the plot ----


@pytest.mark.parametrize("arguments", [["--workers", "1"], ["--workers", "3", "--tp", "4"], ["--workers", "60000"]])
def test_a_plot_is_drawn_and_named_last(tmp_path, arguments):
    path = tmp_path / "plan.png"
    output = planned("--model", "350m", "--bandwidth", "10 Gbit/s", "--plot", path, *arguments)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert output.endswith(f"\nplot      {path}\n")


def test_beside_json_on_stdout_the_plot_is_named_on_stderr(tmp_path):
    """As a process: typer's runner has both in one text with click 8.1."""
    path = tmp_path / "plan.svg"
    arguments = ["--model", "350m", "--bandwidth", "1 GB/s", "--json", "-", "--plot", path]
    command = [sys.executable, "-m", "gradengine", "plan", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (json.loads(done.stdout)["format"], done.stderr) == (2, f"plot      {path}\n")


@pytest.mark.parametrize("place", [["--bandwidth", "1 GB/s"], ["--one-machine"]])
def test_a_folder_that_is_missing_is_refused_and_not_made(tmp_path, monkeypatch, place):
    monkeypatch.setattr(command, "measure_rates", lambda: pytest.fail("it was measured"))
    done = invoke("--model", "350m", *place, "--json", tmp_path / "plan.json", "--plot", tmp_path / "new" / "p.png")
    assert isinstance(done.exception, CallerError)
    assert f"there is no folder '{tmp_path / 'new'}'; make it, or pass another --plot FILE" in str(done.exception)
    assert list(tmp_path.iterdir()) == []


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
        (["--bandwidth", "1e-300 GB/s"], "--bandwidth is out of range"),
        (["--bandwidth", "1 GB/s", "--tp-bandwidth", "5"], "differ by 8"),
        (["--bandwidth", "1 GB/s", "--tp", "3"], "the model's heads cannot be divided by --tp: got 16 / 3"),
        (["--bandwidth", "1 GB/s", "--tp", "8"], "the model's key-value heads cannot be divided by --tp: got 4 / 8"),
        (["--bandwidth", "1 GB/s", "--tp", "2", "--one-machine"], "--bandwidth and --one-machine exclude each other"),
        (["--one-machine", "--tp", "2"], "--tp is out of range: got 2, expected 1 on one machine"),
        (["--bandwidth", "1 GB/s", "--tflops", "nan"], "--tflops is out of range: got nan"),
        (["--bandwidth", "1 GB/s", "--tflops", "0"], "tflops is out of range"),
        (["--bandwidth", "1 GB/s", "--latency-us", "nan"], "--latency-us is out of range"),
        (["--bandwidth", "1 GB/s", "--latency-us", "1e300"], "--latency-us is out of range"),
        (["--bandwidth", "1 GB/s", "--tp-latency-us", "-1"], "--tp-latency-us is out of range"),
        (["--bandwidth", "1 GB/s", "--socket-bandwidth", "3"], "--socket-bandwidth: a bandwidth without a unit"),
        (["--bandwidth", "1 GB/s", "--sum-bandwidth", "fast"], "--sum-bandwidth: a bandwidth cannot be read"),
        (["--bandwidth", "1 GB/s", "--tp", "2", "--backward-seconds", "0.01"], "--backward-seconds is shorter than"),
        (["--bandwidth", "1 GB/s", "--dtype", "int8"], "unknown --dtype: got 'int8', expected one of 'float32'"),
        (["--bandwidth", "1 GB/s", "--optimizer", "none"], "unknown --optimizer"),
        (["--bandwidth", "1 GB/s", "--device", "tpu"], "unknown --device"),
        (
            ["--bandwidth", "1 GB/s", "--one-machine"],
            "--bandwidth and --one-machine exclude each other: got both, expected one of them",
        ),
        ([], "--bandwidth or --one-machine is needed: got neither, expected one of them; pass --bandwidth '10 Gb"),
        (["--bandwidth", "1 GB/s", "--backward-seconds", "-1"], "--backward-seconds is out of range"),
        (["--bandwidth", "1 GB/s", "--workers", str(10**12)], "--workers is out of range"),
        (["--bandwidth", "1 GB/s", "--sequence-length", str(10**12)], "--sequence-length is out of range"),
        (["--bandwidth", "1 GB/s", "--model", "3b"], "there is no model '3b'"),
        (["--bandwidth", "1 GB/s", "--plot", "x.nothing"], "cannot plot"),
        (["--bandwidth", "1 GB/s", "--json", "/dev/null/x.json"], "'/dev/null' is not a folder"),
        (["--bandwidth", "1 GB/s", "--json", "/dev"], "it is a folder; pass another --json FILE"),
        (["--bandwidth", "1 GB/s", "--plot", "/dev/null/x.png"], "pass another --plot FILE"),
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


@pytest.mark.parametrize("paths", [["a/b.png", "a/b.png"], ["a/b.png", "a/../a/b.png"]])
def test_one_file_for_json_and_plot_is_refused(tmp_path, paths):
    json_path, plot_path = (tmp_path / path for path in paths)
    done = invoke("--model", "350m", "--bandwidth", "1 GB/s", "--json", json_path, "--plot", plot_path)
    assert "--json and --plot are one file" in str(done.exception)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("json_path", "plot_path"), [("plan.json", "plan.nothing"), ("/dev/null/x", "plan.png")])
def test_both_paths_are_looked_at_before_either_is_written(tmp_path, json_path, plot_path):
    done = invoke(
        "--model", "350m", "--bandwidth", "1 GB/s", "--json", tmp_path / json_path, "--plot", tmp_path / plot_path
    )
    assert isinstance(done.exception, CallerError)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_is_a_mistake_that_names_the_option():
    done = invoke("--model", "350m", "--bandwidth", "1 GB/s", "--json", "/dev/full")
    assert isinstance(done.exception, CallerError)
    assert "cannot write '/dev/full'" in str(done.exception)
    assert "--json FILE" in str(done.exception)


@pytest.mark.parametrize("arguments", [["--workers", "0"], ["--tp", "0"], ["--workers", "two"]])
def test_options_out_of_range_are_mistakes_of_usage(arguments):
    assert invoke("--model", "350m", "--bandwidth", "1 GB/s", *arguments).exit_code == 2


def test_a_model_is_asked_for():
    assert invoke("--bandwidth", "1 GB/s").exit_code == 2


def test_the_help_names_the_choices_that_are_known():
    shown = invoke("--help", columns=200).output
    for choices in ("float32|bfloat16|float16", "adamw|lion|momentum|sgd", "cpu|cuda"):
        assert choices in shown
