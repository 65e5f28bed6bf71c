"""Seconds, bytes and bandwidths as people say them."""

from __future__ import annotations

from gradengine.tensor_parallel_cost import Bandwidth

__all__ = ["duration", "rate", "size", "three_digits", "two_digits"]

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
            return f"{three_digits(seconds * scale)} {unit}"
    return f"{three_digits(seconds)} s"


def size(nbytes: float) -> str:
    """Bytes, three digits of them.

    >>> [size(nbytes) for nbytes in (0, 999, 4194304, 1594036224, 6.4e12)]
    ['0 B', '999 B', '4.19 MB', '1.59 GB', '6.40 TB']
    """
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.0f} B" if unit == "B" else f"{three_digits(nbytes)} {unit}"
        nbytes /= 1000
    return f"{three_digits(nbytes)} TB"


def rate(bandwidth: Bandwidth) -> str:
    """A bandwidth in bytes and in bits, four digits of each.

    >>> rate(Bandwidth(1822834707.4))
    '1.823 GB/s = 14.58 Gbit/s'
    """
    return f"{bandwidth.gigabytes_per_second:.4g} GB/s = {bandwidth.gigabits_per_second:.4g} Gbit/s"


def three_digits(number: float) -> str:
    """A number with three digits, or all of its whole ones.

    >>> [three_digits(number) for number in (0.1234, 9.996, 99.96, 123.4, 4321.0)]
    ['0.12', '10.0', '100', '123', '4321']
    """
    return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f}"


def two_digits(number: float) -> str:
    """A number to two significant digits: for what is known no better.

    >>> [two_digits(number) for number in (1.05, 1.6, 12.3, 492.39)]
    ['1.1', '1.6', '12', '490']
    """
    return f"{float(f'{number:.2g}'):,.{1 if number < 9.95 else 0}f}"
