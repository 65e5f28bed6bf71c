"""The exchange within one machine: no link limits it, but the copies that all workers' processes make on shared cores.

Copies counted in the code, for N bytes and W workers: each of the W - 1 gradients and W - 1 sums is copied into the
kernel by `sendmsg` and out of it by `recv_into` (exchange/channel.py). One thread at a time checks W contributions and
makes W - 1 additions in rank 0's arena (exchange/group.py). Threads of one process send nothing: the sum is copied to
each of the W - 1 other arenas (exchange/local.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

__all__ = ["ON_ONE_MACHINE", "Rates"]

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
    """

    cores: int
    tcp: float
    unix: float
    check: float
    add: float
    copy: float

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


ON_ONE_MACHINE: Mapping[str, Callable[[Rates, int, int], float]] = {
    "tcp://": Rates.by_tcp,
    "unix://": Rates.by_unix,
    "threads": Rates.by_threads,
}
