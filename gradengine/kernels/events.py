"""Queries of events, memory that is kept until they are done, and a record of the devices that have failed.

No other file of this folder queries the driver's progress, or finds out from an error that a device has failed.
"""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack, suppress
from types import TracebackType
from typing import Any, final

from gradengine.arrays.lost import device_failed, status_of_loss
from gradengine.kernels.device import Answer

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_DONE, _NOT_YET = 0, 600  # cudaSuccess, cudaErrorNotReady
#: CUDA's error of each device that has failed, by device ordinal, kept as long as the process lives.
FAILURES: dict[int, object] = {}
MOST_LENT = 1 << 30  # most bytes of borrowed memory that are kept in addition to the last


@final
class Events(AbstractContextManager[None]):
    """Queries and waits for events of one device, without voiding a graph that any thread records in any mode.

    While a thread captures in global mode (torch's default), the driver refuses such calls of all threads and voids the
    capture. Only calls of threads in relaxed mode are allowed.

    As a context, it raises `DeviceFailed` in place of an error that means that the device has failed.
    """

    def __init__(self, xp: Any, ordinal: int) -> None:
        self._runtime, self._ordinal = xp.cuda.runtime, ordinal
        driver = ctypes.PyDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")  # CuPy has loaded it.
        self._exchange_mode = driver.cuThreadExchangeStreamCaptureMode

    def __enter__(self) -> None:
        """Do nothing. All threads may be in it at the same time."""

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if fault is not None:
            self.raise_if_lost(fault)

    def relaxed(self, call: Callable[..., Answer], *arguments: Any) -> Answer:
        """Make a call that waits for the device, in relaxed mode, which other threads' captures allow."""
        mode = ctypes.c_int(_RELAXED)
        pointer = ctypes.byref(mode)
        with self:
            try:
                self._exchange_mode(pointer)  # The old mode is stored within this call, so Ctrl-C cannot lose it.
                return call(*arguments)
            finally:
                if mode.value != _RELAXED:
                    self._exchange_mode(pointer)

    def is_done(self, event: Any) -> bool:
        """Return whether the work before an event is done, without waiting.

        Raises:
            DeviceFailed: Work on the device, perhaps of another library, ended in an error.
        """
        status = self.relaxed(self._runtime.eventQuery, event.ptr)
        if status not in {_DONE, _NOT_YET}:
            self._note(status)
            self.refuse_failed()
        return bool(status == _DONE)

    def wait(self, event: Any) -> None:
        """Wait for the work before an event."""
        self.relaxed(event.synchronize)

    def raise_if_lost(self, fault: BaseException) -> None:
        """Raise `DeviceFailed` if CUDA's error means that the device has failed. Later calls then raise it too."""
        status = status_of_loss(fault)
        if status is not None:
            self._note(status)
            self.refuse_failed()

    def refuse_failed(self) -> None:
        """Raise `DeviceFailed` if the device is known to have failed. Does not query the driver."""
        if self._ordinal in FAILURES:
            raise device_failed(FAILURES[self._ordinal])

    def _note(self, status: int) -> None:
        FAILURES.setdefault(self._ordinal, self._runtime.CUDARuntimeError(status))


@final
class Entered(AbstractContextManager[None]):
    """Several contexts as one. An interrupt could leave a generator suspended until its traceback is freed.

    An interrupt at the first instruction of `__exit__` leaves the contexts entered.
    """

    def __init__(self, *contexts: AbstractContextManager[object]) -> None:
        self._contexts, self._entered = contexts, ExitStack()

    def __enter__(self) -> None:
        try:
            for context in self._contexts:
                self._entered.enter_context(context)
        except BaseException:
            self._entered.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.__exit__(kind, fault, trace)


@final
class Kept:
    """Memory that work may still read or write, kept until events after that work are done."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._waiting: deque[tuple[Collection[Any], object, int]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def until(self, events: Collection[Any], memory: object) -> None:
        """Keep memory until these events are done. Finalisers call this at any time, so it makes no driver call."""
        self._waiting.append((events, memory, 0))

    def lent(self, event: Any, memory: object, nbytes: int) -> None:
        """Keep memory of a producer whose stream is unknown. If much is kept already, wait for the oldest first.

        Without that bound a host that runs ahead would keep one set of gradients for each micro-batch it is ahead.
        """
        self._events.relaxed(self._wait_until, lambda: sum(size for *_, size in list(self._waiting)) <= MOST_LENT)
        self._waiting.append(((event,), memory, nbytes))

    def let_go(self) -> None:
        """Free entries whose events are done, in relaxed mode, since freeing a graph is a driver call too."""
        self._events.relaxed(self._let_go)

    def _let_go(self) -> None:
        """Pop each entry before it is tested, so that threads do not race."""
        for _ in range(len(self._waiting)):
            try:
                entry = self._waiting.popleft()
            except IndexError:  # Another thread tests the rest.
                return
            is_done = False
            try:
                is_done = all(map(self._events.is_done, entry[0]))
            finally:  # The entry is also kept if the device has failed.
                if not is_done:
                    self._waiting.append(entry)

    def wait(self) -> None:
        """Wait for all events, and free all entries."""
        self._events.relaxed(self._wait_until, lambda: False)

    def _wait_until(self, is_enough: Callable[[], bool]) -> None:
        while self._waiting and not is_enough():
            with suppress(IndexError):  # Another thread took the entry.
                events, *_ = self._waiting.popleft()
                for event in events:
                    self._events.wait(event)
