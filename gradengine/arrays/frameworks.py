"""torch and JAX arrays as their frameworks describe them, and slices of any framework's; no framework is imported.

DLPack alone is not enough: for a torch tensor it takes 6 us where torch's own attributes take 1, and it does not tell
torch's current stream, nor whether autograd tracks a tensor, nor that JAX's arrays are immutable.
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

AnyArray: TypeAlias = Any  # of any framework

TAKEN = "_gradengine_taken"  # attribute of a torch gradient: its version counter when it was last given to an engine

_NO_KIND = object()  # of which nothing is


def is_torch(source: object) -> bool:
    """Whether this is a torch tensor or parameter; False for a subclass, whose memory may not hold its values."""
    return type(source) in torch_kinds()


def torch_kinds() -> tuple[object, object]:
    """Return torch's Tensor and Parameter, or what no array is an instance of."""
    torch = sys.modules.get("torch")  # half imported it lacks either name
    return getattr(torch, "Tensor", _NO_KIND), getattr(getattr(torch, "nn", None), "Parameter", _NO_KIND)


class TorchDevice(Protocol):
    """A torch.device."""

    @property
    def type(self) -> str:
        """Its kind: "cpu", "cuda", ..."""

    @property
    def index(self) -> Any:
        """Its number; None means the current device, which is taken to be the first."""


def device_name(device: object) -> object:
    """The name of a torch.device: "cpu", "cuda:1"; anything else unchanged."""
    kind = getattr(sys.modules.get("torch"), "device", None)
    if not (isinstance(kind, type) and isinstance(device, kind)):
        return device
    named: Any = device
    return "cpu" if named.type == "cpu" else str(named)


def is_jax(source: object) -> bool:
    """Whether this is a JAX array, or a tracer inside a transformation."""
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
    """A view of a torch tensor on one of `devices`; read-only if autograd tracks it. No element is read.

    Raises `BufferRefused` for a parameter rather than a gradient, and for a tensor that is sparse, quantised, not
    contiguous, lazily negated, without storage, or of another dtype or device.
    """
    torch = sys.modules["torch"]
    device = torch_device(tensor)
    if device not in devices:
        if tensor.is_meta:
            what, got = f"component '{component}' is on the meta device and has no memory", "a shape alone"
            do = "materialise the module before backward: module.to_empty(device=...), then load its weights"
            raise BufferRefused(what, got=got, do=do)
        refuse_other_device(device, component, devices)
    if tensor.layout is not torch.strided:
        what = f"component '{component}' is sparse, or of another torch.layout than strided"
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
        what = f"component '{component}' requires grad: it is a parameter, not a gradient or a destination"
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
    """Return a view of a DLPack producer's array; read-only for a JAX array, which JAX exports as writable.

    `devices` are the names of the one device that is allowed, as DLPack has them: "cuda:0", "cuda_managed:0". Raises
    `BufferRefused` for any other, and for an array that is lazily negated, distributed or not contiguous.
    """
    is_neg = getattr(source, "is_neg", None)
    if callable(is_neg) and is_neg():  # a subclass's memory need not hold its values
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
        do = "lay out the local shapes, and add .to_local() of each gradient"
        raise BufferRefused(f"component '{component}' is a distributed tensor", got=type(source).__name__, do=do)


def torch_device(tensor: Any) -> str:
    """The device of a torch tensor: "cpu", "cuda:0", ..."""
    if tensor.is_cpu:
        return "cpu"
    return f"{tensor.device.type}:{tensor.device.index or 0}"


def jax_on_host(array: Any, component: str) -> Array:
    """A JAX array on the CPU, from `jax_copy`, as a read-only NumPy array; waits until it is computed."""
    refuse_other_device(jax_device(array, component), component)
    if not isinstance(array.dtype, np.dtype):  # a key of JAX's random numbers, of which older JAX makes objects
        raise unsupported_dtype(component, str(array.dtype))
    host: Array = np.asarray(array)
    return host


def jax_device(array: Any, component: str) -> str:
    """The device of a JAX array, "cpu", "cuda:0", ..., the first of a replicated one; raises as `jax_copy`."""
    return _jax_devices(jax_copy(array, component).sharding)[0]


