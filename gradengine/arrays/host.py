"""Views of arrays in host memory from NumPy, torch, JAX, DLPack producers and raw pointers."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from gradengine.arrays.buffer import (
    Array,
    Buffer,
    RawBuffer,
    not_contiguous,
    raw_view,
    refuse_invalid_address,
)
from gradengine.arrays.dtypes import DTYPES, supported_name, unsupported_dtype
from gradengine.arrays.frameworks import (
    dlpack_view,
    is_jax,
    is_torch,
    jax_copy,
    jax_on_host,
    torch_buffer,
)
from gradengine.errors import BufferRefused


def host_buffer(source: object, component: str) -> Buffer:
    """Return a view of `source`, which must be contiguous, in host memory, and fp32, fp16 or bf16.

    `source` is a NumPy array (ml_dtypes' bfloat16 too), a torch tensor, a JAX array, a `RawBuffer`, or any object with
    `__dlpack__`. Raises `BufferRefused` otherwise. Nothing is copied.
    """
    if isinstance(source, np.ndarray):
        return _from_numpy(source, component)
    if is_torch(source):
        return _from_torch(source, component)
    if isinstance(source, np.generic):  # NumPy makes this read-only scalar from a 0-d array in an expression.
        return _from_numpy(np.asarray(source), component, source)
    if isinstance(source, RawBuffer):
        return _with_elements(raw_view(source, component, "cpu"))
    if is_jax(source):
        array = jax_copy(source, component)
        return _from_numpy(jax_on_host(array, component), component, array, array.unsafe_buffer_pointer())
    if hasattr(source, "__dlpack__"):
        return _with_elements(dlpack_view(source, component, ("cpu",)))
    do = "pass an array, such as numpy.float32(values)"
    if source is None:
        do = "leave out components that have no gradient"
    elif hasattr(source, "numpy"):  # tinygrad
        do = "pass its .numpy() (writes to that may not reach the tensor)"
    raise BufferRefused(
        f"component '{component}' is not an array",
        got=type(source).__name__,
        expected="an array of NumPy, torch or JAX, DLPack on the CPU, or a RawBuffer",
        do=do,
    )


def _from_numpy(array: Array, component: str, immutable: object = None, pointer: int | None = None) -> Buffer:
    """Return a view of a NumPy array, or of an immutable object by its NumPy view. `pointer` is passed if known."""
    if type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray):
        raise BufferRefused(
            f"component '{component}' is a masked array", do="pass .filled(0), or the array without mask"
        )
    dtype = supported_name(array.dtype)
    if dtype is None:
        raise unsupported_dtype(component, array.dtype)
    flags = array.flags
    if not flags.c_contiguous:
        raise not_contiguous(component, array.shape, tuple(s // array.itemsize for s in array.strides), array)
    # A np.matrix would stay 2-D.
    flat = (array if type(array) is np.ndarray else array.view(np.ndarray)).reshape(-1)
    storage = DTYPES[dtype].storage
    if flat.dtype != storage:  # ml_dtypes' bfloat16
        flat = flat.view(storage)
    owner, writable = (array, flags.writeable) if immutable is None else (immutable, False)
    pointer = address_of(flat) if pointer is None else pointer
    return Buffer(pointer, flat.size, dtype, array.shape, writable, owner, data=flat)


def address_of(flat: Array) -> int:
    """Return the address of a contiguous array's elements."""
    if flat.flags.writeable and flat.size:
        return ctypes.addressof(ctypes.c_char.from_buffer(flat))  # type: ignore[arg-type]  # 0.2 us, .ctypes 0.9 us
    return int(flat.ctypes.data)


def _from_torch(tensor: Any, component: str) -> Buffer:
    buffer = torch_buffer(tensor, component, ("cpu",))
    refuse_invalid_address(buffer.pointer, buffer.size, DTYPES[buffer.dtype].itemsize, component)
    return _with_elements(buffer)


def without_owner(view: Buffer, pointer: int) -> Buffer:
    """Return a view like this one at that address, without an owner. The caller keeps the memory alive."""
    if view.owner is None and view.pointer == pointer:
        return view
    data = None if view.data is None else elements_at(pointer, view.size, view.dtype)
    return Buffer(pointer, view.size, view.dtype, view.shape, view.writable, None, view.device, data, view.producer)


def without_owners(views: Sequence[Buffer | None], pointers: Sequence[int]) -> list[Buffer | None]:
    """Return views like these at these addresses, as `without_owner`. None stays None."""
    return [None if view is None else without_owner(view, at) for view, at in zip(views, pointers, strict=True)]


def _with_elements(buffer: Buffer) -> Buffer:
    buffer.data = elements_at(buffer.pointer, buffer.size, buffer.dtype)
    return buffer


@functools.lru_cache(maxsize=4096)  # 0.1 us instead of 0.6, since allocators reuse addresses
def elements_at(pointer: int, size: int, dtype: str) -> Array:
    """Return the memory at an address as a NumPy array, which does not keep the memory alive."""
    if size == 0:
        return np.empty(0, DTYPES[dtype].storage)
    memory = (ctypes.c_char * (size * DTYPES[dtype].itemsize)).from_address(pointer)
    elements: Array = np.frombuffer(memory, DTYPES[dtype].storage)  # type: ignore[call-overload]
    return elements
