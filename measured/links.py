"""How long ranks that are joined by links take for a sum, beside what they would use instead.

Run:    python measured/links.py --ranks 2                threads of one process, beside one that adds all by NumPy
        mpiexec -n 2 python measured/links.py --by mpi    processes, beside MPI's own Allreduce
        torchrun --nproc-per-node 2 measured/links.py --by tcp    or unix, or shared_memory: beside torch's over gloo

Results are compared first: on small whole numbers every order of adding is exact. Then the ways take turns; the slowest
rank counts, and medians are shown. `exposed` is what is left of a sum behind a backward that takes as long as the sum
does and hands over its spans one after the other; `hidden` is the rest of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from gradengine import Exchange, GradientLayout, connect, local_group
from gradengine.arrays.shared import shared_array

Array = npt.NDArray[np.float32]
Sum = Callable[[], None]

SPANS = 25


class Rank:
    """One rank's arena, and its sum over an exchange."""

    def __init__(self, exchange: Exchange, megabytes: int, *, is_shared: bool = False) -> None:
        self.layout = GradientLayout.of({f"layers.{n}.w": (megabytes * 250_000 // SPANS,) for n in range(SPANS)})
        self.exchange, self.step = exchange, 0
        size = self.layout.arena_size
        self.arena = shared_array(size) if is_shared else np.zeros(size, np.float32)
        exchange.bind(self.layout, self.arena)

    def sum(self, backward: float = 0.0) -> None:
        """Sum the arena, whose spans come at even shares of so many seconds."""
        begin, spans = time.perf_counter(), self.layout.spans
        for number, span in enumerate(spans, start=1):
            left = begin + backward * number / len(spans) - time.perf_counter()
            if left > 0:
                time.sleep(left)
            self.exchange.start(span)
        self.exchange.wait()

    def seconds(self, work: Sum, fill: float) -> float:
        """The slowest rank's seconds for work on an arena full of this rank's numbers."""
        self.arena[:] = fill
        self.exchange.all_gather(b"")
        begin = time.perf_counter()
        work()
        took = time.perf_counter() - begin
        told = self.exchange.all_gather(np.float64(took).tobytes())
        self.step += 1
        self.exchange.begin(self.step)
        return max(float(np.frombuffer(each)[0]) for each in told)

    def refuse_wrong(self, work: Sum) -> None:
        """Exit unless it sums."""
        self.seconds(work, self.exchange.rank + 1)
        slot, expected = self.layout.slots[0], self.exchange.world_size * (self.exchange.world_size + 1) / 2
        if not (self.arena[slot.offset : slot.stop] == expected).all():
            raise SystemExit(f"rank {self.exchange.rank}: another sum than {expected}")


def compared(ours: Rank, theirs: Rank, other: Sum, repeats: int) -> dict[str, float]:
    """The median seconds of both ways and of what is exposed, and of their ratios."""
    ours.refuse_wrong(ours.sum)
    theirs.refuse_wrong(other)
    found: dict[str, list[float]] = {}
    for _ in range(repeats):
        took, took_theirs = ours.seconds(ours.sum, 1), theirs.seconds(other, 1)
        exposed = max(0.0, ours.seconds(partial(ours.sum, took), 1) - took)
        rows = {"ours": took, "theirs": took_theirs, "ratio": took / took_theirs}
        for name, each in {**rows, "exposed": exposed, "hidden": 1 - exposed / took}.items():
            found.setdefault(name, []).append(each)
    return {name: statistics.median(each) for name, each in found.items()}


def threads(ranks: int, megabytes: int, repeats: int) -> dict[str, float]:
    """Seconds of `local_group`, and of one thread that adds all arenas by NumPy and copies the sum to each."""
    arenas, meet = [np.empty(0, np.float32)] * ranks, threading.Barrier(ranks)

    def by_numpy() -> None:
        if meet.wait() == 0:
            for other in arenas[1:]:
                np.add(arenas[0], other, out=arenas[0])
            for other in arenas[1:]:
                np.copyto(other, arenas[0])
        meet.wait()

    def work(exchange: Exchange) -> dict[str, float]:
        rank = Rank(exchange, megabytes)
        arenas[exchange.rank] = rank.arena
        found = compared(rank, rank, by_numpy, repeats)
        exchange.all_gather(b"")
        exchange.close()
        return found

    with ThreadPoolExecutor(ranks) as pool:
        return next(iter(list(pool.map(work, local_group(ranks)))))


def processes(by: str, megabytes: int, repeats: int) -> dict[str, float]:
    """Seconds over one of the ways between processes, and of MPI's or torch's own sum; nothing but on rank 0."""
    exchange, other = over_mpi() if by == "mpi" else over_torch(by)
    with exchange:
        rank = Rank(exchange, megabytes, is_shared=by == "shared_memory")
        found = compared(rank, rank, lambda: other(rank.arena), repeats)
        exchange.all_gather(b"")
    return found if exchange.rank == 0 else {}


def over_mpi() -> tuple[Exchange, Callable[[Array], Any]]:
    """The exchange of all ranks, and MPI's own sum in place."""
    from mpi4py import MPI  # noqa: PLC0415  (no other way needs it)

    return connect("mpi://"), lambda arena: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, arena)


def over_torch(link: str) -> tuple[Exchange, Callable[[Array], Any]]:
    """The exchange of all ranks, which meet by their process group, and torch's own sum in place."""
    import torch  # noqa: PLC0415  (no other way needs it)

    distributed: Any = torch.distributed
    distributed.init_process_group("gloo")
    exchange = connect(process_group=distributed.group.WORLD, link=link)
    return exchange, lambda arena: distributed.all_reduce(torch.from_numpy(arena))


def main() -> None:
    """Measure, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--by", choices=["threads", "mpi", "tcp", "unix", "shared_memory"], default="threads")
    parser.add_argument("--ranks", type=int, default=2, help="threads")
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    if given.by == "threads":
        found = threads(given.ranks, given.megabytes, given.repeats)
    else:
        found = processes(given.by, given.megabytes, given.repeats)
    if found:
        print(json.dumps({"by": given.by, **{name: round(each, 5) for name, each in found.items()}}))


if __name__ == "__main__":
    main()
