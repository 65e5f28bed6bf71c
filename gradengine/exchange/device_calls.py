"""The calls by which a process group of torch moves GPUs' memory between its ranks: queued, and the host never waits.

Of all that NCCL does for torch only `all_to_all` is needed: each rank's parts go to whoever adds them, and sums come
back. It moves bytes and adds nothing, so the order of the sum is ours.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, final
from weakref import WeakSet

from gradengine.errors import CallerError, PeerLost

_NEW = "make a new group on all ranks, torch.distributed.new_group(backend='nccl'), or start them from a checkpoint"

_uneven: WeakSet[Any] = WeakSet()  # groups in which some ranks may have made more calls than others


def device_calls_of(process_group: Any) -> DeviceCalls | None:
    """The calls of a group whose backend for CUDA is NCCL; None for others, whose ranks sum in the host's memory.

    Raises:
        CallerError: A step over this group was left in the middle: a call of the next would meet one of that.
    """
    torch: Any = sys.modules["torch"]
    named = str(torch.distributed.get_backend_config(process_group))  # "cpu:gloo,cuda:nccl"
    if "cuda:nccl" not in named.split(","):
        return None
    if process_group in _uneven:
        raise CallerError("a step over this process group was left in the middle", do=_NEW)
    return DeviceCalls(process_group)


@final
class DeviceCalls:
    """The NCCL calls of a torch process group, on our streams and memory."""

    def __init__(self, process_group: Any) -> None:
        self._group = process_group
        self._torch: Any = sys.modules["torch"]

    def tensor(self, array: Any) -> Any:
        """A device's array as torch has it, without a copy."""
        return self._torch.from_dlpack(array)

    def stream(self, handle: int, ordinal: int) -> Any:
        """A stream of ours as torch has it."""
        return self._torch.cuda.ExternalStream(handle, device=ordinal)

    def all_to_all(self, received: Sequence[Any], sent: Sequence[Any], stream: Any) -> None:
        """Queue on a stream: `sent[r]` goes to rank r, `received[r]` comes from it; none is empty.

        All ranks make the same calls in the same order.

        Raises:
            PeerLost: NCCL does not do it; the group cannot be used any more.
        """
        torch = self._torch
        try:
            with torch.cuda.stream(stream):
                torch.distributed.all_to_all([*received], [*sent], group=self._group)
        except (RuntimeError, ValueError) as fault:  # of NCCL; or the group was destroyed
            self.leave_uneven()
            said = str(fault).partition("\n")[0][-200:]
            raise PeerLost(f"the process group failed ({said})", do=f"discard() the window; {_NEW}") from None

    def leave_uneven(self) -> None:
        """Have nobody join by this group again: not all ranks may have made all calls of a step."""
        _uneven.add(self._group)
