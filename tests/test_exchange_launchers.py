"""What launchers say of a process, and the address that each rank makes of it: alike on all, and no other run's."""

from __future__ import annotations

import itertools
import os
import re
import socket
import stat
import threading
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transports import (
    SMALL,
    SOON,
    Worker,
    bound,
    contributions,
    free_port,
    leave_together,
    on_all,
    rank_order_sum,
)

from gradengine import GradientEngine
from gradengine.errors import CallerError, HandshakeRefused
from gradengine.exchange import GradientServer, connect, connect_if_launched, mesh
from gradengine.exchange.addresses import Listener, address_of
from gradengine.exchange.handshake import MAX_JOB_CHARACTERS
from gradengine.exchange.launchers import (
    JOBS,
    LAUNCHERS,
    PORTS,
    first_node,
    joining,
    read_address,
    read_job,
    read_ports,
    read_secret,
    read_world,
    warn_of_other_ranks,
)

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
        "SLURM_STEP_NODELIST": "node3", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
    },
}  # fmt: skip
BATCH_SCRIPT = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}


def names_of(launcher):
    return [getattr(launcher, name) for name in ("rank", "world_size", "local_size")]


ALL = {name for launcher in LAUNCHERS for name in [*names_of(launcher), *launcher.run, launcher.host, launcher.sign]}
ALL |= {*JOBS, PORTS, "GRADENGINE_ADDRESS", "GRADENGINE_SECRET", "GRADENGINE_SECRET_FILE"}


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path_factory):
    """That of no launcher, and a short TMPDIR of its own, until a test says otherwise."""
    for variable in ALL - {""}:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("t")))
    return monkeypatch


def set_in(environment, variables):
    """As a launcher sets them."""
    for name, value in variables.items():
        environment.setenv(name, value)


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
    assert (world.launcher.name, world.rank, world.world_size) == (name, 1, 2)
    assert world.local_size == (None if name == "srun" else 2)


NESTED = [pair for pair in itertools.combinations(LAUNCHERS, 2) if pair[0].rank != pair[1].rank]


@pytest.mark.parametrize(("ours", "theirs"), NESTED, ids=lambda launcher: launcher.name)
def test_the_innermost_launcher_wins(ours, theirs):
    """torchrun under mpiexec under srun: each variable is there."""
    alone = dict.fromkeys(names_of(theirs), "0") | {theirs.world_size: "1", theirs.sign or "x": "0"}
    assert read_world(alone | SEEN[ours.name]).launcher is ours


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


@pytest.mark.parametrize("name", SEEN)
def test_what_is_half_a_place_or_no_number_in_range_is_refused_with_its_variable(name):
    launcher = read_world(SEEN[name]).launcher
    bad = [(missing, {missing: None}) for missing in (launcher.rank, launcher.world_size)]
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
    assert read_secret({})[0] == read_secret({"GRADENGINE_SECRET": ""})[0] == ""
    assert read_secret({"GRADENGINE_SECRET_FILE": str(path)}) == ("a secret of the file", "GRADENGINE_SECRET_FILE")
    assert read_secret({"GRADENGINE_SECRET": " a secret, in a variable\n"})[0] == "a secret, in a variable"
    both = {"GRADENGINE_SECRET_FILE": str(path), "GRADENGINE_SECRET": "one of the variable"}
    with pytest.raises(CallerError, match="both set") as refused:
        read_secret(both)
    assert not any(secret in str(refused.value) for secret in ("of the variable", "of the file"))


@pytest.mark.parametrize("content", [b"", b" \n", b"one\ntwo\n", b"\xff\xfe", None])
def test_a_file_that_holds_no_secret_or_is_not_there_is_refused_and_what_it_holds_is_not_shown(tmp_path, content):
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CallerError, match="secret") as refused:
        read_secret({"GRADENGINE_SECRET_FILE": str(path)})
    assert not any(word in str(refused.value) for word in ("one\n", "two", "xxx", "xff"))


def test_connect_takes_the_secret_of_the_environment_and_a_given_one_wins(environment):
    environment.setenv("GRADENGINE_SECRET", "0123456789abcdef0123456789abcdef")
    other = "fedcba9876543210fedcba9876543210"
    with connect("tcp://127.0.0.1:0", 0, 2) as hosting:
        stray, mine = (connect(hosting.url, 1, 2, secret=secret, join_timeout=SOON) for secret in (other, None))
        assert "rank 1 has a different secret" in refused_before_they_train(hosting, mine, stray)[0]


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
    assert found == (job, job.partition("=")[0] if "=" in job else "GRADENGINE_JOB" if job else "")


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
    assert read_job({"SLURM_JOB_ID": value})[0] == f"SLURM_JOB_ID={value}"
    with pytest.raises(CallerError):
        read_job({"SLURM_JOB_ID": value + "x"})


