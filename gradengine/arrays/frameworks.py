"""Frameworks that say more than DLPack does: torch and JAX, recognised where they are loaded and never imported.

Asked itself, torch says where a tensor lies in 1 us (6 by DLPack), which stream it works on, and what it cannot give;
JAX says that its arrays are immutable, which its capsules do not.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any, Protocol, final

import numpy as np

from gradengine.arguments import has, said
from gradengine.arrays.buffer import Array, Buffer, strided, wrong_device
from gradengine.arrays.dtypes import DTYPES, unsupported_dtype
from gradengine.arrays.streams import ProducerStream
from gradengine.errors import BufferRefused

__all__ = [
    "NonZero",
    "TorchDevice",
    "TorchStream",
    "device_name",
    "fills_flat_buffer",
    "is_jax",
    "is_torch",
    "jax_device",
    "jax_on_host",
    "note_written",
    "refuse_indirect",
    "torch_buffer",
    "torch_device",
    "torch_versions",
]


def is_torch(source: object) -> bool:
    """Whether this is a torch tensor that can be asked where it lies: no subclass but a parameter.

    >>> is_torch(np.zeros(2))
    False
    """
    torch, kind = sys.modules.get("torch"), type(source)  # half imported it lacks either name
    return kind is getattr(torch, "Tensor", None) or kind is getattr(getattr(torch, "nn", None), "Parameter", None)


class TorchDevice(Protocol):
    """A torch.device."""

    @property
    def type(self) -> str:
        """Its kind: "cpu", "cuda", ..."""
        ...

    @property
    def index(self) -> Any:
        """Which of them; None for the current one, which is taken for the first."""
        ...


def device_name(device: object) -> object:
    """A torch.device by name: "cpu", "cuda:1"; anything else as it is.

    >>> device_name("cuda")
    'cuda'
    """
    kind = getattr(sys.modules.get("torch"), "device", None)
    if not (isinstance(kind, type) and isinstance(device, kind)):
        return device
    named: Any = device
    return "cpu" if named.type == "cpu" else str(named)


def is_jax(source: object) -> bool:
    """Whether this is a JAX array, or what stands for one inside a transformation.

    >>> is_jax(np.zeros(2))
    False
    """
    array_type = getattr(sys.modules.get("jax"), "Array", None)
    return array_type is not None and isinstance(source, array_type)


@final
class TorchStream(ProducerStream):
    """Torch's current stream on one device.

    Args:
        torch: The module.
        ordinal: Which device.
    """

    def __init__(self, torch: Any, ordinal: int) -> None:
        self._torch, self._ordinal = torch, ordinal

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TorchStream) and other._ordinal == self._ordinal

    def __hash__(self) -> int:
        return hash((TorchStream, self._ordinal))

    def stream(self) -> int:
        """See `ProducerStream.stream`."""
        current = self._torch.cuda.current_stream(self._ordinal)
        if hasattr(current, "__cuda_stream__"):
            return int(current.__cuda_stream__()[1])
        return int(current.cuda_stream)  # before 2.10


def torch_buffer(tensor: Any, component: str, devices: Sequence[str]) -> Buffer:
    """Where a torch tensor lies; the elements are not looked at.

    Args:
        tensor: For which `is_torch` holds.
        component: Whose gradient it is; errors name it.
        devices: Those that are taken: "cpu", "cuda:0".

    Returns:
        A view, read-only where autograd watches the tensor.

    Raises:
        BufferRefused: It is a parameter rather than a gradient, sparse, quantised, strided, negated lazily, of another
            dtype or on another device, or it has no memory of its own.
    """
    torch = sys.modules["torch"]
    device = torch_device(tensor)
    if device not in devices:
        raise _on_meta(component) if tensor.is_meta else wrong_device(component, device, devices[0])
    if tensor.layout is not torch.strided:
        raise _sparse(tensor, component)
    dtype = _torch_dtype(tensor.dtype)
    if dtype is None:
        raise unsupported_dtype(component, str(tensor.dtype).removeprefix("torch."))
    try:
        shape, pointer = tensor.shape, tensor.data_ptr()
    except RuntimeError as fault:
        raise _stands_for_several(tensor, component, fault) from None
    if not tensor.is_contiguous():
        raise strided(component, shape, tensor.stride())
    if tensor.is_neg():
        raise _negated(component)
    if tensor.requires_grad and tensor.is_leaf:
        raise _parameter(tensor, component)
    producer = _torch_stream(torch, device) if device != "cpu" else None
    return Buffer(pointer, tensor.numel(), dtype, shape, not tensor.requires_grad, tensor, device, None, producer)


def refuse_indirect(source: object, component: str) -> None:
    """Raise `BufferRefused` for tensors whose export is not their values: torch's DTensor, a subclass's lazy sign."""
    is_neg = getattr(source, "is_neg", None)
    if callable(is_neg) and is_neg():
        raise _negated(component)
    if has(source, "to_local"):
        raise BufferRefused(
            f"component '{component}' is one rank's part of a distributed tensor",
            got=type(source).__name__,
            do="pass .to_local(), in a layout of the local shapes",
        )


def torch_device(tensor: Any) -> str:
    """Where a torch tensor lies: "cpu", "cuda:0", ..."""
    if tensor.is_cpu:
        return "cpu"
    return f"{tensor.device.type}:{tensor.device.index or 0}"


def torch_versions(sources: Sequence[Any]) -> list[int | None]:
    """How often each torch tensor was changed in place, as autograd counts it; None for what is none, or not counted.

    >>> torch_versions([np.zeros(2), None])
    [None, None]
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return [None] * len(sources)
    kinds = getattr(torch, "Tensor", None), getattr(getattr(torch, "nn", None), "Parameter", None)
    try:
        return [s._version if type(s) in kinds else None for s in sources]
    except RuntimeError:  # torch counts nothing for tensors that were made in inference mode
        return [s._version if type(s) in kinds and not s.is_inference() else None for s in sources]


