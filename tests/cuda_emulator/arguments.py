"""Kernel arguments as CuPy passes them, held against the kernel's own parameters (which CuPy cannot do)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .arrays import ndarray
from .errors import EmulatorError
from .memory import MemoryPointer

POINTER, INTEGER, FLOAT, STRUCT = "pifs"
_MOST_PARAMETERS = 256
_MOST_BYTES = 32764  # of all arguments, since CUDA 12.1
_ALIGNMENT = 64


@dataclass(frozen=True)
class Parameter:
    """Of a kernel: bytes, and what kind of type."""

    size: int
    kind: str


@dataclass(frozen=True)
class Packed:
    """A copy of all arguments, and where in it each begins."""

    memory: npt.NDArray[np.uint8]
    offsets: tuple[int, ...]


def parameters_of(describe: Any) -> tuple[Parameter, ...]:
    """What a kernel's own description says."""
    numbers = (ctypes.c_int * (2 * _MOST_PARAMETERS))()
    count = describe(numbers)
    return tuple(Parameter(numbers[2 * i], chr(numbers[2 * i + 1])) for i in range(count))


def pack(name: str, arguments: Sequence[Any], parameters: Sequence[Parameter]) -> Packed:
    """Copy the arguments as they are now."""
    if len(arguments) != len(parameters):
        raise EmulatorError(f"{name}: got {len(arguments)} arguments, expected {len(parameters)}")
    if sum(parameter.size for parameter in parameters) > _MOST_BYTES:
        raise EmulatorError(f"{name}: more than {_MOST_BYTES} bytes of arguments")
    values = [
        _value(argument, parameter, f"{name}, argument {i}")
        for i, (argument, parameter) in enumerate(zip(arguments, parameters, strict=True))
    ]
    offsets, end = [], 0
    for value in values:
        offsets.append(end)
        end += -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT
    memory = np.zeros(end + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    memory = memory[start : start + end]
    for value, offset in zip(values, offsets, strict=True):
        memory[offset : offset + value.nbytes] = np.frombuffer(value.tobytes(), np.uint8)
    return Packed(memory, tuple(offsets))


def _value(argument: Any, parameter: Parameter, what: str) -> npt.NDArray[Any]:
    value, kind = _as_cupy_passes_it(argument, what)
    if isinstance(argument, int) and parameter.kind == INTEGER and parameter.size < value.itemsize:
        # CuPy passes 8 bytes and the kernel reads the lower ones: right as long as they hold the number.
        if not -(1 << (8 * parameter.size - 1)) <= argument < 1 << (8 * parameter.size):
            raise EmulatorError(f"{what}: {argument} does not fit the {parameter.size} bytes of the parameter")
        return value
    fits = kind == parameter.kind or (kind == INTEGER and parameter.kind == POINTER)
    if value.nbytes != parameter.size or not (fits or parameter.kind == STRUCT):
        raise EmulatorError(
            f"{what}: got a {type(argument).__name__} of {value.nbytes} bytes ({_KINDS[kind]}), "
            f"expected {parameter.size} bytes ({_KINDS[parameter.kind]})"
        )
    return value


_KINDS = {POINTER: "a pointer", INTEGER: "an integer", FLOAT: "a floating point number", STRUCT: "a struct"}


def _as_cupy_passes_it(argument: Any, what: str) -> tuple[npt.NDArray[Any], str]:
    if argument is None:
        return np.array(0, np.uint64), POINTER
    if isinstance(argument, ndarray):
        return np.array(argument.data.ptr, np.uint64), POINTER
    if isinstance(argument, MemoryPointer):
        return np.array(argument.ptr, np.uint64), POINTER
    if isinstance(argument, np.ndarray) and argument.size != 1:
        raise TypeError(f"{what}: an array of shape {argument.shape} in host memory; pass a device array")
    if isinstance(argument, (np.ndarray, np.generic)):
        value = np.array(argument)
        return value, {"f": FLOAT, "V": STRUCT}.get(value.dtype.kind, INTEGER)
    if isinstance(argument, bool):
        return np.array(argument, np.bool_), INTEGER
    if isinstance(argument, int):
        return np.array(argument, np.int64 if argument < 1 << 63 else np.uint64), INTEGER
    if isinstance(argument, float):
        return np.array(argument, np.float64), FLOAT
    raise TypeError(f"{what}: unsupported type {type(argument)}")
