"""Threads that share a pass over memory on the CPU, and end with the pass even if the caller is interrupted."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeAlias, TypeVar

import numpy as np

Task = TypeVar("Task")


def available_cpus() -> int:
    """CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def shared_by_threads(work: Callable[[Task], None], tasks: Sequence[Task], helpers: int, threads: int) -> None:
    """Do `work` on each task, with `helpers` threads of a pool of `threads` - 1; they and the caller take one by one.

    When this returns or raises, no thread works on these tasks any more.
    """
    shared = _SharedWork(work, tasks)
    try:
        try:
            pool = _pool(threads)
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


def _pool(threads: int) -> _Calls:
    """The queue of calls for a pool of `threads` - 1 threads of this process, since the caller works too.

    Not an executor: an interrupt of the caller can leave the locks of its futures held.
    """
    if threads not in _pools:
        calls: _Calls = queue.SimpleQueue()
        for number in range(threads - 1):
            name = f"gradengine-host-{threads}-{number}"
            threading.Thread(target=_serve, args=(calls,), name=name, daemon=True).start()
        if _pools.setdefault(threads, calls) is not calls:  # another thread was quicker
            for _ in range(threads - 1):
                calls.put(None)
    return _pools[threads]


def _serve(calls: _Calls) -> None:
    while (call := calls.get()) is not None:
        call()
        del call  # it holds the caller's arrays


if hasattr(os, "register_at_fork"):
    # A forked child has the queues but not their threads; it starts with none, or would work alone.
    os.register_at_fork(after_in_child=_pools.clear)
