"""The exchange within one machine: limited not by links, but by the copies and sums of all workers on shared cores.

For N bytes and W workers: (W - 1) N bytes of parts, and as many of sums, go into the kernel at one process and out of
it at another, checksums taken; W N bytes of parts are summed. A server has W N of each. Threads of one process send
nothing: parts are read where they are, and the sums are copied to the W - 1 other arenas. So do processes in shared
memory, where sockets carry signals alone. `--one-machine` and `measured/plan_check.py` measure the rates alike.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import final

import numpy as np

from gradengine.arguments import as_float, said
from gradengine.arrays.shared import has_shared_memory, shared_array
from gradengine.bench.workers import Crew, Reduction, contribution, free_port, sockets_of, span_layout
from gradengine.errors import CallerError
from gradengine.exchange.addresses import Address
from gradengine.exchange.linked import DEFAULT_SHARE_BYTES
from gradengine.exchange.links.shared_memory import SharedMemoryLink
from gradengine.exchange.links.sockets import SocketLink
from gradengine.exchange.ordered_all_reduce import OrderedAllReduce
from gradengine.exchange.shares import shares_of
from gradengine.exchange.transfers import Receive, Send
from gradengine.kernels import HostKernels
from gradengine.kernels.host_threads import available_cpus
from gradengine.layout.cost import Bandwidth
from gradengine.plan.traffic import Network, Overlap, Traffic, ordered, overlapped, star

__all__ = [
    "TRANSPORTS", "Rates", "Sum", "measure_rates", "measure_tflops", "on_one_machine", "overlap_on_one_machine",
    "pairs", "rates_of",
]  # fmt: skip

TRANSPORTS = ("tcp://", "unix://", "shared memory", "threads", "served")  # the last over TCP
# Where parts are read in place and sums alone are copied: signals that a message takes (lent, read) over a socket.
_SIGNALS = {"shared memory": 2, "threads": 0}
_PAIR = 2  # processes, each of one thread that sends and receives; and threads that sum
_SHARE = DEFAULT_SHARE_BYTES // 4
_ELEMENTS, _ROUNDS = 1 << 23, 5  # 34 MB: beyond the caches, and a second in all
_MULTIPLIED = 1024  # rows and columns: a training step's sizes, and a tenth of a second in all
_NO_LIMIT = Network(Bandwidth(1e18), 0.0)


@dataclass(frozen=True)
class Rates:
    """The measured rates of a machine, in bytes a second.

    Raises:
        CallerError: A rate is not above 0, or not finite; only shared memory may be None.
    """

    cores: int  # that all processes share
    tcp: float  # over a TCP link between two processes that send and receive at once, both directions summed
    unix: float  # the same over a Unix socket
    sum: float  # what an owner sums, bytes of parts
    copy: float  # one thread's copy of a share, bytes of one copy
    # Two processes' copies of what the other lends, both at once and summed; None where this system lends none.
    shared_memory: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            is_none = name == "shared_memory" and value is None
            if not (is_none or 0 < as_float(value) < float("inf")):  # NaN is refused
                raise CallerError(f"a machine's '{name}' is out of range", got=said(value), expected="a number above 0")

    def transports(self, device: str) -> list[str]:
        """Those of `TRANSPORTS` that are possible for arenas of this device: a GPU's are not lent to other processes.

        >>> Rates(2, 4e9, 4e9, sum=20e9, copy=10e9, shared_memory=10e9).transports("cuda")
        ['tcp://', 'unix://', 'threads', 'served']
        """
        are_lent = self.shared_memory is not None and device == "cpu"
        return [name for name in TRANSPORTS if are_lent or name != "shared memory"]

    def seconds(self, transport: str, nbytes: int, workers: int) -> float:
        """The seconds of one of `TRANSPORTS` to move and to sum: added, since a process has one thread for both.

        >>> Rates(2, 4e9, 4e9, sum=20e9, copy=10e9).seconds("tcp://", 10**9, workers=2)
        0.6
        """
        summed = workers * nbytes / self.sum
        if transport == "served":  # as fast as the server, which is one process
            return 2 * workers * nbytes / self.tcp + summed
        others, cores = (workers - 1) * nbytes, min(self.cores, workers)
        times, rate = {  # parts and sums, or sums alone
            "tcp://": (2, self.tcp),
            "unix://": (2, self.unix),
            "shared memory": (1, self.shared_memory),
            "threads": (1, self.copy),
        }[transport]
        assert rate is not None  # noqa: S101  (it is one of `transports`)
        return (times * others / rate + summed) * min(self.cores, _PAIR) / cores


def on_one_machine(transport: str, spans: Sequence[int], workers: int, rates: Rates) -> Traffic:
    """The traffic of one of `TRANSPORTS`: bytes that a rank or the server sends, or copies from other arenas."""
    if workers == 1:
        return Traffic(span_seconds=(0.0,) * len(spans))
    traffic = (star if transport == "served" else ordered)(spans, workers, _NO_LIMIT)
    if transport in _SIGNALS:
        link, signals = traffic.busiest_link_bytes // 2, _SIGNALS[transport] * traffic.messages
        traffic = Traffic((), link, link, traffic.total_bytes // 2, signals)
    seconds = tuple(rates.seconds(transport, nbytes, workers) for nbytes in spans)
    return replace(traffic, span_seconds=seconds, latency_steps=0, tail_seconds=0.0)


def overlap_on_one_machine(
    shares: Sequence[float], backward_seconds: float, spans: Sequence[int], traffic: Traffic, workers: int, rates: Rates
) -> Overlap:
    """How long a step waits after backward, if the cores that exchange a span also add it and clip the sum.

    Backward itself is assumed to run elsewhere, on a GPU; on these cores it would hide nothing, as if it took 0 s.
    Engines add a last micro-batch to their arenas as fast as they sum two parts, and scale the sum as fast as they
    would copy it: that is part of the wait, not of the exchange.
    """
    shared = max(1.0, workers / rates.cores)
    taking = shared * 2 / rates.sum
    held = [seconds + taking * nbytes for seconds, nbytes in zip(traffic.span_seconds, spans, strict=True)]
    clip = shared * sum(spans) / rates.copy
    return Overlap(traffic.seconds, overlapped(shares, backward_seconds, held, clip).exposed_seconds)


@final
class Duplex(Reduction):
    """One of two processes that send each other a whole set at once, share by share, over a link of one connection."""

    def __init__(self, kind: type[SocketLink], address: Address, elements: int, rank: int) -> None:
        super().__init__(rank, 2, elements)
        if kind is SharedMemoryLink:  # as the arenas of engines, which are lent and copied to
            self._mine, self.arena = shared_array(elements), shared_array(elements)
            np.copyto(self._mine, contribution(rank, elements))
        self._link = kind(rank, {1 - rank: sockets_of(address, 2, rank)[0]})

    def run(self) -> None:
        """Send and receive at once."""
        starts = range(0, self.arena.size, _SHARE)
        for tag, start in enumerate(starts):
            self._link.receive(1 - self.rank, tag, self.arena[start : start + _SHARE])
            self._link.send(1 - self.rank, tag, self._mine[start : start + _SHARE])
        left = 2 * len(starts)
        while left:
            over = len(self._link.poll())
            left -= over
            if not over:
                self._link.bell.wait()

    def error(self) -> float:
        """The largest difference between the received set and the other process's."""
        return float(np.abs(self.arena - contribution(1 - self.rank, self.arena.size)).max())


