"""How much memory a piece of work takes at its peak, as the operating system counts it."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

__all__ = ["peak_growth"]

Result = TypeVar("Result")

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def peak_growth(work: Callable[[], Result]) -> tuple[Result, int | None]:
    """What `work` gives back, and by how many bytes this process's memory grew at the peak.

    Memory counts when it is touched; None where the system keeps no peak that can be reset (Linux does).

    Example:
        >>> memory, grown = peak_growth(lambda: b"x" * (1 << 25))
        >>> grown is None or grown > 1 << 24
        True
    """
    _return_free_memory()
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
        before = _resident("VmRSS")
    except OSError:
        return work(), None
    result = work()
    return result, max(0, _resident("VmHWM") - before)


def _return_free_memory() -> None:
    """What the allocator kept from earlier work would be used again, and not seen as growth."""
    with contextlib.suppress(AttributeError, OSError):  # glibc only
        ctypes.CDLL(None).malloc_trim(0)


def _resident(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024
