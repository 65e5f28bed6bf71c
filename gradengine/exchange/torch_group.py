"""A torch process group, through which its ranks connect and whose NCCL calls move data between their GPUs.

Rank 0 sends the others its address and a secret through the group. NCCL's calls are queued, so the host never waits.
They only move bytes. Each rank's parts are sent to the rank that adds them, and the sums are sent to all ranks. So
gradengine fixes the order of the sum.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, final
from weakref import WeakSet

import numpy as np

from gradengine.arguments import said
from gradengine.errors import CallerError, PeerLost
from gradengine.exchange.addresses import address_of, this_host
from gradengine.exchange.links.collectives import Bytes, CollectiveLink
from gradengine.exchange.mesh import Meeting

_INTERFACE = "GLOO_SOCKET_IFNAME"  # read by gloo
_TOLD_BYTES = 512
_SIOCGIFADDR = 0x8915  # Linux's request for an interface's address
_NEW = "make a new group on all ranks, torch.distributed.new_group(backend='nccl'), or start them from a checkpoint"

_uneven: WeakSet[Any] = WeakSet()  # groups in which some ranks may have made more calls than others


def meeting_by_torch(process_group: Any, timeout: float, **options: Any) -> Meeting:
    """Make this rank's meeting with the ranks of a process group. All of its ranks call this together.

    If all ranks are on one host, they use its loopback. Otherwise rank 0 listens at the same host as gloo. This is the
    first interface in GLOO_SOCKET_IFNAME (on Linux), or the address of the host's name.

    Args:
        process_group: A group of torch.distributed with any backend. Its own messages are not disturbed.
        timeout: Seconds within which all ranks must call this.
        options: As for `Meeting`.

    Raises:
        CallerError: torch.distributed is not initialized, the argument is not a torch group that contains this process,
            or rank 0 cannot listen. Also as `Meeting`.
        PeerLost: A rank did not call this in time, or rank 0 could not listen.
    """
    distributed, ranks, rank = _place(process_group)
    with _all_ranks(rank):
        gloo = _new_group(distributed, ranks, timeout, "gloo")
        host = "127.0.0.1" if len({*_gathered(gloo, ranks, this_host())}) == 1 else None
        if rank == 0:
            return _host(gloo, ranks, host, options)
        url, _, secret = _gathered(gloo, ranks, "")[0].partition(" ")
    if not url:
        raise PeerLost("rank 0 of the process group cannot listen", do="see the error of rank 0")
    return Meeting(address_of(url), rank, len(ranks), secret=secret, **options)


def link_over_torch(process_group: Any, timeout: float) -> CollectiveLink:
    """Make this rank's link over the all-to-all of a new group with the same ranks. All of them call this together.

    The new group has the given group's backend for CPU memory, or gloo if there is none.

    Args:
        process_group: A group of torch.distributed. Its own messages are not disturbed.
        timeout: Seconds within which all ranks must call this, and take part in each round.

    Raises:
        CallerError, PeerLost: As `meeting_by_torch`.
    """
    distributed, ranks, rank = _place(process_group)
    torch: Any = sys.modules["torch"]
    backends = dict(each.split(":") for each in str(distributed.get_backend_config(process_group)).split(","))
    with _all_ranks(rank):
        ours = _new_group(distributed, ranks, timeout, backends.get("cpu", "gloo"))
    order = [ranks.index(each) for each in sorted(ranks)]  # torch sorts a group's ranks

    def all_to_all(sent: Sequence[Bytes]) -> Sequence[Bytes]:
        sizes = [sent[each].size for each in order]
        counts = torch.empty(len(ranks), dtype=torch.int64, device="cpu")
        with _all_ranks(rank, CollectiveLink.way_on):
            distributed.all_to_all_single(counts, torch.tensor(sizes, device="cpu"), group=ours)
            received = torch.empty(int(counts.sum()), dtype=torch.uint8, device="cpu")
            data = torch.from_numpy(np.concatenate([sent[each] for each in order]))
            distributed.all_to_all_single(received, data, counts.tolist(), sizes, group=ours)
        pieces = dict(zip(order, np.split(received.numpy(), np.cumsum(counts.numpy())[:-1]), strict=True))
        return [pieces[each] for each in range(len(ranks))]

    return CollectiveLink(rank, len(ranks), all_to_all)


def _new_group(distributed: Any, ranks: Sequence[int], timeout: float, backend: str) -> Any:
    """Make a group, which is kept until the process ends.

    Torch would give the name of a destroyed group to the next one, which would find the old addresses in the store.
    """
    return distributed.new_group(ranks, timedelta(seconds=timeout), backend=backend, use_local_synchronization=True)


@contextlib.contextmanager
def _all_ranks(rank: int, do: str = "call connect with the process group on all of its ranks") -> Iterator[None]:
    """Raise torch's errors as `PeerLost`."""
    try:
        yield
    except RuntimeError as fault:
        words = re.sub(r"^\[[^]]*\] ", "", str(fault).partition("\n")[0])[-200:]  # without gloo's source location
        what = f"rank {rank} does not find all ranks of the process group ({words})"
        raise PeerLost(what, do=do) from None


