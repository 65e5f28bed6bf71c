"""Condition variable and thread group that stay consistent when Ctrl-C interrupts a waiting thread; cached properties.

`threading`'s own classes are Python code, and an interrupt inside of it breaks them: in `Condition.wait`, after the
lock is released, `KeyboardInterrupt` becomes a `RuntimeError`; in `Event.set` it leaves a lock held for ever, so that
the next `set` deadlocks; `Thread.start` waits for such an event; and before Python 3.13 an interrupted `Thread.join`
counts the thread as ended. Here each step between threads is a single call into C, or can be repeated.
"""

from __future__ import annotations

import _thread
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, final

_POLL_SECONDS = 0.25  # waiting threads also poll: the notifying thread may have been interrupted


if TYPE_CHECKING:
    from functools import cached_property as cached_property  # noqa: PLC0414  (so that it is exported)
else:

    class cached_property:  # noqa: N801  (functools' own name)
        """`functools.cached_property` without the lock that all objects share before Python 3.12.

        A child forked while another thread computes such a property inherits the lock held, and waits for ever. Here
        two threads may compute it both.
        """

        def __init__(self, compute):
            self._compute, self.__doc__ = compute, compute.__doc__

        def __set_name__(self, owner, name):
            self._name = name

        def __get__(self, instance, owner=None):
            if instance is None:
                return self
            value = instance.__dict__[self._name] = self._compute(instance)
            return value


@final
class Condition:
    """`threading.Condition` that survives interrupts.

    Attributes:
        lock: Reentrant; `with condition.lock` is one call into C. Not to be held when calling `wait_for`.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._wakeups: dict[int, queue.SimpleQueue[None]] = {}  # of each waiting thread

    def let_go(self) -> None:
        """Release the lock if an interrupt has left it held by this thread; to be called where it should not hold it.

        Python 3.10 checks for signals between an interrupt and the `__exit__` of the `with` that it leaves: the second
        of two interrupts prevents the release.
        """
        # No try/except: an error caught here would appear in the traceback of the one being handled.
        while self.lock._is_owned():  # type: ignore[attr-defined]
            self.lock.release()

    def notify_all(self) -> None:
        """Wake all waiting threads. May be repeated after an interrupt."""
        with self.lock:
            for wakeup in self._wakeups.values():
                wakeup.put(None)
            self._wakeups.clear()

    def wait_for(self, done: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until `done()`, which is called with the lock held, at most for so many seconds (None: forever).

        Returns:
            False after a timeout.
        """
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        wakeup: queue.SimpleQueue[None] = queue.SimpleQueue()
        while True:
            with self.lock:
                if done():
                    return True
                self._wakeups[threading.get_ident()] = wakeup
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            try:
                wakeup.get(timeout=min(left, _POLL_SECONDS))
            except queue.Empty:
                continue


@final
class Threads:
    """The daemon threads of one object."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._running: set[threading.Thread] = set()

    def spawn(self, name: str, work: Callable[..., None], *arguments: object) -> None:
        """Start a thread of this name that calls `work(*arguments)`."""

        def run() -> None:
            try:
                work(*arguments)
            finally:
                self._forget(thread)

        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._changed.lock:
            self._running.add(thread)
        try:
            start_thread(thread)
        except BaseException:
            self._forget(thread)
            raise

    def join(self, seconds: float) -> None:
        """Wait until all but the calling thread have ended, at most for so many seconds; may be repeated."""
        deadline, me = time.monotonic() + seconds, threading.current_thread()
        self._changed.let_go()
        with self._changed.lock:
            others = self._running - {me}
        self._changed.wait_for(lambda: self._running <= {me}, seconds)
        for thread in others - self._running:
            if thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))  # its last lines

    def _forget(self, thread: threading.Thread) -> None:
        with self._changed.lock:
            self._running.discard(thread)
            self._changed.notify_all()


def start_thread(thread: threading.Thread) -> None:
    """Start a thread without waiting until it runs.

    Raises:
        RuntimeError: The process can have no more threads.
    """
    _thread.start_new_thread(_start, (thread,))


def _start(thread: threading.Thread) -> None:
    try:
        thread.start()
    except RuntimeError:  # the process can have no more threads: this one does the work
        thread.run()