# ---- at one address ----


def launched(environment, variables, make):
    """What a process makes that was launched so."""
    with environment.context() as own:
        set_in(own, variables)
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
    own = read_job(mine)[0]
    for theirs, each in zip((read_job(other)[0], "", "a"), told, strict=True):
        assert f"got job='{theirs}', expected job='{own}'" in each


@pytest.mark.parametrize("around", [{}, {"SLURM_JOB_ID": "1"}], ids=["by hand", "in a job of its own"])
def test_a_server_outside_takes_its_first_rank_s_job(environment, around, monkeypatch):
    has_joined, admit = threading.Event(), mesh.Meeting._admit

    def admitted(*arguments):
        admit(*arguments)
        has_joined.set()

    monkeypatch.setattr(mesh.Meeting, "_admit", admitted)
    with launched(environment, around, lambda: GradientServer(2)) as server:
        first, other, second = (
            launched(
                environment,
                {"SLURM_JOB_ID": job},
                lambda rank=rank: connect(server.url, rank, 2, served=True, join_timeout=SOON),
            )
            for rank, job in ((0, "7"), (1, "8"), (1, "7"))
        )

        def second_after_another_job_s():
            assert has_joined.wait(SOON)
            return refusal_of(other), Worker(second, SMALL, DATA[1]).bind()

        with first, second:
            _, (told, _) = on_all(lambda join: join(), [Worker(first, SMALL, DATA[0]).bind, second_after_another_job_s])
        assert "got job='SLURM_JOB_ID=8', expected job='SLURM_JOB_ID=7'" in told


# ---- where the ranks meet ----

ON_SEVERAL_HOSTS = {
    "torchrun": SEEN["torchrun"] | {"WORLD_SIZE": "4", "MASTER_ADDR": "node3"},
    "srun": SEEN["srun"] | {"SLURM_STEP_NODELIST": "node[3-4]"},
}


TORCHRUN, SRUN = ON_SEVERAL_HOSTS.values()


def other_rank(variables):
    """What the launcher told rank 0."""
    launcher = next(each for each in LAUNCHERS if each.is_in(variables))
    return variables | {launcher.rank: "0"}


# ---- the address ----


def address_in(variables, job=None, ports=None):
    world = None if "GRADENGINE_ADDRESS" in variables else read_world(variables)
    return read_address(variables, world, job, ports)


@pytest.mark.parametrize("name", sorted(set(SEEN) - {"by hand", "MPICH's mpiexec"}))
def test_ranks_of_one_host_meet_at_a_unix_socket_that_another_run_has_not(name):
    here = SEEN[name] | {"TMPDIR": "/t"}
    address, source = address_in(here)
    assert re.fullmatch(rf"unix:///t/gradengine-{os.getuid()}/[0-9a-f]{{16}}", address)
    assert address_in(other_rank(here))[0] == address
    run = next(each for each in LAUNCHERS if each.name == name).run
    for variable in set(run) & set(here):
        assert variable in source
        assert address_in(here | {variable: "8"})[0] != address
    assert address_in(here, job="tp")[0] != address == address_in(here, job="")[0]


@pytest.mark.parametrize("name", ON_SEVERAL_HOSTS)
def test_ranks_of_several_hosts_meet_at_a_port_of_the_first(name):
    here = ON_SEVERAL_HOSTS[name]
    address, _ = address_in(here)
    host, port = re.fullmatch(r"tcp://([a-z0-9]+):([0-9]+)", address).groups()
    assert (host, 20_000 <= int(port) <= 29_000) == ("node3", True)
    assert address_in(other_rank(here))[0] == address
    assert address_in(here, job="tp")[0] != address


def test_a_job_s_name_is_the_same_whether_it_was_given_or_set():
    assert address_in(SRUN, job="tp")[0] == address_in(SRUN | {"GRADENGINE_JOB": "tp"})[0]
    assert address_in(SRUN | {"GRADENGINE_JOB": "tp"}, job="")[0] == address_in(SRUN)[0]


def test_ranks_in_two_jobs_of_a_scheduler_come_to_one_port_where_they_are_told_so():
    """One torchrun a machine, each in a job of its own: with two ports they would only wait for each other."""
    assert len({address_in(TORCHRUN | {"SLURM_JOB_ID": job})[0] for job in "78"}) == 1


