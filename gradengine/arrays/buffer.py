"""Flat, checked, zero-copy views of memory.

Users pass a `RawBuffer`. All other code takes a `Buffer`, which `host.py` and `device.py` make from any array. The
checks that both files need are here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy.typing as npt

from gradengine.arguments import as_index, said, truth_value
from gradengine.arrays.dlpack import Exported, contiguous_strides
from gradengine.arrays.dtypes import DTYPES, dtype_name, unsupported_dtype
from gradengine.arrays.streams import ProducerStream
from gradengine.errors import BufferRefused, LayoutMismatch

Array: TypeAlias = npt.NDArray[Any]

_CONTIGUOUS_COPY = {  # The keys are the modules of array types.
    "numpy": "numpy.ascontiguousarray(array)",
    "torch": "tensor.contiguous()",
    "cupy": "cupy.ascontiguousarray(array)",
    "mlx": "mlx.core.contiguous(array)",
}
_FIRST_ADDRESS = 4096  # lowest valid address, since no system maps the first page
_ADDRESS_LIMIT = 1 << 63  # end of the range of C's and NumPy's signed integers


@dataclass(frozen=True)
class RawBuffer:
    """A raw pointer to contiguous memory of one dtype, on the CPU or a GPU.

    Args:
        pointer: Address of the first element, in bytes.
        size: Number of elements.
        dtype: "float32", "float16" or "bfloat16", or a NumPy or torch dtype of that name.
        device: "cpu", or a GPU such as "cuda:0".
        owner: The object that owns the memory. The buffer keeps it alive.
        writable: False for read-only memory.
        stream: Handle of the CUDA stream that produces the memory. The engine's kernels run after work already queued
            on that stream, and before later work on it. 0 and 1 are the default stream. None orders nothing. The
            stream must exist until the step is over.

    Raises:
        BufferRefused: The dtype is not supported, the size is negative, or the address is below 4096 or not a multiple
            of the itemsize. If `size` is 0, the address may be 0.

    Example:
        >>> memory = np.arange(3, dtype=np.float32)
        >>> raw = RawBuffer(memory.ctypes.data, 3, "float32", owner=memory)
        >>> raw.size, raw.device
        (3, 'cpu')
    """

    pointer: int
    size: int
    dtype: str
    device: str = "cpu"
    owner: object = None
    writable: bool = True
    stream: int | None = None

    def __post_init__(self) -> None:
        device = str(self.device)
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        object.__setattr__(self, "device", {"cpu:0": "cpu", "cuda": "cuda:0"}.get(device, device))
        object.__setattr__(self, "writable", truth_value("writable", self.writable))
        if self.dtype not in DTYPES:
            raise BufferRefused("a RawBuffer has an unsupported dtype", got=self.dtype, expected=", ".join(DTYPES))
        pointer, size, itemsize = as_index(self.pointer), as_index(self.size), DTYPES[self.dtype].itemsize
        if pointer is None or size is None or not _can_lie_at(pointer, size, itemsize):
            raise BufferRefused(
                "a RawBuffer is not at a valid address",
                got=f"pointer {said(self.pointer) if pointer is None else hex(pointer)}, size {said(self.size)}",
                expected=f"the address of allocated memory, a multiple of {itemsize}, and a size >= 0",
            )
        object.__setattr__(self, "pointer", pointer)
        object.__setattr__(self, "size", size)


# It is not frozen, since one is made for each gradient. This takes 0.3 us instead of 1.2.
@dataclass(eq=False)
class Buffer:
    """A flat, contiguous view of an array's memory. Its fields never change."""

    pointer: int
    size: int
    dtype: str
    shape: tuple[int, ...]  # shape of the array
    writable: bool  # whether it may be a destination
    owner: object  # object that keeps the memory alive
    device: str = "cpu"
    data: Any = None  # elements as a NumPy array in the storage dtype (bf16 as uint16), None on a GPU
    # The producing stream. None on the CPU, for CuPy arrays (CuPy's current stream) and for gradengine's memory.
    producer: ProducerStream | None = None

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return self.size * DTYPES[self.dtype].itemsize

    def part(self, start: int, stop: int) -> Buffer:
        """Return a flat view of the elements start..stop - 1."""
        pointer, size = self.pointer + start * DTYPES[self.dtype].itemsize, stop - start
        data = None if self.data is None else self.data[start:stop]
        return replace(self, pointer=pointer, size=size, shape=(size,), data=data)

    def overlaps(self, other: Buffer) -> bool:
        """Return whether any byte belongs to both buffers."""
        if not self.size or not other.size:
            return False
        return self.pointer < other.pointer + other.nbytes and other.pointer < self.pointer + self.nbytes


# ---- views of pointers and of exported arrays ----


def raw_view(raw: RawBuffer, component: str, device: str, producer: ProducerStream | None = None) -> Buffer:
    """Return a checked view of a raw pointer's memory, or raise `BufferRefused` if it is not on `device`."""
    refuse_other_device(raw.device, component, (device,))
    return Buffer(raw.pointer, raw.size, raw.dtype, (raw.size,), raw.writable, raw.owner, device, producer=producer)


