"""A process group's calls: which groups have them, what their errors become, and that torch has each name we use.

That they move bytes right: test_exchange_torch_group.py with a real group, test_reduction_device_sums.py on a device.
"""

import importlib.util
import inspect
import re
import sys
from types import SimpleNamespace

import pytest
from emulated_process_group import torch_with_nccl

from gradengine.errors import CallerError, PeerLost
from gradengine.exchange import device_calls
from gradengine.exchange.device_calls import DeviceCalls, device_calls_of


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
    with pytest.raises(CallerError, match=r"was left in the middle; make a new group on all ranks, torch\.dist"):
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
    source = inspect.getsource(device_calls).replace("self._torch.", "torch.")
    assert {*re.findall(r"\btorch\.([\w.]+)\(", source.replace("torch.distributed.new_group(", ""))} == {*CALLS}


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_nccl_is_what_torch_says_of_a_group_with_nccl():
    from torch.distributed.distributed_c10d import Backend, BackendConfig

    config = str(BackendConfig(Backend("cpu:gloo,cuda:nccl")))
    assert "cuda:nccl" in config.split(",")
    assert "cuda:nccl" in str(BackendConfig(Backend("nccl"))).split(",")
