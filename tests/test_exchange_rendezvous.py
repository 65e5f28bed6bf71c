"""Where ranks meet that were told nothing but their launcher's variables: alike on all, and not where others do."""

from __future__ import annotations

import os
import re
import socket
import stat
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from test_exchange_environment import ALL, SEEN
from transports import SMALL, Worker, bound, contributions, free_port, leave_together, on_all, rank_order_sum

from gradengine.errors import CallerError
from gradengine.exchange import connect
from gradengine.exchange.environment import LAUNCHERS
from gradengine.exchange.rendezvous import first_node, joining, read_address

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
    here = ON_SEVERAL_HOSTS["srun"]
    assert read_address(here, job="tp").value == read_address(here | {"GRADENGINE_JOB": "tp"}).value
    assert read_address(here | {"GRADENGINE_JOB": "tp"}, job="").value == read_address(here).value


def test_ranks_in_two_jobs_of_a_scheduler_come_to_one_port_where_they_are_told_so():
    """One torchrun a machine, each in a job of its own: with two ports they would only wait for each other."""
    addresses = {read_address(ON_SEVERAL_HOSTS["torchrun"] | {"PBS_JOBID": job}).value for job in "78"}
    assert len(addresses) == 1


def test_the_port_of_torchrun_s_own_store_is_never_taken():
    here = ON_SEVERAL_HOSTS["torchrun"]
    for port in range(20_000, 29_000):
        address = read_address(here | {"MASTER_PORT": str(port)}).value
        assert int(address.rpartition(":")[2]) != port


def test_an_ipv6_address_is_bracketed():
    assert read_address(ON_SEVERAL_HOSTS["torchrun"] | {"MASTER_ADDR": "fd00::1"}).value.startswith("tcp://[fd00::1]:2")


def test_an_address_that_is_set_wins():
    assert read_address(SEEN["torchrun"] | {"GRADENGINE_ADDRESS": "tcp://a:1"}) == ("tcp://a:1", "GRADENGINE_ADDRESS")
    assert read_address({"GRADENGINE_ADDRESS": "unix:///s"}).value == "unix:///s"


def test_one_rank_alone_needs_no_address_that_others_know():
    alone = {"GRADENGINE_RANK": "0", "GRADENGINE_WORLD_SIZE": "1"}
    assert read_address(alone) == ("tcp://127.0.0.1:0", "GRADENGINE_WORLD_SIZE")


@pytest.mark.parametrize(
    "url", ["host:7000", "tcp://host:x", "tcp://host:70000", "tcp://:7000", "tcp://[::1", "x" * 9999]
)
def test_an_address_that_is_no_url_is_refused_with_its_variable(url):
    with pytest.raises(CallerError, match=r"URL \(of environment variable GRADENGINE_ADDRESS\): got '") as refused:
        read_address({"GRADENGINE_ADDRESS": url})
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("name", ["Open MPI's mpiexec", "MPICH's mpiexec", "PMI"])
def test_mpi_s_ranks_on_several_hosts_are_told_what_to_set(name):
    launcher = next(each for each in LAUNCHERS if each.name == name)
    told = (
        f"the environment names no host.*: got {launcher.world_size}=2, of which {launcher.local_size}=1 on this host"
    )
    with pytest.raises(CallerError, match=f"{told}; set GRADENGINE_ADDRESS=tcp://host:port on all ranks"):
        read_address(SEEN[name] | {launcher.local_rank: "0", launcher.local_size: "1"})


def test_ranks_that_were_started_by_hand_are_told_what_to_set():
    by_hand = {"GRADENGINE_RANK": "0", "GRADENGINE_WORLD_SIZE": "2"}
    told = "got GRADENGINE_WORLD_SIZE=2, of which an unknown number on this host; set GRADENGINE_ADDRESS=tcp://"
    with pytest.raises(CallerError, match=told):
        read_address(by_hand)


def test_a_run_that_nothing_distinguishes_is_told_what_to_set():
    nameless = {key: value for key, value in SEEN["MPICH's mpiexec"].items() if key != "PMI_FD"}
    for here in (
        nameless,
        nameless | {"PMI_FD": "x"},
        nameless | {"PMI_FD": "1000000"},
        nameless | {"PMI_FD": "9" * 12},
    ):
        with pytest.raises(CallerError, match=r"nothing that distinguishes two runs on one host: .*set GRADENGINE_JOB"):
            read_address(here)
        assert read_address(here | {"GRADENGINE_JOB": "a"}).value != read_address(here | {"GRADENGINE_JOB": "b"}).value


