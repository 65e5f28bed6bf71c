"""How much of an exchange runs while backward still does: spans leave as they are ready, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Overlap", "overlapped"]


@dataclass(frozen=True)
class Overlap:
    """Seconds of an exchange beside the backward of a step's last micro-batch.

    Attributes:
        seconds: Of the exchange, if nothing hid it.
        exposed_seconds: After the end of backward: what the step waits; on one machine for its engine, too.
    """

    seconds: float
    exposed_seconds: float

    @property
    def hidden_seconds(self) -> float:
        """While backward runs.

        >>> Overlap(seconds=4.5, exposed_seconds=2.5).hidden_seconds
        2.0
        """
        return max(0.0, self.seconds - self.exposed_seconds)


def overlapped(
    shares: Sequence[float], backward_seconds: float, span_seconds: Sequence[float], tail_seconds: float
) -> Overlap:
    """Send each span when it is ready and the ones before it have gone.

    Args:
        shares: After which share of backward each span is ready, in the order in which spans leave.
        backward_seconds: How long backward runs.
        span_seconds: How long each span holds the link.
        tail_seconds: From the last span's end to the end of the exchange.

    Example:
        >>> overlapped([0.5, 1.0], 4.0, [3.0, 1.0], 0.5)  # the second span waits for the first until 5.0
        Overlap(seconds=4.5, exposed_seconds=2.5)
    """
    free = 0.0
    for share, seconds in zip(shares, span_seconds, strict=True):
        free = max(free, share * backward_seconds) + seconds
    whole = sum(span_seconds) + tail_seconds
    return Overlap(whole, min(whole, max(0.0, free + tail_seconds - backward_seconds)))