def _host(gloo: Any, ranks: Sequence[int], host: str | None, options: Mapping[str, Any]) -> Meeting:
    """Return rank 0's meeting after sending its address to the other ranks. If there is none, send an empty one."""
    secret, told = secrets.token_hex(16), ""
    try:
        meeting = Meeting((host or _host_of_gloo(), 0), 0, len(ranks), secret=secret, **options)
        told = f"{meeting.url} {secret}"
    finally:
        _gathered(gloo, ranks, told)
    return meeting


def _place(process_group: Any) -> tuple[Any, list[int], int]:
    """Return torch.distributed, the group's ranks as numbered in the default group, and this rank in the group."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        raise CallerError("no torch process group here", do="call torch.distributed.init_process_group first")
    with contextlib.suppress(KeyError, ValueError):  # raised for a destroyed group
        if isinstance(process_group, distributed.ProcessGroup):  # torch returns -100 on ranks outside of a new group
            return distributed, distributed.get_process_group_ranks(process_group), distributed.get_rank(process_group)
    do = "pass the result of torch.distributed.new_group, on the ranks of that group only"
    raise CallerError("not a torch process group that contains this process", got=said(process_group), do=do)


def _gathered(gloo: Any, ranks: Sequence[int], told: str) -> list[str]:
    """Return every rank's text in the order of `ranks`, which differs from gloo's. Nothing is pickled."""
    torch = sys.modules["torch"]
    parts = torch.zeros(len(ranks), _TOLD_BYTES, dtype=torch.uint8, device="cpu")
    own = torch.from_numpy(np.frombuffer(told.encode().ljust(_TOLD_BYTES, b"\0"), np.uint8).copy())
    torch.distributed.all_gather([*parts], own, group=gloo)
    return [parts[sorted(ranks).index(rank)].numpy().tobytes().rstrip(b"\0").decode() for rank in ranks]


def _host_of_gloo() -> str:
    """Return the host at which gloo listens, which other hosts have already reached."""
    interface = os.environ.get(_INTERFACE, "").partition(",")[0]
    if not interface or sys.platform != "linux":
        return socket.gethostname()
    import fcntl  # noqa: PLC0415  (Windows has none)

    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
    except (OSError, ValueError) as fault:
        do = f"set {_INTERFACE} to the interface by which other hosts reach this one"
        raise CallerError(f"rank 0 finds no address of interface {interface!r} ({fault})", do=do) from None
    return socket.inet_ntoa(answer[20:24])  # an ifreq holds a name of 16 bytes, then a sockaddr_in


def device_calls_of(process_group: Any) -> DeviceCalls | None:
    """Return the calls of a group whose CUDA backend is NCCL. Return None for others, whose ranks sum in CPU memory.

    Raises:
        CallerError: A step over this group was not finished. Calls of a new step would be matched with its calls.
    """
    backends = str(sys.modules["torch"].distributed.get_backend_config(process_group))
    if "cuda:nccl" not in backends.split(","):
        return None
    if process_group in _uneven:
        raise CallerError("a step over this process group was not finished", do=_NEW)
    return DeviceCalls(process_group)


@final
class DeviceCalls:
    """The NCCL calls of a torch process group, on gradengine's streams and memory."""

    def __init__(self, process_group: Any) -> None:
        self._group, self._torch = process_group, sys.modules["torch"]

    def tensor(self, array: Any) -> Any:
        """Return a device array as a torch tensor, without a copy."""
        return self._torch.from_dlpack(array)

    def stream(self, handle: int, ordinal: int) -> Any:
        """Return one of gradengine's streams as a torch stream."""
        return self._torch.cuda.ExternalStream(handle, device=ordinal)

    def all_to_all(self, received: Sequence[Any], sent: Sequence[Any], stream: Any) -> None:
        """Queue an all-to-all on a stream. Rank r receives `sent[r]` and sends `received[r]`. No array is empty.

        All ranks make the same calls in the same order.

        Raises:
            PeerLost: NCCL failed. The group cannot be used any more.
        """
        try:
            with self._torch.cuda.stream(stream):
                self._torch.distributed.all_to_all([*received], [*sent], group=self._group)
        except (RuntimeError, ValueError) as fault:  # NCCL failed, or the group was destroyed
            self.leave_uneven()
            words = str(fault).partition("\n")[0][-200:]
            raise PeerLost(f"the process group failed ({words})", do=f"discard() the window; {_NEW}") from None

    def leave_uneven(self) -> None:
        """Refuse this group from now on, because its ranks may have made different numbers of calls."""
        _uneven.add(self._group)
