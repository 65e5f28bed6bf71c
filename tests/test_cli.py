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
from channel import TOKEN
from rich.console import Console
from test_exchange_mesh import call, told_by
from transports import SOON, bound, contributions, on_all
from typer.testing import CliRunner

import gradengine
from gradengine import GradientEngine, GradientLayout, GradientServer, WorkerClient
from gradengine.__main__ import main
from gradengine.cli import app
from gradengine.errors import HandshakeRefused, PeerLost
from gradengine.exchange import Progress
from gradengine.serve import table

SMALL = ["--hidden-size", "32", "--blocks", "1", "--sequence-length", "32", "--learning-rate", "0.03"]
QUICK = ["demo", *SMALL, "--steps", "30", "--compared-steps", "8"]
ENDLESS = ["demo", *SMALL, "--steps", "100000"]
PYTHON = [sys.executable, "-m", "gradengine"]


def environment():
    root = str(Path(gradengine.__file__).parent.parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]), "COLUMNS": "120"}


def run(*arguments, cwd):
    return subprocess.run(
        [*PYTHON, *arguments], cwd=cwd, env=environment(), capture_output=True, text=True, timeout=4 * SOON, check=False
    )


@pytest.fixture(autouse=True)
def _interruptible():
    """Ctrl-C interrupts what is started here, though whoever runs the tests may ignore it, as a shell's `&` does."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def squeezed(text):
    return " ".join(text.split())


@pytest.mark.parametrize("is_module", [True, False])
def test_an_interrupt_at_the_very_start_is_a_line_too(tmp_path, is_module):
    """Most of the first quarter of a second goes into the package's own imports."""
    _interrupt_when_imported(tmp_path, "msgpack")
    script = tmp_path / "bin" / "gradengine"
    script.parent.mkdir()
    script.write_text("from gradengine.__main__ import main\nmain()\n")
    done = _started([*PYTHON, "--version"] if is_module else [sys.executable, str(script), "--version"], tmp_path)
    assert done.stderr == "gradengine: interrupted\n"
    assert done.returncode in {
        130,
        -signal.SIGINT,
    }  # Python kills itself where code that was made by exec() was running


def test_a_program_that_imports_the_package_is_interrupted_as_any_other(tmp_path):
    _interrupt_when_imported(tmp_path, "msgpack")
    done = _started([sys.executable, "-c", "import gradengine"], tmp_path)
    assert (done.returncode, done.stderr.strip().endswith("KeyboardInterrupt")) == (-signal.SIGINT, True)


def _interrupt_when_imported(folder, module):
    (folder / f"{module}.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")


def _started(command, folder):
    env = {**environment(), "PYTHONPATH": os.pathsep.join([str(folder), environment()["PYTHONPATH"]])}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=SOON, check=False)


# ---- the demo ----


@pytest.mark.parametrize("transport", ["tcp", "unix", "local"])
def test_the_demo_proves_all_it_claims(tmp_path, transport):
    done = run(*QUICK, "--transport", transport, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^ (\w+) .* (yes|NO) *$", done.stdout, re.MULTILINE) == [
        ("1", "yes"),
        ("2", "yes"),
        ("3a", "yes"),
        ("3b", "yes"),
    ]
    assert "3a: fp32 sums depend on their order" in squeezed(done.stdout)
    assert [int(step) for step in re.findall(r"^ +(\d+)  +\d\.\d{3} ", done.stdout, re.MULTILINE)][-1] == 30
    assert (tmp_path / "out" / "demo-loss.png").read_bytes().startswith(b"\x89PNG")
    assert done.stderr == ""


def test_with_one_micro_batch_each_the_demo_is_one_process_bit_for_bit(tmp_path):
    done = run(*QUICK, "--micro-batches", "1", "--workers", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^ (\w+) .* (yes|NO) *$", done.stdout, re.MULTILINE) == [
        ("1", "yes"),
        ("2", "yes"),
        ("3", "yes"),
    ]
    assert "bit for bit" in squeezed(done.stdout)


def test_a_proof_that_fails_is_the_exit_code(tmp_path):
    done = run("demo", *SMALL, "--steps", "1", "--plot", "loss.svg", cwd=tmp_path)
    assert done.returncode == 1
    assert re.findall(r"^ (\w+) .* NO *$", done.stdout, re.MULTILINE) == ["2"]
    assert b"<svg" in (tmp_path / "loss.svg").read_bytes()


