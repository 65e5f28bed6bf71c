"""Where ranks meet that were told nothing but their launcher's variables: alike on all, and not where others do."""

from __future__ import annotations

import os
import re
import socket
import stat
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from test_exchange_addresses import named
from test_exchange_environment import ALL, SEEN
from transports import SMALL, SOON, Worker, bound, contributions, free_port, leave_together, on_all, rank_order_sum

from gradengine.errors import CallerError
from gradengine.exchange import connect
from gradengine.exchange.addresses import connect_once
from gradengine.exchange.environment import LAUNCHERS
from gradengine.exchange.reach import own_host
from gradengine.exchange.rendezvous import address_of, first_node, joining, read_address

pytestmark = pytest.mark.timeout(150)
ON_SEVERAL_HOSTS = {
    "torchrun": SEEN["torchrun"] | {"WORLD_SIZE": "4", "MASTER_ADDR": "node3"},
    "srun": SEEN["srun"] | {"SLURM_STEP_NODELIST": "node[3-4]"},
}


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path_factory):
    """That of no launcher, and a short TMPDIR of its own, until a test says otherwise."""
    for variable in ALL - {""}:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path_factory.mktemp("t")))
    return monkeypatch


TORCHRUN, SRUN = ON_SEVERAL_HOSTS.values()


def launched(environment, variables):
    for name, value in variables.items():
        environment.setenv(name, value)


def other_rank(variables):
    """What the launcher told rank 0."""
    launcher = next(each for each in LAUNCHERS if each.is_in(variables))
    return variables | {launcher.rank: "0", launcher.local_rank: "0"}


# ---- the address ----


@pytest.mark.parametrize("name", sorted(set(SEEN) - {"by hand", "MPICH's mpiexec"}))
def test_ranks_of_one_host_meet_at_a_unix_socket_that_another_run_has_not(name):
    here = SEEN[name] | {"TMPDIR": "/t"}
    address = read_address(here)
    assert re.fullmatch(rf"unix:///t/gradengine-{os.getuid()}/[0-9a-f]{{16}}", address.value)
    assert read_address(other_rank(here)) == address
    run = next(each for each in LAUNCHERS if each.name == name).run
    for variable in set(run) & set(here):
        assert variable in address.source
        assert read_address(here | {variable: "8"}).value != address.value
    assert read_address(here, job="tp").value != address.value == read_address(here, job="").value


@pytest.mark.parametrize("name", ON_SEVERAL_HOSTS)
def test_ranks_of_several_hosts_meet_at_a_port_of_the_first(name):
    here = ON_SEVERAL_HOSTS[name]
    address = read_address(here)
    host, port = re.fullmatch(r"tcp://([a-z0-9]+):([0-9]+)", address.value).groups()
    assert (host, 20_000 <= int(port) <= 29_000) == ("node3", True)
    assert read_address(other_rank(here)) == address
    assert read_address(here, job="tp").value != address.value


def test_a_job_s_name_is_the_same_whether_it_was_given_or_set():
    assert read_address(SRUN, job="tp").value == read_address(SRUN | {"GRADENGINE_JOB": "tp"}).value
    assert read_address(SRUN | {"GRADENGINE_JOB": "tp"}, job="").value == read_address(SRUN).value


def test_ranks_in_two_jobs_of_a_scheduler_come_to_one_port_where_they_are_told_so():
    """One torchrun a machine, each in a job of its own: with two ports they would only wait for each other."""
    assert len({read_address(TORCHRUN | {"SLURM_JOB_ID": job}).value for job in "78"}) == 1


def test_the_port_of_torchrun_s_own_store_is_never_taken():
    for port in range(20_000, 29_000):
        address = read_address(TORCHRUN | {"MASTER_PORT": str(port)}).value
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
    assert read_address(variables) == address


def test_an_ipv6_address_is_bracketed():
    assert read_address(TORCHRUN | {"MASTER_ADDR": "fd00::1"}).value.startswith("tcp://[fd00::1]:2")


def of_several_hosts(name):
    launcher = next(each for each in LAUNCHERS if each.name == name)
    return SEEN[name] | {launcher.local_rank: "0", launcher.local_size: "1"}


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
        read_address(variables)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 400


def test_a_run_that_nothing_distinguishes_is_told_what_to_set():
    here = SEEN["MPICH's mpiexec"]
    with pytest.raises(CallerError, match="GRADENGINE_JOB"):
        read_address(here)
    assert read_address(here | {"GRADENGINE_JOB": "a"}).value != read_address(here | {"GRADENGINE_JOB": "b"}).value


