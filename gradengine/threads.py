"""Threads of one object, a bell to wake a thread, and cached properties without a lock."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from functools import cached_property as cached_property  # noqa: PLC0414  (so that it is exported)
else:

    class cached_property:  # noqa: N801  (functools' own name)
        """`functools.cached_property` without the lock that all objects share before Python 3.12.

        A child forked while another thread computes such a property inherits a lock that is never released. Here two
        threads may both compute the property.
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


@final
class Threads:
    """The daemon threads of one object."""

    def __init__(self) -> None:
        self._running: set[threading.Thread] = set()

    def spawn(self, name: str, work: Callable[..., None], *arguments: object) -> None:
        """Start a thread of this name that calls `work(*arguments)`.

        Raises:
            RuntimeError: The process can have no more threads.
        """

        def run() -> None:
            try:
                work(*arguments)
            finally:
                self._running.discard(thread)

        thread = threading.Thread(target=run, name=name, daemon=True)
        self._running.add(thread)
        try:
            thread.start()
        except BaseException:
            self._running.discard(thread)
            raise

    def join(self, seconds: float) -> None:
        """Wait until all but the calling thread have ended, at most `seconds`; may be called again."""
        deadline = time.monotonic() + seconds
        for thread in tuple(self._running):
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