def test_the_port_of_torchrun_s_own_store_is_never_taken():
    for port in range(20_000, 29_000):
        address = address_in(TORCHRUN | {"MASTER_PORT": str(port)})[0]
        assert int(address.rpartition(":")[2]) != port


@pytest.mark.parametrize(
    ("variables", "address"),
    [
        (SEEN["torchrun"] | {"GRADENGINE_ADDRESS": "tcp://a:1"}, ("tcp://a:1", "GRADENGINE_ADDRESS")),
        ({"GRADENGINE_ADDRESS": "unix:///s"}, ("unix:///s", "GRADENGINE_ADDRESS")),
        ({"GRADENGINE_RANK": "0", "GRADENGINE_WORLD_SIZE": "1"}, ("tcp://127.0.0.1:0", "GRADENGINE_WORLD_SIZE")),
    ],
)
def test_an_address_that_is_set_wins_and_one_rank_alone_needs_none(variables, address):
    assert address_in(variables) == address


def test_an_ipv6_address_is_bracketed():
    assert address_in(TORCHRUN | {"MASTER_ADDR": "fd00::1"})[0].startswith("tcp://[fd00::1]:2")


def of_several_hosts(name):
    launcher = next(each for each in LAUNCHERS if each.name == name)
    return SEEN[name] | {launcher.local_size: "1"}


BY_HAND = {"GRADENGINE_RANK": "0", "GRADENGINE_WORLD_SIZE": "2"}
REFUSED = [
    *(
        ({"GRADENGINE_ADDRESS": url}, "GRADENGINE_ADDRESS")
        for url in ("host:7000", "tcp://host:x", "tcp://host:70000", "tcp://:7000", "tcp://[::1", "x" * 9999)
    ),
    *((of_several_hosts(name), "GRADENGINE_ADDRESS") for name in ("Open MPI's mpiexec", "MPICH's mpiexec")),
    (BY_HAND, "GRADENGINE_ADDRESS"),
    *(
        (TORCHRUN | {"MASTER_ADDR": host}, "MASTER_ADDR")
        for host in ("a b", "a/b", "-a", "a\n", "ä", "x" * 300, "\x1b[31m", "a:b@c")
    ),
]


@pytest.mark.parametrize(("variables", "word"), REFUSED, ids=range(len(REFUSED)))
def test_what_gives_no_address_is_refused_with_its_variable_or_the_one_to_set(variables, word):
    with pytest.raises(CallerError, match=word) as refused:
        address_in(variables)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 400


def test_a_run_that_nothing_distinguishes_is_told_what_to_set():
    here = SEEN["MPICH's mpiexec"]
    with pytest.raises(CallerError, match="GRADENGINE_JOB"):
        address_in(here)
    assert address_in(here | {"GRADENGINE_JOB": "a"})[0] != address_in(here | {"GRADENGINE_JOB": "b"})[0]


@pytest.mark.parametrize("folder", ["x" * 90, "a#b"])
def test_a_tmpdir_that_is_too_long_or_no_part_of_a_url_is_refused(environment, folder, tmp_path):
    (tmp_path / folder).mkdir()
    set_in(environment, SEEN["torchrun"] | {"TMPDIR": str(tmp_path / folder)})
    with pytest.raises(CallerError):
        connect()


# ---- Slurm's lists of nodes ----


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        *(("node1", ("node1", True)), ("node1,node2", ("node1", False)), ("node[001-003,007]", ("node001", False))),
        *(("node[7]", ("node7", True)), ("a[2,1]-b[03-04].c,d", ("a2-b03.c", False)), ("[1-2]", ("1", False))),
        ("sh04-14n01.example.org", ("sh04-14n01.example.org", True)),
        *(
            (nodes, ("", False))
            for nodes in ("", ",a", "a[", "a[]", "a[1", "a[[1]]", "a[x]", "a]b", "bgl[000x123]", "a b")
        ),
        *((nodes, ("", False)) for nodes in ("a\n", "ſ1")),
    ],
)
def test_the_first_node_of_a_list(nodes, first):
    assert first_node(nodes) == first


@given(st.text("ab01[],-. \n\x00é", max_size=60))
@example("[1" * 60_000)
@example("a[" + "1," * 60_000)
@example("a" * 120_000)
@example("[1]" * 40_000 + "[")
def test_a_hostile_list_gives_a_host_or_an_error_of_a_few_lines_at_once(nodes):
    try:
        address = address_in(SRUN | {"SLURM_STEP_NODELIST": nodes})[0]
    except CallerError as refused:
        assert str(refused).isprintable()  # noqa: PT017
        assert len(str(refused)) < 400  # noqa: PT017
    else:
        assert re.fullmatch(r"tcp://[a-z0-9_.-]{1,253}:[0-9]{5}|unix://\S+", address)


