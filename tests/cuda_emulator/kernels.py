"""CuPy's RawModule and RawKernel: compiled by g++, checked at the launch, run when the stream's turn comes."""

from __future__ import annotations

import ctypes
import functools
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import native
from .arguments import pack, parameters_of
from .compiler import library
from .errors import CUDARuntimeError, EmulatorError
from .native import LOCK
from .queues import Work, add
from .record import note_launch
from .settings import settings
from .source import kernel_names, preprocessed, translated
from .streams import current_queue

_FLAGS = (
    "-std=c++17",
    "-O2",
    "-w",
    "-U_FORTIFY_SOURCE",
    "-fno-strict-aliasing",
    "-ffp-contract=off",  # no FMA where the source has none
    "-fno-gnu-unique",  # else two libraries share one function's static __shared__ memory
    "-fstack-clash-protection",
)
_CHECKED = ("-fsanitize=thread,alignment,bounds", "--param=tsan-distinguish-volatile=1", "-g1")
_MOST_THREADS = 1024
_LAUNCH_NUMBERS = itertools.count(1)


class Library:
    """Compiled kernels by name."""

    def __init__(self, code: str, options: tuple[str, ...], expressions: tuple[str, ...], check: bool) -> None:
        text = preprocessed(code, options)
        names = list(dict.fromkeys([*expressions, *kernel_names(text)]))
        flags = (*_FLAGS, *(_CHECKED if check else ()))
        path = library(translated(text, names), flags, (native.runtime_path(),))
        self._loaded = ctypes.CDLL(str(path))
        self._numbers = {name: number for number, name in enumerate(names)}

    @functools.cache  # noqa: B019  (libraries stay loaded)
    def kernel(self, name: str) -> tuple[int, tuple[Any, ...]]:
        """Address of its trampoline, and its parameters."""
        if name not in self._numbers:
            raise EmulatorError(f"no kernel {name!r}; there are {sorted(self._numbers)}")
        number = self._numbers[name]
        entry = ctypes.cast(getattr(self._loaded, f"emu_call_{number}"), ctypes.c_void_p).value
        assert entry is not None
        return entry, parameters_of(getattr(self._loaded, f"emu_describe_{number}"))


@functools.cache
def compiled(code: str, options: tuple[str, ...], expressions: tuple[str, ...], check: bool) -> Library:
    """The kernels of a source, and of its templates those with these name expressions."""
    return Library(code, options, expressions, check)


class RawModule:
    """Kernels in CUDA C++; compiled at the first use."""

    def __init__(
        self,
        *,
        code: str,
        options: tuple[str, ...] = (),
        backend: str = "nvrtc",
        name_expressions: Sequence[str] | None = None,
    ) -> None:
        self.code, self.options, self.backend = code, tuple(options), backend
        self.name_expressions = tuple(name_expressions or ())

    def _library(self) -> Library:
        with LOCK:
            return compiled(self.code, self.options, self.name_expressions, settings().check)

    def compile(self, log_stream: Any = None) -> None:
        """Compile now."""
        self._library()

    def get_function(self, name: str) -> RawKernel:
        """The kernel of that name, or name expression."""
        self._library().kernel(name)
        return RawKernel(self.code, name, self.options, self.backend, _module=self)


class RawKernel:
    """A kernel: `kernel(grid, block, args, shared_mem=0)` queues a launch on the current stream."""

    max_dynamic_shared_size_bytes = 48 << 10

    def __init__(
        self,
        code: str,
        name: str,
        options: tuple[str, ...] = (),
        backend: str = "nvrtc",
        *,
        _module: RawModule | None = None,
    ) -> None:
        self.name = self.__name__ = name
        self._module = _module or RawModule(code=code, options=options, backend=backend)

    def compile(self, log_stream: Any = None) -> None:
        """Compile now."""
        self._module.compile()

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], *, shared_mem: int = 0
    ) -> None:
        """Arguments are copied now; what goes wrong in the kernel is raised where the host waits for it."""
        if settings().device_count < 1:
            raise CUDARuntimeError(100)
        how = settings()
        blocks, threads = _three(grid), _three(block)
        self._check_size(blocks, threads, shared_mem)
        entry, parameters = self._module._library().kernel(self.name)
        packed = pack(self.name, args, parameters)
        where = f"launch {next(_LAUNCH_NUMBERS)}, grid {blocks}, block {threads}, made at {_caller()}"

        def do() -> None:
            found = native.launch(entry, packed.memory, packed.offsets, blocks, threads, shared_mem, how)
            if found:
                raise EmulatorError(f"{self.name}: {found}, {where}")

        add(current_queue(), Work(self.name, do))
        note_launch(self.name)

    def _check_size(self, grid: Sequence[int], block: Sequence[int], shared_mem: int) -> None:
        if block[0] * block[1] * block[2] > _MOST_THREADS or block[2] > 64:
            raise EmulatorError(f"{self.name}: a block of {block} has more than {_MOST_THREADS} threads or 64 layers")
        if grid[0] > 2**31 - 1 or max(grid[1:]) > 65535:
            raise EmulatorError(f"{self.name}: a grid of {grid} is larger than (2147483647, 65535, 65535)")
        if shared_mem > self.max_dynamic_shared_size_bytes:
            raise EmulatorError(
                f"{self.name}: {shared_mem} bytes of dynamic shared memory, "
                f"at most {self.max_dynamic_shared_size_bytes} (max_dynamic_shared_size_bytes)"
            )


def _three(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """In three dimensions; as in CuPy, a 0 becomes 1."""
    return tuple(max(1, int(size)) for size in (*sizes, 1, 1)[:3])


def _caller() -> str:
    """File and line of the launch."""
    frame: Any = sys._getframe(1)
    here = str(Path(__file__).parent)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(here):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
