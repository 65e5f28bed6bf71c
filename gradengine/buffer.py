"""The only door in and out: any array or pointer becomes a flat `Buffer`, checked once, copied never.

What is resolved here is (pointer, size, dtype, device, owner); nothing after this file asks what an object is.
This is the host half: NumPy arrays, DLPack producers on the CPU, and raw host pointers.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gradengine.errors import BufferRefused

__all__ = ["Buffer", "RawBuffer", "host_buffer"]

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
        device: "cpu"; a GPU's pointers are taken by an engine with device="cuda".
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
class Buffer:
    """A flat, contiguous view of somebody's memory.

    Attributes:
        data: The elements, one-dimensional, in the storage dtype (bf16 as uint16).
        dtype: "float32", "float16" or "bfloat16".
        shape: The shape it came with.
        writable: Whether it may be a destination.
        owner: Kept alive for as long as this view is.
    """

    data: Array
    dtype: str
    shape: tuple[int, ...]
    writable: bool
    owner: object

    @functools.cached_property
    def pointer(self) -> int:
        """Address of the first element."""
        return int(self.data.ctypes.data)

    @property
    def size(self) -> int:
        """Elements."""
        return self.data.size

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.data.nbytes

    def part(self, start: int, stop: int) -> Buffer:
        """The elements start..stop - 1 of the same memory, flat."""
        return Buffer(self.data[start:stop], self.dtype, (stop - start,), self.writable, self.owner)

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
    if not buffer.writable:
        raise BufferRefused(
            f"destination '{component}' is read-only",
            got=type(destination).__name__,
            expected="writable memory",
            do="pass out= an array that may be written, or take result.gradients instead",
        )
    return buffer


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
        raise _strided(component, array.shape, tuple(s // array.itemsize for s in array.strides))
    flat = array.view(np.ndarray).reshape(-1).view(STORAGE[dtype])  # a np.matrix stays 2-D if reshaped first
    return Buffer(flat, dtype, array.shape, array.flags.writeable, array)


def _dtype_name(dtype: np.dtype[Any], component: str) -> str:
    if dtype in _NAMES:  # numpy's own .name takes 1 us, as long as all the rest of a view
        return _NAMES[dtype]
    if dtype.name in STORAGE and dtype.isnative:
        return str(dtype.name)
    raise _wrong_dtype(component, f"{dtype.name}{'' if dtype.isnative else ' in foreign byte order'}")


def _wrong_dtype(component: str, got: str) -> BufferRefused:
    return BufferRefused(
        f"component '{component}' has a dtype that is not taken",
        got=got,
        expected="float32, float16 or bfloat16",
        do="cast it first, for example with .astype('float32')",
    )


def _strided(component: str, shape: Sequence[int], strides: Sequence[int]) -> BufferRefused:
    return BufferRefused(
        f"component '{component}' is not contiguous",
        got=f"shape {tuple(shape)} with strides {tuple(strides)} (in elements)",
        expected=f"strides {contiguous_strides(shape)}",
        do="pass the array that owns the memory, or a contiguous copy",
    )


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a C-contiguous array of that shape.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _from_raw(raw: RawBuffer, component: str) -> Buffer:
    if raw.device != "cpu":
        raise _wrong_device(component, raw.device)
    if str(raw.dtype) not in STORAGE:
        raise _wrong_dtype(component, str(raw.dtype))
    try:
        pointer, size = operator.index(raw.pointer), operator.index(raw.size)
    except TypeError:
        raise _no_memory(component, repr(raw.pointer), raw.size) from None
    data = _memory(pointer, size, STORAGE[str(raw.dtype)], raw.owner, component)
    return Buffer(data, str(raw.dtype), (size,), raw.writable, raw.owner)


def _memory(pointer: int, size: int, storage: np.dtype[Any], owner: object, component: str) -> Array:
    """Memory at an address as an array that keeps `owner` alive."""
    if size < 0 or pointer < 0 or (pointer == 0 and size):
        raise _no_memory(component, hex(pointer), size)
    if pointer % storage.itemsize:
        raise BufferRefused(
            f"component '{component}' is not aligned to its elements",
            got=f"pointer {pointer:#x}",
            expected=f"a multiple of {storage.itemsize}",
        )
    if size == 0:
        return np.empty(0, storage)
    memory = (ctypes.c_char * (size * storage.itemsize)).from_address(pointer)
    memory.owner = owner  # type: ignore[attr-defined]
    flat: Array = np.frombuffer(memoryview(memory), storage)
    return flat


def _no_memory(component: str, pointer: str, size: object) -> BufferRefused:
    return BufferRefused(
        f"component '{component}' is no memory",
        got=f"pointer {pointer}, size {size}",
        expected="the address of allocated memory and a size >= 0",
    )


def _wrong_device(component: str, got: str) -> BufferRefused:
    return BufferRefused(
        f"component '{component}' lies on another device",
        got=got,
        expected="cpu",
        do="build the engine with the device where the gradients are",
    )


# ---- DLPack: its capsule is read in place and kept as the owner, so bf16 works, which numpy.from_dlpack refuses ----

_DTYPE_BY_CODE = {(2, 32): "float32", (2, 16): "float16", (4, 16): "bfloat16"}
_CODE_NAMES = {0: "int", 1: "uint", 2: "float", 3: "opaque", 4: "bfloat", 5: "complex", 6: "bool"}
_HOST_DEVICES = (1, 3, 11)  # kDLCPU, kDLCUDAHost, kDLROCMHost: all readable by the CPU
_DEVICE_NAMES = {2: "cuda", 4: "opencl", 7: "vulkan", 8: "metal", 10: "rocm", 13: "cuda_managed"}
_READ_ONLY_FLAG = 1


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _VersionedTensor(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _DLTensor),
    )


_capsule_name = ctypes.pythonapi.PyCapsule_GetName
_capsule_name.restype, _capsule_name.argtypes = ctypes.c_char_p, (ctypes.py_object,)
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


def _from_dlpack(source: Any, component: str) -> Buffer:
    capsule = _capsule_of(source, component)
    tensor, writable = _tensor_in(capsule, component)
    _refuse_other_device(tensor.device_type, tensor.device_id, component)
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    strides = tuple(tensor.strides[i] for i in range(tensor.ndim)) if tensor.strides else contiguous_strides(shape)
    if not _is_contiguous(shape, strides):
        raise _strided(component, shape, strides)
    dtype = _DTYPE_BY_CODE.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype is None:
        lanes = "" if tensor.lanes == 1 else f" in vectors of {tensor.lanes}"
        raise _wrong_dtype(component, f"{_CODE_NAMES.get(tensor.code, f'code {tensor.code} ')}{tensor.bits}{lanes}")
    # The capsule is never renamed to "used_dltensor": its own destructor frees the producer's reference with us.
    owner = (capsule, source)
    pointer = tensor.data + tensor.byte_offset if tensor.data else 0
    return Buffer(_memory(pointer, math.prod(shape), STORAGE[dtype], owner, component), dtype, shape, writable, owner)


def _capsule_of(source: Any, component: str) -> object:
    try:
        device_type, device_id = source.__dlpack_device__()
        _refuse_other_device(device_type, device_id, component)
        try:
            return source.__dlpack__(max_version=(1, 0))
        except TypeError:  # a producer older than DLPack 1.0 does not know the argument
            return source.__dlpack__()
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as refusal:
        raise BufferRefused(
            f"component '{component}' cannot be exported by its framework ({refusal})", got=type(source).__name__
        ) from None


def _refuse_other_device(device_type: int, device_id: int, component: str) -> None:
    if int(device_type) not in _HOST_DEVICES:
        raise _wrong_device(component, f"{_DEVICE_NAMES.get(int(device_type), int(device_type))}:{device_id}")


def _tensor_in(capsule: object, component: str) -> tuple[_DLTensor, bool]:
    name = _capsule_name(capsule)
    if name == b"dltensor":  # before 1.0 there was no read-only flag: writable is what every consumer assumed
        return _DLTensor.from_address(_capsule_pointer(capsule, name)), True
    if name == b"dltensor_versioned":
        versioned = _VersionedTensor.from_address(_capsule_pointer(capsule, name))
        if versioned.major == 1:
            return versioned.tensor, not versioned.flags & _READ_ONLY_FLAG
        raise BufferRefused(
            f"component '{component}' speaks another DLPack",
            got=f"version {versioned.major}",
            expected="version 0 or 1",
        )
    raise BufferRefused(f"component '{component}' exports no DLPack tensor", got=name, expected="a fresh capsule")


def _is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    if 0 in shape:
        return True
    wanted = contiguous_strides(shape)
    return all(n == 1 or s == w for n, s, w in zip(shape, strides, wanted, strict=True))