def fills_flat_buffer(tensor: Any) -> bool:
    """Whether a torch tensor is a view of all of a flat one, as DDP's are of a bucket that holds one parameter."""
    base = tensor._base
    return base is not None and base.ndim == 1 and base.numel() == tensor.numel()


@final
class NonZero:
    """Which torch tensors of one device hold anything but zeros: asked without a wait, answered behind a GPU's work.

    Args:
        tensors: At least one. A GPU's are read on torch's current stream.
    """

    def __init__(self, tensors: Sequence[Any]) -> None:
        torch = sys.modules["torch"]
        self._found = torch.stack([tensor.any() for tensor in tensors])
        self._event: Any = None
        if not self._found.is_cpu:
            # A copy to memory that is not pinned would be waited for.
            pinned = torch.empty(len(tensors), dtype=torch.bool, device="cpu", pin_memory=True)
            stream = torch.cuda.current_stream(self._found.device)
            self._found = pinned.copy_(self._found, non_blocking=True)
            self._event = stream.record_event()

    @property
    def is_known(self) -> bool:
        """Whether the answers have come; never a wait."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Wait for the GPU's work up to here."""
        if self._event is not None:
            self._event.synchronize()

    def answers(self) -> list[bool]:
        """One for each tensor, once they are known."""
        found: list[bool] = self._found.tolist()
        return found


def jax_on_host(array: Any, component: str) -> Array:
    """A JAX array as a read-only NumPy array of the same memory, when it is computed.

    Raises:
        BufferRefused: It lies elsewhere, or as `jax_device`.
    """
    device = jax_device(array, component)
    if device != "cpu":
        raise wrong_device(component, device, "cpu")
    if not isinstance(array.dtype, np.dtype):  # a key of JAX's random numbers, of which older JAX makes objects
        raise unsupported_dtype(component, str(array.dtype))
    host: Array = np.asarray(array)
    return host


def jax_device(array: Any, component: str) -> str:
    """Where a JAX array lies: "cpu", "cuda:0", ...

    Raises:
        BufferRefused: It is traced, was deleted, or is spread over devices.
    """
    if isinstance(array, sys.modules["jax"].core.Tracer):
        raise BufferRefused(
            f"component '{component}' is traced by JAX and has no memory yet",
            got=type(array).__name__,
            do="return the gradients from the jitted function and pass them then",
        )
    if array.is_deleted():
        raise BufferRefused(
            f"component '{component}' was deleted by JAX",
            got=f"{array.dtype}{list(array.shape)}",
            do="do not donate gradients that are still to be added",
        )
    devices = _jax_devices(array.sharding)
    if len(devices) > 1:
        raise BufferRefused(
            f"component '{component}' is spread over devices",
            got=f"{len(devices)} of them",
            expected="one device",
            do="pass each device's own part, for example array.addressable_shards[i].data",
        )
    return devices[0]


@functools.lru_cache(maxsize=64)  # 0.5 us an array otherwise, and a process has few
def _jax_devices(sharding: Any) -> tuple[str, ...]:
    return tuple(_named(device) for device in sharding.device_set)


def _named(device: Any) -> str:
    if device.platform == "cpu":
        return "cpu"
    return f"{'cuda' if device.platform == 'gpu' else device.platform}:{device.local_hardware_id}"


@functools.lru_cache(maxsize=32)
def _torch_dtype(dtype: object) -> str | None:
    name = str(dtype).removeprefix("torch.")
    return name if name in DTYPES else None


@functools.lru_cache(maxsize=16)
def _torch_stream(torch: ModuleType, device: str) -> TorchStream:
    return TorchStream(torch, int(device.partition(":")[2]))


def _stands_for_several(tensor: Any, component: str, fault: Exception) -> BufferRefused:
    return BufferRefused(
        f"component '{component}' has no memory of its own ({said(fault)})",
        got=type(tensor).__name__,
        do="pass plain tensors, outside of torch.func transformations",
    )


def _on_meta(component: str) -> BufferRefused:
    return BufferRefused(
        f"component '{component}' is on the meta device and has no memory",
        got="a shape and a dtype",
        expected="a gradient that was computed",
        do="materialise the module before backward: module.to_empty(device=...), then load its weights",
    )


def _negated(component: str) -> BufferRefused:
    return BufferRefused(f"component '{component}' is negated lazily", do="pass .resolve_neg()")


def note_written(arrays: Iterable[object]) -> None:
    """Tell autograd that torch's tensors were written to, so that a backward that saved them refuses what they hold."""
    for array in arrays:
        if is_torch(array):
            tensor: Any = array
            if not tensor.is_inference():
                sys.modules["torch"].autograd.graph.increment_version(tensor)


def _parameter(tensor: Any, component: str) -> BufferRefused:
    return BufferRefused(
        f"component '{component}' requires grad: it is a parameter, neither a gradient nor a destination",
        got=type(tensor).__name__,
        do="pass its .grad, or .detach() it",
    )


def _sparse(tensor: Any, component: str) -> BufferRefused:
    return BufferRefused(
        f"component '{component}' is sparse, or laid out in a way of its own",
        got=str(tensor.layout),
        expected="torch.strided",
        do="pass .to_dense(), or build the embedding with sparse=False",
    )