# ---- joining ----


def test_two_ranks_connect_by_what_their_launcher_says(environment):
    set_in(environment, SEEN["torchrun"])
    second = connect()
    environment.setenv("RANK", "0")
    first = connect()
    assert [(one.rank, one.world_size) for one in (first, second)] == [(0, 2), (1, 2)]
    data = contributions(SMALL, 2)
    workers = bound([first, second], SMALL, data)
    on_all(Worker.sum, workers)
    on_all(leave_together, workers)
    assert {worker.arena.tobytes() for worker in workers} == {rank_order_sum(data).tobytes()}


def test_what_is_given_wins(environment):
    set_in(
        environment, SEEN["torchrun"] | {"GRADENGINE_SECRET": "of the environment", "GRADENGINE_ADDRESS": "tcp://a:1"}
    )
    assert joining("tcp://b:2", 0, 3, "given", None, None) == ("tcp://b:2", 0, 3, "given")
    assert joining(None, None, None, None, None, None) == ("tcp://a:1", 1, 2, "of the environment")
    assert joining(None, 0, None, None, None, None)[1:3] == (0, 2)


def test_what_is_given_whole_needs_no_environment_and_is_not_hurt_by_a_broken_one(environment):
    given = "tcp://127.0.0.1:0", 0, 1
    assert joining(*given, None, None, None) == (*given, "")
    set_in(environment, {"RANK": "x", "GRADENGINE_ADDRESS": "?", "GRADENGINE_WORLD_SIZE": "-1"})
    assert joining(*given, None, None, None) == (*given, "")


MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("given", "variables", "found"),
    [
        ((None, 1, 2), MASTER, (r"tcp://127\.0\.0\.1:2\d{4}", 1, 2)),
        ((None, 1, 2), {"GRADENGINE_ADDRESS": "unix:///s"}, ("unix:///s", 1, 2)),
        ((None, 0, 1), {}, (r"tcp://127\.0\.0\.1:0", 0, 1)),
        ((None, 1, None), MASTER | {"WORLD_SIZE": "2"}, (r"tcp://127\.0\.0\.1:2\d{4}", 1, 2)),
        (("tcp://a:1", None, 2), {"RANK": "1"}, ("tcp://a:1", 1, 2)),
        (("tcp://a:1", None, 2), MASTER, "no launcher found"),
        (("tcp://a:1", 0, None), {}, "no launcher found"),
        ((None, None, 2), {}, "no launcher found"),
        ((None, 0, 2), {}, "names no host"),
        ((None, 0, 2), {"MASTER_ADDR": "127.0.0.1"}, "set GRADENGINE_JOB"),
        ((None, 2, 2), MASTER, "rank of world_size=2 is out of range"),
        (("tcp://a:1", None, None), MASTER, "no launcher found"),
    ],
)
def test_what_is_given_is_completed_by_what_is_there_and_what_is_missing_is_named(environment, given, variables, found):
    set_in(environment, variables)
    if isinstance(found, str):
        with pytest.raises(CallerError, match=re.escape(found)):
            joining(*given, None, None, None)
        return
    url, *place, _ = joining(*given, None, None, None)
    assert re.fullmatch(found[0], url)
    assert place == [*found[1:]]


def test_several_machines_need_a_secret_and_each_rank_is_told_how(environment):
    set_in(environment, SRUN)
    for rank in "01":
        environment.setenv("SLURM_PROCID", rank)
        with pytest.raises(CallerError, match="GRADENGINE_SECRET_FILE"):
            connect()
    environment.setenv("SLURM_PROCID", "1")
    environment.setenv("GRADENGINE_SECRET", "0123456789abcdef0123456789abcdef")
    connect().close()


def test_the_socket_s_folder_is_its_user_s_alone(environment):
    set_in(environment, SEEN["torchrun"])
    before = os.umask(0)
    try:
        connect().close()
    finally:
        os.umask(before)
    folder = Path(os.environ["TMPDIR"], f"gradengine-{os.getuid()}")
    assert stat.filemode(folder.stat().st_mode) == "drwx------"
    connect().close()  # it is there


@pytest.mark.parametrize("fault", ["others may read it", "a file", "a link", "no TMPDIR"])
def test_a_folder_that_is_not_private_is_refused(environment, fault, tmp_path):
    set_in(environment, SEEN["torchrun"])
    folder = Path(os.environ["TMPDIR"], f"gradengine-{os.getuid()}")
    if fault == "no TMPDIR":
        environment.setenv("TMPDIR", "/none")
    elif fault == "a file":
        folder.touch()
    elif fault == "a link":
        tmp_path.chmod(0o700)
        folder.symlink_to(tmp_path)
    else:
        folder.mkdir()
        folder.chmod(0o750)
    with pytest.raises(CallerError, match=f"gradengine-{os.getuid()}"):
        connect()


