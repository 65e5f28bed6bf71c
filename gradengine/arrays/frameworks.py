"""Views of torch and JAX arrays by their own attributes, and slices of any framework's arrays.

No framework is imported. DLPack alone is not enough. For a torch tensor it takes 6 us, and torch's attributes 1 us. It
also lacks torch's current stream, whether autograd tracks a tensor, and that JAX arrays are immutable.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, final

import numpy as np

from gradengine.arguments import said
from gradengine.arrays.buffer import Array, Buffer, exported_view, not_contiguous, refuse_other_device
from gradengine.arrays.dlpack import dlpack_device, exported, exporting_device
from gradengine.arrays.dtypes import supported_name, unsupported_dtype
from gradengine.arrays.streams import ProducerStream
from gradengine.errors import BufferRefused, LayoutMismatch

AnyArray: TypeAlias = Any  # an array of any framework

TAKEN = "_gradengine_taken"  # attribute of a torch gradient, its version counter when an engine last received it

_NO_KIND = object()  # a stand-in for a class that does not exist


def is_torch(source: object) -> bool:
    """Return whether this is a torch tensor or parameter. A subclass's memory may not hold its values, so it is not."""
    return type(source) in torch_kinds()


def torch_kinds() -> tuple[object, object]:
    """Return torch's classes Tensor and Parameter. A class that is missing is replaced by an object."""
    torch = sys.modules.get("torch")  # While it is being imported, it may lack either name.
    return getattr(torch, "Tensor", _NO_KIND), getattr(getattr(torch, "nn", None), "Parameter", _NO_KIND)


class TorchDevice(Protocol):
    """A torch.device."""

    @property
    def type(self) -> str:
        """The kind of device, such as "cpu" or "cuda"."""

    @property
    def index(self) -> Any:
        """The number of the device. None means the current device, which is taken to be number 0."""


def device_name(device: object) -> object:
    """Return the name of a torch.device, such as "cpu" or "cuda:1". Other objects are returned unchanged."""
    kind = getattr(sys.modules.get("torch"), "device", None)
    if not (isinstance(kind, type) and isinstance(device, kind)):
        return device
    named: Any = device
    return "cpu" if named.type == "cpu" else str(named)


def is_jax(source: object) -> bool:
    """Return whether this is a JAX array, or a tracer inside a transformation."""
    array_type = getattr(sys.modules.get("jax"), "Array", None)
    return array_type is not None and isinstance(source, array_type)


@final
@dataclass(frozen=True)
class TorchStream(ProducerStream):
    """torch's current stream on one device."""

    ordinal: int

    def stream(self) -> int:
        return int(sys.modules["torch"].cuda.current_stream(self.ordinal).cuda_stream)


def torch_buffer(tensor: Any, component: str, devices: Sequence[str]) -> Buffer:
    """Return a view of a torch tensor on one of `devices`. It is read-only if autograd tracks the tensor.

    Reads no element. Raises `BufferRefused` for a parameter, and for a tensor that is sparse, quantised, not contiguous
    or lazily negated, has no storage, or has the wrong dtype or device.
    """
    torch = sys.modules["torch"]
    device = torch_device(tensor)
    if device not in devices:
        if tensor.is_meta:
            what, got = f"component '{component}' is on the meta device and has no memory", "a shape alone"
            do = "call module.to_empty(device=...) and load the weights before backward"
            raise BufferRefused(what, got=got, do=do)
        refuse_other_device(device, component, devices)
    if tensor.layout is not torch.strided:
        what = f"component '{component}' is sparse, or has the wrong torch.layout"
        do = "pass .to_dense(), or build the embedding with sparse=False"
        raise BufferRefused(what, got=str(tensor.layout), expected="torch.strided", do=do)
    dtype = supported_name(tensor.dtype)
    if dtype is None:
        raise unsupported_dtype(component, tensor.dtype)
    try:
        shape, pointer = tensor.shape, tensor.data_ptr()
    except RuntimeError as fault:
        what = f"component '{component}' has no storage ({said(fault)})"
        do = "pass plain tensors, outside of torch.func transformations"
        raise BufferRefused(what, got=type(tensor).__name__, do=do) from None
    if tensor.requires_grad and tensor.is_leaf:
        what = f"component '{component}' requires grad"
        raise BufferRefused(what, got=type(tensor).__name__, do="pass its .grad, or .detach() it")
    if not tensor.is_contiguous():
        raise not_contiguous(component, shape, tensor.stride(), tensor)
    if tensor.is_neg():
        raise _negated(component)
    producer = _torch_stream(device) if device != "cpu" else None
    return Buffer(pointer, tensor.numel(), dtype, shape, not tensor.requires_grad, tensor, device, None, producer)


