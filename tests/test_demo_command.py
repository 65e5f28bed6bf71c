"""`gradengine demo`, in shards and as launched ranks: what it shows, what it refuses at once, and how it ends."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transports import SOON, free_port

import gradengine
from gradengine.__main__ import main
from gradengine.demo import command
from gradengine.demo.run import ENVIRONMENT
from gradengine.demo.settings import Settings, Transport
from gradengine.exchange.environment import LAUNCHERS
from gradengine.processes import ProcessPool

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
    line = [*PYTHON, "--steps", "30", "--compared-steps", "8", *arguments]
    return subprocess.run(
        line, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=4 * SOON, check=False
    )


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
    assert "differences relative to the whole" in done.stdout
    assert "3b runs the code of the shards twice" in done.stdout
    assert done.stderr == ""


def fails(monkeypatch, capsys, *arguments):
    """Exit code and standard error of what is refused before any process is started."""
    monkeypatch.setattr(ProcessPool, "start", lambda pool, name: pytest.fail(f"{name} was started"))
    monkeypatch.setattr(sys, "argv", ["gradengine", "demo", *map(str, arguments)])
    with pytest.raises(SystemExit) as ending:
        main()
    return ending.value.code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tp", 4], " --kv-heads cannot be divided by --tp: got 2 / 4.*pass --heads and --kv-heads that 4"),
        (["--tp", 3], " --heads cannot be divided by --tp: got 4 / 3.*pass --heads and --kv-heads that 3"),
        (
            ["--tp", 3, "--heads", 6, "--kv-heads", 3],
            " the intermediate size cannot be divided by --tp: got 256 / 3.*pass another --hidden-size",
        ),
        (["--heads", 5], " --hidden-size cannot be divided by --heads: got 96 / 5, which leaves 1"),
        (["--kv-heads", 3], " --heads cannot be divided by --kv-heads: got 4 / 3, which leaves 1"),
        (["--heads", 32, "--kv-heads", 2], " --hidden-size / --heads must be even: got 96 / 32 = 3"),
    ],
)
def test_a_model_that_cannot_be_cut_is_said_so_before_anything_is_started(monkeypatch, capsys, options, message):
    code, error = fails(monkeypatch, capsys, *options)
    assert code == 2
    assert re.search(message, error)
    assert "Traceback" not in error


@pytest.mark.parametrize("tp", ["1", "2"])
@pytest.mark.parametrize("rate", ["0", "-1", "nan", "inf"])
def test_a_rate_at_which_nothing_is_learned_is_a_mistake_of_usage(monkeypatch, capsys, rate, tp):
    code, error = fails(monkeypatch, capsys, "--learning-rate", rate, "--tp", tp)
    assert code == 2
    assert "is not a finite number above 0" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("options", [["--tp", "2"], []])
def test_weights_that_never_move_fail_the_proofs_without_a_traceback(tmp_path, options):
    """So small a rate that fp32 rounds it away; options that come later count."""
    done = run("--learning-rate", "1e-30", *options, cwd=tmp_path)
    assert done.returncode == 1
    assert "the weights of one process have not moved" in " ".join(done.stdout.split())
    assert done.stderr == ""
    failed = re.findall(r"^ (\w+) .* NO *$", done.stdout, re.MULTILINE)
    assert failed == ["2", "3a"]


@pytest.mark.parametrize(("port", "tp", "last"), [(65535, 2, 65536), (65533, 4, 65536), (65530, 16, 65545)])
def test_ports_beyond_the_last_are_refused_before_anything_is_started(monkeypatch, capsys, port, tp, last):
    options = ["--port", port, "--tp", tp, "--heads", 16, "--kv-heads", 16, "--hidden-size", 96]
    code, error = fails(monkeypatch, capsys, *options)
    assert code == 2
    assert f"--port={port} leaves too few ports for {tp} shards: got ports {port} to {last}, expected at most" in error
    assert f"pass --port {65536 - tp} or less" in error


@pytest.mark.parametrize(
    ("port", "tp", "transport"), [(65534, 2, "tcp"), (65535, 1, "tcp"), (0, 2, "tcp"), (65535, 2, "local")]
)
def test_ports_up_to_the_last_are_not_refused(port, tp, transport):
    settings = Settings(port=port, tensor_parallel=tp, transport=Transport(transport))
    command._refuse_ports_beyond_last(settings)


# ---- as one of the ranks that were launched ----


def place(rank, world_size, address="tcp://127.0.0.1:0"):
    """What says to a process that it is a rank, as whoever starts it by hand would."""
    return {"GRADENGINE_RANK": str(rank), "GRADENGINE_WORLD_SIZE": str(world_size), "GRADENGINE_ADDRESS": address}


@pytest.fixture
def launched(tmp_path):
    """So many ranks, started by hand."""
    started = []

    def start(ranks, *arguments):
        address = f"tcp://127.0.0.1:{free_port()}"
        line = [*PYTHON, "--compared-steps", "4", "--transport", "launcher", *arguments]
        started.extend(
            subprocess.Popen(
                line, cwd=tmp_path, env=environment() | place(rank, ranks, address), stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, text=True,
            )
            for rank in range(ranks)
        )  # fmt: skip
        return started

    yield start
    for process in started:
        process.kill()
        process.communicate()


def digests(output):
    return re.findall(r"^ (?:1|3b) .* sha256 ([0-9a-f]{12}) .* yes *$", output, re.MULTILINE)


def test_ranks_that_were_launched_prove_what_workers_that_the_demo_starts_prove(tmp_path, launched):
    first, *others = launched(3, "--steps", "20")
    output, error = first.communicate(timeout=4 * SOON)
    assert (first.returncode, error) == (0, "")
    assert [(*other.communicate(timeout=SOON), other.returncode) for other in others] == [("", "", 0)] * 2
    assert re.search(r"^workers  3 ranks that were launched, over tcp://127\.0\.0\.1:\d+$", output, re.MULTILINE)
    own = run("--compared-steps", "4", "--steps", "20", "--workers", "3", "--transport", "local", cwd=tmp_path)
    assert len(digests(own.stdout)) == 2
    assert digests(output) == digests(own.stdout)


def test_only_rank_0_fails_where_a_proof_does(launched):
    first, second = launched(2, "--steps", "4", "--learning-rate", "1e-30")
    output, error = first.communicate(timeout=4 * SOON)
    assert (first.returncode, error) == (1, "")
    assert re.findall(r"^ (\w+) .* NO *$", output, re.MULTILINE) == ["2", "3a"]
    assert (*second.communicate(timeout=SOON), second.returncode) == ("", "", 0)


@pytest.mark.parametrize("who", [0, 1])
def test_a_launched_rank_that_is_killed_is_an_error_of_the_other(launched, who):
    ranks = launched(2, "--steps", "100000")
    while "norm" not in (line := ranks[0].stdout.readline()):  # above the first step
        assert line, ranks[0].stderr.read()
    ranks[who].kill()
    (_, error), _ = (ranks[rank].communicate(timeout=2 * SOON) for rank in (1 - who, who))
    assert ranks[1 - who].returncode == 1
    assert re.fullmatch(rf"gradengine: rank {who} is gone.*\n", error), error


@pytest.mark.parametrize(
    ("options", "world_size", "message"),
    [
        ([], 2, "GRADENGINE_WORLD_SIZE=2: each of these ranks would start .*; pass --transport launcher or mpi for"),
        (["--transport", "launcher"], None, "no launcher started this process"),
        (
            ["--transport", "launcher", "--workers", 2],
            1,
            "--workers is not the number of launched ranks: got 2, expected 1",
        ),
        (["--transport", "launcher", "--tp", 2], 1, "with --transport launcher each rank .* got --tp 2, expected --tp"),
        (["--transport", "mpi", "--tp", 2], None, "with --transport mpi each rank .* got --tp 2, expected --tp 1"),
    ],
)
def test_what_launched_ranks_cannot_do_is_refused(monkeypatch, capsys, options, world_size, message):
    for variable in (name for each in LAUNCHERS for name in (each.rank, each.world_size)):
        monkeypatch.delenv(variable, raising=False)
    for name, value in (ENVIRONMENT | (place(0, world_size) if world_size else {})).items():
        monkeypatch.setenv(name, value)
    code, error = fails(monkeypatch, capsys, *options)
    assert code == 2
    assert re.search(message, error)
    assert "Traceback" not in error


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


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_ends_the_demo_in_shards_and_is_named(tmp_path, rank):
    process = subprocess.Popen(
        [*PYTHON, "--steps", "100000", "--tp", "2"], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    text = ""
    while "over tcp://" not in text:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        text += line
    pids = {int(rank): int(pid) for rank, pid in re.findall(r"rank (\d): process (\d+)", text)}
    os.kill(pids[rank], signal.SIGKILL)
    begin = time.monotonic()
    _, error = process.communicate(timeout=2 * SOON)
    assert process.returncode == 1
    assert f"rank {rank} (process {pids[rank]}) was killed by SIGKILL" in error
    assert len(error.splitlines()) == 1
    assert time.monotonic() - begin < SOON
    for pid in pids.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
