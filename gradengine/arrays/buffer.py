"""What any array or pointer becomes at the door: a flat `Buffer`, checked once, copied never.

What is resolved is (pointer, size, dtype, device, owner, and whose stream it is worked on); nothing after the doors
asks what an object is. The doors are `host_buffer.py` and `device_buffer.py`; what they refuse alike is here.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy.typing as npt

from gradengine.arguments import as_index, as_text, said, truth_value
from gradengine.arrays.dlpack import Exported, contiguous_strides
from gradengine.arrays.dtypes import DTYPES, dtype_name, unsupported_dtype
from gradengine.arrays.streams import ProducerStream
from gradengine.errors import BufferRefused

__all__ = ["Array", "Buffer", "RawBuffer"]

Array: TypeAlias = npt.NDArray[Any]

_LARGEST_ADDRESS = 1 << 63  # bytes; no machine has more, and the integers of C and NumPy end there


@dataclass(frozen=True)
class RawBuffer:
    """Memory that no framework object stands for.

    Args:
        pointer: Address of the first element.
        size: Elements.
        dtype: "float32", "float16" or "bfloat16"; a dtype of NumPy's or torch's of that name will do.
        device: "cpu", or a GPU's: "cuda:0".
        owner: Whatever must stay alive while the memory is in use. One that can say that its memory is gone (a weak
            reference, a map or shared memory that is closed) is asked at each call that reads or writes.
        writable: False where the memory may be read only.
        stream: Handle of the GPU's stream that the memory is worked on: our work on it is ordered behind what that
            stream has to do, and before what it is given next. 0 and 1 are the default stream; None orders nothing. It
            must live until the step is over.

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
        device = as_text(self.device)
        object.__setattr__(self, "dtype", dtype_name(self.dtype))
        object.__setattr__(self, "device", {"cpu:0": "cpu", "cuda": "cuda:0"}.get(device, device))
        object.__setattr__(self, "writable", truth_value("writable", self.writable))


@dataclass(eq=False)  # not frozen: 0.3 us instead of 1.2, and the way in makes one for each gradient
class Buffer:
    """A flat, contiguous view of somebody's memory; never changed once it is made.

    Attributes:
        pointer: Address of the first element.
        size: Elements.
        dtype: "float32", "float16" or "bfloat16".
        shape: The shape it came with.
        writable: Whether it may be a destination.
        owner: Kept alive for as long as this view is.
        device: "cpu", "cuda:0", ...
        data: The elements as a NumPy array, in the storage dtype (bf16 as uint16); None on a GPU.
        producer: Whose stream it is worked on; None where it is our own, or CuPy's, which works on the current stream.
    """

    pointer: int
    size: int
    dtype: str
    shape: tuple[int, ...]
    writable: bool
    owner: object
    device: str = "cpu"
    data: Any = None
    producer: ProducerStream | None = None

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.size * DTYPES[self.dtype].itemsize

    def part(self, start: int, stop: int) -> Buffer:
        """The elements start..stop - 1 of the same memory, flat."""
        pointer = self.pointer + start * DTYPES[self.dtype].itemsize
        data = None if self.data is None else self.data[start:stop]
        shape = (stop - start,)
        return Buffer(
            pointer, stop - start, self.dtype, shape, self.writable, self.owner, self.device, data, self.producer
        )

    def overlaps(self, other: Buffer) -> bool:
        """Whether any byte belongs to both."""
        if not self.size or not other.size:
            return False
        return self.pointer < other.pointer + other.nbytes and other.pointer < self.pointer + self.nbytes


def refuse_read_only(buffer: Buffer, destination: object, component: str) -> None:
    """Raise `BufferRefused` where a destination's memory may only be read."""
    if getattr(destination, "requires_grad", False):
        raise BufferRefused(
            f"destination '{component}' requires grad",
            got=type(destination).__name__,
            expected="memory that autograd does not watch",
            do="pass the parameter's .grad, or .detach() it",
        )
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
        raise BufferRefused(
            f"destinations '{names[pair[0]]}' and '{names[pair[1]]}' overlap in memory",
            do="pass arrays of their own; without out= the gradients are handed back in the arena",
        )


def overlapping(buffers: Sequence[Buffer]) -> tuple[int, int] | None:
    """The positions of two buffers that share memory, or None.

    Example:
        >>> whole = Buffer(4096, 4, "float32", (4,), True, None)
        >>> overlapping([whole.part(0, 3), whole.part(2, 4)])
        (0, 1)
    """
    order = sorted((i for i, b in enumerate(buffers) if b.size), key=lambda i: buffers[i].pointer)
    for before, after in itertools.pairwise(order):
        if buffers[before].pointer + buffers[before].nbytes > buffers[after].pointer:
            return min(before, after), max(before, after)
    return None