def dlpack_view(
    source: object,
    component: str,
    devices: Sequence[str],
    stream: int | None = None,
    producer: ProducerStream | None = None,
) -> Buffer:
    """Return a view of a DLPack producer's array. It is read-only for a JAX array, although JAX exports it as writable.

    `devices` are DLPack's names of the one device that is allowed, such as "cuda:0" and "cuda_managed:0". Raises
    `BufferRefused` for a different device, and for an array that is lazily negated, distributed or not contiguous.
    """
    is_neg = getattr(source, "is_neg", None)
    if callable(is_neg) and is_neg():  # The memory of a tensor's subclass may not hold its values.
        raise _negated(component)
    refuse_distributed(component, source)
    refuse_other_device(exporting_device(source, component), component, devices)
    tensor = exported(source, component, stream)
    refuse_other_device(tensor.device, component, devices)
    view = exported_view(tensor, component, devices[0], producer, source)
    view.writable &= not is_jax(source)
    return view


def _negated(component: str) -> BufferRefused:
    return BufferRefused(f"component '{component}' is lazily negated", do="pass .resolve_neg()")


def refuse_distributed(component: str, source: object) -> None:
    """Raise `BufferRefused` for a DTensor, whose memory is one rank's shard."""
    if hasattr(source, "to_local"):
        do = "build the layout from local shapes, and pass .to_local() of each gradient"
        raise BufferRefused(f"component '{component}' is a distributed tensor", got=type(source).__name__, do=do)


def torch_device(tensor: Any) -> str:
    """Return the device of a torch tensor, such as "cpu" or "cuda:0"."""
    if tensor.is_cpu:
        return "cpu"
    return f"{tensor.device.type}:{tensor.device.index or 0}"


def jax_on_host(array: Any, component: str) -> Array:
    """Return a JAX array on the CPU, from `jax_copy`, as a read-only NumPy array. Waits until JAX has computed it."""
    refuse_other_device(jax_device(array, component), component)
    # A JAX random key has no NumPy dtype. Older JAX would convert it to an array of objects.
    if not isinstance(array.dtype, np.dtype):
        raise unsupported_dtype(component, str(array.dtype))
    host: Array = np.asarray(array)
    return host


def jax_device(array: Any, component: str) -> str:
    """Return the device of a JAX array, or the first device of a replicated one. Raises as `jax_copy`."""
    return _jax_devices(jax_copy(array, component).sharding)[0]


def jax_copy(array: Any, component: str, device: str = "cpu") -> Any:
    """Return the JAX array, or one of its copies if it is replicated over several devices.

    This is the copy on `device`, or otherwise the first one of this process. Raises `BufferRefused` if the array is
    traced, deleted or sharded.
    """
    if isinstance(array, sys.modules["jax"].core.Tracer):
        what = f"component '{component}' is traced by JAX and has no memory yet"
        raise BufferRefused(what, got=type(array).__name__, do="pass the result of the jitted function, outside of it")
    if array.is_deleted():
        got, do = f"{array.dtype}{list(array.shape)}", "do not donate gradients before they are added"
        raise BufferRefused(f"component '{component}' was deleted by JAX", got=got, do=do)
    devices = _jax_devices(array.sharding)
    if len(devices) == 1:
        return array
    copies = [shard.data for shard in array.addressable_shards] if array.is_fully_replicated else []
    if not copies:
        what, got = f"component '{component}' is sharded over several devices", f"{len(devices)} devices"
        do = "pass each device's shard, for example array.addressable_shards[i].data"
        raise BufferRefused(what, got=got, expected="one device, or a copy on each", do=do)
    return next((copy for copy in copies if _jax_devices(copy.sharding)[0] == device), copies[0])


@functools.lru_cache(maxsize=64)  # The cache saves 0.5 us an array, and a process has few shardings.
def _jax_devices(sharding: Any) -> tuple[str, ...]:
    names = ((device.platform.replace("gpu", "cuda"), device.local_hardware_id) for device in sharding.device_set)
    return tuple("cpu" if kind == "cpu" else f"{kind}:{ordinal}" for kind, ordinal in names)


