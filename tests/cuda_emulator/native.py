"""The runtime in C++: loading it, launching through it, telling it which memory kernels may touch."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

from .compiler import library
from .settings import Settings

_ORDERS = {"forward": 0, "reverse": 1, "random": 2}


class _Options(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("order", "block_order")),
        ("seed", ctypes.c_uint),
        *((name, ctypes.c_int) for name in ("check", "ftz", "strict")),
        ("stack", ctypes.c_long),
        ("timeout", ctypes.c_int),
    )


@functools.cache
def runtime() -> Any:
    """The loaded runtime."""
    source = "".join(f'#include "{name}"\n' for name in ("scheduler.cpp", "memory_checks.cpp", "launch.cpp"))
    path = library(source, ("-std=c++17", "-O2", "-U_FORTIFY_SOURCE"), ("-lrt",))
    loaded = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    many = (pointer, pointer, size, pointer, ctypes.c_int, pointer, pointer, size, pointer)
    loaded.emulator_launch.argtypes = many
    loaded.emulator_error.restype = ctypes.c_char_p
    loaded.emulator_register.argtypes = (size, size)
    loaded.emulator_unregister.argtypes = (size,)
    return loaded


def runtime_path() -> str:
    """For linking kernels with it."""
    return str(runtime()._name)


def launch(
    kernel: int,
    arguments: int,
    nbytes: int,
    offsets: Sequence[int],
    grid: Sequence[int],
    block: Sequence[int],
    shared_size: int,
    how: Settings,
) -> str | None:
    """Run a kernel to its end; what was found, or None.

    Args:
        kernel: Address of its trampoline.
        arguments: Address of the bytes of all arguments.
        nbytes: How many these are.
        offsets: Where in them each argument begins.
        grid: Blocks, in three dimensions.
        block: Threads of a block, in three dimensions.
        shared_size: Bytes of dynamic shared memory.
        how: Orders and checks.
    """
    options = _Options(
        _ORDERS[how.order],
        _ORDERS[how.block_order or how.order],
        how.seed,
        how.check,
        how.ftz,
        how.strict,
        how.stack,
        how.timeout,
    )
    failed = runtime().emulator_launch(
        kernel,
        arguments,
        nbytes,
        (ctypes.c_size_t * len(offsets))(*offsets),
        len(offsets),
        (ctypes.c_uint * 3)(*grid),
        (ctypes.c_uint * 3)(*block),
        shared_size,
        ctypes.byref(options),
    )
    return runtime().emulator_error().decode(errors="replace") if failed else None


def register(address: int, size: int) -> None:
    """Kernels may touch this memory from now on."""
    runtime().emulator_register(address, size)


def unregister(address: int) -> None:
    """Kernels may no longer touch the memory that begins there."""
    runtime().emulator_unregister(address)
