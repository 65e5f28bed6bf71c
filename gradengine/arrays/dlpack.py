"""Reader of DLPack capsules by ctypes, which returns pointer, dtype, shape, strides and device.

It also reads bf16 and GPU memory, which `numpy.from_dlpack` does not support. The capsule is kept as the owner of the
memory. It is never renamed to "used_dltensor", so that its destructor frees the producer's reference.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from gradengine.arguments import said
from gradengine.arrays.dtypes import by_dlpack_code
from gradengine.arrays.lost import device_failed, status_of_loss
from gradengine.errors import BufferRefused, GradientError

_HOST_DEVICES = (1, 3, 11)  # kDLCPU, kDLCUDAHost and kDLROCMHost, which the CPU can read
_DEVICES = {2: "cuda", 4: "opencl", 7: "vulkan", 8: "metal", 10: "rocm", 13: "cuda_managed"}
_KINDS = {0: "int", 1: "uint", 2: "float", 3: "opaque", 4: "bfloat", 5: "complex", 6: "bool"}
_READ_ONLY_FLAG, _COPY_FLAG = 1, 2  # Writes to a copy would not reach the producer.
_WRITABLE = {"torch", "cupy"}  # frameworks whose arrays are all writable
MAX_DIMENSIONS = 64  # limit of NumPy and torch, and of what is read from a capsule's shape


class Exported(NamedTuple):  # 0.4 us to make, instead of 1.2 for a frozen dataclass
    """An array as a protocol exports it, before checks. Strides are in elements."""

    pointer: int  # address of the first element, or 0 if there is none
    dtype: str  # name, or a description of an unsupported dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: str
    writable: bool
    owner: object  # object that keeps the memory alive


def exporting_device(source: Any, component: str) -> str:
    """Return the device of a DLPack producer, such as "cpu" or "cuda:0".

    Raises:
        BufferRefused: The producer raised an error.
        DeviceFailed: The device has failed.
    """
    try:
        return dlpack_device(source)
    except Exception as refusal:  # noqa: BLE001  (a framework may raise any error)
        raise _cannot_export(source, component, refusal) from None


def dlpack_device(source: Any) -> str:
    """Return the device of a DLPack producer, as `exporting_device`. Raises the producer's errors unchanged."""
    device_type, ordinal = source.__dlpack_device__()
    is_unnumbered = ordinal is None and int(device_type) in _HOST_DEVICES  # Paddle does not number its CPU.
    return _device_name(int(device_type), 0 if is_unnumbered else int(ordinal))


def exported(source: Any, component: str, stream: int | None = None) -> Exported:
    """Return the array that `source.__dlpack__()` exports. Raises `BufferRefused` unless DLPack's version is 0 or 1.

    `stream` is the consumer's stream on a GPU in DLPack's numbering, and None on the CPU.
    """
    capsule = _capsule_of(source, component, {} if stream is None else {"stream": stream})
    tensor, writable = _tensor_in(capsule, component)
    if writable is None:
        writable = any(kind.__module__.partition(".")[0] in _WRITABLE for kind in type(source).__mro__)
    dimensions = tensor.ndim
    if not 0 <= dimensions <= MAX_DIMENSIONS or (dimensions and not tensor.shape):
        raise BufferRefused(
            f"component '{component}' exports an invalid DLPack shape",
            got=f"{dimensions} dimensions{'' if tensor.shape else ' and a null pointer for them'}",
            expected=f"0 to {MAX_DIMENSIONS}",
        )
    shape = tuple(tensor.shape[:dimensions])  # A ctypes pointer has no bounds, so `dimensions` is checked above.
    strides = tuple(tensor.strides[:dimensions]) if tensor.strides else contiguous_strides(shape)
    return Exported(
        pointer=tensor.data + tensor.byte_offset if tensor.data else 0,
        dtype=_dtype_of(tensor),
        shape=shape,
        strides=strides,
        device=_device_name(tensor.device_type, tensor.device_id),
        writable=writable,
        owner=(capsule, source),
    )


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a C-contiguous array. The shape (2, 3, 4) gives (12, 4, 1)."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


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


def _capsule_of(source: Any, component: str, options: dict[str, int]) -> object:
    try:
        try:
            return source.__dlpack__(max_version=(1, 0), **options)
        except TypeError:  # Producers older than DLPack 1.0 do not take this argument.
            return source.__dlpack__(**options)
    except Exception as refusal:  # noqa: BLE001  (a framework may raise any error)
        raise _cannot_export(source, component, refusal) from None


def _cannot_export(source: object, component: str, refusal: Exception) -> GradientError:
    if status_of_loss(refusal) is not None:  # CuPy calls the driver to find the kind of memory.
        return device_failed(refusal)
    return BufferRefused(
        f"component '{component}' cannot be exported by its framework ({said(refusal)})", got=type(source).__name__
    )


def _tensor_in(capsule: object, component: str) -> tuple[_DLTensor, bool | None]:
    """Return the tensor, and whether it may be written. This is None for capsules before DLPack 1.0, which lack it."""
    name = _capsule_name(capsule) if type(capsule).__name__ == "PyCapsule" else type(capsule).__name__
    if name == b"dltensor":
        return _DLTensor.from_address(_capsule_pointer(capsule, name)), None
    if name == b"dltensor_versioned":
        versioned = _VersionedTensor.from_address(_capsule_pointer(capsule, name))
        if versioned.major == 1:
            return versioned.tensor, not versioned.flags & (_READ_ONLY_FLAG | _COPY_FLAG)
        raise BufferRefused(
            f"component '{component}' exports an unsupported DLPack version",
            got=f"version {versioned.major}",
            expected="version 0 or 1",
        )
    raise BufferRefused(
        f"component '{component}' does not export a DLPack capsule", got=name, expected="an unused capsule"
    )


def _device_name(device_type: int, ordinal: int) -> str:
    return "cpu" if device_type in _HOST_DEVICES else f"{_DEVICES.get(device_type, device_type)}:{ordinal}"


def _dtype_of(tensor: _DLTensor) -> str:
    name = by_dlpack_code(tensor.code, tensor.bits) if tensor.lanes == 1 else None
    lanes = "" if tensor.lanes == 1 else f" in vectors of {tensor.lanes}"
    return name or f"{_KINDS.get(tensor.code, f'code {tensor.code} ')}{tensor.bits}{lanes}"
