"""The job that a launcher names: from which variable, and that two of them at one address do not train together."""

from __future__ import annotations

import pytest
from transports import SMALL, SOON, Worker, bound, contributions, leave_together, on_all, rank_order_sum

from gradengine.errors import CallerError, HandshakeRefused
from gradengine.exchange import GradientServer, WorkerClient, connect
from gradengine.exchange.handshake import MAX_JOB_CHARACTERS
from gradengine.exchange.launcher import VARIABLES, job_or_launchers, launchers_job

pytestmark = pytest.mark.timeout(150)
DATA = contributions(SMALL, 2)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Launched by hand, until a test says otherwise; whatever launched the tests."""
    for variable in (*VARIABLES, "LSB_JOBINDEX"):
        monkeypatch.delenv(variable, raising=False)
    return monkeypatch


# As each launcher sets them, with others of its own.
@pytest.mark.parametrize(
    ("variables", "job"),
    [
        ({}, ""),
        ({"TORCHELASTIC_RUN_ID": "llama", "RANK": "0", "WORLD_SIZE": "2"}, "TORCHELASTIC_RUN_ID=llama"),
        ({"TORCHELASTIC_RUN_ID": "none"}, ""),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "7"}, "SLURM_JOB_ID=7"),
        ({"TORCHELASTIC_RUN_ID": "llama", "SLURM_JOB_ID": "7"}, "TORCHELASTIC_RUN_ID=llama"),
        ({"PMIX_NAMESPACE": "prterun-node1-4711@1"}, "PMIX_NAMESPACE=prterun-node1-4711@1"),
        ({"PMIX_NAMESPACE": "123", "OMPI_MCA_ess_base_jobid": "123"}, "PMIX_NAMESPACE=123"),
        ({"OMPI_MCA_ess_base_jobid": "123", "OMPI_COMM_WORLD_RANK": "1"}, "OMPI_MCA_ess_base_jobid=123"),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "PMIX_NAMESPACE": "slurm.pmix.7.1"}, "SLURM_JOB_ID=7"),
        ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}, "SLURM_JOB_ID=9"),
        ({"PBS_JOBID": "7[2].head", "PMIX_NAMESPACE": "123"}, "PMIX_NAMESPACE=123"),
        ({"PBS_JOBID": "7[2].head"}, "PBS_JOBID=7[2].head"),
        ({"LSB_JOBID": "7", "LSB_JOBINDEX": "0"}, "LSB_JOBID=7"),
        ({"LSB_JOBID": "7"}, "LSB_JOBID=7"),
        ({"LSB_JOBID": "7", "LSB_JOBINDEX": "3"}, "LSB_JOBID=7[3]"),
        ({"SLURM_JOB_ID": "", "PBS_JOBID": "7"}, "PBS_JOBID=7"),
        ({"JOB_COMPLETION_INDEX": "1", "PMI_RANK": "1", "PMI_SIZE": "2", "JOB_ID": "7"}, ""),
    ],
    ids=str,
)
def test_what_each_launcher_names(variables, job):
    assert launchers_job(variables) == job


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize("value", ["x" * MAX_JOB_CHARACTERS, "x" * 10**6, "7\n", "\x1b[31m7", "7\udc80", "\x00"])
def test_what_cannot_be_a_name_is_refused_with_its_variable_in_a_bounded_error(environment, variable, value):
    environment.setattr("os.environ", {variable: value})  # a real one refuses some of them
    with pytest.raises(
        CallerError, match=f"the environment.s job is not a valid job name: got '{variable}="
    ) as refused:
        connect("tcp://127.0.0.1:0", 0, 1)
    told = str(refused.value)
    assert len(told) < 300
    assert told.isprintable()
    assert told.endswith('pass the same job="name" on all ranks, or job="" for none')
    with connect("tcp://127.0.0.1:0", 0, 1, job="mine"), connect("tcp://127.0.0.1:0", 0, 1, job=""):
        pass  # then the environment is not asked


def test_longest_value_that_fits():
    value = "x" * (MAX_JOB_CHARACTERS - len("PBS_JOBID="))
    assert launchers_job({"PBS_JOBID": value}) == f"PBS_JOBID={value}"
    with pytest.raises(CallerError):
        launchers_job({"PBS_JOBID": value + "x"})


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


def trains(exchanges):
    workers = bound(exchanges, SMALL, DATA)
    on_all(Worker.sum, workers)
    on_all(leave_together, workers)
    return all(worker.arena.tobytes() == rank_order_sum(DATA).tobytes() for worker in workers)


def refusal_of(exchange):
    with exchange, pytest.raises(HandshakeRefused) as refused:
        Worker(exchange, SMALL, DATA[1]).bind()
    return str(refused.value)


@pytest.mark.parametrize("variable", VARIABLES)
def test_two_jobs_of_a_launcher_at_one_port_do_not_train_together(environment, variable):
    """Nobody passed job=; token, layout and world size agree."""
    mine, other = {variable: "7"}, {variable: "8"}
    with launched(environment, mine, lambda: connect("tcp://127.0.0.1:0", 0, 2)) as hosting:
        for theirs, named in ((other, f"{variable}=8"), ({}, "")):
            stray = launched(environment, theirs, lambda: connect(hosting.url, 1, 2, join_timeout=SOON))
            told = f"rank 1 belongs to another job: got job='{named}', expected job='{variable}=7'"
            assert told in refusal_of(stray)
        assert trains([hosting, launched(environment, mine, lambda: connect(hosting.url, 1, 2, join_timeout=SOON))])


def test_a_job_that_is_given_does_not_meet_one_of_a_launcher(environment):
    slurm = {"SLURM_JOB_ID": "7"}
    with launched(environment, slurm, lambda: connect("tcp://127.0.0.1:0", 0, 2, job="")) as hosting:
        named = launched(environment, slurm, lambda: connect(hosting.url, 1, 2, join_timeout=SOON))
        assert "got job='SLURM_JOB_ID=7', expected job=''" in refusal_of(named)
        assert trains([hosting, launched(environment, {}, lambda: connect(hosting.url, 1, 2, join_timeout=SOON))])


def test_two_steps_of_one_allocation_are_one_job(environment):
    steps = [
        {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": str(step), "PMIX_NAMESPACE": f"slurm.pmix.7.{step}"} for step in range(2)
    ]
    with launched(environment, steps[0], lambda: connect("tcp://127.0.0.1:0", 0, 2)) as hosting:
        assert trains([hosting, launched(environment, steps[1], lambda: connect(hosting.url, 1, 2, join_timeout=SOON))])


@pytest.mark.parametrize("around", [{}, {"SLURM_JOB_ID": "1"}], ids=["by hand", "in a job of its own"])
def test_a_coordinator_outside_takes_its_first_rank_s_job(environment, around):
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
            with server.group.lock:
                assert server.group.changed.wait_for(lambda: 0 in server.group.members, SOON)
            return refusal_of(other), Worker(second, SMALL, DATA[1]).bind()

        with first, second:
            _, (told, _) = on_all(lambda join: join(), [Worker(first, SMALL, DATA[0]).bind, second_after_another_job_s])
        assert "rank 1 belongs to another job: got job='SLURM_JOB_ID=8', expected job='SLURM_JOB_ID=7'" in told
