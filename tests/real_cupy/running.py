"""Kernels on the CPU: the emulator compiles what CuPy launches from the source that its image carries, and runs it."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import re
from pathlib import Path

from cuda_emulator import EmulatorError, native
from cuda_emulator.kernels import Library, compiled
from cuda_emulator.settings import settings

from .compiling import Source, source_of
from .loaded import DRIVER

_LAUNCH_FAILED = 719  # cudaErrorLaunchFailure
_WORDS = ctypes.POINTER(ctypes.c_size_t)


class _Call(ctypes.Structure):  # struct Call of driver/launches.h
    _fields_ = (
        ("module", ctypes.c_size_t),
        ("image", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("arguments", ctypes.c_void_p),
        ("nbytes", ctypes.c_size_t),
        ("offsets", _WORDS),
        ("sizes", _WORDS),
        ("count", ctypes.c_size_t),
    )


_sources: dict[int, Source] = {}  # by module
launches: dict[str, int] = {}  # kernel -> how often it ran


def _run(call: _Call) -> None:
    name = call.name.decode()
    source = _source(call)
    library = _library(source, settings().check)
    entry, expected = library.kernel(source.expressions.get(name, name))
    sizes = call.sizes[: call.count]
    if sizes != expected:
        raise TypeError(f"its parameters have {sizes} bytes in PTX, {expected} by g++")
    grid, block = tuple(call.grid), tuple(call.block)
    offsets = call.offsets[: call.count]
    found = native.launch(entry, call.arguments, call.nbytes, offsets, grid, block, call.shared, settings())
    if found:
        raise EmulatorError(f"{found}, grid {grid}, block {block}")
    launches[name] = launches.get(name, 0) + 1


def _source(call: _Call) -> Source:
    if call.module not in _sources:
        _sources[call.module] = source_of(ctypes.string_at(call.image))
    return _sources[call.module]


def _library(source: Source, check: bool) -> Library:
    code, options = _for_the_emulator(source.code)
    kept = tuple(option for option in source.options if option.startswith(("-D", "--std", "-std")))
    return compiled(code, kept + options, tuple(source.expressions.values()), check)


# ---- CuPy's own kernels: of its headers, carray.cuh is all that g++ needs. Of complex numbers nothing is here. ----

_SHORT_FLOATS = """
class float16 {
 public:
  _Float16 value;
  float16() {}
  template <class T> float16(T it) : value((_Float16)it) {}
  operator float() const { return (float)value; }
};
class bfloat16 {
 public:
  unsigned short bits;
  bfloat16() {}
  template <class T> bfloat16(T given) {
    float it = (float)given;
    unsigned word;
    __builtin_memcpy(&word, &it, 4);
    bits = it != it ? 0x7fff : (word + 0x7fff + (word >> 16 & 1)) >> 16;
  }
  operator float() const {
    unsigned word = (unsigned)bits << 16;
    float it;
    __builtin_memcpy(&it, &word, 4);
    return it;
  }
};
"""
_CUPYS_HEADER = re.compile(r'#include [<"]cupy/[\w./]+[>"] *\n')
_WORDS_OF_NVRTC = (
    "-D__CUDACC_RTC__",
    '-Dassert(x)=((x)?(void)0:emu_fail("assert(" #x ")"))',
    "-Dmemset=__builtin_memset",
)


@functools.cache
def _for_the_emulator(code: str) -> tuple[str, tuple[str, ...]]:
    if not _CUPYS_HEADER.search(code):
        return code, ()
    spec = importlib.util.find_spec("cupy")
    assert spec is not None
    assert spec.origin is not None
    carray = (Path(spec.origin).parent / "_core/include/cupy/carray.cuh").read_text().replace("#pragma once", "")
    return f"{carray}\n{_SHORT_FLOATS}\n{_CUPYS_HEADER.sub('', code)}", _WORDS_OF_NVRTC


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Call))
def _run_and_answer(call: ctypes._Pointer[_Call]) -> int:
    try:
        _run(call.contents)
    except BaseException as fault:  # none can pass through C; a test's interrupt is not among them, it is the host's
        text = f"{call.contents.name.decode()}: {type(fault).__name__}: {fault}"
        DRIVER.gpuless_fault(text.encode()[:4000])
        return _LAUNCH_FAILED
    return 0


DRIVER.gpuless_run_kernels_by(_run_and_answer)
DRIVER.gpuless_tell_of_memory(native.runtime().emulator_register, native.runtime().emulator_unregister)