def test_the_users_text_is_learned(tmp_path):
    (tmp_path / "text").write_bytes(b"abcdefgh" * 2000)
    done = run(*QUICK, "--text", "text", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "text: 0.01 MB to learn" in done.stdout


class Running:
    """A demo that would run for long, with the processes of its ranks."""

    def __init__(self, cwd):
        self.process = subprocess.Popen(
            [*PYTHON, *ENDLESS, "--workers", "3"],
            cwd=cwd,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        text = ""
        while "over tcp://" not in text:
            line = self.process.stdout.readline()
            assert line, self.process.stderr.read()
            text += line
        self.ranks = {int(rank): int(pid) for rank, pid in re.findall(r"rank (\d): process (\d+)", text)}

    def end(self):
        """Exit code, standard error and seconds; every process must be gone."""
        begin = time.monotonic()
        _, error = self.process.communicate(timeout=2 * SOON)
        deadline = time.monotonic() + SOON
        while any(alive(pid) for pid in self.ranks.values()):
            assert time.monotonic() < deadline, "a worker was left behind"
            time.sleep(0.05)
        return self.process.returncode, error, time.monotonic() - begin


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    if not Path("/proc/self/stat").exists():
        return True
    return stat_of(Path(f"/proc/{pid}/stat"))[2][:1] not in {"Z", ""}


@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_worker_ends_the_demo_and_is_named(tmp_path, rank):
    running = Running(tmp_path)
    os.kill(running.ranks[rank], signal.SIGKILL)
    code, error, seconds = running.end()
    assert code == 1
    assert f"rank {rank} (process {running.ranks[rank]}) was killed by SIGKILL" in error
    assert len(error.splitlines()) == 1
    assert seconds < SOON


def test_ctrl_c_ends_all_and_says_nothing_more(tmp_path):
    running = Running(tmp_path)
    os.killpg(running.process.pid, signal.SIGINT)
    code, error, seconds = running.end()
    assert (code, error) == (130, "gradengine: interrupted\n")
    assert seconds < SOON


def test_no_worker_outlives_a_killed_demo(tmp_path):
    running = Running(tmp_path)
    running.process.kill()
    assert running.end()[0] == -signal.SIGKILL


def children_of(pid):
    """The processes that a process has started and that still run; multiprocessing's own helper is one of them."""
    stats = [stat_of(path) for path in Path("/proc").glob("[0-9]*/stat")]
    return [int(head.split()[0]) for head, _, tail in stats if tail.split()[:2] in (["S", str(pid)], ["R", str(pid)])]


def seconds_used(pid):
    """The seconds of CPU that a process has used; 0 of one that has ended."""
    fields = stat_of(Path(f"/proc/{pid}/stat"))[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def stat_of(path):
    """What stands before a process's name, the name's end, and what stands behind it; nothing of one that has ended."""
    try:
        head, bracket, tail = path.read_text().rpartition(")")
    except OSError:
        return "", "", ""
    return head, bracket, tail.strip()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="children are counted in /proc")
@pytest.mark.parametrize("used", [0.0, 0.4], ids=["starting", "at work"])  # a worker's seconds of CPU; imports take 0.3
@pytest.mark.parametrize(
    ("command", "workers"),
    [
        (["bench", "exchange", "--megabytes", "1", "--rounds", "1000000"], 2),
        (["plan", "--model", "350m", "--one-machine"], 2),
    ],
    ids=["bench", "plan"],
)
def test_ctrl_c_is_one_line_however_many_workers_there_are(tmp_path, command, workers, used):
    process = subprocess.Popen(
        [*PYTHON, *command],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while len(started := children_of(process.pid)) <= workers:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    while max(seconds_used(pid) for pid in started) < used:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=2 * SOON)
    assert (process.returncode, error) == (130, "gradengine: interrupted\n")
    deadline = time.monotonic() + SOON
    while any(alive(pid) for pid in started):
        assert time.monotonic() < deadline, "a worker was left behind"
        time.sleep(0.05)


# ---- mistakes ----


def fails(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["gradengine", *map(str, arguments)])
    with pytest.raises(SystemExit) as ending:
        main()
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return ending.value.code, error


def test_a_missing_text_is_said_so(monkeypatch, capsys, tmp_path):
    code, error = fails(monkeypatch, capsys, "demo", "--text", tmp_path / "none")
    assert code == 2
    assert error.startswith("gradengine: cannot read the text")
    assert "pass --text FILE" in error


def test_a_text_too_short_is_said_so(monkeypatch, capsys, tmp_path):
    (tmp_path / "short").write_bytes(b"short")
    code, error = fails(monkeypatch, capsys, "demo", "--text", tmp_path / "short")
    assert code == 2
    assert "too little text" in error
    assert "got 5 bytes, expected at least 10000" in error


def test_a_model_that_cannot_be_is_said_so(monkeypatch, capsys):
    code, error = fails(monkeypatch, capsys, "demo", "--hidden-size", 30)
    assert (code, "--hidden-size cannot be divided by --heads: got 30 / 4" in error) == (2, True)


def test_a_bad_plot_is_said_so_before_anything_is_started(monkeypatch, capsys, tmp_path):
    code, error = fails(monkeypatch, capsys, "demo", "--plot", tmp_path / "plot.doc")
    assert (code, "cannot plot to" in error) == (2, True)


def test_a_port_in_use_is_said_so(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, error = fails(monkeypatch, capsys, *QUICK, "--port", port)
    assert code == 1
    assert f"rank 0: cannot listen at 127.0.0.1:{port} (Address already in use)" in error
    assert "choose another port" in error


def run_without(packages, *arguments, cwd):
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({packages.split()!r})); sys.argv = {['gradengine', *arguments]};"
        "from gradengine.__main__ import main; main()"
    )
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment(), capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("package", "message"),
    [
        ("typer", "the command line needs typer, which is not installed: pip install 'gradengine[cli]'"),
        ("rich", "the command line needs rich, which is not installed: pip install 'gradengine[cli]'"),
        ("matplotlib", "a plot needs matplotlib, which is not installed: pip install 'gradengine[plot]'"),
    ],
)
def test_a_missing_extra_is_named(tmp_path, package, message):
    done = run_without(package, "demo", "--steps", "1", "--plot", "loss.png", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"gradengine: {message}\n"


def test_without_matplotlib_the_demo_says_that_it_draws_nothing(tmp_path):
    done = run_without("matplotlib", *QUICK, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "plot     none without matplotlib: pip install 'gradengine[plot]'" in done.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments",
    [["--version"], ["doctor"], ["serve", "--help"], ["plan", "--model", "350m", "--bandwidth", "1 GB/s"]],
    ids=" ".join,
)
def test_what_draws_nothing_needs_no_matplotlib(tmp_path, arguments):
    done = run_without("matplotlib", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


WITHOUT_CLI = pytest.mark.parametrize("packages", ["typer", "rich", "typer rich"])


@WITHOUT_CLI
def test_the_version_and_the_doctor_need_no_extra(tmp_path, packages):
    done = run_without(packages, "--version", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{gradengine.__version__}\n", "")
    done = run_without(packages, "doctor", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == run("doctor", cwd=tmp_path).stdout


@WITHOUT_CLI
@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]])
def test_without_an_extra_the_help_says_what_there_is_and_what_more_needs(tmp_path, packages, arguments):
    done = run_without(packages, *arguments, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    ready, _, more = done.stdout.partition("pip install 'gradengine[cli]'")
    assert re.findall(r"^  gradengine (\S+)", ready, re.MULTILINE) == ["doctor", "--version"]
    names = [command.name or command.callback.__name__ for command in app.registered_commands]
    groups = [group.name for group in app.registered_groups]
    assert {*re.findall(r"^  gradengine (\S+)", more, re.MULTILINE), "doctor"} == {*names, *groups}
    assert max(map(len, done.stdout.splitlines())) <= 100


@WITHOUT_CLI
@pytest.mark.parametrize("arguments", [["plan"], ["serve", "--help"], ["doctor", "--bad"]], ids=" ".join)
def test_without_an_extra_all_else_is_one_line_with_what_installs_it(tmp_path, packages, arguments):
    done = run_without(packages, *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    missing = packages.split()[0]
    assert done.stderr == (
        f"gradengine: the command line needs {missing}, which is not installed: pip install 'gradengine[cli]'\n"
    )


def test_another_missing_module_is_no_missing_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "gradengine.cli", None)
    with pytest.raises(ModuleNotFoundError, match=r"gradengine\.cli"):
        main()


# ---- the rest ----


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_help_names_the_commands():
    shown = invoke("--help")
    assert shown.exit_code == 0
    for command in ("demo", "bench", "plan", "serve", "env", "doctor"):
        assert re.search(rf"\b{command}\b", shown.output)


@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize("command", ["demo", "bench", "bench gpu", "plan", "serve", "env", "doctor"])
def test_every_command_has_help(command, option):
    assert invoke(*command.split(), option).exit_code == 0


@pytest.mark.parametrize(
    ("command", "flags"),
    [("", ["--version"]), ("plan", ["--one-machine", "--vocab-parallel"]), ("bench gpu", ["--odd"])],
    ids=["gradengine", "plan", "bench"],
)
def test_flags_show_no_value_that_they_would_take(command, flags):
    shown = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "100"}).output
    for flag in flags:
        lines = re.findall(rf"^\W* {flag} .*$", shown, re.MULTILINE)
        assert lines
        assert "bool" not in "".join(lines).lower()


