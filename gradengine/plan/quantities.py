"""Seconds and bytes as people say them."""

from __future__ import annotations

__all__ = ["duration", "size"]

_NOTHING = 5e-9  # seconds: what a difference of two times leaves where it is none


def duration(seconds: float) -> str:
    """Seconds, three digits of them.

    >>> [duration(seconds) for seconds in (0, 5e-6, 0.0123, 0.9996, 3.5, 62.6, 4000)]
    ['0 s', '5.00 us', '12.3 ms', '1.00 s', '3.50 s', '62.6 s', '4000 s']
    """
    if seconds < _NOTHING:
        return "0 s"
    for scale, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * scale < 999.5:
            return f"{_three_digits(seconds * scale)} {unit}"
    return f"{_three_digits(seconds)} s"


def size(nbytes: float) -> str:
    """Bytes, three digits of them.

    >>> [size(nbytes) for nbytes in (0, 999, 4194304, 1594036224, 6.4e12)]
    ['0 B', '999 B', '4.19 MB', '1.59 GB', '6.40 TB']
    """
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.0f} B" if unit == "B" else f"{_three_digits(nbytes)} {unit}"
        nbytes /= 1000
    return f"{_three_digits(nbytes)} TB"


def _three_digits(number: float) -> str:
    return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f}"
