"""The GPU's door: CuPy arrays, torch tensors, DLPack producers, CUDA array interfaces and raw device pointers."""

from __future__ import annotations

import importlib
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gradengine.arguments import has, said
from gradengine.arrays.buffer import (
    Buffer,
    RawBuffer,
    raw_extent,
    refuse_as_it_lies,
    refuse_impossible,
    refuse_other_device,
    strided,
)
from gradengine.arrays.dlpack import Exported, contiguous_strides, exported, exporting_device
from gradengine.arrays.dtypes import DTYPES, numpy_dtype_name, unsupported_dtype
from gradengine.arrays.frameworks import is_jax, is_torch, jax_device, refuse_indirect, torch_buffer, torch_device
from gradengine.arrays.streams import NamedStream, ProducerStream, UnknownStream
from gradengine.errors import BufferRefused, CallerError

__all__ = ["device_buffer", "device_of", "exporting_stream"]

_MOST_DIMENSIONS = 64  # as NumPy has
_MEMORY_OF_A_DEVICE = {2, 3}  # cudaMemoryType: device, managed


def device_of(source: object) -> str:
    """Where an array lies: "cpu", "cuda:0", ...; "cpu" for what is no array at all, which the host's door refuses.

    >>> device_of(np.zeros(3))
    'cpu'
    """
    if isinstance(source, RawBuffer):
        return source.device
    if is_torch(source):
        return torch_device(source)
    if is_jax(source):
        return jax_device(source, "array")
    if isinstance(source, (np.ndarray, np.generic)) and not has(source, "__cuda_array_interface__"):
        return "cpu"
    if has(source, "__dlpack_device__"):
        return exporting_device(source, "array").replace("cuda_managed", "cuda")
    return _device_of_interface(source) if has(source, "__cuda_array_interface__") else "cpu"


def _device_of_interface(source: Any) -> str:
    """Where the driver says that it lies, which the interface does not; "cuda:0" where that cannot be asked.

    CuPy is imported for it: whoever asks has its kernels made next.
    """
    try:
        cupy, pointer = importlib.import_module("cupy"), int(source.__cuda_array_interface__["data"][0])
        found = cupy.cuda.runtime.pointerGetAttributes(pointer)
    except Exception:  # noqa: BLE001  (no CuPy, no driver, any object's interface: the device's door says what is wrong)
        return "cuda:0"
    return f"cuda:{found.device}" if found.type in _MEMORY_OF_A_DEVICE else "cuda:0"


def device_buffer(source: Any, component: str, device: str, array_type: type, stream: int) -> Buffer:
    """A view of `source`, which must lie on `device`, contiguous, in fp32, fp16 or bf16.

    Args:
        source: An array of the device's own kind, a torch tensor, a `RawBuffer`, a DLPack producer (JAX), or an object
            with `__cuda_array_interface__`.
        component: Whose gradient it is; errors name it.
        device: "cuda:0", ....
        array_type: The device's own kind of array, which needs no protocol: cupy.ndarray.
        stream: The stream that will read it, as DLPack counts them; -1 asks the producer to order nothing. Others than
            DLPack's producers order nothing: see `Buffer.producer`, and `exporting_stream` for array interfaces.

    Raises:
        BufferRefused: Another device, dtype or layout in memory.
    """
    if isinstance(source, array_type):
        return _from_own_array(source, component, device)
    if is_torch(source):
        return torch_buffer(source, component, (device,))
    if isinstance(source, RawBuffer):
        return _from_raw(source, component, device)
    if has(source, "__dlpack__"):
        refuse_indirect(source, component)
        if is_jax(source):
            refuse_other_device(jax_device(source, component), component, (device,))
            _refuse_to_record_immutable(component, stream)
        ordinal = device.removeprefix("cuda:")
        devices = (device, f"cuda_managed:{ordinal}")
        refuse_other_device(exporting_device(source, component), component, devices)
        tensor = exported(source, component, stream)
        refuse_other_device(tensor.device, component, devices)
        return _from_exported(tensor, component, device, UnknownStream(), writable=not is_jax(source))
    if has(source, "__cuda_array_interface__"):
        return _from_exported(_interface_of(source, component, device), component, device, UnknownStream())
    raise BufferRefused(
        f"component '{component}' is no array on a GPU",
        got=type(source).__name__,
        expected=f"an array on {device}: CuPy, DLPack (torch, JAX), __cuda_array_interface__, or a RawBuffer",
    )