@functools.lru_cache(maxsize=16)
def _torch_stream(device: str) -> TorchStream:
    return TorchStream(int(device.partition(":")[2]))


def memories_of(sources: Iterable[object]) -> tuple[object, ...]:
    """Return the objects that keep the arrays' memory alive. A torch tensor may get new memory, its storage may not."""
    kinds = torch_kinds()
    return tuple(source.untyped_storage() if type(source) in kinds else source for source in sources)  # type: ignore[attr-defined]


def note_written(arrays: Iterable[object]) -> None:
    """Increment the version counters of written torch tensors, so that a backward that saved them fails."""
    kinds = torch_kinds()
    tensors: list[Any] = [array for array in arrays if type(array) in kinds and not array.is_inference()]  # type: ignore[attr-defined]
    if not tensors:
        return
    count_change = sys.modules["torch"].autograd.graph.increment_version
    try:
        count_change(tensors)  # 0.02 us each, or 0.5 us one by one
    except (TypeError, RuntimeError):  # Older torch takes a single tensor.
        for tensor in tensors:
            count_change(tensor)
    for tensor in tensors:
        whole = tensor if tensor._base is None else tensor._base
        if hasattr(whole, TAKEN):  # No backward made this change.
            setattr(whole, TAKEN, whole._version)


# ---- slices of any framework's arrays ----


def as_sliceable(array: AnyArray, what: str) -> AnyArray:
    """Return an array whose slices are views.

    This is the array itself, detached from autograd, or a view of a DLPack producer's array. Raises `BufferRefused` if
    it is not an array, is sparse or masked, or has a dtype unknown to NumPy.
    """
    if is_torch(array):
        if array.layout is not sys.modules["torch"].strided:
            raise BufferRefused(f"{what} is sparse", got=str(array.layout), do="pass .to_dense()")
        return array.detach()
    if isinstance(array, np.ma.MaskedArray):
        raise BufferRefused(f"{what} is masked", got="MaskedArray", do="pass .filled(value)")
    if is_jax(array) or (hasattr(array, "__getitem__") and hasattr(_module_of(array), "empty")):
        return array
    if not hasattr(array, "__dlpack__"):
        raise BufferRefused(f"{what} is not an array", got=type(array).__name__, expected="an array, or DLPack")
    try:
        xp = np if dlpack_device(array) == "cpu" else importlib.import_module("cupy")
        return xp.from_dlpack(array)
    except Exception as fault:  # noqa: BLE001  (a framework may raise any error)
        raise BufferRefused(f"{what} cannot be read by DLPack ({said(fault)})", got=type(array).__name__) from None


def copied(array: AnyArray) -> AnyArray:
    """Return a contiguous copy."""
    if is_torch(array):
        return array.clone(memory_format=sys.modules["torch"].contiguous_format)
    return array.copy() if hasattr(array, "copy") else array.clone()  # Paddle has no copy().


def empty_like(array: AnyArray, shape: tuple[int, ...]) -> AnyArray:
    """Return an uninitialised array of this shape with the array's framework, dtype and device."""
    if is_torch(array):
        return array.new_empty(shape)
    return _module_of(array).empty(shape, array.dtype)


def joined_by_jax(arrays: Sequence[AnyArray], dimension: int) -> AnyArray:
    """Concatenate JAX arrays along a dimension."""
    return sys.modules["jax"].numpy.concatenate(arrays, axis=dimension)


def assign(whole: AnyArray, parts: Iterable[tuple[tuple[Any, ...], AnyArray]], what: str) -> None:
    """Assign `whole[index] = part` for each pair. Raises the framework's errors as `BufferRefused`."""
    try:
        for index, part in parts:
            whole[index] = part
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as fault:
        raise BufferRefused(f"{what} cannot be written to ({said(fault)})", got=type(whole).__name__) from None


def refuse_mixed(array: AnyArray, first: AnyArray, what: str) -> None:
    """Raise `LayoutMismatch` unless both arrays have the same framework and dtype."""
    if (kind := _kind_of(array)) != (expected := _kind_of(first)):
        raise LayoutMismatch(f"{what} has a different framework or dtype than on rank 0", got=kind, expected=expected)


def _kind_of(array: AnyArray) -> str:
    framework = "jax" if is_jax(array) else type(array).__module__.partition(".")[0]
    return f"{framework} of {array.dtype}"


def _module_of(array: AnyArray) -> Any:
    return sys.modules.get(type(array).__module__.partition(".")[0])
