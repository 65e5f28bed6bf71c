"""Threads that share a pass over memory on the CPU. Their work ends with the pass, also after an interrupt."""

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
    """Return the number of CPUs that this process may use, limited by the CPU time of its container."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return cpus if quota >= cpus else math.ceil(quota)


def cpu_quota(root: Path = Path("/")) -> float:
    """Return the number of CPUs whose time the control groups (v1 or v2) of this process allow, infinity for no limit.

    Args:
        root: The folder that contains `proc` and `sys`.
    """
    quotas = [math.inf]
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "cpu" in controllers.split(","):
                top = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
                group = top / os.path.normpath(f"/{path}").lstrip("/")
                # In a container, its group is at the top.
                quotas += [_quota_of(folder) for folder in (group, *group.parents) if folder.is_relative_to(top)]
    return min(quotas)


def _quota_of(group: Path) -> float:
    for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
        with contextlib.suppress(OSError, ValueError):  # The group has the other version, or no limit.
            quota, period = map(float, " ".join((group / name).read_text() for name in names).split())
            return quota / period if quota > 0 else math.inf
    return math.inf


def shared_by_threads(work: Callable[[Task], None], tasks: Sequence[Task], helpers: int, threads: int) -> None:
    """Do `work` on each task in the caller and in `helpers` threads of a pool of `threads` - 1, one task at a time.

    After this returns or raises, no thread works on these tasks, unless Ctrl-C came twice in a millisecond. A helper
    that never began is not waited for. If no thread can be started, the caller does all tasks.
    """
    waiting, begun, ended = deque(tasks), deque[None](), deque[None]()  # Operations on a deque are atomic.
    faults: list[BaseException] = []
    news: queue.SimpleQueue[None] = queue.SimpleQueue()  # one item for each helper that has ended

    def drain() -> None:
        # Overflow and NaN are found by the squared sums and reported by name, unlike in NumPy's warnings.
        with np.errstate(all="ignore"):
            while True:
                try:
                    task = waiting.popleft()
                except IndexError:
                    return
                work(task)

    def drain_beside() -> None:
        # This precedes the first task, since the caller empties `waiting` and then waits for all helpers that began.
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
            with contextlib.suppress(RuntimeError):  # No new thread can be started.
                calls = _calls_of_pool(threads)
                for _ in range(helpers):
                    calls.put(drain_beside)
            drain()
        finally:
            end()
    finally:
        end()  # Ctrl-C may have interrupted the first call.
    if faults:
        raise faults[0]


_Calls: TypeAlias = "queue.SimpleQueue[Callable[[], None]]"
_pools: dict[tuple[int, int], _Calls] = {}  # pools by process (a forked child has no threads) and `threads`


def _calls_of_pool(threads: int) -> _Calls:
    """Return the queue that `threads` - 1 threads of this process serve, since the caller works too.

    An executor would take 5 to 20 us longer, and an interrupt of the caller could leave the locks of its futures held.
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
                del _pools[key]  # A queue that no thread serves would keep the callers' arrays.
    return calls


def _serve(calls: _Calls) -> None:
    while True:
        call = calls.get()
        call()
        del call  # `call` keeps the caller's arrays alive.
