"""The only door in and out: any array or pointer becomes a flat `Buffer`, checked once, copied never.

What is resolved here is (pointer, size, dtype, device, owner); nothing after the doors asks what an object is. The door
in this file is the host's: NumPy arrays, DLPack producers on the CPU, and raw host pointers.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gradengine.dlpack import Exported, contiguous_strides, exported, exporting_device
from gradengine.errors import BufferRefused

__all__ = ["Buffer", "DeviceMemory", "RawBuffer", "host_buffer"]

Array: TypeAlias = npt.NDArray[Any]

# bf16 has no NumPy dtype of its own: its bits travel as uint16 and the kernels widen them.
_NAMES = {np.dtype("<f4"): "float32", np.dtype("<f2"): "float16"}
STORAGE: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
}


@dataclass(frozen=True)
class RawBuffer:
    """Memory that no framework object stands for.

    Args:
        pointer: Address of the first element.
        size: Elements.
        dtype: "float32", "float16" or "bfloat16".
        device: "cpu", or a GPU's: "cuda:0".
        owner: Whatever must stay alive while the memory is in use.
        writable: False where the memory may be read only.

    Example:
        >>> memory = np.arange(3, dtype=np.float32)
        >>> raw = RawBuffer(memory.ctypes.data, 3, "float32", owner=memory)
        >>> host_buffer(raw, "w").data
        array([0., 1., 2.], dtype=float32)
    """

    pointer: int
    size: int
    dtype: str
    device: str = "cpu"
    owner: object = None
    writable: bool = True


@dataclass(frozen=True)
class DeviceMemory:
    """A stretch of a GPU's memory: numbers only, since the host cannot look into it."""

    pointer: int
    size: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.size * self.itemsize

    def __getitem__(self, elements: slice) -> DeviceMemory:
        start, stop, _ = elements.indices(self.size)
        return DeviceMemory(self.pointer + start * self.itemsize, max(0, stop - start), self.itemsize)


@dataclass(frozen=True)
class Buffer:
    """A flat, contiguous view of somebody's memory.

    Attributes:
        data: The elements, one-dimensional, in the storage dtype (bf16 as uint16); of a GPU where they lie.
        dtype: "float32", "float16" or "bfloat16".
        shape: The shape it came with.
        writable: Whether it may be a destination.
        owner: Kept alive for as long as this view is.
    """

    data: Any
    dtype: str
    shape: tuple[int, ...]
    writable: bool
    owner: object
    device: str = "cpu"

    @functools.cached_property
    def pointer(self) -> int:
        """Address of the first element."""
        return int(self.data.ctypes.data) if self.device == "cpu" else int(self.data.pointer)

    @property
    def size(self) -> int:
        """Elements."""
        return int(self.data.size)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return int(self.data.nbytes)

    def part(self, start: int, stop: int) -> Buffer:
        """The elements start..stop - 1 of the same memory, flat."""
        return Buffer(self.data[start:stop], self.dtype, (stop - start,), self.writable, self.owner, self.device)

    def overlaps(self, other: Buffer) -> bool:
        """Whether any byte belongs to both."""
        if not self.size or not other.size:
            return False
        return self.pointer < other.pointer + other.nbytes and other.pointer < self.pointer + self.nbytes


def host_buffer(source: object, component: str) -> Buffer:
    """A view of `source`, which must lie in host memory, contiguous, in fp32, fp16 or bf16.

    Args:
        source: A NumPy array (ml_dtypes' bfloat16 too), a `RawBuffer`, or any object with `__dlpack__` on the CPU.
        component: Whose gradient it is; errors name it.

    Returns:
        A view of the same memory: nothing is copied.

    Raises:
        BufferRefused: Another dtype, device or layout in memory; the error says which came and which are taken.

    Example:
        >>> array = np.ones((2, 3), np.float16)
        >>> view = host_buffer(array, "w")
        >>> view.size, view.dtype, view.pointer == array.ctypes.data
        (6, 'float16', True)
    """
    if isinstance(source, np.generic):  # what NumPy makes of a 0-d array in an expression; it has no memory to write to
        source = np.asarray(source)
        source.flags.writeable = False
    if isinstance(source, np.ndarray):
        return _from_numpy(source, component)
    if isinstance(source, RawBuffer):
        return _from_raw(source, component)
    if hasattr(source, "__dlpack__"):
        return _from_dlpack(source, component)
    raise BufferRefused(
        f"component '{component}' is no array",
        got=type(source).__name__,
        expected="a NumPy array, a DLPack producer on the CPU or a RawBuffer",
        do="pass the gradient as it lies in memory, for example numpy.asarray(values, dtype=numpy.float32)",
    )


