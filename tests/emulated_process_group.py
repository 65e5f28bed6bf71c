"""A process group of torch with NCCL, as far as the package asks it: ranks are threads, and all are on one device.

`all_to_all` queues copies, and the events that order them, as NCCL's kernels would be: nobody waits for the device. A
rank is held in it until all have called; NCCL holds the stream.
"""

import threading
from types import SimpleNamespace

from emulated_torch import copy_on, emulated_torch

from gradengine.exchange.exchange import Exchange
from gradengine.exchange.links.threads import thread_links
from gradengine.exchange.torch_group import device_calls_of

SECONDS = 60.0  # that only a rank which never calls reaches


class Tensor:
    """A flat array on the device, and slices of it."""

    def __init__(self, array):
        self.array = array

    def __getitem__(self, where):
        return Tensor(self.array[where])


class ProcessGroup:
    """A group of so many ranks; which of them a thread is, is said by `as_rank`.

    Attributes:
        calls: How many calls all ranks have made together.
    """

    def __init__(self, xp, ranks):
        self.xp, self.ranks, self.calls, self._left = xp, ranks, 0, None
        self._rank, self._given, self._read = threading.local(), [None] * ranks, [None] * ranks
        self._all_here = threading.Barrier(ranks, timeout=SECONDS)

    def as_rank(self, rank):
        self._rank.number = rank

    def fail_after(self, calls):
        """The calls of this thread's rank fail once so many more are over."""
        self._left = self._rank.number, self.calls + calls

    def all_to_all(self, received, sent, stream):
        rank = self._rank.number
        if self._left is not None and self._left[0] == rank and self.calls >= self._left[1]:
            self.abort()
        self._given[rank] = sent, self._event(stream)
        self._wait()
        for other, (parts, event) in enumerate(self._given):
            stream.wait_event(event)
            self._copy(stream, received[other], parts[rank])
        self._read[rank] = self._event(stream)
        self._wait()
        for event in self._read:
            stream.wait_event(event)  # what was read may be written from now on
        if rank == 0:
            self.calls += 1
        self._wait()
        self._given[rank] = None  # nothing is kept alive here

    def abort(self):
        """As the watchdog does when a rank is gone."""
        self._all_here.abort()

    def _copy(self, stream, target, source):
        assert (target.array.size, target.array.dtype) == (source.array.size, source.array.dtype)
        assert target.array.size
        copy_on(self.xp, stream, target.array, source.array)

    def _event(self, stream):
        return stream.record(self.xp.cuda.Event(disable_timing=True))

    def _wait(self):
        try:
            self._all_here.wait()
        except threading.BrokenBarrierError:
            raise RuntimeError("[Rank 0] NCCL communicator was aborted on rank 0.\nand more") from None


class Mirrored(ProcessGroup):
    """Rank 0 of a group whose other ranks hold the same, where rank 0 owns all: what comes of it can be captured."""

    def all_to_all(self, received, sent, stream):
        for target in received:
            if target.array.size == sent[0].array.size:  # else the sum of nobody's
                self._copy(stream, target, sent[0])


def torch_with_nccl(xp):
    """The stand-in of emulated_torch.py with what the package asks of torch.distributed; `group` is the last one."""
    torch = emulated_torch(xp.cuda.Stream.null)
    torch.xp, torch.backends, torch.group, current = xp, "cpu:gloo,cuda:nccl", None, threading.local()

    class Current:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            self.before, current.stream = getattr(current, "stream", None), self.stream

        def __exit__(self, *_):
            current.stream = self.before

    def external_stream(stream_ptr, device=None, **kwargs):
        return xp.cuda.Stream.from_external(SimpleNamespace(__cuda_stream__=lambda: (0, stream_ptr)))

    def all_to_all(output_tensor_list, input_tensor_list, group=None, async_op=False):
        assert len(output_tensor_list) == len(input_tensor_list) == group.ranks
        assert async_op is False
        group.all_to_all(output_tensor_list, input_tensor_list, current.stream)

    def get_backend_config(group=None):
        return torch.backends

    torch.from_dlpack = Tensor
    torch.cuda.ExternalStream, torch.cuda.stream = external_stream, Current
    torch.distributed = SimpleNamespace(all_to_all=all_to_all, get_backend_config=get_backend_config)
    return torch


def on_group(work, ranks, torch, group=None, **options):
    """Run work(exchange) on a thread for each rank; its results or errors in rank order. All is closed then."""
    torch.group = group = group or ProcessGroup(torch.xp, ranks)
    options = {"timeout": SECONDS, "join_timeout": SECONDS, "device_calls": device_calls_of(group), **options}
    exchanges = [Exchange(link, **options) for link in thread_links(ranks)]
    outcomes = [None] * ranks

    def run(exchange):
        group.as_rank(exchange.rank)
        try:
            outcomes[exchange.rank] = work(exchange)
        except Exception as error:
            outcomes[exchange.rank] = error
            exchange.close()
            group.abort()

    threads = [threading.Thread(target=run, args=(exchange,)) for exchange in exchanges]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    for exchange in exchanges:
        exchange.close()
    return outcomes
