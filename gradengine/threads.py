"""Threads that wait for each other while Ctrl-C comes: no lock stays held, and nobody who is waited for is lost.

`threading`'s own classes are Python code, and an interrupt in it breaks them: in `Condition.wait`, behind the release
of the lock, `KeyboardInterrupt` becomes a `RuntimeError`; in `Event.set` it leaves a lock held for ever, in which
whoever sets it next hangs; `Thread.start` waits in such an event; and a `Thread.join` that was interrupted takes the
thread for ended (before Python 3.13). Here each step between threads is one call into C, or can be done again.
"""

from __future__ import annotations

import _thread
import math
import queue
import threading
import time
from collections.abc import Callable
from typing import final

__all__ = ["Condition", "Threads", "start_thread"]

_LOOK_SECONDS = 0.25  # who waits looks by himself so often: whoever should have woken him may have been interrupted


@final
class Condition:
    """A lock, and waiting for what others do under it: `threading.Condition` for threads that Ctrl-C interrupts.

    Attributes:
        lock: Held by `with condition.lock`, which is one call into C and may be nested; not where `wait_for` is called.

    Example:
        >>> condition = Condition()
        >>> condition.wait_for(lambda: True), condition.wait_for(lambda: False, seconds=0.0)
        (True, False)
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._bells: dict[int, queue.SimpleQueue[None]] = {}  # of each thread that waits

    def let_go(self) -> None:
        """Release the lock, should an interrupt have left it to this thread; called where the caller does not hold it.

        Python 3.10 looks for signals once more between an interrupt and the `with` that it leaves: of two that come
        at once the second keeps that from its release.
        """
        # Asked, not tried: an error that is caught here would stand in the traceback of what is being handled.
        while self.lock._is_owned():  # type: ignore[attr-defined]
            self.lock.release()

    def notify_all(self) -> None:
        """Have all who wait look again. Interrupted, it may be done again."""
        with self.lock:
            for bell in self._bells.values():
                bell.put(None)
            self._bells.clear()

    def wait_for(self, done: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until `done()`, which is asked with the lock held, for so many seconds at most (None: for ever).

        Returns:
            Whether it is done.
        """
        deadline = math.inf if seconds is None else time.monotonic() + seconds
        bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        while True:
            with self.lock:
                if done():
                    return True
                self._bells[threading.get_ident()] = bell
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            try:
                bell.get(timeout=min(left, _LOOK_SECONDS))
            except queue.Empty:
                continue


@final
class Threads:
    """The threads that work for one object, and end when it is closed or the process ends."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._running: set[threading.Thread] = set()

    def spawn(self, name: str, work: Callable[..., None], *arguments: object) -> None:
        """Start a thread of this name that does the work once."""

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
        """Wait until all but the caller have ended, for so many seconds at most; may be done again."""
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
    """Start a thread, without waiting until it runs.

    Raises:
        RuntimeError: The process may have no more threads.
    """
    _thread.start_new_thread(_start, (thread,))


def _start(thread: threading.Thread) -> None:
    try:
        thread.start()
    except RuntimeError:  # the process may have no more threads: this one does the work
        thread.run()