def exporting_stream(source: Any, component: str) -> NamedStream | None:
    """The stream that a CUDA array interface names: to be waited for now, since it may be gone later.

    Raises:
        BufferRefused: What it names is no stream.
    """
    interface: Any = source.__cuda_array_interface__ if has(source, "__cuda_array_interface__") else None
    handle = interface.get("stream") if isinstance(interface, Mapping) else None
    try:
        return None if handle is None else NamedStream(handle)
    except CallerError:
        raise BufferRefused(
            f"component '{component}' has a CUDA array interface that names no stream",
            got=hex(handle) if isinstance(handle, int) else type(handle).__name__,
            expected="None, 1, 2 or a stream's handle",
        ) from None


def _from_own_array(array: Any, component: str, device: str) -> Buffer:
    refuse_other_device(f"cuda:{array.device.id}", component, (device,))
    dtype = _named(array.dtype, component)
    if not array.flags.c_contiguous:
        strides = tuple(stride // array.dtype.itemsize for stride in array.strides)
        refuse_as_it_lies(Exported(0, dtype, array.shape, strides, "", True, None), component)
    return Buffer(int(array.data.ptr), int(array.size), dtype, tuple(array.shape), True, array, device)


def _from_raw(raw: RawBuffer, component: str, device: str) -> Buffer:
    refuse_other_device(raw.device, component, (device,))
    pointer, size = raw_extent(raw, component)
    refuse_impossible(pointer, size, DTYPES[raw.dtype].itemsize, component)
    producer = UnknownStream() if raw.stream is None else NamedStream(raw.stream)
    return Buffer(pointer, size, raw.dtype, (size,), raw.writable, raw.owner, device, producer=producer)


def _from_exported(
    tensor: Exported, component: str, device: str, producer: ProducerStream, *, writable: bool = True
) -> Buffer:
    refuse_as_it_lies(tensor, component)
    pointer, size, writable = tensor.pointer, math.prod(tensor.shape), writable and tensor.writable
    refuse_impossible(pointer, size, DTYPES[tensor.dtype].itemsize, component)
    return Buffer(pointer, size, tensor.dtype, tensor.shape, writable, tensor.owner, device, producer=producer)


def _refuse_to_record_immutable(component: str, stream: int) -> None:
    if stream == -1:
        raise BufferRefused(
            f"component '{component}' is a JAX array, which no graph can use",
            got="an array that is immutable",
            expected="memory that is written anew before each replay",
            do="add it outside of a capture",
        )


def _interface_of(source: Any, component: str, device: str) -> Exported:
    try:
        return _read_interface(source, component, device)
    except BufferRefused:
        raise
    except Exception as fault:  # noqa: BLE001  (a framework's own object, and its own errors)
        raise BufferRefused(
            f"component '{component}' has a CUDA array interface that cannot be read ({said(fault)})",
            got=type(source).__name__,
        ) from None


def _read_interface(source: Any, component: str, device: str) -> Exported:
    """A CUDA array interface; it says nothing of the device, which the address does."""
    interface = source.__cuda_array_interface__
    if interface.get("mask") is not None:
        raise BufferRefused(f"component '{component}' is a masked array", do="pass the array without mask")
    pointer, read_only = interface["data"]
    shape = tuple(operator.index(length) for length in itertools.islice(interface["shape"], _MOST_DIMENSIONS + 1))
    if len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"more than {_MOST_DIMENSIONS} dimensions")
    dtype = np.dtype(interface["typestr"])
    strides = _element_strides(interface.get("strides"), dtype.itemsize, shape)
    if any(stride % dtype.itemsize for stride in interface.get("strides") or ()):
        raise strided(component, shape, strides)
    return Exported(int(pointer), _named(dtype, component), shape, strides, device, not read_only, source)


def _element_strides(strides: Sequence[int] | None, itemsize: int, shape: Sequence[int]) -> tuple[int, ...]:
    if strides is None:
        return contiguous_strides(shape)
    if len(strides) != len(shape):
        raise ValueError(f"{len(strides)} strides for {len(shape)} dimensions")
    return tuple(stride // itemsize for stride in strides)


def _named(dtype: Any, component: str) -> str:
    name = str(dtype.name)
    if name not in DTYPES or not dtype.isnative:
        raise unsupported_dtype(component, numpy_dtype_name(dtype))
    return name
