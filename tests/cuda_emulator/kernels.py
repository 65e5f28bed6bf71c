"""A source's kernels, compiled by g++."""

from __future__ import annotations

import ctypes
import functools

from . import native
from .compiler import library
from .errors import EmulatorError
from .source import kernel_names, preprocessed, translated

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
_MOST_PARAMETERS = 256


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
    def kernel(self, name: str) -> tuple[int, list[int]]:
        """Address of its trampoline, and the bytes of each parameter."""
        if name not in self._numbers:
            raise EmulatorError(f"no kernel {name!r}; there are {sorted(self._numbers)}")
        number = self._numbers[name]
        entry = ctypes.cast(getattr(self._loaded, f"emu_call_{number}"), ctypes.c_void_p).value
        assert entry is not None
        sizes = (ctypes.c_int * _MOST_PARAMETERS)()
        return entry, sizes[: getattr(self._loaded, f"emu_describe_{number}")(sizes)]


@functools.cache
def compiled(code: str, options: tuple[str, ...], expressions: tuple[str, ...], check: bool) -> Library:
    """The kernels of a source, and of its templates those with these name expressions."""
    return Library(code, options, expressions, check)
