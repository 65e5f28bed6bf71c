"""The exchange within one machine: no link limits it, but the copies that all workers' processes make on shared cores.

Copies counted in the code, for N bytes and W workers: each of the W - 1 gradients and W - 1 sums is copied into the
kernel by `sendmsg` and out of it by `recv_into` (exchange/channel.py). One thread at a time checks W contributions and
makes W - 1 additions in rank 0's arena (exchange/group.py). Threads of one process send nothing: the sum is copied to
each of the W - 1 other arenas (exchange/local.py). All workers' engines share those cores, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gradengine.errors import CallerError
from gradengine.exchange.interface import DEFAULT_BUCKET_BYTES
from gradengine.plan.overlap import Overlap, overlapped
from gradengine.plan.traffic import Traffic, no_traffic

__all__ = ["ON_ONE_MACHINE", "Rates", "on_one_machine", "overlap_on_one_machine"]

_THREADS_OF_A_PAIR = 4  # of two processes, each sending and receiving at once


@dataclass(frozen=True)
class Rates:
    """What a machine was measured to do, in bytes a second.

    Attributes:
        cores: That all processes share.
        tcp: Through plain TCP sockets between two processes that send and receive at once, both directions summed.
        unix: The same through Unix sockets.
        check: One thread's look for NaN and Inf, bytes read.
        add: One thread's addition to the sum, bytes of one contribution that has just been looked at.
        copy: One thread's copy of a bucket, bytes of one copy.

    Raises:
        CallerError: One is not above 0, or not finite.
    """

    cores: int
    tcp: float
    unix: float
    check: float
    add: float
    copy: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise CallerError(f"a machine's '{name}' is out of range", got=value, expected="above 0 and finite")

    def sum_seconds(self, nbytes: int, workers: int) -> float:
        """Of the sum, which one thread at a time takes.

        >>> Rates(2, 4e9, 4e9, check=20e9, add=20e9, copy=10e9).sum_seconds(10**9, workers=3)
        0.25
        """
        return workers * nbytes / self.check + (workers - 1) * nbytes / self.add

    def by_sockets(self, nbytes: int, workers: int, rate: float) -> float:
        """Seconds of a star of processes: its transfers on all cores, and the sum.

        >>> Rates(2, 4e9, 4e9, check=20e9, add=20e9, copy=10e9).by_sockets(10**9, workers=2, rate=4e9)
        0.65
        """
        transfers = 2 * (workers - 1) * nbytes
        measured = min(self.cores, _THREADS_OF_A_PAIR)
        usable = min(self.cores, _THREADS_OF_A_PAIR * (workers - 1))
        # Added, not side by side: it is a reading thread that sums, and nobody reads for it meanwhile.
        return transfers / rate * measured / usable + self.sum_seconds(nbytes, workers)

    def by_tcp(self, nbytes: int, workers: int) -> float:
        """Seconds of `tcp://` on loopback."""
        return self.by_sockets(nbytes, workers, self.tcp)

    def by_unix(self, nbytes: int, workers: int) -> float:
        """Seconds of `unix://`."""
        return self.by_sockets(nbytes, workers, self.unix)

    def by_threads(self, nbytes: int, workers: int) -> float:
        """Seconds of `local_group`: one thread sums and copies while the others wait.

        >>> Rates(2, 4e9, 4e9, check=20e9, add=20e9, copy=10e9).by_threads(10**9, workers=2)
        0.25
        """
        return self.sum_seconds(nbytes, workers) + (workers - 1) * nbytes / self.copy

    def taking_seconds(self, nbytes: int, workers: int) -> float:
        """Of the workers' engines, which all add a last micro-batch to their arenas and look at it, on these cores.

        >>> Rates(2, 4e9, 4e9, check=20e9, add=20e9, copy=10e9).taking_seconds(10**9, workers=4)
        0.2
        """
        return (nbytes / self.add + nbytes / self.check) * self._shared_by(workers)

    def clip_seconds(self, nbytes: int, workers: int) -> float:
        """Of the workers' engines, which all scale the sum once it is there, as fast as they would copy it.

        >>> Rates(2, 4e9, 4e9, check=20e9, add=20e9, copy=10e9).clip_seconds(10**9, workers=2)
        0.1
        """
        return nbytes / self.copy * self._shared_by(workers)

    def _shared_by(self, workers: int) -> float:
        return max(1.0, workers / self.cores)


ON_ONE_MACHINE: Mapping[str, Callable[[Rates, int, int], float]] = {
    "tcp://": Rates.by_tcp,
    "unix://": Rates.by_unix,
    "threads": Rates.by_threads,
}


def on_one_machine(transport: str, spans: Sequence[int], workers: int, rates: Rates) -> Traffic:
    """What a transport takes within one machine; bytes are those that rank 0 sends, or copies to the other arenas.

    Args:
        transport: A key of `ON_ONE_MACHINE`.
        spans: Bytes of each span.
        workers: Processes of the machine, or threads of one process.
        rates: The machine's.

    Example:
        >>> machine = Rates(2, 4e9, 4e9, check=20e9, add=20e9, copy=10e9)
        >>> on_one_machine("tcp://", [10**9], 2, machine).seconds
        0.65
    """
    if workers == 1:
        return no_traffic(transport, spans)
    each, sends = (workers - 1) * sum(spans), transport != "threads"
    return Traffic(
        transport,
        busiest_link_bytes=each,
        other_link_bytes=sum(spans) if sends else 0,
        total_bytes=(2 if sends else 1) * each,
        messages=(workers - 1) * sum(-(-nbytes // DEFAULT_BUCKET_BYTES) for nbytes in spans) if sends else 0,
        latency_steps=0,
        span_seconds=tuple(ON_ONE_MACHINE[transport](rates, nbytes, workers) for nbytes in spans),
        tail_seconds=0.0,
    )


def overlap_on_one_machine(
    shares: Sequence[float], backward_seconds: float, spans: Sequence[int], traffic: Traffic, workers: int, rates: Rates
) -> Overlap:
    """What a step waits after backward, where the cores that exchange a span are those that take it and clip the sum.

    Backward itself is taken to run elsewhere, on a GPU. What the engines do is part of the wait, not of the exchange.
    """
    if workers == 1:
        return Overlap(0.0, 0.0)
    held = [taken + rates.taking_seconds(n, workers) for taken, n in zip(traffic.span_seconds, spans, strict=True)]
    tail = traffic.tail_seconds + rates.clip_seconds(sum(spans), workers)
    return Overlap(traffic.seconds, overlapped(shares, backward_seconds, held, tail).exposed_seconds)
