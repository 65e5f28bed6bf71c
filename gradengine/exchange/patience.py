"""How long a rank, or a server, has waited for others, on a clock that its own pauses do not count on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import final

_PAUSE_SECONDS = 1.0  # who waits looks ten times as often


@final
class Patience:
    """Counts the seconds for which nothing has moved.

    Args:
        clock: The clock of all seconds here.

    Example:
        >>> now = [0.0]
        >>> patience = Patience(lambda: now[0])
        >>> now[0] = 1e6  # a scheduler has suspended all processes of the job
        >>> patience.waited()
        0.0
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._was_paused = clock, False
        self._since = self._looked_at = clock()

    def waited(self, moved_at: float = 0.0) -> float:
        """Seconds since `moved_at`, or since the beginning; anew where this process itself stood still.

        To be asked often: the time from one look to the next is taken for a pause if it is over a second.
        """
        now = self._clock()
        is_paused = now - self._looked_at > _PAUSE_SECONDS
        # With one pause right after another the machine is slow, and the time passes.
        if is_paused and not self._was_paused:
            self._since = now
        self._looked_at, self._was_paused = now, is_paused
        return now - max(self._since, moved_at)