@pytest.mark.parametrize("folder", ["x" * 90, "a#b"])
def test_a_tmpdir_that_is_too_long_or_no_part_of_a_url_is_refused(environment, folder, tmp_path):
    (tmp_path / folder).mkdir()
    launched(environment, SEEN["torchrun"] | {"TMPDIR": str(tmp_path / folder)})
    with pytest.raises(CallerError):
        connect()


# ---- Slurm's lists of nodes ----


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        *(("node1", ("node1", True)), ("node1,node2", ("node1", False)), ("node[001-003,007]", ("node001", False))),
        *(("node[7]", ("node7", True)), ("a[2,1]-b[03-04].c,d", ("a2-b03.c", False)), ("[1-2]", ("1", False))),
        ("sh04-14n01.example.org", ("sh04-14n01.example.org", True)),
        *((nodes, None) for nodes in ("", ",a", "a[", "a[]", "a[1", "a[[1]]", "a[x]", "a]b", "bgl[000x123]", "a b")),
        *((nodes, None) for nodes in ("a\n", "ſ1")),
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
        address = read_address(SRUN | {"SLURM_STEP_NODELIST": nodes}).value
    except CallerError as refused:
        assert str(refused).isprintable()  # noqa: PT017
        assert len(str(refused)) < 400  # noqa: PT017
    else:
        assert re.fullmatch(r"tcp://[a-z0-9_.-]{1,253}:[0-9]{5}|unix://\S+", address)


# ---- joining ----


def test_two_ranks_connect_by_what_their_launcher_says(environment):
    launched(environment, SEEN["torchrun"])
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
    launched(
        environment, SEEN["torchrun"] | {"GRADENGINE_SECRET": "of the environment", "GRADENGINE_ADDRESS": "tcp://a:1"}
    )
    assert joining("tcp://b:2", 0, 3, "given", None, served=False) == ("tcp://b:2", 0, 3, "given")
    assert joining(None, None, None, None, None, served=False) == ("tcp://a:1", 1, 2, "of the environment")
    assert joining(None, 0, None, None, None, served=False)[1:3] == (0, 2)


def test_what_is_given_whole_needs_no_environment_and_is_not_hurt_by_a_broken_one(environment):
    given = "tcp://127.0.0.1:0", 0, 1
    assert joining(*given, None, None, served=False) == (*given, None)
    launched(environment, {"RANK": "x", "GRADENGINE_ADDRESS": "?", "GRADENGINE_WORLD_SIZE": "-1"})
    assert joining(*given, None, None, served=False) == (*given, None)


MASTER = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("given", "variables", "found"),
    [
        ((None, 1, 2), MASTER, (r"tcp://127\.0\.0\.1:2\d{4}", 1, 2)),
        ((None, 1, 2), {"GRADENGINE_ADDRESS": "unix:///s"}, ("unix:///s", 1, 2)),
        ((None, 0, 1), {}, (r"tcp://127\.0\.0\.1:0", 0, 1)),
        ((None, 1, None), MASTER | {"WORLD_SIZE": "2"}, (r"tcp://127\.0\.0\.1:2\d{4}", 1, 2)),
        (("tcp://a:1", None, 2), {"RANK": "1"}, ("tcp://a:1", 1, 2)),
        (("tcp://a:1", None, 2), MASTER, "rank= is missing; pass it with world_size="),
        (("tcp://a:1", 0, None), {}, "world_size= is missing; pass it with rank="),
        ((None, None, 2), {}, "rank= is missing; pass it with world_size="),
        ((None, 0, 2), {}, "names no host where all ranks could meet"),
        ((None, 0, 2), {"MASTER_ADDR": "127.0.0.1"}, "set GRADENGINE_JOB"),
        ((None, 2, 2), MASTER, "rank of world_size=2 is out of range"),
        (("tcp://a:1", None, None), MASTER, "no launcher found"),
    ],
)
def test_what_is_given_is_completed_by_what_is_there_and_what_is_missing_is_named(environment, given, variables, found):
    launched(environment, variables)
    if isinstance(found, str):
        with pytest.raises(CallerError, match=re.escape(found)):
            joining(*given, None, None, served=False)
        return
    url, *place, _ = joining(*given, None, None, served=False)
    assert re.fullmatch(found[0], url)
    assert place == [*found[1:]]


