"""A bell to wake a thread, and cached properties without a lock."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

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
