"""What launchers say of a process: its place, secret and job, from which variable, and what is refused of it."""

from __future__ import annotations

import itertools
import os
import threading
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transports import SMALL, SOON, Worker, contributions, leave_together, on_all, rank_order_sum

from gradengine import GradientEngine
from gradengine.errors import CallerError, HandshakeRefused
from gradengine.exchange import GradientServer, WorkerClient, connect, connect_if_launched, mesh
from gradengine.exchange.environment import (
    JOBS,
    LAUNCHERS,
    Fact,
    job_or_launchers,
    not_taken,
    read_job,
    read_secret,
    read_world,
    warn_of_other_ranks,
)
from gradengine.exchange.handshake import MAX_JOB_CHARACTERS

pytestmark = pytest.mark.timeout(150)
DATA = contributions(SMALL, 2)

# As each launcher sets them for rank 1 of 2 on one host, as seen under the real one; srun's by its source.
SEEN = {
    "by hand": {
        "GRADENGINE_RANK": "1", "GRADENGINE_WORLD_SIZE": "2", "GRADENGINE_LOCAL_RANK": "1",
        "GRADENGINE_LOCAL_SIZE": "2",
        "GRADENGINE_ADDRESS": "unix:///tmp/x/socket", "GRADENGINE_JOB": "run 7",
    },
    "torchrun": {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
        "MASTER_ADDR": "localhost", "MASTER_PORT": "41289", "TORCHELASTIC_RUN_ID": "700d4223",
    },
    "Open MPI's mpiexec": {
        "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-vm-12002@1",
    },
    "MPICH's mpiexec": {
        "PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2",
    },
    "srun": {
        "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "node3", "SLURM_JOB_NODELIST": "node[3-4]", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
    },
}  # fmt: skip
BATCH_SCRIPT = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}


def names_of(launcher):
    return [getattr(launcher, name) for name in ("rank", "world_size", "local_rank", "local_size")]


