"""How long a rank, or a server, has waited for others, and a warning when that is long; its own pauses do not count."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

from gradengine.exchange.links.link import VANISHED_SECONDS, Link

logger = logging.getLogger("gradengine.exchange")
_WARN_SECONDS = 10.0  # until the first warning; the next ones come after 20, 40, ...
_PAUSE_SECONDS = 1.0  # who waits looks ten times as often


class Late(NamedTuple):
    """Whom others wait for."""

    ranks: Sequence[int]
    where: str  # the step, or what else they do
    error: str  # what an error says about it


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
        self._warns_at = _WARN_SECONDS

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

    def look(self, waited: float, link: Link, late: Callable[[], Late]) -> None:
        """Log for whom this end of a link has waited, and lose ranks whose machines vanished, when it is time."""
        if waited > VANISHED_SECONDS:
            link.lose_vanished()
        if waited < _WARN_SECONDS:
            self._warns_at = _WARN_SECONDS
        elif waited >= self._warns_at:
            while waited >= self._warns_at:
                self._warns_at *= 2
            ranks, where, _ = late()
            names = ", ".join(map(link.named, ranks))
            logger.warning("%s has waited %.0f s for %s (%s)", link.named(link.rank), waited, names, where)
