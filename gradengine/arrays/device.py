"""Views of arrays in GPU memory from CuPy, torch, DLPack producers, CUDA array interfaces and raw pointers."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from gradengine.arrays.buffer import (
    Buffer,
    RawBuffer,
    exported_view,
    not_contiguous,
    raw_view,
    refuse_other_device,
    refuse_strided,
)
from gradengine.arrays.dlpack import Exported, contiguous_strides, exporting_device
from gradengine.arrays.dtypes import supported_name, unsupported_dtype
from gradengine.arrays.frameworks import (
    dlpack_view,
    is_jax,
    is_torch,
    jax_copy,
    jax_device,
    torch_buffer,
    torch_device,
)
from gradengine.arrays.streams import NamedStream, ProducerStream
from gradengine.errors import BufferRefused

_MEMORY_OF_A_DEVICE = {2, 3}  # cudaMemoryTypeDevice, cudaMemoryTypeManaged


def device_of(source: object) -> str:
    """Return the device of an array, or "cpu" for other objects, which `host_buffer` then refuses."""
    if isinstance(source, RawBuffer):
        return source.device
    if is_torch(source):
        return torch_device(source)
    if is_jax(source):
        return jax_device(source, "array")
    if isinstance(source, (np.ndarray, np.generic)) and not hasattr(source, "__cuda_array_interface__"):
        return "cpu"
    if hasattr(source, "__dlpack_device__"):
        return exporting_device(source, "array").replace("cuda_managed", "cuda")
    return _device_of_interface(source) if hasattr(source, "__cuda_array_interface__") else "cpu"


def _device_of_interface(source: Any) -> str:
    """Return the device of a CUDA array interface's address from the driver, or "cuda:0" without CuPy or a driver.

    CuPy may be imported here, since the caller creates the kernels of that device next.
    """
    try:
        cupy, pointer = importlib.import_module("cupy"), int(source.__cuda_array_interface__["data"][0])
        found = cupy.cuda.runtime.pointerGetAttributes(pointer)
    except Exception:  # noqa: BLE001  (`device_buffer` reports a missing CuPy or driver, or a bad interface)
        return "cuda:0"
    return f"cuda:{found.device}" if found.type in _MEMORY_OF_A_DEVICE else "cuda:0"


def device_buffer(source: Any, component: str, device: str, array_type: type, stream: int) -> Buffer:
    """Return a view of `source`, which must be contiguous, on `device`, and fp32, fp16 or bf16.

    `source` is an `array_type` (cupy.ndarray, which needs no protocol), a torch tensor, a `RawBuffer`, a DLPack
    producer (JAX), or has `__cuda_array_interface__`. Raises `BufferRefused` otherwise. `stream` is the reading stream
    in DLPack's numbering. -1 makes a DLPack producer order nothing. The other kinds of source order nothing here. See
    `Buffer.producer` and `exporting_stream`.
    """
    if isinstance(source, array_type):
        return _from_own_array(source, component, device)
    if is_torch(source):
        return torch_buffer(source, component, (device,))
    if isinstance(source, RawBuffer):
        producer = ProducerStream() if source.stream is None else NamedStream(source.stream)
        return raw_view(source, component, device, producer)
    if hasattr(source, "__dlpack__"):
        if is_jax(source):
            source = jax_copy(source, component, device)
            refuse_other_device(jax_device(source, component), component, (device,))
            if stream == -1:
                what = f"component '{component}' is a JAX array, which a CUDA graph cannot capture"
                raise BufferRefused(what, do="add it outside of the capture")
        devices = (device, device.replace("cuda", "cuda_managed"))
        return dlpack_view(source, component, devices, stream, ProducerStream())
    if hasattr(source, "__cuda_array_interface__"):
        return exported_view(_interface_of(source, component, device), component, device, ProducerStream(), source)
    raise BufferRefused(
        f"component '{component}' is not an array on a GPU",
        got=type(source).__name__,
        expected=f"an array on {device} (CuPy, torch, JAX, DLPack, __cuda_array_interface__) or a RawBuffer",
    )


def exporting_stream(source: Any) -> NamedStream | None:
    """Return the stream of a CUDA array interface, or None. Wait for it now, since it may be destroyed later."""
    interface: Any = source.__cuda_array_interface__ if hasattr(source, "__cuda_array_interface__") else None
    handle = interface.get("stream") if isinstance(interface, Mapping) else None
    return None if handle is None else NamedStream(handle)


def _from_own_array(array: Any, component: str, device: str) -> Buffer:
    refuse_other_device(f"cuda:{array.device.id}", component, (device,))
    dtype, shape = _named(array.dtype, component), tuple(array.shape)
    if not array.flags.c_contiguous:
        refuse_strided(component, shape, tuple(stride // array.dtype.itemsize for stride in array.strides), array)
    return Buffer(int(array.data.ptr), int(array.size), dtype, shape, True, array, device)


def _interface_of(source: Any, component: str, device: str) -> Exported:
    """Return the exported array. Its device is checked in `kernels/cuda_device.py`, since the interface lacks it."""
    interface = source.__cuda_array_interface__
    if interface.get("mask") is not None:
        raise BufferRefused(f"component '{component}' is a masked array", do="pass the array without mask")
    (pointer, read_only), in_bytes = interface["data"], interface.get("strides")
    shape, dtype = tuple(interface["shape"]), np.dtype(interface["typestr"])
    strides = contiguous_strides(shape)
    if in_bytes is not None:
        strides = tuple(stride // dtype.itemsize for stride in in_bytes)
        if any(stride % dtype.itemsize for stride in in_bytes):
            raise not_contiguous(component, shape, strides, source)
    return Exported(int(pointer), _named(dtype, component), shape, strides, device, not read_only, source)


def _named(dtype: Any, component: str) -> str:
    name = supported_name(dtype)
    if name is None:
        raise unsupported_dtype(component, dtype)
    return name