ALL = {name for launcher in LAUNCHERS for name in [*names_of(launcher), *launcher.run, *launcher.host, launcher.sign]}
ALL |= {*JOBS, "GRADENGINE_ADDRESS", "GRADENGINE_SECRET", "GRADENGINE_SECRET_FILE"}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Launched by hand, until a test says otherwise; whatever launched the tests."""
    for variable in ALL - {""}:
        monkeypatch.delenv(variable, raising=False)
    return monkeypatch


@pytest.mark.parametrize("launcher", [None, *SEEN])
def test_one_call_is_for_a_script_that_may_run_alone(launcher, environment):
    """An engine without an exchange warns under any launcher of several ranks, once in a process."""
    alone = GradientEngine(SMALL)
    environment.setattr("gradengine.exchange.connect", lambda **options: options)
    warn_of_other_ranks.cache_clear()
    for variable, value in SEEN.get(launcher, BATCH_SCRIPT).items():
        environment.setenv(variable, value)
    assert connect_if_launched(timeout=5) == (launcher and {"timeout": 5})
    with pytest.warns(UserWarning, match="one of 2 ranks, .*connect_if_launched") if launcher else nullcontext():
        alone.add([np.ones(slot.shape, np.float32) for slot in SMALL.slots])
        alone.step()
    warn_of_other_ranks.cache_clear()


# ---- its place ----


@pytest.mark.parametrize("name", SEEN)
def test_each_launcher_names_rank_and_world_size(name):
    world = read_world(SEEN[name])
    assert (world.launcher.name, world.rank, world.world_size, world.local_rank) == (name, 1, 2, 1)
    assert world.local_size == (None if name == "srun" else 2)


NESTED = [pair for pair in itertools.combinations(LAUNCHERS, 2) if pair[0].rank != pair[1].rank]


@pytest.mark.parametrize(("ours", "theirs"), NESTED, ids=lambda launcher: launcher.name)
def test_the_innermost_launcher_wins_and_a_report_says_what_lost(ours, theirs):
    """torchrun under mpiexec under srun: each variable is there."""
    alone = dict.fromkeys(names_of(theirs), "0") | {theirs.world_size: "1", theirs.sign or "x": "0"}
    both = alone | SEEN[ours.name]
    assert read_world(both).launcher is ours
    assert not_taken(both) == [f"{theirs.rank}=0, {theirs.world_size}=1"]
    agreeing = both | {theirs.rank: "1", theirs.world_size: "2"}
    assert not_taken(agreeing) == []


def test_what_an_outer_launcher_says_wrong_is_nobody_s_business():
    assert read_world(SEEN["torchrun"] | {"PMI_RANK": "x", "MPI_LOCALRANKID": "0"}).rank == 1


def test_pmi_of_srun_is_srun_s_and_that_of_mpich_under_srun_is_mpich_s():
    """srun --mpi=pmi2 sets PMI_RANK, and not MPI_LOCALRANKID; mpiexec's daemons are steps of Slurm's."""
    by_srun = SEEN["srun"] | {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_JOBID": "7.0"}
    assert read_world(by_srun).launcher.name == "srun"
    under_srun = SEEN["MPICH's mpiexec"] | SEEN["srun"] | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    assert read_world(under_srun).launcher.name == "MPICH's mpiexec"


@pytest.mark.parametrize("environment", [{}, {"PATH": "/bin", "LOCAL_RANK": "0", "MASTER_ADDR": "a"}, BATCH_SCRIPT])
def test_without_a_launcher_it_is_told_how_to_have_one(environment):
    with pytest.raises(CallerError, match=r"no launcher found.*torchrun.*connect\(url") as refused:
        read_world(environment)
    assert len(str(refused.value)) <= 200
    assert ("Slurm job" in str(refused.value)) is (environment is BATCH_SCRIPT)


@pytest.mark.parametrize("name", SEEN)
def test_what_is_half_a_place_or_no_number_in_range_is_refused_with_its_variable(name):
    launcher = read_world(SEEN[name]).launcher
    bad = [(there, {missing: None}) for there, missing in itertools.permutations([launcher.rank, launcher.world_size])]
    values = ["-1", "two", "", " 1", "1.0", "1_0", "٣", "0x1", "1\n", "9" * 5000, "\x1b[31m", "99999"]
    bad += [(variable, {variable: value}) for variable in filter(None, names_of(launcher)) for value in values]
    bad += [(launcher.rank, {launcher.rank: "2"})]
    for variable, change in bad:
        environment = {key: value for key, value in (SEEN[name] | change).items() if value is not None}
        with pytest.raises(CallerError, match=f"environment variable {variable}\\b") as refused:
            read_world(environment)
        assert len(str(refused.value)) < 250
        assert str(refused.value).isprintable()


@given(st.dictionaries(st.sampled_from(sorted(ALL - {""})), st.text(max_size=8) | st.integers(-1, 9).map(str)))
def test_whatever_the_environment_says_it_is_a_place_or_an_error_of_ours(environment):
    try:
        world = read_world(environment)
    except CallerError as refused:
        assert str(refused).isprintable()  # noqa: PT017
    else:
        assert 0 <= world.rank < world.world_size


# ---- its secret ----


def test_a_secret_comes_from_the_variable_or_from_the_file_that_one_names(tmp_path):
    path = tmp_path / "secret"
    path.write_text("a secret of the file\n")
    assert read_secret({}) is read_secret({"GRADENGINE_SECRET": ""}) is None
    assert read_secret({"GRADENGINE_SECRET_FILE": str(path)}) == Fact("a secret of the file", "GRADENGINE_SECRET_FILE")
    both = {"GRADENGINE_SECRET_FILE": str(path), "GRADENGINE_SECRET": " a secret of the file\n"}
    assert read_secret(both) == Fact("a secret of the file", "GRADENGINE_SECRET")
    with pytest.raises(CallerError, match="different secrets") as refused:
        read_secret(both | {"GRADENGINE_SECRET": "one of the variable"})
    assert not any(secret in str(refused.value) for secret in ("of the variable", "of the file"))


@pytest.mark.parametrize("content", [b"", b" \n", b"one\ntwo\n", b"\xff\xfe", b"x" * 5000, "FIFO", None])
def test_a_file_that_holds_no_secret_or_is_not_there_is_refused_and_what_it_holds_is_not_shown(tmp_path, content):
    path = tmp_path / "secret"
    if content == "FIFO":
        os.mkfifo(path)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(CallerError, match="secret") as refused:
        read_secret({"GRADENGINE_SECRET_FILE": str(path)})
    assert not any(word in str(refused.value) for word in ("one\n", "two", "xxx", "xff"))


def test_connect_takes_the_secret_of_the_environment_and_a_given_one_wins(environment):
    environment.setenv("GRADENGINE_SECRET", "0123456789abcdef0123456789abcdef")
    other = "fedcba9876543210fedcba9876543210"
    with connect("tcp://127.0.0.1:0", 0, 2) as hosting:
        stray, mine = (connect(hosting.url, 1, 2, secret=secret, join_timeout=SOON) for secret in (other, None))
        assert "rank 1 has another secret" in refused_before_they_train(hosting, mine, stray)[0]


# ---- its job ----


# As each launcher sets them, with others of its own.
@pytest.mark.parametrize(
    ("variables", "job"),
    [
        *(({}, ""), ({"TORCHELASTIC_RUN_ID": "none"}, "")),
        ({"TORCHELASTIC_RUN_ID": "llama", "RANK": "0", "WORLD_SIZE": "2"}, "TORCHELASTIC_RUN_ID=llama"),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "7"}, "SLURM_JOB_ID=7"),
        ({"TORCHELASTIC_RUN_ID": "llama", "SLURM_JOB_ID": "7"}, "TORCHELASTIC_RUN_ID=llama"),
        ({"PMIX_NAMESPACE": "123", "SLURM_JOB_ID": "7"}, "PMIX_NAMESPACE=123"),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "PMIX_NAMESPACE": "slurm.pmix.7.1"}, "SLURM_JOB_ID=7"),
        ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}, "SLURM_JOB_ID=9"),
        ({"PMIX_NAMESPACE": "", "SLURM_JOB_ID": "7"}, "SLURM_JOB_ID=7"),
        ({"JOB_COMPLETION_INDEX": "1", "PMI_RANK": "1", "PMI_SIZE": "2", "JOB_ID": "7"}, ""),
        ({"GRADENGINE_JOB": "mine", "TORCHELASTIC_RUN_ID": "llama"}, "mine"),
        ({"GRADENGINE_JOB": "", "TORCHELASTIC_RUN_ID": "llama"}, "TORCHELASTIC_RUN_ID=llama"),
    ],
    ids=str,
)
def test_what_each_launcher_names(variables, job):
    found = read_job(variables)
    assert found.value == job
    assert found.source == (job.partition("=")[0] if "=" in job else "GRADENGINE_JOB" if job else "")


@pytest.mark.parametrize("variable", JOBS)
@pytest.mark.parametrize("value", ["x" * (MAX_JOB_CHARACTERS + 1), "7\n", "\x1b[31m7", "7\udc80", "\x00"])
def test_what_cannot_be_a_name_is_refused_with_its_variable_in_a_bounded_error(environment, variable, value):
    environment.setattr("os.environ", {variable: value})  # a real one refuses some of them
    with pytest.raises(CallerError, match=f"the job of {variable} ") as refused:
        connect("tcp://127.0.0.1:0", 0, 1)
    assert len(str(refused.value)) < 300
    assert str(refused.value).isprintable()
    for job in ("mine", ""):
        connect("tcp://127.0.0.1:0", 0, 1, job=job).close()  # then the environment is not asked


def test_longest_value_that_fits():
    value = "x" * (MAX_JOB_CHARACTERS - len("SLURM_JOB_ID="))
    assert read_job({"SLURM_JOB_ID": value}).value == f"SLURM_JOB_ID={value}"
    with pytest.raises(CallerError):
        read_job({"SLURM_JOB_ID": value + "x"})


def test_a_job_that_is_given_wins_and_an_empty_one_is_none(environment):
    environment.setenv("SLURM_JOB_ID", "7")
    assert [job_or_launchers(job) for job in ("mine", "", None)] == ["mine", "", "SLURM_JOB_ID=7"]


# ---- at one address ----


def launched(environment, variables, make):
    """What a process makes that was launched so."""
    with environment.context() as own:
        for name, value in variables.items():
            own.setenv(name, value)
        return make()


def refused_before_they_train(hosting, mine, *strays):
    """What each stray is told before two ranks train together, while rank 0 waits for its rank 1."""

    def work(exchange):
        worker = Worker(exchange, SMALL, DATA[exchange.rank])
        told = [refusal_of(stray) for stray in strays] if exchange is mine else []
        worker.bind()
        worker.sum()
        leave_together(worker)
        assert worker.arena.tobytes() == rank_order_sum(DATA).tobytes()
        return told

    return on_all(work, [hosting, mine])[1]


def refusal_of(exchange):
    with exchange, pytest.raises(HandshakeRefused) as refused:
        Worker(exchange, SMALL, DATA[1]).bind()
    return str(refused.value)


@pytest.mark.parametrize("variable", JOBS)
def test_two_jobs_of_a_launcher_at_one_port_do_not_train_together(environment, variable):
    """Nobody passed job=; secret, layout and world size agree. Two steps of an allocation are one job."""
    mine, other, step = {variable: "7"}, {variable: "8"}, {variable: "7", "SLURM_STEP_ID": "1"}
    with launched(environment, mine, lambda: connect("tcp://127.0.0.1:0", 0, 2)) as hosting:
        others = [
            launched(environment, each, lambda: connect(hosting.url, 1, 2, join_timeout=SOON))
            for each in (step, other, {})
        ]
        others.append(launched(environment, mine, lambda: connect(hosting.url, 1, 2, job="a", join_timeout=SOON)))
        told = refused_before_they_train(hosting, *others)
    own = read_job(mine).value
    for named, each in zip((read_job(other).value, "", "a"), told, strict=True):
        assert f"got job='{named}', expected job='{own}'" in each


@pytest.mark.parametrize("around", [{}, {"SLURM_JOB_ID": "1"}], ids=["by hand", "in a job of its own"])
def test_a_server_outside_takes_its_first_rank_s_job(environment, around, monkeypatch):
    has_joined, admit = threading.Event(), mesh._Joining._admit

    def admitted(joining, line, hello, given):
        admit(joining, line, hello, given)
        has_joined.set()

    monkeypatch.setattr(mesh._Joining, "_admit", admitted)
    with launched(environment, around, lambda: GradientServer(2)) as server:
        first, other, second = (
            launched(
                environment,
                {"SLURM_JOB_ID": job},
                lambda rank=rank: WorkerClient(server.address, rank, 2, join_timeout=SOON),
            )
            for rank, job in ((0, "7"), (1, "8"), (1, "7"))
        )

        def second_after_another_job_s():
            assert has_joined.wait(SOON)
            return refusal_of(other), Worker(second, SMALL, DATA[1]).bind()

        with first, second:
            _, (told, _) = on_all(lambda join: join(), [Worker(first, SMALL, DATA[0]).bind, second_after_another_job_s])
        assert "got job='SLURM_JOB_ID=8', expected job='SLURM_JOB_ID=7'" in told
