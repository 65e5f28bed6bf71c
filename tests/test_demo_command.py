"""`gradengine demo --tp`: what it shows, what it refuses before it starts anything, and how it ends."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import gradengine
from gradengine.__main__ import main

SMALL = [
    "--hidden-size",
    "32",
    "--blocks",
    "1",
    "--sequence-length",
    "32",
    "--learning-rate",
    "0.03",
    "--kv-heads",
    "4",
]
PYTHON = [sys.executable, "-m", "gradengine", "demo", *SMALL]


def environment():
    root = str(Path(gradengine.__file__).parent.parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]), "COLUMNS": "120"}


def run(*arguments, cwd):
    command = [*PYTHON, "--steps", "30", "--compared-steps", "8", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--tp", "2"], id="tcp"),
        pytest.param(["--tp", "2", "--transport", "unix"], id="unix"),
        pytest.param(["--tp", "4", "--transport", "local"], id="local"),
        pytest.param(["--tp", "2", "--workers", "1"], id="one-worker"),
    ],
)
def test_the_demo_proves_all_it_claims_of_shards(tmp_path, options):
    done = run(*options, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    proofs = re.findall(r"^ (\w+) .* (yes|NO) *$", done.stdout, re.MULTILINE)
    assert proofs == [(name, "yes") for name in ("1", "2", "3a", "3b", "4")]
    assert f"in {options[1]} shards" in done.stdout
    assert "C-TP-001" in done.stdout
    assert done.stderr == ""


def fails(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["gradengine", "demo", *map(str, arguments)])
    with pytest.raises(SystemExit) as ending:
        main()
    return ending.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--tp", 4],
            "--tp=4: num_kv_heads cannot be divided by tp_size: got 2 / 4.*pass --heads and --kv-heads that 4",
        ),
        (["--tp", 3], "--tp=3: num_heads cannot be divided by tp_size: got 4 / 3.*pass --heads and --kv-heads that 3"),
        (["--tp", 3, "--heads", 6, "--kv-heads", 3], "intermediate_size .* got 256 / 3.*pass another --hidden-size"),
        (["--heads", 5], "there is no such model: got --heads=5 .*96 / 5 leaves 1"),
        (["--kv-heads", 3], "there is no such model: got --heads=4 --kv-heads=3 .*4 / 3 leaves 1"),
    ],
)
def test_a_model_that_cannot_be_cut_is_said_so_before_anything_is_started(monkeypatch, capsys, options, message):
    begin = time.monotonic()
    code, error = fails(monkeypatch, capsys, *options)
    assert code == 1
    assert re.search(message, error)
    assert "Traceback" not in error
    assert time.monotonic() - begin < 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_ends_the_demo_in_shards_and_is_named(tmp_path, rank):
    process = subprocess.Popen(
        [*PYTHON, "--steps", "100000", "--tp", "2"], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    text = ""
    while "shard 1" not in text:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        text += line
    pids = {int(rank): int(pid) for rank, pid in re.findall(r"rank (\d): process (\d+)", text)}
    os.kill(pids[rank], signal.SIGKILL)
    begin = time.monotonic()
    _, error = process.communicate(timeout=30)
    assert process.returncode == 1
    assert f"rank {rank} (process {pids[rank]}) was killed by SIGKILL" in error
    assert len(error.splitlines()) == 1
    assert time.monotonic() - begin < 15
    for pid in pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