@pytest.mark.skipif(sys.platform != "linux", reason="SO_PEERCRED is Linux's")
def test_mpich_s_run_is_named_by_the_process_at_the_other_end_of_its_socket():
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.create_server(("127.0.0.1", 0)) as of_another_kind:
        here = SEEN["MPICH's mpiexec"]
        addresses = {read_address(here | {"PMI_FD": str(end.fileno())}) for end in (ours, theirs)}
        assert len(addresses) == 1
        assert "PMI_FD" in addresses.pop().source
        assert ours.fileno() >= 0  # it was looked at, and not closed
        ours.send(b"x")
        assert theirs.recv(1) == b"x"
        with pytest.raises(CallerError, match="nothing that distinguishes"):
            read_address(here | {"PMI_FD": str(of_another_kind.fileno())})


@pytest.mark.parametrize("host", ["a b", "a/b", "-a", "a\n", "ä", "x" * 300, "\x1b[31m", "a:b@c"])
def test_a_host_that_is_none_is_refused_with_its_variable(host):
    with pytest.raises(CallerError, match="MASTER_ADDR names no host: got '") as refused:
        read_address(ON_SEVERAL_HOSTS["torchrun"] | {"MASTER_ADDR": host})
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 300


def test_a_tmpdir_too_long_for_a_socket_is_told_with_both_numbers():
    told = r"TMPDIR is too long for a Unix socket: .*: got 1\d\d bytes, expected at most (97|101); set TMPDIR"
    with pytest.raises(CallerError, match=told):
        read_address(SEEN["torchrun"] | {"TMPDIR": "/" + "x" * 90})
    fits = "/" + "x" * (97 - len(f"//gradengine-{os.getuid()}/") - 16)
    assert len(read_address(SEEN["torchrun"] | {"TMPDIR": fits}).value) == len("unix://") + 97


# ---- Slurm's lists of nodes ----


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", ("node1", True)),
        ("node1,node2", ("node1", False)),
        ("node[001-003,007]", ("node001", False)),
        ("node[7]", ("node7", True)),
        ("a[2,1]-b[03-04].c,d", ("a2-b03.c", False)),
        ("sh04-14n01.example.org", ("sh04-14n01.example.org", True)),
        ("[1-2]", ("1", False)),
        ("", None),
        (",a", None),
        ("a[", None),
        ("a[]", None),
        ("a[1", None),
        ("a[[1]]", None),
        ("a[x]", None),
        ("a]b", None),
        ("bgl[000x123]", None),
        ("a b", None),
        ("a\n", None),
        ("ſ1", None),
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
        address = read_address(ON_SEVERAL_HOSTS["srun"] | {"SLURM_STEP_NODELIST": nodes}).value
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
        environment, SEEN["torchrun"] | {"GRADENGINE_TOKEN": "of the environment", "GRADENGINE_ADDRESS": "tcp://a:1"}
    )
    assert joining("tcp://b:2", 0, 3, "given", None, served=False) == ("tcp://b:2", 0, 3, "given")
    assert joining(None, None, None, None, None, served=False) == ("tcp://a:1", 1, 2, "of the environment")
    assert joining(None, 0, None, None, None, served=False)[1:3] == (0, 2)


def test_what_is_given_whole_needs_no_environment_and_is_not_hurt_by_a_broken_one(environment):
    given = "tcp://127.0.0.1:0", 0, 1
    assert joining(*given, None, None, served=False) == (*given, None)
    launched(environment, {"RANK": "x", "GRADENGINE_ADDRESS": "?", "GRADENGINE_WORLD_SIZE": "-1"})
    assert joining(*given, None, None, served=False) == (*given, None)


def test_connect_without_anything_is_no_silent_world_of_one():
    with pytest.raises(CallerError, match="no launcher started this process"):
        connect()


def test_several_machines_need_a_token_and_each_rank_is_told_how(environment):
    launched(environment, ON_SEVERAL_HOSTS["srun"])
    told = "is for several machines, and needs a token; write one line of .* set GRADENGINE_TOKEN_FILE"
    for rank in "01":
        environment.setenv("SLURM_PROCID", rank)
        with pytest.raises(CallerError, match=told):
            connect()
    environment.setenv("SLURM_PROCID", "1")
    environment.setenv("GRADENGINE_TOKEN", "0123456789abcdef0123456789abcdef")
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


