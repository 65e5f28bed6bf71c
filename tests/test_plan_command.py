"""`gradengine plan` as a user meets it: the figures it prints, the JSON, and what it refuses."""

import dataclasses
import io
import json
import re

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

from rich.console import Console
from typer.testing import CliRunner

from gradengine.commands.cli import app
from gradengine.errors import CallerError
from gradengine.layout.cost import Bandwidth
from gradengine.plan.models import load_model
from gradengine.plan.prediction import Question, predict
from gradengine.plan.table import show, size

QUESTION = Question(load_model("350m"), 4, Bandwidth.gigabits(10), tp=2)


def invoke(*arguments):
    model = [] if "--model" in arguments else ["--model", "350m"]
    return CliRunner().invoke(app, ["plan", *model, *map(str, arguments)], env={"COLUMNS": "120"})


def planned(*arguments):
    done = invoke(*arguments)
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def test_350m_prints_the_known_numbers_and_writes_them(tmp_path):
    path = tmp_path / "plan.json"
    for model in ("7b", "350m"):  # the second replaces the first
        output = planned("--model", model, "--workers", 8, "--tp", 2, "--bandwidth", "10 Gbit/s", "--json", path)
    found = json.loads(path.read_text())
    assert (found["format"], found["question"]["model"]["name"]) == (4, "350m")
    assert found["tensor_parallel"]["bytes_per_step"] == 201326592
    for known in ("4.19 MB an all-reduce", "432,063,488 weights", f"{found['memory_bytes_per_rank']['arena']:,}"):
        assert known in output
    assert size(found["exchange"]["tcp://"]["busiest_link_bytes"]) in output
    assert f"tcp://: a step waits {found['waiting_seconds']:.3f} s" in output


def test_json_to_stdout_is_json_alone_and_has_all_that_was_asked():
    options = {
        "workers": 3, "tp": 2, "sequence_length": 8, "batch_size": 5, "micro_batches": 7, "dtype": "bfloat16",
        "optimizer": "sgd", "tflops": 9.0, "device": "cpu", "gpu_gigabytes": 24.0, "vocab_parallel": True,
    }  # fmt: skip
    given = [
        word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value) if word is not True
    ]
    rates = {"bandwidth": 1e9, "tp_bandwidth": 2e9, "socket_bandwidth": 3e9}
    given += [word for name, rate in rates.items() for word in (f"--{name.replace('_', '-')}", f"{rate / 1e9} GB/s")]
    found = json.loads(planned(*given, "--json", "-"))["question"]
    assert options == {name: found[name] for name in options}
    assert rates == {name: found[name]["bytes_per_second"] for name in rates}
    measured = json.loads(planned("--bandwidth", "1 GB/s", "--backward-seconds", 2, "--json", "-"))
    assert (measured["backward_seconds"], measured["question"]["tp_bandwidth"]) == (2.0, None)


def test_a_config_file_is_planned_whatever_it_is_called(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    path = tmp_path / "[bold]x.json"
    path.write_text(json.dumps(sizes | {"model_type": "llama", "vocab_size": 256, "num_key_value_heads": 2}))
    assert "[bold]x ([bold]x.json, taken as a Llama): 106,816" in planned("--model", path, "--bandwidth", "1 Gbit/s")


# ---- the table ----


def shown(width=120, **changes):
    console = Console(width=width, file=io.StringIO(), highlight=False)
    show(predict(dataclasses.replace(QUESTION, **changes)), console)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [60, 120])
def test_it_fits_the_terminal_and_cuts_nothing(width):
    text = shown(width)
    assert max(map(len, text.splitlines())) <= width
    assert "\u2026" not in text
    squeezed = " ".join(text.split())
    assert "4 data-parallel (workers) x 2 tensor-parallel = 8 in all" in squeezed
    assert "carries 402.65 MB each way in a step: 0.322 s" in squeezed


@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16"}, {"device": "cpu"}, {"workers": 1}])
def test_on_device_is_the_sum_of_the_rows_above_it(changes):
    rows = re.findall(r"^([a-z ,]+?) +([\d,]+) +\S+ [kMG]B$", shown(80, **changes), re.MULTILINE)
    sizes = {name: int(nbytes.replace(",", "")) for name, nbytes in rows}
    above = list(sizes).index("on device")
    assert sizes["on device"] == sum(list(sizes.values())[:above])
    below = set() if "workers" in changes else {"host rows, at most", "pinned rows, at most"}
    assert set(list(sizes)[above + 1 :]) == below - ({"pinned rows, at most"} if "device" in changes else set())


def test_what_does_not_fit_and_what_to_do_is_said():
    text = " ".join(shown(model=load_model("70b"), tp=8).split())
    assert re.search(r"memory does not fit: a rank needs 1\d\d\.\d\d GB, its GPU has 80 GB .*Raise --tp", text)
    assert "does not fit" not in shown()
    assert "build the engine without exchange=" in shown(workers=1)
    assert "connect(process_group=" in shown(tp=1, bandwidth=Bandwidth.gigabytes(50))


# ---- refusals ----

BANDWIDTH = ["--bandwidth", "1 GB/s"]
MISTAKES = [
    (["--bandwidth", "10"], "unknown unit: got '10'"),
    (["--bandwidth", "1e-300 GB/s"], "--bandwidth is out of range"),
    ([*BANDWIDTH, "--tp-bandwidth", "5 gb/s"], "unknown unit: got '5 gb/s'"),
    ([*BANDWIDTH, "--socket-bandwidth", "fast"], "'fast'"),
    ([*BANDWIDTH, "--model", "3b"], "'3b'"),
    ([*BANDWIDTH, "--tp", "3"], "heads cannot be divided by --tp: got 16 / 3"),
    ([*BANDWIDTH, "--tp", "8"], "key-value heads cannot be divided by --tp: got 4 / 8"),
    ([*BANDWIDTH, "--tp", "0"], "--tp is out of range"),
    ([*BANDWIDTH, "--tflops", "nan"], "--tflops"),
    ([*BANDWIDTH, "--gpu-gigabytes", "0"], "--gpu-gigabytes"),
    ([*BANDWIDTH, "--tp", "2", "--backward-seconds", "0.01"], "--backward-seconds is shorter"),
    ([*BANDWIDTH, "--dtype", "int8"], "unknown --dtype"),
    ([*BANDWIDTH, "--optimizer", "none"], "unknown --optimizer"),
    ([*BANDWIDTH, "--device", "tpu"], "unknown --device"),
    ([*BANDWIDTH, "--workers", str(10**12)], "--workers"),
    ([*BANDWIDTH, "--json", "/dev/null/x.json"], "--json FILE"),
    ([*BANDWIDTH, "--json", "/dev"], "--json FILE"),
    ([*BANDWIDTH, "--json", "/dev/full"], "--json FILE"),
]


def test_mistakes_are_errors_of_the_caller_and_nothing_is_written(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for arguments, named in MISTAKES:
        done = invoke(*arguments)
        assert isinstance(done.exception, CallerError), done.output
        assert named in str(done.exception)
        assert len(str(done.exception)) <= 200
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [[], [*BANDWIDTH, "--workers", "two"], [*BANDWIDTH, "--one-machine"]])
def test_what_is_missing_unknown_or_no_number_is_a_mistake_of_usage(arguments):
    assert invoke(*arguments).exit_code == 2
