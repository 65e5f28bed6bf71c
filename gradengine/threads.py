"""A bell to wake a thread."""

from __future__ import annotations

import contextlib
import threading


class Bell:
    """Wakes the thread that waits for it, or else the next one to wait.

    One bare lock: Ctrl-C in the Python code of `threading.Event` leaves its lock locked for good, and Python 3.10's
    `SimpleQueue.get` may wait for ever when its timeout has just passed.
    """

    def __init__(self) -> None:
        self._silence = threading.Lock()  # held until the bell is rung
        self._silence.acquire()

    def ring(self) -> None:
        """End the wait that is under way, or else the next one."""
        with contextlib.suppress(RuntimeError):  # rung already, and not waited for since
            self._silence.release()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the bell is rung; returns False if that takes longer than `seconds`."""
        return self._silence.acquire(timeout=-1 if seconds is None else seconds)
