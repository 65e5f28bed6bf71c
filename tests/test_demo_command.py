"""`gradengine demo`, whole, in shards and as launched ranks: what it shows, what it refuses at once, how it ends."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from transports import SOON, free_port

import gradengine
from gradengine.__main__ import main
from gradengine.console.processes import ProcessPool
from gradengine.demo import command
from gradengine.demo.run import ENVIRONMENT
from gradengine.demo.settings import Settings, Transport
from gradengine.exchange.launchers import LAUNCHERS

SMALL = ["--hidden-size", "32", "--blocks", "1", "--sequence-length", "32", "--kv-heads", "4"]
QUICK = [*SMALL, "--learning-rate", "0.03", "--compared-steps", "4"]
PYTHON = [sys.executable, "-m", "gradengine", "demo", *QUICK]


def started(cwd, *arguments, **variables):
    root = str(Path(gradengine.__file__).parent.parent)
    paths = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "COLUMNS": "120"} | variables
    return subprocess.Popen(
        [*PYTHON, *map(str, arguments)], cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def ended(process):
    """Exit code, output and standard error."""
    output, error = process.communicate(timeout=4 * SOON)
    return process.returncode, output, error


def verdicts(output):
    return re.findall(r"^ (\w+) .* (yes|NO) *$", output, re.MULTILINE)


# ---- refused before any process is started ----


def fails(monkeypatch, capsys, *arguments):
    """The standard error of what is a mistake of the user."""
    monkeypatch.setattr(ProcessPool, "start", lambda pool, name: pytest.fail(f"{name} was started"))
    monkeypatch.setattr(sys, "argv", ["gradengine", "demo", *map(str, arguments)])
    with pytest.raises(SystemExit) as ending:
        main()
    error = capsys.readouterr().err
    assert ending.value.code == 2
    assert "Traceback" not in error
    return error


MISTAKES = [
    (["--tp", 4], "--kv-heads cannot be divided by --tp: got 2 / 4"),
    (["--tp", 3], "--heads cannot be divided by --tp: got 4 / 3"),
    (["--tp", 3, "--heads", 6, "--kv-heads", 3], "intermediate size cannot be divided by --tp: got 256 / 3"),
    (["--heads", 5], "--hidden-size cannot be divided by --heads: got 96 / 5"),
    (["--kv-heads", 3], "--heads cannot be divided by --kv-heads: got 4 / 3"),
    (["--heads", 32, "--kv-heads", 2], "--hidden-size / --heads must be even: got 96 / 32 = 3"),
    *((["--learning-rate", rate], "--learning-rate") for rate in ("0", "-1", "inf")),
    (["--transport", "launcher"], "no launcher"),
    (["--transport", "launcher", "--tp", 2, "--kv-heads", 4], "got --tp 2"),
    (["--transport", "mpi", "--tp", 2, "--kv-heads", 4], "got --tp 2"),
    *(
        ([option, 0], option)
        for option in ("--workers", "--steps", "--micro-batches", "--batch-size", "--compared-steps")
    ),
]


@pytest.fixture
def unlaunched(monkeypatch):
    for variable in (name for each in LAUNCHERS for name in (each.rank, each.world_size)):
        monkeypatch.delenv(variable, raising=False)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("unlaunched")
def test_mistakes_are_said_before_anything_is_started(monkeypatch, capsys):
    for options, message in MISTAKES:
        assert re.search(message, fails(monkeypatch, capsys, *options), re.DOTALL), options


# ---- as one of the ranks that were launched ----


def place(rank, world_size, address="tcp://127.0.0.1:0"):
    """What says to a process that it is a rank, as whoever starts it by hand would."""
    return {"GRADENGINE_RANK": str(rank), "GRADENGINE_WORLD_SIZE": str(world_size), "GRADENGINE_ADDRESS": address}


@pytest.fixture
def launched(tmp_path):
    """Two ranks, started by hand."""
    ranks = []

    def start(*arguments):
        address = f"tcp://127.0.0.1:{free_port()}"
        options = ["--transport", "launcher", *arguments]
        ranks.extend(started(tmp_path, *options, **place(rank, 2, address)) for rank in range(2))
        return ranks

    yield start
    for process in ranks:
        process.kill()
        process.communicate()


def test_ranks_that_were_launched_prove_what_workers_that_the_demo_starts_prove(launched):
    first, other = launched("--steps", 20)
    code, output, error = ended(first)
    assert (code, error) == (0, "")
    assert ended(other) == (0, "", "")
    assert re.search(r"^workers  2 ranks that were launched, over tcp://127\.0\.0\.1:\d+$", output, re.MULTILINE)
    assert verdicts(output) == [(name, "yes") for name in ("1", "2", "3a", "3b")]


def test_a_launched_rank_that_is_killed_is_an_error_of_the_other(launched):
    first, second = launched("--steps", 100000)
    while "norm" not in (line := first.stdout.readline()):  # above the first step
        assert line, first.stderr.read()
    second.kill()
    code, _, error = ended(first)
    assert code == 1
    assert re.fullmatch(r"gradengine: rank 1 is gone.*\n", error), error


@pytest.mark.parametrize(
    ("options", "world_size", "message"),
    [
        ([], 2, "--transport is missing.*GRADENGINE_WORLD_SIZE=2.*pass --transport launcher"),
        (["--transport", "launcher", "--workers", 2], 1, "got 2, expected 1"),
    ],
)
@pytest.mark.usefixtures("unlaunched")
def test_what_launched_ranks_cannot_do_is_refused(monkeypatch, capsys, options, world_size, message):
    for name, value in place(0, world_size).items():
        monkeypatch.setenv(name, value)
    assert re.search(message, fails(monkeypatch, capsys, *options))


def test_a_launched_rank_begins_anew_before_it_joins_the_others(monkeypatch):
    monkeypatch.setattr(command, "begin_anew", lambda: sys.exit("anew"))
    monkeypatch.setattr(command, "join_launched", lambda _: pytest.fail("it has joined them"))
    with pytest.raises(SystemExit, match="anew"):
        command._run_launched(Settings(transport=Transport.MPI), None, None, None)


@pytest.mark.parametrize(("rank", "world_size"), [("0", "1"), ("2", "2"), ("0", "many")])
def test_workers_are_started_where_no_others_were_launched(monkeypatch, rank, world_size):
    """Also where the variables say nothing of sense: nobody has asked for them."""
    for name, value in place(rank, world_size).items():
        monkeypatch.setenv(name, value)
    assert command._default_transport() is Transport.TCP
