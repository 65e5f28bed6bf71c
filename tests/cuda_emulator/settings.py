"""How kernels are run: in which order, with which checks, and how large the device is."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Settings:
    """What `options` can change; a launch is run by what holds when its turn comes.

    Attributes:
        order: Of a block's threads: "forward", "reverse" or "random".
        block_order: Of a grid's blocks, likewise; None is as `order`.
        seed: For the random orders.
        check: Check every access of a kernel; without it a kernel runs up to 100 times faster and may crash us.
        strict: Refuse also what most GPUs bear: a barrier after threads of the block have returned.
        ftz: Flush subnormals in fp32 arithmetic (here in fp64 too), as CuPy compiles kernels to do.
        asynchronous: Queue work until the host waits for it; else it is done at once.
        stack: Bytes of stack for a thread.
        timeout: Seconds for one launch.
        device_memory: Bytes the device has.
        device_count: 0 for a machine without one, else as many as there are.
    """

    order: str = "forward"
    block_order: str | None = None
    seed: int = 0
    check: bool = True
    strict: bool = True
    ftz: bool = True
    asynchronous: bool = True
    stack: int = 128 << 10
    timeout: int = 60
    device_memory: int = 8 << 30
    device_count: int = 1


_current = Settings()
listeners: list[Callable[[Settings], None]] = []  # told of each change: whoever else behaves as the settings say


def settings() -> Settings:
    """What holds now."""
    return _current


def set_settings(new: Settings) -> None:
    """From now on, for all threads."""
    global _current  # noqa: PLW0603  (one device, one way to run it)
    _current = new
    for tell in listeners:
        tell(new)


def reset() -> None:
    """As it was at first."""
    set_settings(Settings())


@contextlib.contextmanager
def options(**changes: Any) -> Iterator[Settings]:
    """Change some of `Settings` until the end of the block."""
    before = _current
    set_settings(dataclasses.replace(before, **changes))
    try:
        yield _current
    finally:
        set_settings(before)