def writable_host_buffer(destination: object, component: str) -> Buffer:
    """As `host_buffer`, for memory that will be written.

    Raises:
        BufferRefused: Also where the memory is read-only.

    Example:
        >>> array = np.zeros(2, np.float32); array.flags.writeable = False
        >>> writable_host_buffer(array, "w")
        Traceback (most recent call last):
        gradengine.errors.BufferRefused: destination 'w' is read-only: got ndarray, expected ...
    """
    buffer = host_buffer(destination, component)
    refuse_read_only(buffer, destination, component)
    return buffer


def refuse_read_only(buffer: Buffer, destination: object, component: str) -> None:
    """Raise `BufferRefused` where a destination's memory may only be read."""
    if not buffer.writable:
        raise BufferRefused(
            f"destination '{component}' is read-only",
            got=type(destination).__name__,
            expected="writable memory",
            do="pass out= an array that may be written, or take result.gradients instead",
        )


def refuse_overlapping_destinations(destinations: Mapping[str, Buffer], arena: Buffer, whose: str) -> None:
    """Raise `BufferRefused` where two destinations, or one and the arena that they are written from, share memory."""
    pair = overlapping([*destinations.values(), arena])
    if pair is not None:
        names = [*destinations, f"the {whose}'s arena"]
        raise BufferRefused(f"destinations '{names[pair[0]]}' and '{names[pair[1]]}' overlap in memory")


def overlapping(buffers: Sequence[Buffer]) -> tuple[int, int] | None:
    """The positions of two buffers that share memory, or None.

    Example:
        >>> whole = np.zeros(4, np.float32)
        >>> overlapping([host_buffer(whole[:3], "a"), host_buffer(whole[2:], "b")])
        (0, 1)
    """
    order = sorted((i for i, b in enumerate(buffers) if b.size), key=lambda i: buffers[i].pointer)
    for before, after in itertools.pairwise(order):
        if buffers[before].pointer + buffers[before].nbytes > buffers[after].pointer:
            return min(before, after), max(before, after)
    return None


