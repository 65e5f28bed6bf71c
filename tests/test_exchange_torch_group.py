"""Ranks that meet by a process group of torch: processes that are forked from one which has imported it.

And a group's calls: which groups have them, what their errors become, and that torch has each name we use. That they
move bytes right is tested with a real group here, and on a device in test_reduction_device_sums.py.
"""

import importlib.util
import inspect
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from emulated_process_group import torch_with_nccl
from transports import HAS_SHARED_MEMORY

from gradengine import connect
from gradengine.errors import CallerError, PeerLost
from gradengine.exchange import torch_group
from gradengine.exchange.addresses import this_host
from gradengine.exchange.torch_group import DeviceCalls, device_calls_of

pytestmark = pytest.mark.timeout(150)
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def parent():
    """The process whose forks are the ranks."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed")
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "link_process.py"), "torch"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        bufsize=1,
        start_new_session=True,
    )
    yield process
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.fixture
def ranks_that_run(parent, tmp_path):
    """Exit status and words of the first ranks up to `last`, or of all; those that run then are killed."""

    def run(ranks, *command, last=None):
        store = tmp_path / "store"
        parent.stdin.write(json.dumps([ranks, str(store), last or ranks, *command]) + "\n")
        statuses = json.loads(parent.stdout.readline())
        return [(status, Path(f"{store}{rank}").read_text()) for rank, status in enumerate(statuses)]

    return run


@pytest.mark.parametrize(
    ("what", "ranks"), [("part", 3), ("calls", 4), ("engine", 3), ("arguments", 2), ("collectives", 4)]
)
def test_parts_of_the_ranks_calls_and_engines_find_what_they_find_over_threads(what, ranks, ranks_that_run):
    """Also where a rank's arguments contradicted the group and were refused before."""
    assert ranks_that_run(ranks, what) == [(0, "the same\n")] * ranks


def test_engines_over_groups_of_workers_and_of_parts_find_what_they_find_over_threads(ranks_that_run):
    assert ranks_that_run(4, "grid") == [(0, "the same\n")] * 4


@pytest.mark.parametrize("what", ["raises", "killed", "late"])
def test_a_rank_that_does_not_go_on_is_named_and_the_others_end(what, ranks_that_run):
    found = ranks_that_run(3, f"step-{what}", 2, last=2)
    assert [status for status, _ in found] == [1, 1], found
    said = "DeadlineExceeded: rank 2 is late: " if what == "late" else "PeerLost: rank 2 is gone: "
    assert any(said in words for _, words in found), found
    assert all(re.match(r"rank \d: (PeerLost|DeadlineExceeded): rank \d is ", words) for _, words in found), found


def test_after_a_rank_has_left_in_a_step_all_join_again_and_end_with_the_same_bytes(ranks_that_run):
    assert ranks_that_run(3, "reconnects") == [(0, "the same\n")] * 3


@pytest.mark.parametrize(("link", "found"), [((), "shared_memory" if HAS_SHARED_MEMORY else "unix"), (("tcp",), "tcp")])
def test_ranks_of_one_host_meet_at_its_loopback_and_share_memory(link, found, ranks_that_run):
    assert ranks_that_run(2, "meets", *link) == [(0, f"{found} 127.0.0.1\n")] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has 127.0.0.2")
def test_ranks_of_several_hosts_meet_where_gloo_listens(ranks_that_run):
    assert ranks_that_run(2, "meets-afar", "127.0.0.2") == [(0, "tcp 127.0.0.2\n")] * 2


def test_a_rank_0_that_cannot_listen_says_why_and_the_others_that_it_cannot(ranks_that_run):
    (first, told), (second, other) = ranks_that_run(2, "meets-afar", "192.0.2.1")
    assert (first, second) == (1, 1)
    assert re.match(r"rank 0: CallerError: cannot listen at 192.0.2.1:0 ", told), told
    assert other.startswith("rank 1: PeerLost: rank 0 of the process group cannot listen; see"), other


