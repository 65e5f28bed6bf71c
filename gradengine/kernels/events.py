"""What is asked of events, and memory that is kept until they are done. Nobody else asks the driver how far it is."""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, TypeVar, final

from gradengine.errors import DeviceFailed

T = TypeVar("T")

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_DONE, _NOT_YET = 0, 600  # cudaSuccess, cudaErrorNotReady
MOST_LENT = 1 << 30  # bytes of lent memory that may be kept besides what was lent last


@final
class Events:
    """Asks and waits for events so that no graph is voided that somebody records, in whatever thread and mode.

    While any thread captures in global mode (torch's default), the driver refuses to be asked, and voids that capture;
    not where the thread that asks has made itself relaxed.
    """

    def __init__(self, xp: Any) -> None:
        self._runtime = xp.cuda.runtime
        self._exchange_mode = _driver(xp).cuThreadExchangeStreamCaptureMode

    def relaxed(self, call: Callable[..., T], *arguments: Any) -> T:
        """What a call returns that may wait for the device while others capture; not for what is being captured."""
        mode = ctypes.c_int(_RELAXED)
        pointer = ctypes.byref(mode)
        try:
            self._exchange_mode(pointer)  # it holds the mode before at once: Ctrl-C behind this call loses nothing
            return call(*arguments)
        finally:
            if mode.value != _RELAXED:
                self._exchange_mode(pointer)

    def is_done(self, event: Any) -> bool:
        """Whether the work before an event is done; never waits.

        Raises:
            DeviceFailed: Work on the device ended in an error, perhaps another library's: it will never be done.
        """
        status = self.relaxed(self._runtime.eventQuery, event.ptr)
        if status not in {_DONE, _NOT_YET}:
            raise DeviceFailed(
                "work on the GPU ended in an error, which may be another library's",
                got=self._runtime.CUDARuntimeError(status),
                do="start this process again, from a checkpoint: the driver does nothing more in it; "
                "CUDA_LAUNCH_BLOCKING=1 or compute-sanitizer shows whose kernel it was",
            )
        return bool(status == _DONE)

    def wait(self, event: Any) -> None:
        """Wait for the work before an event."""
        self.relaxed(event.synchronize)


def _driver(xp: Any) -> Any:
    """CUDA's driver, for what CuPy has no name for; or what a stand-in for CuPy has in its place."""
    stand_in = getattr(xp.cuda, "libcuda", None)
    return stand_in or ctypes.PyDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")  # CuPy has loaded it


@final
class Kept:
    """Memory that work may still read or write: kept until events behind that work are done."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._waiting: deque[tuple[Collection[Any], object, int]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def until(self, events: Collection[Any], memory: object) -> None:
        """Keep memory until these events are done. Finalisers call this, amid whatever runs then: nothing is asked."""
        self._waiting.append((events, memory, 0))

    def lent(self, event: Any, memory: object, nbytes: int) -> None:
        """Keep memory of a producer whose stream is unknown; of much that is kept for such, wait for the oldest first.

        Without a bound, a host that runs ahead would keep as many sets of gradients as it is ahead.
        """
        self._wait_until(lambda: sum(size for *_, size in list(self._waiting)) <= MOST_LENT)
        self._waiting.append(((event,), memory, nbytes))

    def let_go(self) -> None:
        """Of what work is done with. Threads share these, so each entry is one's own while it is looked at."""
        for _ in range(len(self._waiting)):
            try:
                entry = self._waiting.popleft()
            except IndexError:  # another thread looks at the rest
                return
            is_done = False
            try:
                is_done = all(map(self._events.is_done, entry[0]))
            finally:  # where the device has failed, too
                if not is_done:
                    self._waiting.append(entry)

    def wait(self) -> None:
        """Wait for the work, and let all of it go."""
        self._wait_until(lambda: False)

    def _wait_until(self, is_enough: Callable[[], bool]) -> None:
        while self._waiting and not is_enough():
            with suppress(IndexError):  # another thread took it
                events, *_ = self._waiting.popleft()
                for event in events:
                    self._events.wait(event)