def test_several_machines_need_a_secret_and_each_rank_is_told_how(environment):
    launched(environment, SRUN)
    for rank in "01":
        environment.setenv("SLURM_PROCID", rank)
        with pytest.raises(CallerError, match="GRADENGINE_SECRET_FILE"):
            connect()
    environment.setenv("SLURM_PROCID", "1")
    environment.setenv("GRADENGINE_SECRET", "0123456789abcdef0123456789abcdef")
    connect().close()


def test_the_socket_s_folder_is_its_user_s_alone(environment):
    launched(environment, SEEN["torchrun"])
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
    launched(environment, SEEN["torchrun"])
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
    launched(environment, TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": host})
    return int(read_address(os.environ).value.rpartition(":")[2])


def test_a_port_that_is_taken_is_told_with_the_variable_that_sets_another(environment):
    environment.setenv("MASTER_PORT", str(free_port()))
    environment.setenv("GRADENGINE_SECRET", "0123456789abcdef0123456789abcdef")
    port = taken_port(environment, "127.0.0.1")
    told = pytest.raises(CallerError, match=rf"cannot listen at .*:{port} ")
    with socket.create_server(("127.0.0.1", port)), told:
        connect()
    connect().close()


def unknown(*_, **__):
    raise socket.gaierror(-2, "Name or service not known")


@pytest.mark.parametrize("host", ["no-such-host", "node..x"])
def test_a_first_host_that_is_not_this_one_is_told_by_rank_0(environment, host):
    taken_port(environment, host)
    environment.setenv("GRADENGINE_SECRET", "0123456789abcdef0123456789abcdef")
    if host == "no-such-host":
        environment.setattr("socket.getaddrinfo", unknown)
    with pytest.raises(CallerError, match=r"cannot listen at .*MASTER_ADDR"):
        connect()


@pytest.mark.parametrize("number", ["127.0.1.1", "::1"])
def test_a_host_that_its_own_hosts_file_calls_loopback_listens_for_the_others_too(environment, number):
    taken_port(environment, "node3")
    environment.setenv("GRADENGINE_SECRET", "0123456789abcdef0123456789abcdef")
    named(environment, node3=[number])
    with connect() as exchange:
        assert exchange.url.startswith("tcp://[::]:2" if socket.has_dualstack_ipv6() else "tcp://0.0.0.0:2")
    environment.setenv("RANK", "1")
    with connect() as exchange:
        assert exchange.url.startswith("tcp://node3:2")


@pytest.mark.parametrize("local", [{}, {"LOCAL_WORLD_SIZE": "2"}], ids=["unknown", "known"])
def test_where_rank_0_is_told_localhost_and_ranks_elsewhere_its_name_they_meet(environment, local):
    """As Kubeflow tells them; without a secret rank 0 listens on loopback, and ranks elsewhere are told to have one."""
    here = {name: value for name, value in TORCHRUN.items() if name != "LOCAL_WORLD_SIZE"} | local
    launched(environment, here | {"RANK": "0", "MASTER_ADDR": "localhost"})
    assert joining(None, None, None, None, None, served=False)[0].startswith("tcp://localhost:2")
    environment.setenv("GRADENGINE_SECRET", secret := "0123456789abcdef0123456789abcdef")
    with connect() as exchange:
        host, port = address_of(exchange.url)
        assert host in {"::", "0.0.0.0"}
        assert port == address_of(read_address(here, secret=secret).value)[1]
        environment.setenv("RANK", "1")
        beside = address_of(joining(None, None, None, None, None, served=False)[0])
        assert (own_host(beside[0], "127.0.0.1"), beside[1]) == (host, port)  # which ranks elsewhere reach too
        connect_once(beside, SOON).close()


def test_two_groups_of_one_run_need_two_jobs(environment):
    launched(environment, SEEN["torchrun"] | {"RANK": "0"})
    with connect():
        with pytest.raises(CallerError, match="job="):
            connect()
        connect(job="tp").close()
    connect().close()


def test_a_server_s_address_is_not_made_up(environment):
    launched(environment, SEEN["torchrun"])
    with pytest.raises(CallerError, match="GRADENGINE_ADDRESS"):
        connect(served=True)
    environment.setenv("GRADENGINE_ADDRESS", "unix:///tmp/s")
    connect(served=True).close()