def _from_numpy(array: Array, component: str) -> Buffer:
    if type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray):
        raise BufferRefused(
            f"component '{component}' is a masked array", do="pass .filled(0), or the array without mask"
        )
    dtype = _dtype_name(array.dtype, component)
    if not array.flags.c_contiguous:
        raise strided(component, array.shape, tuple(s // array.itemsize for s in array.strides))
    flat = array.view(np.ndarray).reshape(-1).view(STORAGE[dtype])  # a np.matrix stays 2-D if reshaped first
    return Buffer(flat, dtype, array.shape, array.flags.writeable, array)


def _dtype_name(dtype: np.dtype[Any], component: str) -> str:
    if dtype in _NAMES:  # numpy's own .name takes 1 us, as long as all the rest of a view
        return _NAMES[dtype]
    if dtype.name in STORAGE and dtype.isnative:
        return str(dtype.name)
    raise wrong_dtype(component, f"{dtype.name}{'' if dtype.isnative else ' in foreign byte order'}")


def wrong_dtype(component: str, got: str) -> BufferRefused:
    """The error for a dtype that is none of ours."""
    return BufferRefused(
        f"component '{component}' has a dtype that is not taken",
        got=got,
        expected="float32, float16 or bfloat16",
        do="cast it first, for example with .astype('float32')",
    )


def strided(component: str, shape: Sequence[int], strides: Sequence[int]) -> BufferRefused:
    """The error for memory with gaps, or in another order; strides in elements."""
    return BufferRefused(
        f"component '{component}' is not contiguous",
        got=f"shape {tuple(shape)} with strides {tuple(strides)} (in elements)",
        expected=f"strides {contiguous_strides(shape)}",
        do="pass the array that owns the memory, or a contiguous copy",
    )


def _from_raw(raw: RawBuffer, component: str) -> Buffer:
    refuse_other_device(raw.device, component)
    pointer, size = raw_extent(raw, component)
    data = _memory(pointer, size, STORAGE[str(raw.dtype)], raw.owner, component)
    return Buffer(data, str(raw.dtype), (size,), raw.writable, raw.owner)


def raw_extent(raw: RawBuffer, component: str) -> tuple[int, int]:
    """A raw buffer's pointer and size as integers, its dtype checked; raises `BufferRefused`."""
    if str(raw.dtype) not in STORAGE:
        raise wrong_dtype(component, str(raw.dtype))
    try:
        return operator.index(raw.pointer), operator.index(raw.size)
    except TypeError:
        raise no_memory(component, repr(raw.pointer), raw.size) from None


def _memory(pointer: int, size: int, storage: np.dtype[Any], owner: object, component: str) -> Array:
    """Memory at an address as an array that keeps `owner` alive."""
    refuse_impossible(pointer, size, storage.itemsize, component)
    if size == 0:
        return np.empty(0, storage)
    memory = (ctypes.c_char * (size * storage.itemsize)).from_address(pointer)
    memory.owner = owner  # type: ignore[attr-defined]
    flat: Array = np.frombuffer(memoryview(memory), storage)
    return flat


def refuse_impossible(pointer: int, size: int, itemsize: int, component: str) -> None:
    """Raise `BufferRefused` where no elements of that size can lie."""
    if size < 0 or pointer < 0 or (pointer == 0 and size):
        raise no_memory(component, hex(pointer), size)
    if pointer % itemsize:
        raise BufferRefused(
            f"component '{component}' is not aligned to its elements",
            got=f"pointer {pointer:#x}",
            expected=f"a multiple of {itemsize}",
        )


def no_memory(component: str, pointer: str, size: object) -> BufferRefused:
    """The error for an address that stands for nothing."""
    return BufferRefused(
        f"component '{component}' is no memory",
        got=f"pointer {pointer}, size {size}",
        expected="the address of allocated memory and a size >= 0",
    )


def wrong_device(component: str, got: str, expected: str) -> BufferRefused:
    """The error for memory on another device than the engine's."""
    return BufferRefused(
        f"component '{component}' lies on another device",
        got=got,
        expected=expected,
        do="build the engine with the device where the gradients are",
    )


def _from_dlpack(source: Any, component: str) -> Buffer:
    refuse_other_device(exporting_device(source, component), component)
    tensor = exported(source, component)
    refuse_other_device(tensor.device, component)
    refuse_as_it_lies(tensor, component)
    data = _memory(tensor.pointer, math.prod(tensor.shape), STORAGE[tensor.dtype], tensor.owner, component)
    return Buffer(data, tensor.dtype, tensor.shape, tensor.writable, tensor.owner)


def refuse_other_device(device: str, component: str, expected: Sequence[str] = ("cpu",)) -> None:
    """Raise `BufferRefused` unless the memory lies on one of the devices expected."""
    if device not in expected:
        raise wrong_device(component, device, expected[0])


def refuse_as_it_lies(tensor: Exported, component: str) -> None:
    """Raise `BufferRefused` where an exported tensor is strided or of another dtype than ours."""
    if not tensor.is_contiguous:
        raise strided(component, tensor.shape, tensor.strides)
    if tensor.dtype not in STORAGE:
        raise wrong_dtype(component, tensor.dtype)
