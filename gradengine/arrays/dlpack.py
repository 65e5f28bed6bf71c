"""Reader of DLPack capsules by ctypes: pointer, dtype, shape, strides and device, also of bf16 and of a GPU's memory.

`numpy.from_dlpack` takes neither of these two. The capsule is kept as the owner of the memory and never renamed to
"used_dltensor", so that its own destructor frees the producer's reference.
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

_HOST_DEVICES = (1, 3, 11)  # kDLCPU, kDLCUDAHost, kDLROCMHost: all readable by the CPU
_DEVICES = {2: "cuda", 4: "opencl", 7: "vulkan", 8: "metal", 10: "rocm", 13: "cuda_managed"}
_KINDS = {0: "int", 1: "uint", 2: "float", 3: "opaque", 4: "bfloat", 5: "complex", 6: "bool"}
_READ_ONLY_FLAG, _COPY_FLAG = 1, 2  # writes to a copy would not reach its producer
_WRITABLE = {"torch", "cupy"}  # whose arrays can all be written
MAX_DIMENSIONS = 64  # NumPy's and torch's limit; a capsule that claims more would have us read beyond its shape


class Exported(NamedTuple):  # 0.4 us to make, a frozen dataclass 1.2
    """An array as a protocol exports it, unchecked; strides in elements."""

    pointer: int  # of the first element; 0 where there is none
    dtype: str  # its name, or a description of an unsupported one
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: str
    writable: bool
    owner: object  # what must stay alive while the memory is in use


def exporting_device(source: Any, component: str) -> str:
    """The device of a DLPack producer, "cpu", "cuda:0", ...

    Raises:
        BufferRefused: The producer's own error.
        DeviceFailed: That of a device that has failed.
    """
    try:
        return dlpack_device(source)
    except Exception as refusal:  # noqa: BLE001  (a framework's own code, and its own errors)
        raise _cannot_export(source, component, refusal) from None


def dlpack_device(source: Any) -> str:
    """The device of a DLPack producer, as `exporting_device`; raises the producer's own errors unchanged."""
    device_type, ordinal = source.__dlpack_device__()
    is_unnumbered = ordinal is None and int(device_type) in _HOST_DEVICES  # Paddle's, of which there is one
    return _device_name(int(device_type), 0 if is_unnumbered else int(ordinal))


def exported(source: Any, component: str, stream: int | None = None) -> Exported:
    """The array that `source.__dlpack__()` exports; raises `BufferRefused` for another version of DLPack than 0 or 1.

    `stream` is the consumer's on a GPU, as DLPack numbers them; None on the CPU.
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
    shape = tuple(tensor.shape[:dimensions])  # a ctypes pointer has no bounds: hence the check above
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
    """The strides, in elements, of a C-contiguous array of that shape: (12, 4, 1) of (2, 3, 4)."""
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
        except TypeError:  # a producer older than DLPack 1.0 does not know the argument
            return source.__dlpack__(**options)
    except Exception as refusal:  # noqa: BLE001  (a framework's own code, and its own errors)
        raise _cannot_export(source, component, refusal) from None


def _cannot_export(source: object, component: str, refusal: Exception) -> GradientError:
    if status_of_loss(refusal) is not None:  # CuPy asks the driver what kind of memory it has
        return device_failed(refusal)
    return BufferRefused(
        f"component '{component}' cannot be exported by its framework ({said(refusal)})", got=type(source).__name__
    )


def _tensor_in(capsule: object, component: str) -> tuple[_DLTensor, bool | None]:
    """The tensor, and whether it may be written: None if the capsule is older than DLPack 1.0 and cannot say so."""
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
