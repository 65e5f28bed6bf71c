"""The command line as a user meets it: what it prints, how it fails, what it leaves behind."""

import io
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from test_exchange_mesh import call, told_by
from transports import SOON, bound, contributions, on_all
from typer.testing import CliRunner

import gradengine
from gradengine import GradientEngine, GradientLayout, GradientServer, connect
from gradengine.__main__ import main
from gradengine.commands.cli import app
from gradengine.commands.serve import table
from gradengine.demo import command as demo_command
from gradengine.demo.proofs import Proof
from gradengine.errors import HandshakeRefused, PeerLost

SMALL = ["demo", "--hidden-size", "32", "--blocks", "1", "--sequence-length", "32", "--learning-rate", "0.03"]
PYTHON = [sys.executable, "-m", "gradengine"]
PROC = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="children are counted in /proc")


def environment():
    root = str(Path(gradengine.__file__).parent.parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]), "COLUMNS": "120"}


def run(command, cwd, **options):
    return subprocess.run(
        command, cwd=cwd, text=True, check=False, timeout=4 * SOON,
        **{"env": environment(), "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options,
    )  # fmt: skip


def started(command, cwd, **options):
    return subprocess.Popen(
        command, cwd=cwd, text=True, start_new_session=True,
        **{"env": environment(), "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options,
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _interruptible():
    """Ctrl-C interrupts what is started here, though whoever runs the tests may ignore it, as a shell's `&` does."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# ---- interrupts and processes that end ----


def stat_of(path):
    """What stands before a process's name, the name's end, and what stands behind it; nothing of one that has ended."""
    try:
        head, bracket, tail = path.read_text().rpartition(")")
    except OSError:
        return "", "", ""
    return head, bracket, tail.strip()


def children_of(pid):
    """The processes that a process has started and that still run; multiprocessing's own helper is one of them."""
    stats = [stat_of(path) for path in Path("/proc").glob("[0-9]*/stat")]
    return [int(head.split()[0]) for head, _, tail in stats if tail.split()[:2] in (["S", str(pid)], ["R", str(pid)])]


def ended(process, children):
    """Exit code and standard error; every child must be gone."""
    _, error = process.communicate(timeout=2 * SOON)
    deadline = time.monotonic() + SOON
    while any(stat_of(Path(f"/proc/{pid}/stat"))[2][:1] not in {"Z", ""} for pid in children):
        assert time.monotonic() < deadline, "a worker was left behind"
        time.sleep(0.02)
    return process.returncode, error


@pytest.fixture
def demo(tmp_path):
    """A demo that would run for long, with the processes of its ranks."""
    process = started([*PYTHON, *SMALL, "--steps", "100000", "--workers", "3"], tmp_path)
    text = ""
    while "over tcp://" not in text:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        text += line
    return process, {int(rank): int(pid) for rank, pid in re.findall(r"rank (\d): process (\d+)", text)}


@PROC
def test_a_killed_worker_ends_the_demo_and_is_named(demo):
    process, ranks = demo
    os.kill(ranks[2], signal.SIGKILL)
    code, error = ended(process, ranks.values())
    assert code == 1
    assert f"rank 2 (process {ranks[2]}) was killed by SIGKILL" in error
    assert len(error.splitlines()) == 1


@PROC
def test_no_worker_outlives_a_killed_demo(demo):
    process, ranks = demo
    process.kill()
    assert ended(process, ranks.values())[0] == -signal.SIGKILL


@PROC
@pytest.mark.parametrize("is_at_work", [False, True])
def test_ctrl_c_is_one_line_however_many_workers_there_are(tmp_path, request, is_at_work):
    if is_at_work:
        process, ranks = request.getfixturevalue("demo")
        children = ranks.values()
    else:
        command = [*PYTHON, "bench", "exchange", "--megabytes", "1", "--rounds", "1000000"]
        process = started(command, tmp_path, stdout=subprocess.DEVNULL)
        while len(children := children_of(process.pid)) <= 2:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    assert ended(process, children) == (130, "gradengine: interrupted\n")


# ---- the demo ----


def test_the_demo_in_shards_proves_all_it_claims_of_the_users_text(tmp_path):
    (tmp_path / "text").write_bytes(b"abcdefgh" * 2000)
    options = ["--steps", "30", "--compared-steps", "8", "--text", "text", "--tp", "2", "--kv-heads", "4"]
    done = run([*PYTHON, *SMALL, *options], tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    names = ("1", "2", "3a", "3b")
    assert re.findall(r"^ (\w+) .* (yes|NO) *$", done.stdout, re.MULTILINE) == [(name, "yes") for name in names]
    assert [int(step) for step in re.findall(r"^ +(\d+)  +\d\.\d{3} ", done.stdout, re.MULTILINE)][-1] == 30
    assert "text: 0.01 MB to learn" in done.stdout
    assert (tmp_path / "out" / "demo-loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_proof_that_fails_is_the_exit_code(monkeypatch):
    monkeypatch.setattr(demo_command, "_run", lambda *_: [Proof("1", "", "", "", holds) for holds in (False, True)])
    assert CliRunner().invoke(app, SMALL).exit_code == 1


# ---- mistakes ----


def fails(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["gradengine", *map(str, arguments)])
    with pytest.raises(SystemExit) as ending:
        main()
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return ending.value.code, error


MISTAKES = [
    (["demo", "--text", "none"], "cannot read the text"),
    (["demo", "--text", "short"], "got 5 bytes"),
    (["demo", "--hidden-size", 30], "--hidden-size"),
    (["demo", "--plot", "plot.doc"], "cannot plot to"),
    (["serve", "--world-size", 2, "--host", "0.0.0.0"], "there is no secret"),
    (["serve", "--world-size", 2, "--secret-file", "empty"], "there is no secret in"),
    (["serve", "--world-size", 2, "--secret-file", "none"], "cannot read the secret from"),
]


def test_a_mistake_is_one_line_that_names_it(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GRADENGINE_SECRET", raising=False)
    (tmp_path / "short").write_bytes(b"short")
    (tmp_path / "empty").touch()
    for arguments, named in MISTAKES:
        code, error = fails(monkeypatch, capsys, *arguments)
        assert code == 2
        assert error.startswith("gradengine: ")
        assert named in error


def test_a_port_in_use_is_said_so(monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, error = fails(monkeypatch, capsys, "serve", "--world-size", 2, "--port", port)
    assert (code, f"cannot listen at 127.0.0.1:{port}" in error) == (2, True)


def test_a_full_disk_behind_stdout_is_one_line(tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    with open("/dev/full", "w") as full:
        done = run([*PYTHON, "plan", "--model", "350m", "--bandwidth", "10Gbit/s"], tmp_path, stdout=full)
    assert (done.returncode, done.stderr) == (1, "gradengine: cannot write to stdout: No space left on device\n")


def _without(packages, cases):
    """A program that runs the command line once with each of these arguments, without these packages."""
    ends = "\n    print(f'ends with {end.code or 0}', file=sys.stderr)" if len(cases) > 1 else "\n    raise"
    return (
        f"import sys; sys.modules.update(dict.fromkeys({packages.split()!r}))\n"
        "from gradengine.__main__ import main\n"
        f"for arguments in {list(map(list, cases))!r}:\n"
        "  sys.argv = ['gradengine', *arguments]\n"
        f"  try: main()\n  except SystemExit as end:{ends}"
    )


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_an_extra_some_commands_work_and_the_others_say_what_installs_it(tmp_path, package):
    done = run([sys.executable, "-c", _without(package, [["--version"], ["doctor"], []])], tmp_path)
    assert done.stderr == ""
    first, *others = done.stdout.splitlines()
    assert first == gradengine.__version__
    ready, _, more = "\n".join(others).partition("pip install 'gradengine[cli]'")
    assert re.findall(r"^gradengine (\S+)", ready, re.MULTILINE) == ["doctor", "--version"]
    names = [command.name or command.callback.__name__ for command in app.registered_commands]
    groups = [group.name for group in app.registered_groups]
    assert {*re.findall(r"(?:gradengine|,|and) (\w+)", more), "doctor"} == {*names, *groups}
    done = run([sys.executable, "-c", _without(package, [["plan"], ["serve", "--help"], ["doctor", "-x"]])], tmp_path)
    said = f"gradengine: {package} is not installed: pip install 'gradengine[cli]'\n"
    assert (done.stdout, done.stderr) == ("", f"{said}ends with 2\n" * 3)


def test_without_matplotlib_all_but_a_plot_works(tmp_path, monkeypatch):
    cases = [["--version"], ["plan", "--model", "350m", "--bandwidth", "1 GB/s"], ["demo", "--plot", "loss.png"]]
    done = run([sys.executable, "-c", _without("matplotlib", cases)], tmp_path)
    said = "gradengine: matplotlib is not installed: pip install 'gradengine[plot]'\n"
    assert done.stderr.endswith(f"{said}ends with 2\n")
    assert done.stderr.count("gradengine:") == 1
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "gradengine[plot]" in demo_command._plotter(None)(None, 0)


def test_another_missing_module_is_no_missing_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "gradengine.commands.cli", None)
    with pytest.raises(ModuleNotFoundError, match=r"gradengine\.commands\.cli"):
        main()


# ---- help ----


def test_every_command_has_help_and_flags_show_no_value_that_they_would_take():
    def shown(*arguments):
        done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "100"})
        assert done.exit_code == 0
        return done.output

    commands = ("demo", "bench", "bench gpu step", "plan", "serve", "doctor")
    helps = {command: shown(*command.split(), "--help") for command in commands}
    assert all(re.search(rf"\b{command}\b", shown("-h")) for command in commands if " " not in command)
    (line,) = re.findall(r"^\W* --vocab-parallel .*$", helps["plan"], re.MULTILINE)
    assert "bool" not in line.lower()
    assert shown("--version").strip() == gradengine.__version__


# ---- serve ----


LAYOUT, ARENA = GradientLayout.of({"w": (3,)}), np.zeros(32, np.float32)
SECRET = "a secret of all ranks"


def start_server(cwd, *arguments, secret=None):
    variables = environment() | ({"GRADENGINE_SECRET": secret} if secret else {})
    process = started([*PYTHON, "serve", *arguments], cwd, env=variables)
    url = process.stdout.readline().strip()
    assert url, process.stderr.read()
    return process, url


def address_of(url):
    scheme, _, place = url.partition("://")
    host, _, port = place.rpartition(":")
    return place if scheme == "unix" else (host, int(port))


def sums_of_two(url, secret=None, job=""):
    sums = [None, None]

    def work(rank):
        with connect(url, rank, 2, served=True, secret=secret, job=job, join_timeout=SOON) as exchange:
            engine = GradientEngine(LAYOUT, max_norm=None, exchange=exchange)
            engine.add({"w": np.full(3, rank + 1, np.float32)})
            sums[rank] = engine.step().gradients["w"].tolist()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    return sums


def test_serve_sums_until_its_workers_have_gone_and_says_who_is_refused(tmp_path):
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    process, url = start_server(
        tmp_path, "--world-size", "2", "--job", "run 1", "--unix", "socket", "--secret-file", "secret"
    )
    for options in ({"secret": SECRET, "job": "run 2"}, {"secret": "another secret of all ranks", "job": "run 1"}):
        with pytest.raises(HandshakeRefused):
            connect(url, 1, 2, served=True, **options).bind(LAYOUT, ARENA)
    assert sums_of_two(url, SECRET, job="run 1") == [[1.5] * 3] * 2
    told = process.communicate(timeout=2 * SOON)[1]
    assert process.returncode == 0, told
    assert "rank 1 has a different secret" in told
    assert told.endswith("\nall 2 workers have connected and left\n")


def test_serve_takes_its_secret_from_the_environment_and_its_job_from_its_first_rank(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "1")  # of the server alone: it is another job's
    process, url = start_server(tmp_path, "--world-size", "2", secret=SECRET)
    assert sums_of_two(url, SECRET, job="SLURM_JOB_ID=7") == [[1.5] * 3] * 2
    process.communicate(timeout=2 * SOON)
    assert process.returncode == 0


WORKER = """
import os, sys
import numpy as np
from gradengine import GradientEngine, GradientLayout, connect

exchange = connect(sys.argv[1], int(sys.argv[2]), 2, served=True)
engine = GradientEngine(GradientLayout.of({"w": (3,)}), max_norm=None, exchange=exchange)
engine.add({"w": np.ones(3, np.float32)})
engine.step()
print("stepped", flush=True)
if sys.stdin.readline() == "killed\\n":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_serve_says_which_worker_was_killed_also_between_steps(tmp_path):
    """One whose script just ends, without closing its exchange, has left."""
    process, url = start_server(tmp_path, "--world-size", "2")
    command = [sys.executable, "-c", WORKER, url]
    workers = [started([*command, str(rank)], tmp_path, stdin=subprocess.PIPE) for rank in range(2)]
    assert [worker.stdout.readline() for worker in workers] == ["stepped\n"] * 2
    for worker, end in zip(workers, ("unclosed", "killed"), strict=True):
        worker.communicate(f"{end}\n", timeout=2 * SOON)
    *joined, last = process.communicate(timeout=2 * SOON)[1].splitlines()
    assert (last.startswith("gradengine: rank 1 is gone"), process.returncode) == (True, 1)
    assert {line.partition("the server: ")[2] for line in joined} == {
        f"rank {rank} has joined from 127.0.0.1" for rank in range(2)
    }


def test_the_table_of_serve_has_each_workers_traffic_and_the_step():
    def shown():
        console = Console(file=io.StringIO(), width=80)
        console.print(table(server, 2))
        return console.file.getvalue()

    with GradientServer(2) as server:
        assert shown() == "waiting for 2 workers\n"
        exchanges = [connect(server.url, rank, 2, served=True) for rank in range(2)]
        workers = bound(exchanges, LAYOUT, contributions(LAYOUT, 2))
        on_all(lambda worker: worker.sum() and None, workers)
        on_all(lambda worker: worker.exchange.barrier(), workers)
        found = server.workers
        assert [each[:2] for each in found] == [(0, "127.0.0.1"), (1, "127.0.0.1")]
        assert all(min(received, sent) > LAYOUT.nbytes for *_, received, sent in found)
        assert "2 workers, step 1" in shown()
        assert re.search(r"^ +1 +127\.0\.0\.1 +[\d.]+ kB +[\d.]+ kB", shown(), re.MULTILINE), shown()
        for exchange in exchanges:
            exchange.close()
        server.serve()
    assert server.workers == []


def test_serve_ends_where_nobody_comes(monkeypatch, capsys):
    code, error = fails(monkeypatch, capsys, "serve", "--world-size", 1, "--join-timeout", 0.1)
    assert (code, "rank 0 did not join the server" in error) == (1, True)


def test_serve_that_is_terminated_tells_its_workers_and_removes_its_socket(tmp_path):
    process, url = start_server(tmp_path, "--world-size", "2", "--unix", "socket")
    first = call(address_of(url), 0, 2, secret=None, called=2)
    process.terminate()
    assert told_by(first) == (PeerLost, "the server was closed; reconnect on all ranks")
    assert process.communicate(timeout=2 * SOON)[1].endswith("gradengine: terminated\n")
    assert process.returncode == 143
    assert not (tmp_path / "socket").exists()