def jax_copy(array: Any, component: str, device: str = "cpu") -> Any:
    """The JAX array; of one that is replicated over several devices its copy on `device`, or else its first one here.

    Raises `BufferRefused` if the array is traced, deleted or sharded.
    """
    if isinstance(array, sys.modules["jax"].core.Tracer):
        what = f"component '{component}' is traced by JAX and has no memory yet"
        raise BufferRefused(what, got=type(array).__name__, do="pass what the jitted function returns, outside of it")
    if array.is_deleted():
        got, do = f"{array.dtype}{list(array.shape)}", "do not donate gradients that are still to be added"
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


@functools.lru_cache(maxsize=64)  # 0.5 us an array otherwise, and a process has few
def _jax_devices(sharding: Any) -> tuple[str, ...]:
    names = ((device.platform.replace("gpu", "cuda"), device.local_hardware_id) for device in sharding.device_set)
    return tuple("cpu" if kind == "cpu" else f"{kind}:{ordinal}" for kind, ordinal in names)


@functools.lru_cache(maxsize=16)
def _torch_stream(device: str) -> TorchStream:
    return TorchStream(int(device.partition(":")[2]))


def memories_of(sources: Iterable[object]) -> tuple[object, ...]:
    """Return what keeps the arrays' memory alive: a torch tensor may be given another one, but not its storage."""
    kinds = torch_kinds()
    return tuple(source.untyped_storage() if type(source) in kinds else source for source in sources)  # type: ignore[attr-defined]


def note_written(arrays: Iterable[object]) -> None:
    """Increment the version counters of torch tensors that we wrote to, so that a backward that saved them fails."""
    kinds = torch_kinds()
    tensors: list[Any] = [array for array in arrays if type(array) in kinds and not array.is_inference()]  # type: ignore[attr-defined]
    if not tensors:
        return
    count_change = sys.modules["torch"].autograd.graph.increment_version
    try:
        count_change(tensors)  # 0.02 us each, and one by one 0.5
    except (TypeError, RuntimeError):  # an older torch takes one
        for tensor in tensors:
            count_change(tensor)
    for tensor in tensors:
        whole = tensor if tensor._base is None else tensor._base
        if hasattr(whole, TAKEN):  # this change was not made by a backward
            setattr(whole, TAKEN, whole._version)


# ---- slices of any framework's arrays ----


def as_sliceable(array: AnyArray, what: str) -> AnyArray:
    """An array whose `array[...]` are views: the array itself, detached from autograd, or a DLPack producer's view.

    Raises `BufferRefused` if it is not an array, or is sparse, masked, or of a dtype unknown to NumPy.
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
    except Exception as fault:  # noqa: BLE001  (a framework's own code, and its own errors)
        raise BufferRefused(f"{what} cannot be read by DLPack ({said(fault)})", got=type(array).__name__) from None


def copied(array: AnyArray) -> AnyArray:
    """A contiguous copy."""
    if is_torch(array):
        return array.clone(memory_format=sys.modules["torch"].contiguous_format)
    return array.copy() if hasattr(array, "copy") else array.clone()  # Paddle


def empty_like(array: AnyArray, shape: tuple[int, ...]) -> AnyArray:
    """An uninitialised array of another shape, of the array's framework, dtype and device."""
    if is_torch(array):
        return array.new_empty(shape)
    return _module_of(array).empty(shape, array.dtype)


def joined_by_jax(arrays: Sequence[AnyArray], dimension: int) -> AnyArray:
    """JAX arrays concatenated along a dimension."""
    return sys.modules["jax"].numpy.concatenate(arrays, axis=dimension)


def assign(whole: AnyArray, parts: Iterable[tuple[tuple[Any, ...], AnyArray]], what: str) -> None:
    """Assign `whole[index] = part` for each pair; raises the framework's own errors as `BufferRefused`."""
    try:
        for index, part in parts:
            whole[index] = part
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as fault:
        raise BufferRefused(f"{what} cannot be written to ({said(fault)})", got=type(whole).__name__) from None


def refuse_mixed(array: AnyArray, first: AnyArray, what: str) -> None:
    """Raise `LayoutMismatch` unless both are of one framework and dtype."""
    if (kind := _kind_of(array)) != (expected := _kind_of(first)):
        raise LayoutMismatch(f"{what} is of another framework or dtype than rank 0's", got=kind, expected=expected)


def _kind_of(array: AnyArray) -> str:
    framework = "jax" if is_jax(array) else type(array).__module__.partition(".")[0]
    return f"{framework} of {array.dtype}"


def _module_of(array: AnyArray) -> Any:
    return sys.modules.get(type(array).__module__.partition(".")[0])
