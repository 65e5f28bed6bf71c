"""What a machine does in a second: plain sockets between two processes, and what the coordinator does with a bucket.

`gradengine plan --one-machine` measures these before it predicts; `bench/plan_check.py` measures them by the same
classes in the rounds of the exchanges that they predict.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import final

import numpy as np

from gradengine.bench.crew import Crew, ProcessCrew
from gradengine.bench.reduction import Reduction, contribution, free_port, receive_all
from gradengine.exchange.channel import Address, Channel, connect_socket, listen_socket
from gradengine.exchange.interface import DEFAULT_BUCKET_BYTES, find_non_finite
from gradengine.kernels.host import available_cpus
from gradengine.plan.machine import Rates

__all__ = ["Duplex", "Sum", "measure_rates", "pairs", "rates_of"]

_JOIN_SECONDS = 60.0
_PIECE = DEFAULT_BUCKET_BYTES // 4
_ELEMENTS, _ROUNDS = 1 << 23, 5  # 34 MB: beyond the caches, and a second in all
_OURS = ("check", "add", "copy")


@final
class Duplex(Reduction):
    """One of two processes that send each other a whole set at once, through one plain socket.

    Args:
        address: Where rank 0 listens.
        elements: fp32 elements of the set.
        rank: 0 or 1.
    """

    def __init__(self, address: Address, elements: int, rank: int) -> None:
        super().__init__(rank, 2, elements)
        if rank:
            self._socket = connect_socket(address, _JOIN_SECONDS)
        else:
            with listen_socket(address) as listener:
                self._socket = listener.accept()[0]
        self._socket.settimeout(_JOIN_SECONDS)
        Channel(self._socket, "the other process")  # the options that the exchange sets

    def run(self) -> None:
        """Send and receive at once."""
        sender = threading.Thread(target=self._send)
        sender.start()
        receive_all(self._socket, self.arena)
        sender.join()

    def _send(self) -> None:
        for start in range(0, self._mine.size, _PIECE):
            self._socket.sendall(self._mine[start : start + _PIECE].data)

    def error(self) -> float:
        """0 where what came is what the other has."""
        return float(np.abs(self.arena - contribution(1 - self.rank, self.arena.size)).max())

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


@final
class Sum:
    """What one thread of the coordinator does with each bucket: look at it, add it, copy the sum.

    Args:
        elements: fp32 elements of a contribution.
    """

    def __init__(self, elements: int) -> None:
        self._total, self._part = contribution(0, elements), contribution(1, elements)
        self._copy = np.zeros_like(self._part)

    def run(self) -> dict[str, float]:
        """Seconds of "check", "add" and "copy", over the whole set."""
        spent = dict.fromkeys(_OURS, 0.0)
        for start in range(0, self._part.size, _PIECE):
            total, part, copy = (array[start : start + _PIECE] for array in (self._total, self._part, self._copy))
            spent["check"] += _seconds(partial(find_non_finite, 1, part, start))
            spent["add"] += _seconds(partial(np.add, total, part, out=total))
            spent["copy"] += _seconds(partial(np.copyto, copy, total))
        return spent


def pairs(folder: Path, elements: int) -> dict[str, Callable[[], Crew]]:
    """The pairs of processes that send each other a set: "tcp" and "unix" -> how one is started."""
    tcp, unix = ("127.0.0.1", free_port()), str(folder / "plain")
    return {
        "tcp": lambda: ProcessCrew(partial(Duplex, tcp, elements), 2),
        "unix": lambda: ProcessCrew(partial(Duplex, unix, elements), 2),
    }


def rates_of(seconds: Mapping[str, float], elements: int) -> Rates:
    """From the seconds of each: "tcp" and "unix" of a pair, "check", "add" and "copy" of a `Sum`.

    >>> rates_of({"tcp": 1, "unix": 0.5, "check": 0.1, "add": 0.1, "copy": 0.2}, elements=10**9).tcp
    8000000000.0
    """
    nbytes = 4 * elements
    return Rates(
        cores=available_cpus(),
        tcp=2 * nbytes / seconds["tcp"],
        unix=2 * nbytes / seconds["unix"],
        **{name: nbytes / seconds[name] for name in _OURS},
    )


def measure_rates(elements: int = _ELEMENTS, rounds: int = _ROUNDS) -> Rates:
    """Medians of interleaved rounds, of which the first is dropped; it starts four processes.

    Args:
        elements: fp32 elements that are sent and summed.
        rounds: That count.
    """
    samples: dict[str, list[float]] = {name: [] for name in ("tcp", "unix", *_OURS)}
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


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
