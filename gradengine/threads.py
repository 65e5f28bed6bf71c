"""A bell to wake a thread."""

from __future__ import annotations

import contextlib
import threading


class Bell:
    """Wakes the thread that waits for it, or otherwise the next thread to wait.

    It is one bare lock. Ctrl-C in the Python code of `threading.Event` would leave the event's lock locked forever.
    Python 3.10's `SimpleQueue.get` may wait forever if its timeout has just passed.
    """

    def __init__(self) -> None:
        self._silence = threading.Lock()  # held until the bell is rung
        self._silence.acquire()

    def ring(self) -> None:
        """End the current wait, or otherwise the next one."""
        with contextlib.suppress(RuntimeError):  # already rung, and not waited for since
            self._silence.release()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the bell is rung. Returns False if that takes longer than `seconds`."""
        return self._silence.acquire(timeout=-1 if seconds is None else seconds)