def test_version():
    assert invoke("--version").output.strip() == gradengine.__version__


@pytest.mark.parametrize("option", ["--workers", "--steps", "--micro-batches", "--batch-size", "--compared-steps"])
def test_numbers_out_of_range_are_mistakes_of_usage(option):
    assert invoke("demo", option, "0").exit_code == 2


# ---- serve ----


LAYOUT, ARENA = GradientLayout.of({"w": (3,)}), np.zeros(32, np.float32)


def start_server(cwd, *arguments, token=None):
    variables = environment() | ({"GRADENGINE_TOKEN": token} if token else {})
    process = subprocess.Popen(
        [*PYTHON, "serve", *arguments],
        cwd=cwd,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    url = process.stdout.readline().strip()
    assert url, process.stderr.read()
    return process, url


def address_of(url):
    scheme, _, place = url.partition("://")
    host, _, port = place.rpartition(":")
    return place if scheme == "unix" else (host, int(port))


def sums_of_two(url, token=None, job=""):
    sums = [None, None]

    def work(rank):
        with WorkerClient(address_of(url), rank, 2, token=token, job=job, join_timeout=SOON) as exchange:
            engine = GradientEngine(LAYOUT, max_norm=None, exchange=exchange)
            engine.add({"w": np.full(3, rank + 1, np.float32)})
            sums[rank] = engine.step().gradients["w"].tolist()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
    return sums


@pytest.mark.parametrize(("where", "job"), [([], ""), (["--unix", "socket"], "run 1")])
def test_serve_sums_until_its_workers_have_gone(tmp_path, where, job):
    process, url = start_server(tmp_path, "--world-size", "2", "--job", job, *where)
    with pytest.raises(HandshakeRefused, match=f"rank 0 belongs to another job: got job='run 2', expected job='{job}'"):
        WorkerClient(address_of(url), 0, 2, job="run 2").bind(LAYOUT, ARENA, Progress())
    assert sums_of_two(url, job=job) == [[1.5] * 3] * 2
    _, error = process.communicate(timeout=2 * SOON)
    assert process.returncode == 0, error
    assert error.endswith("\nall 2 workers have connected and left\n")


def test_serve_without_a_job_s_name_serves_its_first_rank_s_job(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "1")  # of the server alone: it is another job's
    process, url = start_server(tmp_path, "--world-size", "2")
    assert sums_of_two(url, job="SLURM_JOB_ID=7") == [[1.5] * 3] * 2
    assert process.communicate(timeout=2 * SOON)[1].endswith("\nall 2 workers have connected and left\n")


@pytest.mark.parametrize("given", ["file", "environment"])
def test_serve_takes_its_token_from_a_file_or_the_environment(tmp_path, given):
    (tmp_path / "token").write_text("a secret of all ranks\n")
    by_file = ["--token-file", "token"] if given == "file" else []
    process, url = start_server(
        tmp_path, "--world-size", "2", *by_file, token="a secret of all ranks" if given == "environment" else None
    )
    assert sums_of_two(url, "a secret of all ranks") == [[1.5] * 3] * 2
    process.communicate(timeout=2 * SOON)
    assert process.returncode == 0


def test_serve_beyond_loopback_needs_a_token(monkeypatch, capsys):
    monkeypatch.delenv("GRADENGINE_TOKEN", raising=False)
    code, error = fails(monkeypatch, capsys, "serve", "--world-size", 2, "--host", "0.0.0.0")
    assert code == 2
    assert "there is no token" in error


def test_an_empty_or_missing_token_file_is_said_so(monkeypatch, capsys, tmp_path):
    (tmp_path / "empty").touch()
    for name, expected in (("empty", "there is no token in"), ("none", "cannot read the token from")):
        code, error = fails(monkeypatch, capsys, "serve", "--world-size", 2, "--token-file", tmp_path / name)
        assert (code, expected in error) == (2, True)


WORKER = """
import os, sys
import numpy as np
from gradengine import GradientEngine, GradientLayout, WorkerClient

host, port = sys.argv[1].removeprefix("tcp://").split(":")
exchange = WorkerClient((host, int(port)), int(sys.argv[2]), 2)
engine = GradientEngine(GradientLayout.of({"w": (3,)}), max_norm=None, exchange=exchange)
engine.add({"w": np.ones(3, np.float32)})
engine.step()
print("stepped", flush=True)
if sys.stdin.readline() == "killed\\n":
    os.kill(os.getpid(), 9)
"""


def two_workers_that_end(tmp_path, url, *ends):
    """Two processes that step once, and then end in these ways."""
    command = [sys.executable, "-c", WORKER, url]
    workers = [
        subprocess.Popen(
            [*command, str(rank)],
            cwd=tmp_path,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    assert [worker.stdout.readline() for worker in workers] == ["stepped\n"] * 2
    for worker, end in zip(workers, ends, strict=True):
        worker.communicate(f"{end}\n", timeout=2 * SOON)


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("ends", "code", "says"),
    [
        (("unclosed", "unclosed"), 0, "all 2 workers have connected and left\n"),
        (("unclosed", "killed"), 1, "gradengine: rank 1 is gone: its connection has ended; reconnect on all ranks\n"),
        (("killed", "unclosed"), 1, "gradengine: rank 0 is gone: its connection has ended; reconnect on all ranks\n"),
    ],
)
def test_serve_says_which_worker_was_killed_also_between_steps(tmp_path, ends, code, says):
    """One whose script just ends, without closing its exchange, has left."""
    process, url = start_server(tmp_path, "--world-size", "2")
    two_workers_that_end(tmp_path, url, *ends)
    *joined, last = process.communicate(timeout=2 * SOON)[1].splitlines(keepends=True)
    assert (last, process.returncode) == (says, code)
    assert {line.partition("the server: ")[2] for line in joined} == {
        f"rank {rank} has joined from 127.0.0.1\n" for rank in range(2)
    }


def test_serve_says_who_is_refused(tmp_path):
    process, url = start_server(tmp_path, "--world-size", "2", token=TOKEN)
    with pytest.raises(HandshakeRefused):
        WorkerClient(address_of(url), 1, 2, token="another secret of all ranks").bind(LAYOUT, ARENA, Progress())
    assert sums_of_two(url, token=TOKEN) == [[1.5] * 3] * 2
    told = process.communicate(timeout=2 * SOON)[1]
    assert "the server refuses a connection from 127.0.0.1: rank 1 has another token; start all with" in told


def test_the_table_of_serve_has_each_workers_traffic_and_the_step():
    def shown():
        console = Console(file=io.StringIO(), width=80)
        console.print(table(server, 2))
        return console.file.getvalue()

    with GradientServer(2) as server:
        assert shown() == "waiting for 2 workers\n"
        exchanges = [WorkerClient(server.address, rank, 2) for rank in range(2)]
        workers = bound(exchanges, LAYOUT, contributions(LAYOUT, 2))
        on_all(lambda worker: worker.sum() and None, workers)
        on_all(lambda worker: worker.exchange.barrier(), workers)
        found = server.workers
        assert [(each.rank, each.host) for each in found] == [(0, "127.0.0.1"), (1, "127.0.0.1")]
        assert all(each.received > LAYOUT.nbytes and each.sent > LAYOUT.nbytes for each in found)
        assert "2 workers, step 1" in shown()
        assert re.search(r"^ +1 +127\.0\.0\.1 +[\d.]+ kB +[\d.]+ kB", shown(), re.MULTILINE), shown()
        for exchange in exchanges:
            exchange.close()
        server.serve()
    assert server.workers == []


def test_serve_ends_where_nobody_comes(tmp_path):
    process, _ = start_server(tmp_path, "--world-size", "1", "--join-timeout", "0.1")
    _, error = process.communicate(timeout=2 * SOON)
    told = "gradengine: the server waits for ranks that have not joined: 0: got 0.1 s; start all ranks\n"
    assert (error, process.returncode) == (told, 1)


def test_serve_that_is_terminated_tells_its_workers_and_removes_its_socket(tmp_path):
    process, url = start_server(tmp_path, "--world-size", "2", "--unix", "socket")
    first = call(address_of(url), 0, 2, token=None, called=2)
    process.terminate()
    assert told_by(first) == (PeerLost, "the server was closed; reconnect on all ranks")
    assert process.communicate(timeout=2 * SOON)[1].endswith("gradengine: terminated\n")
    assert process.returncode == 143
    assert not (tmp_path / "socket").exists()


def test_serve_stops_at_ctrl_c(tmp_path):
    process, _ = start_server(tmp_path, "--world-size", "2")
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=2 * SOON)
    assert process.returncode == 130
    assert "Traceback" not in error


def test_a_full_disk_behind_stdout_is_one_line():
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    command = [*PYTHON, "plan", "--model", "350m", "--workers", "2", "--bandwidth", "10Gbit/s"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "gradengine: cannot write to stdout: No space left on device\n"