@final
class Sum:
    """The work of a rank that owns all shares of two ranks, if the other rank's parts are copied from its memory."""

    def __init__(self, elements: int) -> None:
        self._layout = span_layout(elements)
        self.arena, self._part = (contribution(rank, elements) for rank in range(2))
        self._shares = shares_of(self._layout, 2, DEFAULT_SHARE_BYTES, owner=0)
        self._owner = OrderedAllReduce(0, 2, self._layout, self._shares, self.arena, HostKernels())

    def run(self) -> dict[str, float]:
        """Seconds of "sum" and "copy", over the whole set."""
        copied, begin = 0.0, time.perf_counter()
        for span in self._layout.spans:
            self._owner.start(span)
        while transfers := self._owner.transfers():
            for transfer in transfers:
                if isinstance(transfer, Receive):
                    share = self._shares[transfer.tag // 6]
                    copied += _seconds(partial(np.copyto, transfer.memory, self._part[share.start : share.stop]))
                    self._owner.received(transfer.peer, transfer.tag)
                elif isinstance(transfer, Send):
                    self._owner.sent(transfer.peer, transfer.tag)
        self._owner.next_step()
        return {"sum": time.perf_counter() - begin - copied, "copy": copied}


def pairs(folder: Path, elements: int) -> dict[str, Callable[[], Crew]]:
    """Pairs of processes that send each other a set: "tcp", "unix", "shared_memory" -> a function that starts one."""
    links: dict[str, tuple[type[SocketLink], Address]] = {
        "tcp": (SocketLink, ("127.0.0.1", free_port())),
        "unix": (SocketLink, str(folder / "plain")),
    }
    if has_shared_memory():
        links["shared_memory"] = SharedMemoryLink, str(folder / "lent")
    return {name: partial(Crew, partial(Duplex, *link, elements), 2) for name, link in links.items()}


def rates_of(seconds: Mapping[str, float], elements: int) -> Rates:
    """The rates from the measured seconds of `pairs`, and of "sum" and "copy" of a `Sum`.

    >>> rates_of({"tcp": 1, "unix": 0.5, "sum": 0.1, "copy": 0.2}, elements=10**9).tcp
    8000000000.0
    """
    rates = {name: (4 if name == "copy" else 8) * elements / taken for name, taken in seconds.items()}
    return Rates(available_cpus(), **rates)


def measure_rates(elements: int = _ELEMENTS, rounds: int = _ROUNDS) -> Rates:
    """The rates as medians of `rounds` interleaved rounds, after one that is dropped; starts two processes a link."""
    samples: dict[str, list[float]] = defaultdict(list)
    with TemporaryDirectory(prefix="gradengine-plan-") as folder, ExitStack() as stack:
        crews = {}
        for name, build in pairs(Path(folder), elements).items():
            crews[name] = build()
            stack.callback(crews[name].close)
        total = Sum(elements)
        for _ in range(rounds + 1):
            found = total.run() | {name: _seconds(crew.run) for name, crew in crews.items()}
            for name, seconds in found.items():
                samples[name].append(seconds)
    return rates_of({name: statistics.median(taken[1:]) for name, taken in samples.items()}, elements)


def measure_tflops(size: int = _MULTIPLIED, rounds: int = _ROUNDS) -> float:
    """10^12 operations a second of NumPy's fp32 matrix products, on all cores that it takes; medians as above."""
    one, other = (contribution(rank, size * size).reshape(size, size) for rank in range(2))
    product = np.empty_like(one)
    taken = [_seconds(partial(np.matmul, one, other, out=product)) for _ in range(rounds + 1)]
    return 2 * size**3 / statistics.median(taken[1:]) / 1e12


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