def strided(component: str, shape: Sequence[int], strides: Sequence[int]) -> BufferRefused:
    """The error for memory with gaps, or in another order; strides in elements."""
    return BufferRefused(
        f"component '{component}' is not contiguous",
        got=f"shape {tuple(shape)} with strides {tuple(strides)} (in elements)",
        expected=f"strides {contiguous_strides(shape)}",
        do="pass the array that owns the memory, or a contiguous copy",
    )


def raw_extent(raw: RawBuffer, component: str) -> tuple[int, int]:
    """A raw buffer's pointer and size as integers, its dtype checked; raises `BufferRefused`."""
    refuse_freed(raw.owner, component)
    if raw.dtype not in DTYPES:
        raise unsupported_dtype(component, str(raw.dtype))
    pointer, size = as_index(raw.pointer), as_index(raw.size)
    if pointer is None or size is None:
        raise no_memory(component, said(raw.pointer), raw.size)
    return pointer, size


def refuse_freed(owner: object, component: str) -> None:
    """Raise `BufferRefused` where the owner of a pointer's memory says that it is gone.

    >>> import mmap
    >>> freed = mmap.mmap(-1, 4096); freed.close()
    >>> refuse_freed(freed, "w")
    Traceback (most recent call last):
    gradengine.errors.BufferRefused: component 'w' lies in memory that its owner has freed: got a mmap that is closed...
    """
    how = freed(owner)
    if how:
        raise BufferRefused(
            f"component '{component}' lies in memory that its owner has freed",
            got=how,
            expected="an owner that is alive",
            do="keep the owner, and what it owns, until the step is over",
        )


def freed(owner: object) -> str | None:
    """How an owner says that its memory is gone; None where it does not."""
    try:
        return _said_by(owner)
    except ReferenceError:
        return "a weak reference to nothing"
    except Exception as fault:  # noqa: BLE001  (an owner's own code, and its own errors)
        return f"a {type(owner).__name__} that cannot say whether it is ({said(fault)})"


def _said_by(owner: object) -> str | None:
    if isinstance(owner, weakref.ref):
        return "a weak reference to nothing" if owner() is None else freed(owner())
    if isinstance(owner, memoryview):
        return _freed_view(owner)
    is_deleted = getattr(owner, "is_deleted", None)  # JAX
    if callable(is_deleted) and is_deleted() is True:
        return f"a {type(owner).__name__} that is deleted"
    has_no_buffer = type(owner).__name__ == "SharedMemory" and getattr(owner, "buf", None) is None
    if has_no_buffer or getattr(owner, "closed", False) is True:  # files and memory maps say so
        return f"a {type(owner).__name__} that is closed"
    return None


def _freed_view(view: memoryview) -> str | None:
    try:
        view.nbytes  # noqa: B018  (the only way to ask)
    except ValueError:
        return "a memoryview that is released"
    return None


def refuse_impossible(pointer: int, size: int, itemsize: int, component: str) -> None:
    """Raise `BufferRefused` where no elements of that size can lie."""
    if size < 0 or pointer < 0 or (pointer == 0 and size) or pointer + size * itemsize > _LARGEST_ADDRESS:
        raise no_memory(component, hex(pointer), size)
    if pointer % itemsize:
        raise BufferRefused(
            f"component '{component}' is not aligned to its elements",
            got=f"pointer {pointer:#x}",
            expected=f"a multiple of {itemsize}",
        )


def no_memory(component: str, pointer: object, size: object) -> BufferRefused:
    """The error for an address that stands for nothing."""
    return BufferRefused(
        f"component '{component}' is no memory",
        got=f"pointer {pointer}, size {said(size)}",
        expected="the address of allocated memory and a size >= 0",
    )


def wrong_device(component: str, got: str, expected: str) -> BufferRefused:
    """The error for memory on another device than the engine's."""
    return BufferRefused(
        f"component '{component}' lies on another device",
        got=got,
        expected=expected,
        do="bring all of a call's arrays to one device, and give the engine that one",
    )


def refuse_other_device(device: str, component: str, expected: Sequence[str] = ("cpu",)) -> None:
    """Raise `BufferRefused` unless the memory lies on one of the devices expected."""
    if device not in expected:
        raise wrong_device(component, device, expected[0])


def refuse_as_it_lies(tensor: Exported, component: str) -> None:
    """Raise `BufferRefused` where an exported tensor is strided or of another dtype than ours."""
    if not tensor.is_contiguous:
        raise strided(component, tensor.shape, tensor.strides)
    if tensor.dtype not in DTYPES:
        raise unsupported_dtype(component, tensor.dtype)
