"""The exchange within one machine: no link limits it, but the copies that all workers make on shared cores.

Copies counted in the code, for N bytes and W workers: each of the W - 1 gradients and W - 1 sums is copied into the
kernel by `sendmsg` and out of it by `recv_into`. One thread at a time checks W contributions and makes W - 1 additions
in rank 0's arena. Threads of one process send nothing: the sum is copied to each of the W - 1 other arenas.
`--one-machine` and `bench/plan_check.py` measure the rates alike.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import final

import numpy as np

from gradengine.arguments import as_float, said
from gradengine.bench.workers import Crew, Reduction, contribution, free_port, receive_all, sockets_of
from gradengine.errors import CallerError
from gradengine.exchange.addresses import Address
from gradengine.exchange.interface import DEFAULT_BUCKET_BYTES
from gradengine.exchange.links.sockets import set_options
from gradengine.kernels.host_sums import squared_sum
from gradengine.kernels.host_threads import available_cpus
from gradengine.plan.traffic import Overlap, Traffic, buckets_in, overlapped

__all__ = [
    "TRANSPORTS", "Rates", "Sum", "measure_rates", "measure_tflops", "on_one_machine", "overlap_on_one_machine",
    "pairs", "rates_of",
]  # fmt: skip

TRANSPORTS = ("tcp://", "unix://", "threads")
_THREADS_OF_A_PAIR = 4  # of two processes, each sending and receiving at once
_BUCKET = DEFAULT_BUCKET_BYTES // 4
_ELEMENTS, _ROUNDS = 1 << 23, 5  # 34 MB: beyond the caches, and a second in all
_MULTIPLIED = 1024  # rows and columns: a training step's sizes, and a tenth of a second in all
_OF_A_SUM = ("check", "add", "copy")


@dataclass(frozen=True)
class Rates:
    """What a machine was measured to do, in bytes a second.

    Raises:
        CallerError: One is not above 0, or not finite.
    """

    cores: int  # that all processes share
    tcp: float  # through plain TCP sockets between two processes that send and receive at once, both directions summed
    unix: float  # the same through Unix sockets
    check: float  # one thread's check for NaN and Inf, bytes read
    add: float  # one thread's addition to the sum, bytes of one contribution that has just been checked
    copy: float  # one thread's copy of a bucket, bytes of one copy

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 < as_float(value) < float("inf"):  # NaN is refused
                raise CallerError(f"a machine's '{name}' is out of range", got=said(value), expected="a number above 0")

    def sum_seconds(self, nbytes: int, workers: int) -> float:
        """Of the sum, which one thread at a time takes.

        >>> Rates(2, 4e9, 4e9, check=20e9, add=20e9, copy=10e9).sum_seconds(10**9, workers=3)
        0.25
        """
        return workers * nbytes / self.check + (workers - 1) * nbytes / self.add

    def seconds(self, transport: str, nbytes: int, workers: int) -> float:
        """Of one of `TRANSPORTS`: of sockets' transfers on all cores, or of threads' copies; and of the sum.

        >>> Rates(2, 4e9, 4e9, check=20e9, add=20e9, copy=10e9).seconds("tcp://", 10**9, workers=2)
        0.65
        """
        # Added, not side by side: it is a reading thread that sums, and nobody reads for it meanwhile.
        summed = self.sum_seconds(nbytes, workers)
        if transport == "threads":
            return summed + (workers - 1) * nbytes / self.copy
        rate = self.tcp if transport == "tcp://" else self.unix
        measured = min(self.cores, _THREADS_OF_A_PAIR)
        usable = min(self.cores, _THREADS_OF_A_PAIR * (workers - 1))
        return 2 * (workers - 1) * nbytes / rate * measured / usable + summed


def on_one_machine(transport: str, spans: Sequence[int], workers: int, rates: Rates) -> Traffic:
    """What one of `TRANSPORTS` takes; bytes are those that rank 0 sends, or copies to the other arenas."""
    if workers == 1:
        return Traffic(span_seconds=(0.0,) * len(spans))
    each, sends = (workers - 1) * sum(spans), transport != "threads"
    return Traffic(
        busiest_link_bytes=each,
        other_link_bytes=sum(spans) if sends else 0,
        total_bytes=(2 if sends else 1) * each,
        messages=(workers - 1) * buckets_in(spans) if sends else 0,
        span_seconds=tuple(rates.seconds(transport, nbytes, workers) for nbytes in spans),
    )


def overlap_on_one_machine(
    shares: Sequence[float], backward_seconds: float, spans: Sequence[int], traffic: Traffic, workers: int, rates: Rates
) -> Overlap:
    """What a step waits after backward, where the cores that exchange a span are those that add it and clip the sum.

    Backward itself is taken to run elsewhere, on a GPU; one on these cores hides nothing, as if it took 0 s. Engines
    add a last micro-batch to their arenas and check it, and scale the sum as fast as they would copy it: that is part
    of the wait, not of the exchange.
    """
    shared = max(1.0, workers / rates.cores)
    taking = shared * (1 / rates.add + 1 / rates.check)
    held = [seconds + taking * nbytes for seconds, nbytes in zip(traffic.span_seconds, spans, strict=True)]
    clip = shared * sum(spans) / rates.copy
    return Overlap(traffic.seconds, overlapped(shares, backward_seconds, held, clip).exposed_seconds)


@final
class Duplex(Reduction):
    """One of two processes that send each other a whole set at once, through one plain socket."""

    def __init__(self, address: Address, elements: int, rank: int) -> None:
        super().__init__(rank, 2, elements)
        (self._socket,) = sockets_of(address, 2, rank)
        set_options(self._socket)

    def run(self) -> None:
        """Send and receive at once."""
        sender = threading.Thread(target=self._send)
        sender.start()
        receive_all(self._socket, self.arena)
        sender.join()

    def _send(self) -> None:
        for start in range(0, self._mine.size, _BUCKET):
            self._socket.sendall(self._mine[start : start + _BUCKET].data)

    def error(self) -> float:
        """0 where what came is what the other has."""
        return float(np.abs(self.arena - contribution(1 - self.rank, self.arena.size)).max())


@final
class Sum:
    """What one thread of the coordinator does with each bucket of `elements` fp32: check it, add it, copy the sum."""

    def __init__(self, elements: int) -> None:
        self._total, self._part = contribution(0, elements), contribution(1, elements)
        self._copy = np.zeros_like(self._part)

    def run(self) -> dict[str, float]:
        """Seconds of "check", "add" and "copy", over the whole set."""
        spent = dict.fromkeys(_OF_A_SUM, 0.0)
        for start in range(0, self._part.size, _BUCKET):
            total, part, copy = (array[start : start + _BUCKET] for array in (self._total, self._part, self._copy))
            spent["check"] += _seconds(partial(squared_sum, part))
            spent["add"] += _seconds(partial(np.add, total, part, out=total))
            spent["copy"] += _seconds(partial(np.copyto, copy, total))
        return spent


def pairs(folder: Path, elements: int) -> dict[str, Callable[[], Crew]]:
    """The pairs of processes that send each other a set: "tcp" and "unix" -> how one is started."""
    addresses: dict[str, Address] = {"tcp": ("127.0.0.1", free_port()), "unix": str(folder / "plain")}
    return {name: partial(Crew, partial(Duplex, address, elements), 2) for name, address in addresses.items()}


def rates_of(seconds: Mapping[str, float], elements: int) -> Rates:
    """From the seconds of each: "tcp" and "unix" of a pair, "check", "add" and "copy" of a `Sum`.

    >>> rates_of({"tcp": 1, "unix": 0.5, "check": 0.1, "add": 0.1, "copy": 0.2}, elements=10**9).tcp
    8000000000.0
    """
    nbytes = {"tcp": 8 * elements, "unix": 8 * elements} | dict.fromkeys(_OF_A_SUM, 4 * elements)
    return Rates(available_cpus(), **{name: nbytes[name] / seconds[name] for name in nbytes})


def measure_rates(elements: int = _ELEMENTS, rounds: int = _ROUNDS) -> Rates:
    """Medians of that many interleaved rounds, after one that is dropped; it starts four processes."""
    samples: dict[str, list[float]] = {name: [] for name in ("tcp", "unix", *_OF_A_SUM)}
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
