"""Threads that share a pass over memory on the CPU, and end with the pass even if the caller is interrupted."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np

Task = TypeVar("Task")


def available_cpus() -> int:
    """CPUs this process may run on, no more than its container's time is worth."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return cpus if quota >= cpus else math.ceil(quota)


def cpu_quota(root: Path = Path("/")) -> float:
    """CPUs whose whole time the control groups of this process allow it, of either version; infinite without a limit.

    Args:
        root: The folder that has `proc` and `sys`.
    """
    quotas = [math.inf]
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "cpu" in controllers.split(","):
                top = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
                group = top / os.path.normpath(f"/{path}").lstrip("/")
                # A container sees its own group at the top.
                quotas += [_quota_of(folder) for folder in (group, *group.parents) if folder.is_relative_to(top)]
    return min(quotas)


def _quota_of(group: Path) -> float:
    for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
        with contextlib.suppress(OSError, ValueError):  # it is of the other version, or has no limit
            quota, period = map(float, " ".join((group / name).read_text() for name in names).split())
            return quota / period if quota > 0 else math.inf
    return math.inf


def shared_by_threads(work: Callable[[Task], None], tasks: Sequence[Task], helpers: int, threads: int) -> None:
    """Do `work` on each task, with `helpers` threads of a pool of `threads` - 1; they and the caller take one by one.

    When this returns or raises, no thread works on these tasks any more, unless Ctrl-C came twice in a
    millisecond. A helper that never began is not waited for. Without room for a thread the caller does all of it.
    """
    waiting, begun, ended = deque(tasks), deque[None](), deque[None]()  # a deque's operations are atomic
    faults: list[BaseException] = []
    news: queue.SimpleQueue[None] = queue.SimpleQueue()  # a helper has ended

    def drain() -> None:
        # Overflow and NaN are found by the squared sums and reported by name; NumPy's warnings name nothing.
        with np.errstate(all="ignore"):
            while True:
                try:
                    task = waiting.popleft()
                except IndexError:
                    return
                work(task)

    def drain_beside() -> None:
        # Before the first task is taken: the caller empties `waiting`, and then waits for all that began.
        begun.append(None)
        try:
            drain()
        except BaseException as fault:  # noqa: BLE001  (the caller raises it)
            faults.append(fault)
            waiting.clear()
        finally:
            ended.append(None)
            news.put(None)

    def end() -> None:
        waiting.clear()
        while len(ended) < len(begun):
            news.get()

    try:
        try:
            with contextlib.suppress(RuntimeError):  # no new thread
                calls = _calls_of_pool(threads)
                for _ in range(helpers):
                    calls.put(drain_beside)
            drain()
        finally:
            end()
    finally:
        end()  # the first one may be what Ctrl-C interrupted
    if faults:
        raise faults[0]


_Calls: TypeAlias = "queue.SimpleQueue[Callable[[], None]]"
_pools: dict[tuple[int, int], _Calls] = {}  # by process, since a forked child has no threads, and by `threads`


def _calls_of_pool(threads: int) -> _Calls:
    """The queue that `threads` - 1 threads of this process serve, since the caller works too.

    Not an executor: it takes 5 to 20 us longer, and an interrupt of the caller can leave its futures' locks held.
    """
    key = os.getpid(), threads
    new: _Calls = queue.SimpleQueue()
    calls = _pools.setdefault(key, new)
    if calls is new:
        started = 0
        try:
            while started < threads - 1:
                threading.Thread(target=_serve, args=(calls,), name=f"gradengine-host-{threads}", daemon=True).start()
                started += 1
        finally:
            if not started:
                del _pools[key]  # a queue that no thread serves would keep the callers' arrays
    return calls


def _serve(calls: _Calls) -> None:
    while True:
        call = calls.get()
        call()
        del call  # it holds the caller's arrays
