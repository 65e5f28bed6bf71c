"""Any framework's array as something to cut views from and to write parts into; no framework is imported.

torch and JAX are recognised, NumPy's and CuPy's arrays are taken as they are, and what offers DLPack alone becomes
NumPy's on the host and CuPy's on a GPU.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from gradengine.arguments import has, said
from gradengine.arrays.frameworks import is_jax, is_torch
from gradengine.errors import BufferRefused, LayoutMismatch

__all__ = [
    "Array",
    "as_sliceable",
    "as_writable",
    "assign",
    "copied",
    "empty_like",
    "joined_by_jax",
    "refuse_other_kind",
]

Array: TypeAlias = Any  # of any framework

_DLPACK_CPU = 1


def as_sliceable(array: Array, what: str) -> Array:
    """What `array[...]` cuts views from: the array itself, detached from autograd, or a view of what offers DLPack.

    Raises:
        BufferRefused: It is no array, or has no elements to view: sparse, masked, of a dtype unknown to NumPy.

    Example:
        >>> as_sliceable([1, 2], "the whole")
        Traceback (most recent call last):
        gradengine.errors.BufferRefused: the whole is no array: got list, expected an array, or DLPack
    """
    if is_torch(array):
        if array.layout is not sys.modules["torch"].strided:
            raise BufferRefused(f"{what} is sparse", got=str(array.layout), do="pass .to_dense()")
        return array.detach()
    if isinstance(array, np.ma.MaskedArray):
        raise BufferRefused(f"{what} is masked", got="MaskedArray", do="pass .filled(value)")
    if is_jax(array) or (has(array, "__getitem__") and has(_module_of(array), "empty")):
        return array
    if not has(array, "__dlpack__"):
        raise BufferRefused(f"{what} is no array", got=type(array).__name__, expected="an array, or DLPack")
    try:
        on_host = array.__dlpack_device__()[0] == _DLPACK_CPU
        return np.from_dlpack(array) if on_host else importlib.import_module("cupy").from_dlpack(array)
    except Exception as fault:  # noqa: BLE001  (a framework's own code, and its own errors)
        raise BufferRefused(f"{what} cannot be taken by DLPack ({said(fault)})", got=type(array).__name__) from None


def copied(array: Array) -> Array:
    """The same elements in contiguous memory of their own."""
    if is_torch(array):
        return array.clone(memory_format=sys.modules["torch"].contiguous_format)
    return array.copy()


def empty_like(array: Array, shape: tuple[int, ...]) -> Array:
    """Memory for another shape, of the array's framework, dtype and device."""
    if is_torch(array):
        return array.new_empty(shape)
    return _module_of(array).empty(shape, array.dtype)


def joined_by_jax(arrays: Sequence[Array], dimension: int) -> Array:
    """JAX's immutable arrays one after the other along a dimension."""
    return sys.modules["jax"].numpy.concatenate(arrays, axis=dimension)


def as_writable(out: Array, what: str) -> Array:
    """What parts can be written into; raises `BufferRefused` where nothing can."""
    whole = as_sliceable(out, what)
    if is_jax(out) or not getattr(getattr(whole, "flags", None), "writeable", True):
        raise BufferRefused(f"{what} cannot be written to", got=f"a read-only {type(out).__name__}")
    return whole


def assign(whole: Array, index: tuple[Any, ...], part: Array, what: str) -> None:
    """`whole[index] = part`; what the framework refuses of it is a `BufferRefused`."""
    try:
        whole[index] = part
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as fault:
        raise BufferRefused(f"{what} cannot be written to ({said(fault)})", got=type(whole).__name__) from None


def refuse_other_kind(array: Array, first: Array, what: str) -> None:
    """Raise `LayoutMismatch` unless both are of one framework and dtype.

    >>> refuse_other_kind(np.zeros(1), np.zeros(1, np.float32), "rank 1's part")
    Traceback (most recent call last):
    gradengine.errors.LayoutMismatch: rank 1's part is of another kind than rank 0's: got numpy of float64, ...
    """
    if (kind := _kind_of(array)) != (expected := _kind_of(first)):
        raise LayoutMismatch(f"{what} is of another kind than rank 0's", got=kind, expected=expected)


def _kind_of(array: Array) -> str:
    framework = "jax" if is_jax(array) else type(array).__module__.partition(".")[0]
    return f"{framework} of {array.dtype}"


def _module_of(array: Array) -> Any:
    return sys.modules.get(type(array).__module__.partition(".")[0])