def exported_view(
    tensor: Exported, component: str, device: str, producer: ProducerStream | None = None, source: object = None
) -> Buffer:
    """Return a checked view of the array that `source` exports, or raise `BufferRefused`. Does not check the device."""
    if tensor.dtype not in DTYPES:
        raise unsupported_dtype(component, tensor.dtype)
    refuse_strided(component, tensor.shape, tensor.strides, source)
    pointer, size = tensor.pointer, math.prod(tensor.shape)
    refuse_invalid_address(pointer, size, DTYPES[tensor.dtype].itemsize, component)
    return Buffer(pointer, size, tensor.dtype, tensor.shape, tensor.writable, tensor.owner, device, producer=producer)


def refuse_strided(component: str, shape: Sequence[int], strides: Sequence[int], source: object) -> None:
    """Raise `BufferRefused` unless elements with these strides are contiguous in C order."""
    dimensions = zip(shape, strides, contiguous_strides(shape), strict=True)
    # The stride of a dimension of length 1 has no meaning.
    if 0 not in shape and any(length != 1 and stride != dense for length, stride, dense in dimensions):
        raise not_contiguous(component, shape, strides, source)


def refuse_other_shape(component: str, got: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Raise `LayoutMismatch` unless an array has this shape, or is flat and has as many elements."""
    if got != shape and got != (math.prod(shape),):
        raise LayoutMismatch(
            f"component '{component}' has the wrong shape",
            got=tuple(got),
            expected=shape,
            do="pass it in this shape, or flat",
        )


def not_contiguous(component: str, shape: Sequence[int], strides: Sequence[int], source: object) -> BufferRefused:
    """Return the error for an array that is not C-contiguous, with its framework's copying call.

    Strides are in elements.
    """
    call = _CONTIGUOUS_COPY.get(type(source).__module__.partition(".")[0])
    return BufferRefused(
        f"component '{component}' is not contiguous",
        got=f"shape {tuple(shape)} with strides {tuple(strides)} (in elements)",
        expected=f"strides {contiguous_strides(shape)}",
        do=f"pass a contiguous copy{f': {call}' if call else ''}",
    )


def refuse_invalid_address(pointer: int, size: int, itemsize: int, component: str) -> None:
    """Raise `BufferRefused` unless `size` elements can be at this address."""
    if not _can_lie_at(pointer, size, itemsize):
        raise BufferRefused(
            f"component '{component}' is not at a valid address",
            got=f"pointer {pointer:#x}, size {size}",
            expected=f"the address of allocated memory, a multiple of {itemsize}, and a size >= 0",
        )


def _can_lie_at(pointer: int, size: int, itemsize: int) -> bool:
    is_mapped = pointer >= _FIRST_ADDRESS or (pointer >= 0 and not size)
    return size >= 0 and is_mapped and not pointer % itemsize and pointer + size * itemsize <= _ADDRESS_LIMIT


def refuse_other_device(device: str, component: str, expected: Sequence[str] = ("cpu",)) -> None:
    """Raise `BufferRefused` unless `device` is one of the names of the expected device."""
    if device not in expected:
        raise BufferRefused(
            f"component '{component}' is on the wrong device",
            got=device,
            expected=expected[0],
            do="move all arrays to that device, or create the engine with the arrays' device",
        )


# ---- destinations ----


def refuse_read_only(buffer: Buffer, destination: object, component: str) -> None:
    """Raise `BufferRefused` for a destination that is read-only or tracked by autograd."""
    if getattr(destination, "requires_grad", False):
        raise BufferRefused(
            f"destination '{component}' requires grad",
            got=type(destination).__name__,
            expected="a tensor that autograd does not track",
            do="pass the parameter's .grad, or .detach() it",
        )
    if not buffer.writable:
        raise BufferRefused(
            f"destination '{component}' is read-only",
            got=type(destination).__name__,
            expected="writable memory",
            do="pass a writable array (JAX arrays, and exports by DLPack before 1.0, count as read-only)",
        )


def refuse_overlapping_destinations(destinations: Mapping[str, Buffer], arena: Buffer) -> None:
    """Raise `BufferRefused` if two destinations overlap, or if one overlaps the arena they are written from."""
    pair = overlapping([*destinations.values(), arena])
    if pair is not None:
        names = [*destinations, "the arena"]
        raise BufferRefused(
            f"destinations '{names[pair[0]]}' and '{names[pair[1]]}' overlap in memory",
            do="pass arrays that share no memory, or omit out= to get views of the arena",
        )


def overlapping(buffers: Sequence[Buffer]) -> tuple[int, int] | None:
    """Return the positions of two buffers that overlap in memory, or None."""
    spans = sorted((b.pointer, b.pointer + b.nbytes, i) for i, b in enumerate(buffers) if b.size)
    for (_, stop, before), (start, _, after) in itertools.pairwise(spans):
        if stop > start:
            return min(before, after), max(before, after)
    return None
