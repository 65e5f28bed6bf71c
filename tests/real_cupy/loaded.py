"""The driver as Python sees it: how it behaves, what it is asked for, what was done wrong."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator

from cuda_emulator import record
from cuda_emulator.settings import Settings, listeners, settings

from .importing import BUILT

DRIVER = ctypes.CDLL(str(BUILT / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)  # from now on known by that name
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
DRIVER.gpuless_set.argtypes = (ctypes.c_int, ctypes.c_uint, ctypes.c_int, _SIZE, ctypes.c_int)
DRIVER.gpuless_tell_of_memory.argtypes = (_POINTER, _POINTER)
DRIVER.gpuless_take_fault.argtypes = (ctypes.c_char_p, _SIZE)
DRIVER.gpuless_take_fault.restype = ctypes.c_bool
DRIVER.gpuless_fault.argtypes = (ctypes.c_char_p,)
DRIVER.gpuless_lose.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int)
DRIVER.gpuless_has_told_of_loss.restype = ctypes.c_bool
DRIVER.gpuless_take.argtypes = DRIVER.gpuless_void.argtypes = (_POINTER, _SIZE, _POINTER, ctypes.c_int)

# ---- how it behaves ----

ORDER, SEED, DEVICES, GUARD = (f"REAL_CUPY_{name}" for name in ("ORDER", "SEED", "DEVICES", "GUARD"))
_ORDERS = {"lazy": 0, "eager": 1, "random": 2}
_seed = 0


def _apply(how: Settings) -> None:
    order = _ORDERS[os.environ.get(ORDER, "lazy")] if how.asynchronous else _ORDERS["eager"]
    devices = min(how.device_count, 1) * int(os.environ.get(DEVICES, "2"))
    guard = os.environ.get(GUARD) == "1"
    DRIVER.gpuless_set(order, _seed, devices, how.device_memory, guard)


def seed(number: int) -> None:
    """Begin anew all that is random, with a number; REAL_CUPY_SEED is mixed in."""
    global _seed  # noqa: PLW0603  (one driver)
    _seed = number ^ int(os.environ.get(SEED, "0"))
    _apply(settings())


# ---- what it is asked for: the emulator's own record is told ----

_LAUNCH, _COPY, _FILL, _GRAPH, _WAIT = range(5)
_NOTES = {
    _LAUNCH: record.note_launch,
    _COPY: record.note_copy,
    _FILL: lambda _: record.note_fill(),
    _GRAPH: lambda _: record.note_graph(),
    _WAIT: record.note_wait,
}


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p)
def _note(request: int, name: bytes) -> None:
    _NOTES[request](name.decode())


# ---- what was done wrong ----


def faults() -> list[str]:
    """All that were found since the last call: what no GPU would have borne, or nobody would have noticed there."""
    text, found = ctypes.create_string_buffer(4096), []
    while DRIVER.gpuless_take_fault(text, len(text)):
        found.append(text.value.decode(errors="replace"))
    return found


def finish_all() -> None:
    """All devices do all they have to do; captures are forgotten, and which have failed. What goes wrong is a fault."""
    from gradengine.kernels.events import FAILURES  # not before CuPy is imported

    DRIVER.gpuless_finish_all()
    FAILURES.clear()


@contextlib.contextmanager
def lost(device: int, status: int, after: int = 0) -> Iterator[Callable[[], bool]]:
    """Within it, a device answers each call after so many with this status, as where somebody else's work failed.

    Yields a function that says whether it has answered so by now.
    """
    DRIVER.gpuless_lose(device, status, after)
    try:
        yield lambda: bool(DRIVER.gpuless_has_told_of_loss(device))
    finally:
        finish_all()


def be_idle() -> None:
    """Run no kernel from now on, and note nothing: what a call takes then is the host's own time.

    Other work is done as it is queued: else the next call that asks for an event would take the time of all of it.
    """
    os.environ[ORDER] = "eager"
    _apply(settings())
    DRIVER.gpuless_idle()


@contextlib.contextmanager
def expected_faults() -> Iterator[list[str]]:
    """Within it, faults are meant; they are in the list afterwards."""
    found = faults()
    assert not found, found
    yield found
    finish_all()
    found += faults()


listeners.append(_apply)
_apply(settings())
DRIVER.gpuless_tell(_note)