def test_gloo_listens_at_the_first_interface_that_it_is_told_or_where_the_name_of_the_host_leads(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert torch_group._host_of_gloo() == socket.gethostname()
    if sys.platform == "linux":
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth7")
        assert torch_group._host_of_gloo() == "127.0.0.1"
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7\udcff" * 100)
        with pytest.raises(
            CallerError, match=r"rank 0 finds no address of interface 'eth7.*; set GLOO_SOCKET_IFNAME to"
        ):
            torch_group._host_of_gloo()


def test_processes_of_one_host_say_the_same_host():
    program = "from gradengine.exchange.addresses import this_host; print(this_host())"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout
    assert found == f"{this_host()}\n"


def test_a_rank_that_does_not_come_is_waited_for_until_the_timeout(ranks_that_run):
    ((status, words),) = ranks_that_run(2, "joins-late", 1, last=1)
    assert status == 1
    assert re.match(r"rank 0: PeerLost: rank 0 does not find all ranks of the process group \(\w.*\); call", words), (
        words
    )


def test_without_a_group_it_is_said_what_to_call():
    torch = pytest.importorskip("torch")
    assert not torch.distributed.is_initialized()
    with pytest.raises(CallerError, match=r"no torch process group .*init_process_group first"):
        connect(process_group=object())


# ---- calls ----


class Group:
    """As much of a group as anybody looks at here."""


@pytest.fixture
def torch(monkeypatch):
    stream = SimpleNamespace(ptr=0)  # nothing here is put on it
    torch = torch_with_nccl(SimpleNamespace(cuda=SimpleNamespace(Stream=SimpleNamespace(null=stream))))
    monkeypatch.setitem(sys.modules, "torch", torch)
    return torch


@pytest.mark.parametrize(
    ("backends", "has_calls"),
    [
        *((backends, True) for backends in ("cuda:nccl", "cpu:gloo,cuda:nccl")),
        *((name, False) for name in ("cpu:gloo,cuda:gloo", "cpu:gloo", "cpu:mpi,cuda:mpi", "xpu:nccl,cuda:nccl2")),
    ],
)
def test_a_group_has_them_whose_backend_for_cuda_is_nccl(torch, backends, has_calls):
    torch.backends = backends
    assert (device_calls_of(Group()) is not None) is has_calls


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_an_error_of_torchs_is_a_lost_peer_and_the_group_is_nobodys_then(torch, kind):
    group, other = Group(), Group()
    calls = device_calls_of(group)

    def fail(*given, **named):
        raise kind("NCCL error in: somewhere.cpp:9, remote process exited\nLast error:\n" + "x" * 999)

    torch.distributed.all_to_all = fail
    with pytest.raises(PeerLost, match=r"failed \(NCCL error .* exited\); discard\(\) the window; make a new group"):
        calls.all_to_all([], [], None)
    with pytest.raises(CallerError, match=r"was not finished; make a new group on all ranks, torch\.dist"):
        device_calls_of(group)
    assert isinstance(device_calls_of(other), DeviceCalls)


# Each name of torch's that calls need, and how it is called.
CALLS = {
    "from_dlpack": ((object(),), {}),
    "cuda.ExternalStream": ((1234,), {"device": 0}),
    "cuda.stream": ((object(),), {}),
    "distributed.all_to_all": (([], []), {"group": None}),
    "distributed.get_backend_config": ((None,), {}),
}


def found(torch, name):
    for part in name.split("."):
        torch = getattr(torch, part)
    return torch.__new__ if isinstance(torch, type) and name == "cuda.ExternalStream" else torch


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("whose", ["installed", "stand-in"])
def test_torch_has_each_name_and_takes_what_it_is_given(name, whose, torch, monkeypatch):
    if whose == "installed":
        monkeypatch.undo()
        torch = pytest.importorskip("torch")
    args, named = CALLS[name]
    theirs = found(torch, name)
    is_class = whose == "installed" and name == "cuda.ExternalStream"
    inspect.signature(theirs).bind(*([None] if is_class else []), *args, **named)


def test_nothing_else_of_torch_is_named():
    source = inspect.getsource(device_calls_of) + inspect.getsource(DeviceCalls)
    assert {*re.findall(r"\b_?torch(?:\"\])?\.([\w.]+)\(", source)} == {*CALLS}


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_nccl_is_what_torch_says_of_a_group_with_nccl():
    from torch.distributed.distributed_c10d import Backend, BackendConfig

    config = str(BackendConfig(Backend("cpu:gloo,cuda:nccl")))
    assert "cuda:nccl" in config.split(",")
    assert "cuda:nccl" in str(BackendConfig(Backend("nccl"))).split(",")
