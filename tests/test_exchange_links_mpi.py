"""Links over MPI between processes that mpiexec has started, of the library in this environment: `make test-mpi`."""

import os
import re
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(os.environ.get("TEST_MPI") != "1", reason="set TEST_MPI=1, as make test-mpi does"),
    pytest.mark.timeout(150),
]
ROOT = Path(__file__).parent.parent
SOON = 120.0
LAUNCHERS = ("PMI", "OMPI_", "PRTE_", "MPI_", "SLURM_", "TEST_MPI")
PAGE, EXAMPLE = ((ROOT / path).read_text() for path in ("docs/how-to/launch.md", "examples/any_launcher.py"))
SHOWN = sorted({*re.findall(r"^ *mpiexec -n 2 python (examples/any_launcher.py .*)$", PAGE + EXAMPLE, re.MULTILINE)})
(DEMO,) = re.findall(r"^mpiexec -n 2 gradengine (demo .*)$", PAGE, re.MULTILINE)
SMALL = ["--hidden-size", "32", "--blocks", "1", "--sequence-length", "32", "--learning-rate", "0.03"]
OF_OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",  # more ranks than cores
}


def mpiexec(ranks, *command):
    """The exit status of so many ranks, and what they say; none of them is left, though they hang."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    process = subprocess.Popen(
        [Path(sys.executable).parent / "mpiexec", "-n", str(ranks), sys.executable, *map(str, command)],
        env=own | OF_OPEN_MPI | {"PYTHONPATH": str(ROOT), "GRADENGINE_JOB": secrets.token_hex(8)},  # MPICH names no run
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, error = process.communicate(timeout=SOON)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, error = process.communicate()
        pytest.fail(f"hangs: {output}{error}")
    return process.returncode, output, error


def ranks_that_run(ranks, *command):
    return mpiexec(ranks, ROOT / "tests" / "link_process.py", "mpi", *command)


def told(what, who):
    """What each of three ranks was told, by rank, where that one does not go on: the job ends, and not well."""
    status, output, error = ranks_that_run(3, what, who)
    assert status != 0, output + error
    return {int(rank): words for rank, words in re.findall(r"^rank (\d): (.*)$", output, re.MULTILINE)}


@pytest.mark.parametrize(
    ("what", "ranks"),
    [
        *((what, ranks) for what in ("sums", "engine", "collectives") for ranks in (1, 2, 3, 4)),
        *(("part", 4), ("grid", 4), ("arguments", 2), ("moves", 2)),
    ],
)
def test_links_engines_and_parts_of_a_communicator_find_what_they_find_over_threads(what, ranks):
    """Also after arguments that contradict the group were refused; and a link keeps what links promise."""
    status, output, error = ranks_that_run(ranks, what)
    assert (status, output) == (0, "the same\n" * ranks), error


@pytest.mark.parametrize(("command", "ranks"), [(DEMO, 2), (DEMO, 3), ("demo --transport launcher", 2)])
def test_the_demo_s_ranks_prove_what_workers_that_it_starts_prove(command, ranks, tmp_path):
    small = [*SMALL, "--steps", "20", "--compared-steps", "4", "--plot", tmp_path / "loss.png"]
    status, output, error = mpiexec(ranks, "-m", "gradengine", *command.split(), *small)
    assert status == 0, output + error
    assert f"workers  {ranks} ranks that were launched, over {'mpi://' if 'mpi' in command else 'unix:///'}" in output
    own = [sys.executable, "-m", "gradengine", "demo", "--workers", str(ranks), *map(str, small)]
    theirs = subprocess.run(own, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True)
    assert len(digests(theirs.stdout)) == 2
    assert digests(output) == digests(theirs.stdout)


def digests(output):
    return re.findall(r"sha256 [0-9a-f]{12}", output)


def test_a_proof_of_the_demo_s_that_fails_fails_the_job(tmp_path):
    options = ["--steps", "4", "--learning-rate", "1e-9", "--plot", tmp_path / "loss.png"]
    status, output, error = mpiexec(2, "-m", "gradengine", *DEMO.split(), *SMALL, *options)
    assert status == 1, output + error
    assert "NO" in output
    assert not re.search("Traceback|gradengine:", output + error)


def test_another_size_is_refused_and_nobody_hangs():
    _, output, _ = ranks_that_run(2, "other-size")
    assert "rank 0 sent rank 1 a message of the wrong size with tag 4: got 16 bytes, expected 24 bytes" in output


@pytest.mark.parametrize("what", ["raises", "step-raises"])
@pytest.mark.parametrize("who", [0, 2])
def test_a_rank_that_raises_is_named_by_all_others(what, who):
    found = told(what, who)
    assert found.pop(who).startswith("KeyError")
    assert {*found} == {0, 1, 2} - {who}
    assert all(words.startswith(f"PeerLost: rank {who} is gone") for words in found.values()), found


@pytest.mark.parametrize("what", ["late", "stopped", "step-late", "step-stopped"])
def test_a_rank_that_does_not_go_on_is_named_and_the_job_ends(what):
    found = told(what, 2)
    assert {*found} == {0, 1}
    assert any(words.startswith("DeadlineExceeded: rank 2 is late: rank ") for words in found.values()), found
    assert all(re.match(r"\w+: rank 2 is (late|gone or late): ", words) for words in found.values()), found


def test_a_rank_that_makes_no_link_ends_the_job_by_errors_of_the_others():
    found = told("joins-late", 1)
    assert {*found} == {0, 2}
    assert all(words.startswith("PeerLost: not all ranks make a link with rank ") for words in found.values()), found


@pytest.mark.parametrize("what", ["killed", "step-killed"])
@pytest.mark.parametrize("who", [0, 2])
def test_a_rank_that_is_killed_ends_the_job(what, who):
    assert who not in told(what, who)


def refusal(call, before=""):
    """What a rank alone is told."""
    script = f"import mpi4py\n{before}\nfrom mpi4py import MPI\nfrom gradengine.exchange.links.mpi import MpiLink\n"
    script += f"from gradengine.errors import CallerError\ntry: {call}\nexcept CallerError as error: print(error)"
    status, output, error = mpiexec(1, "-c", script)
    assert status == 0, error
    return output


def test_what_mpi_cannot_do_for_a_link_is_refused_by_name():
    assert "MPI was initialized for one thread" in refusal("MpiLink()", "mpi4py.rc.thread_level = 'funneled'")
    assert "not an intracommunicator that contains this process" in refusal("MpiLink(MPI.COMM_NULL)")
    assert "not an intracommunicator that contains this process" in refusal("MpiLink('mpi://')")
    assert "MPI is not running in this process" in refusal("MpiLink()", "mpi4py.rc.initialize = False")


@pytest.mark.parametrize("command", SHOWN)
def test_a_command_that_is_shown_ends_well(command):
    file, *options = command.split()
    status, output, error = mpiexec(2, ROOT / file, *options)
    assert status == 0, output + error
    assert output.startswith(f"2 ranks over {'mpi://: the same' if command.endswith('mpi') else 'unix:///'}"), output


@pytest.mark.parametrize("function", ["main", "main_over_mpi"])
def test_what_the_page_defines_runs_under_mpiexec(function):
    page = "\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
    status, output, error = mpiexec(4, "-c", f"__name__ = 'page'\n{page}\n{function}()")
    assert status == 0, output + error
    assert output.count("the mean of 4 ranks: [2.5 2.5 2.5 2.5]") == 4, output


def test_the_environment_names_mpi_for_a_script_that_does_not():
    script = "import os; from gradengine import connect; os.environ['GRADENGINE_ADDRESS'] = 'mpi://'\n"
    script += "with connect() as exchange: os.write(1, f'{exchange.url}\\n'.encode())"
    status, output, error = mpiexec(2, "-c", script)
    assert (status, output) == (0, "mpi://\n" * 2), error
