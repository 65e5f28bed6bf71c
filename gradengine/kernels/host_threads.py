"""Threads that share a pass over memory on the CPU, and end with the pass even if the caller is interrupted."""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

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

    When this returns or raises, no thread works on these tasks any more. Where the process can have no more threads,
    the caller does all of it.
    """
    shared = _SharedWork(work, tasks)
    try:
        try:
            pool = _pool(threads)
            if pool is not None:
                for _ in range(helpers):
                    pool.put(shared.help)
            shared.drain()
        finally:
            shared.end()
    finally:
        shared.end()  # the first one may be what Ctrl-C interrupted
    if shared.faults:
        raise shared.faults[0]  # what a helper ended with


class _SharedWork(Generic[Task]):
    """Tasks that a caller and helper threads take one by one; an interrupt of the caller leaves no lock held.

    No lock but a helper's own: an interrupt between acquiring one and the `with` that releases it would stop the
    others for ever. A deque's operations are atomic.
    """

    def __init__(self, work: Callable[[Task], None], tasks: Iterable[Task]) -> None:
        self._work, self._tasks = work, deque(tasks)
        self._helpers: list[_Helper] = []
        self.faults: list[BaseException] = []

    def drain(self) -> None:
        """Take tasks until there are none."""
        # Overflow and NaN are found by the squared sums and reported by name; NumPy's warnings name nothing.
        with np.errstate(all="ignore"):
            while True:
                try:
                    task = self._tasks.popleft()
                except IndexError:
                    return
                self._work(task)

    def help(self) -> None:
        """Drain, in a helper thread."""
        helper = _Helper()
        # Before the first task is taken: who empties the list and then waits for all helpers misses none.
        self._helpers.append(helper)
        try:
            self.drain()
        except BaseException as fault:  # noqa: BLE001  (the caller raises it)
            self.faults.append(fault)
            self._tasks.clear()
        finally:
            helper.finish()

    def end(self) -> None:
        """Return when no thread works any more, even if interrupted; helpers that never began are not waited for."""
        interrupt: BaseException | None = None
        while True:
            try:
                self._tasks.clear()
                for helper in tuple(self._helpers):
                    helper.wait()
                break
            except BaseException as fault:  # noqa: BLE001  (raised when the chunk under way, 0.1 ms of work, is done)
                interrupt = fault
        if interrupt is not None:
            raise interrupt


class _Helper:
    """One helper thread's part in the shared work."""

    def __init__(self) -> None:
        self._is_done = False
        self._done = threading.Lock()
        self._done.acquire()

    def finish(self) -> None:
        """Note that this helper is done."""
        self._is_done = True
        self._done.release()

    def wait(self) -> None:
        """Return when this helper is done; call it again if it was interrupted."""
        while not self._is_done:
            self._done.acquire()


_Calls: TypeAlias = "queue.SimpleQueue[Callable[[], None] | None]"
_pools: dict[int, _Calls] = {}


def _pool(threads: int) -> _Calls | None:
    """The queue of calls for a pool of `threads` - 1 threads of this process at most, since the caller works too.

    None where not one can be started; the next call tries again.

    Not an executor: an interrupt of the caller can leave the locks of its futures held.
    """
    if threads not in _pools:
        calls: _Calls = queue.SimpleQueue()
        started = _start(calls, threads)
        if started and _pools.setdefault(threads, calls) is not calls:  # another thread was quicker
            for _ in range(started):
                calls.put(None)
    return _pools.get(threads)


def _start(calls: _Calls, threads: int) -> int:
    """Start the threads of a pool; returns how many there are."""
    for number in range(threads - 1):
        name = f"gradengine-host-{threads}-{number}"
        try:
            threading.Thread(target=_serve, args=(calls,), name=name, daemon=True).start()
        except RuntimeError:  # a limit of the container, or of the user
            return number
    return threads - 1


def _serve(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # it holds the caller's arrays


if hasattr(os, "register_at_fork"):
    # A forked child has the queues but not their threads; it starts with none, or would work alone.
    os.register_at_fork(after_in_child=_pools.clear)