def taken_port(environment, host):
    """Where torchrun's ranks of two hosts come to, of which this is one."""
    set_in(environment, TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": host})
    return int(address_in(os.environ)[0].rpartition(":")[2])


def test_a_port_that_is_taken_is_told_with_the_variable_that_sets_another(environment):
    environment.setenv("MASTER_PORT", str(free_port()))
    environment.setenv("GRADENGINE_SECRET", "0123456789abcdef0123456789abcdef")
    port = taken_port(environment, "127.0.0.1")
    told = pytest.raises(CallerError, match=rf"cannot listen at .*:{port} ")
    with socket.create_server(("127.0.0.1", port)), told:
        connect()
    connect().close()


@pytest.mark.parametrize("host", ["no-such-host", "10.255.255.254"])
def test_rank_0_listens_for_all_whatever_its_host_is_called(environment, host):
    """A name may mean loopback on its own host, as in Debian's /etc/hosts, or a service in front of it."""
    taken_port(environment, host)
    environment.setenv("GRADENGINE_SECRET", "0123456789abcdef0123456789abcdef")
    with connect() as exchange:
        assert exchange.url.startswith("tcp://[::]:2" if socket.has_dualstack_ipv6() else "tcp://0.0.0.0:2")
    environment.setenv("RANK", "1")
    with connect() as exchange:
        assert exchange.url.startswith(f"tcp://{host}:2")


@pytest.mark.parametrize("way", ["given", "set"])
def test_all_ranks_listen_at_the_ports_that_are_named(environment, way):
    """Rank 0 too, if its port is made of the launcher's variables; what is given wins."""
    environment.setenv("GRADENGINE_SECRET", "0123456789abcdef0123456789abcdef")
    environment.setenv(PORTS, "29000-29100" if way == "set" else "x")
    given = {} if way == "set" else {"ports": "29000-29100"}
    set_in(environment, TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29000"})
    with connect(**given) as exchange:
        port = address_of(exchange.url)[1]
        assert 29001 <= port <= 29100
        if way == "set":
            assert address_in(os.environ, ports=range(29000, 29101))[0].endswith(f":{port}")
    listeners, sound = [], Listener.__init__

    def noted(listener, *arguments, **options):
        sound(listener, *arguments, **options)
        listeners.append(listener.address)

    environment.setattr(Listener, "__init__", noted)
    ranks = [connect("tcp://127.0.0.1:0", 0, 3, link="tcp", **given)]
    ranks += [connect(ranks[0].url, rank, 3, **given) for rank in (1, 2)]
    on_all(leave_together, bound(ranks, SMALL, contributions(SMALL, 3)))
    assert len(listeners) == 3
    assert all(29000 <= port <= 29100 for _, port in listeners)


@pytest.mark.parametrize(("text", "ports"), [("1-65535", range(1, 65536)), ("29000-29000", range(29000, 29001))])
def test_a_range_of_ports_has_its_last_one(text, ports):
    assert read_ports({}, text) == read_ports({PORTS: text}) == ports


@pytest.mark.parametrize(
    "text",
    ["", "29000", "0-5", "5-4", "1-65536", "1-2-3", "a-b", " 1-2", "1-2\n", "-1-2", "٣-٤", 29000, (1, 2), b"1-2"],
)
def test_what_is_no_range_of_ports_is_refused_with_its_name(text):
    with pytest.raises(CallerError, match=r"^ports is not a range of ports"):
        connect("tcp://127.0.0.1:0", 0, 1, ports=text)
    if text:
        with pytest.raises(CallerError, match=f"environment variable {PORTS} is not a range of ports"):
            read_ports({PORTS: text})


def test_two_groups_of_one_run_need_two_jobs(environment):
    set_in(environment, SEEN["torchrun"] | {"RANK": "0"})
    with connect():
        with pytest.raises(CallerError, match="job="):
            connect()
        connect(job="tp").close()
    connect().close()


def test_a_server_s_address_is_not_made_up(environment):
    set_in(environment, SEEN["torchrun"])
    with pytest.raises(CallerError, match="GRADENGINE_ADDRESS"):
        connect(served=True)
    environment.setenv("GRADENGINE_ADDRESS", "unix:///tmp/s")
    connect(served=True).close()
