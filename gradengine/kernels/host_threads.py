"""Threads that share a pass over memory on the CPU, and end with the pass even if the caller is interrupted."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
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


def shared_by_threads(work: Callable[[Task], None], tasks: Iterable[Task], helpers: int, threads: int) -> None:
    """Do `work` on each task, with `helpers` threads of a pool of `threads` - 1; they and the caller take one by one.

    When this returns or raises, no thread works on these tasks any more, unless Ctrl-C came twice. A helper that has
    not begun by then finds no task, and is not waited for. Where the process can have no more threads, the caller does
    all of it.

    Not an executor: to submit to one takes 50 us longer.
    """
    waiting = deque(tasks)
    bell: queue.SimpleQueue[None] = queue.SimpleQueue()
    begun: list[None] = []  # by helpers, as are the faults by which they ended, if by one
    ended: list[BaseException | None] = []

    def drain() -> None:
        # Overflow and NaN are found by the squared sums and reported by name; NumPy's warnings name nothing.
        with np.errstate(all="ignore"):
            while True:
                try:
                    task = waiting.popleft()
                except IndexError:
                    return
                work(task)

    def help_caller() -> None:
        begun.append(None)  # before the first task is taken: the caller waits for all that took one
        fault: BaseException | None = None
        try:
            drain()
        except BaseException as raised:  # noqa: BLE001  (the caller raises it)
            fault = raised
            waiting.clear()
        ended.append(fault)
        bell.put(None)

    try:
        pool = _pool(threads)
        if pool is not None:
            for _ in range(helpers):
                pool.put(help_caller)
        drain()
        while len(ended) < len(begun):
            bell.get()
    except BaseException:
        waiting.clear()
        while len(ended) < len(begun):  # not by the bell: what Ctrl-C interrupted may have taken a helper's ring
            time.sleep(0.0001)
        raise
    for fault in tuple(ended):  # a late helper may add to them
        if fault is not None:
            raise fault


_Calls: TypeAlias = "queue.SimpleQueue[Callable[[], None]]"
_pools: dict[int, _Calls] = {}


def _pool(threads: int) -> _Calls | None:
    """The queue of calls for a pool of `threads` - 1 threads of this process at most, since the caller works too.

    None where not one can be started; the next call tries again.
    """
    if threads not in _pools:
        calls: _Calls = queue.SimpleQueue()
        for number in range(threads - 1):
            name = f"gradengine-host-{threads}-{number}"
            try:
                threading.Thread(target=_serve, args=(calls,), name=name, daemon=True).start()
            except RuntimeError:  # a limit of the container, or of the user
                break
            _pools.setdefault(threads, calls)
    return _pools.get(threads)


def _serve(calls: _Calls) -> None:
    while True:
        call = calls.get()
        call()
        del call  # it holds the caller's arrays


if hasattr(os, "register_at_fork"):
    # A forked child has the queues but not their threads; it starts with none, or would work alone.
    os.register_at_fork(after_in_child=_pools.clear)