@pytest.mark.parametrize("fault", ["others may read it", "a file", "a link"])
def test_a_folder_that_is_not_private_is_refused(environment, fault, tmp_path):
    launched(environment, SEEN["torchrun"])
    folder = Path(os.environ["TMPDIR"], f"gradengine-{os.getuid()}")
    if fault == "a file":
        folder.touch()
    elif fault == "a link":
        tmp_path.chmod(0o700)
        folder.symlink_to(tmp_path)
    else:
        folder.mkdir()
        folder.chmod(0o750)
    with pytest.raises(
        CallerError, match=f"gradengine-{os.getuid()}' (is not private: got|for a Unix socket: File exi)"
    ):
        connect()


def test_a_tmpdir_that_is_not_there_is_told(environment):
    launched(environment, SEEN["torchrun"] | {"TMPDIR": "/none"})
    with pytest.raises(CallerError, match=r"cannot make '/none/gradengine-.*: No such file or directory; set TMPDIR"):
        connect()


def taken_port(environment, host):
    """Where torchrun's ranks of two hosts come to, of which this is one."""
    launched(environment, ON_SEVERAL_HOSTS["torchrun"] | {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": host})
    return int(read_address(os.environ).value.rpartition(":")[2])


def test_a_port_that_is_taken_is_told_with_the_variable_that_sets_another(environment):
    environment.setenv("MASTER_PORT", str(free_port()))
    port = taken_port(environment, "127.0.0.1")
    with socket.create_server(("127.0.0.1", port)):
        told = (
            rf"rank 0 cannot listen at 127.0.0.1:{port} \(Address already in use\), made of MASTER_ADDR, TORCHELASTIC"
        )
        with pytest.raises(CallerError, match=f"{told}.*; set GRADENGINE_ADDRESS=tcp://host:port on all ranks"):
            connect()
    connect().close()


def unknown(host):
    raise socket.gaierror(-2, "Name or service not known")


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host", "node..x"])
def test_a_first_host_that_is_not_this_one_is_told_by_rank_0(environment, host):
    taken_port(environment, host)
    environment.setenv("GRADENGINE_TOKEN", "0123456789abcdef0123456789abcdef")
    if host == "no-such-host":
        environment.setattr("socket.gethostbyname", unknown)
    with pytest.raises(CallerError, match=f"rank 0 cannot listen at {host}:2.* made of MASTER_ADDR"):
        connect()


def test_a_host_that_its_own_hosts_file_calls_loopback_listens_for_the_others_too(environment):
    taken_port(environment, "node3")
    environment.setenv("GRADENGINE_TOKEN", "0123456789abcdef0123456789abcdef")
    environment.setattr("socket.gethostbyname", {"node3": "127.0.1.1"}.__getitem__)
    with connect() as exchange:
        assert exchange.url.startswith("tcp://0.0.0.0:2")
    environment.setenv("RANK", "1")
    with connect() as exchange:
        assert exchange.url.startswith("tcp://node3:2")


def test_two_groups_of_one_run_need_two_jobs(environment):
    launched(environment, SEEN["torchrun"] | {"RANK": "0"})
    with connect():
        with pytest.raises(CallerError, match=r"a process listens at .* made of LOCAL_WORLD_SIZE.*its own job="):
            connect()
        connect(job="tp").close()
    connect().close()


def test_a_job_that_is_no_name_is_refused_before_it_is_used(environment):
    launched(environment, SEEN["torchrun"])
    with pytest.raises(CallerError, match="this is not a valid job name: got 5"):
        connect(job=5)


def test_a_tmpdir_that_fits_no_url_is_told():
    with pytest.raises(CallerError, match="TMPDIR has a character that a URL cannot have: got '/a#b"):
        read_address(SEEN["torchrun"] | {"TMPDIR": "/a#b"})


def test_a_server_s_address_is_not_made_up(environment):
    launched(environment, SEEN["torchrun"])
    with pytest.raises(
        CallerError, match="served=True needs the server's address; pass its url, or set GRADENGINE_ADD"
    ):
        connect(served=True)
    environment.setenv("GRADENGINE_ADDRESS", "unix:///tmp/s")
    connect(served=True).close()
