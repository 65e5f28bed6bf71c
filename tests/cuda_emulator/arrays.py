"""Arrays in device memory, as CuPy's: the host sees their elements only through a copy, which waits."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .copies import DEVICE_TO_HOST, HOST_TO_DEVICE, copy, fill
from .device import Device
from .memory import Memory, MemoryPointer
from .queues import Work, add, finish_queue
from .record import note_copy, note_launch, note_wait
from .streams import Event, Stream, current_queue, get_current_stream

_KDL_CUDA = 2
_KDL_BFLOAT = 4


class ndarray:
    """An array in device memory.

    Args:
        shape: Of the array.
        dtype: Of its elements.
        memptr: Where it lies; memory of its own, uninitialised, where it is None.
        strides: In bytes; C-contiguous where they are None.
        order: Only "C".
    """

    __array_ufunc__ = None  # elementwise arithmetic is not emulated, and NumPy's must not read device memory
    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        shape: int | Sequence[int],
        dtype: npt.DTypeLike = float,
        memptr: MemoryPointer | None = None,
        strides: Sequence[int] | None = None,
        order: str = "C",
    ) -> None:
        dtype = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        memptr = alloc(nbytes) if memptr is None else memptr
        extent = nbytes if strides is None else int(sum((n - 1) * s for n, s in zip(shape, strides, strict=True)))
        extent = extent + dtype.itemsize if strides is not None and nbytes else nbytes
        self._elements: npt.NDArray[Any] = np.ndarray(shape, dtype, _bytes_at(memptr.ptr, extent), 0, strides)
        self.data = memptr

    @classmethod
    def _view(cls, elements: npt.NDArray[Any], memory: MemoryPointer) -> ndarray:
        array = cls.__new__(cls)
        array._elements = elements
        array.data = MemoryPointer(memory.mem, elements.ctypes.data - memory.mem.ptr) if elements.size else memory
        return array

    # ---- what it is ----

    @property
    def shape(self) -> tuple[int, ...]:
        return self._elements.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._elements.dtype

    @property
    def strides(self) -> tuple[int, ...]:
        return self._elements.strides

    @property
    def size(self) -> int:
        return self._elements.size

    @property
    def nbytes(self) -> int:
        return self._elements.nbytes

    @property
    def itemsize(self) -> int:
        return self._elements.itemsize

    @property
    def ndim(self) -> int:
        return self._elements.ndim

    @property
    def device(self) -> Device:
        return Device(self.data.device_id)

    @property
    def flags(self) -> Any:
        return self._elements.flags

    def __len__(self) -> int:
        return len(self._elements)

    def __repr__(self) -> str:
        return f"<device array, shape {self.shape}, {self.dtype}, at {self.data.ptr:#x}>"

    # ---- views ----

    def __getitem__(self, index: Any) -> ndarray:
        index = index if isinstance(index, tuple) else (index,)
        if Ellipsis not in index:
            index = (*index, Ellipsis)  # an element alone is a view of no dimensions, not a value
        return self._view(self._elements[index], self.data)

    def reshape(self, *shape: Any) -> ndarray:
        """The same memory in another shape."""
        if not self.flags.c_contiguous:
            raise NotImplementedError("reshaping an array that is not contiguous")
        return self._view(self._elements.reshape(*shape), self.data)

    def ravel(self) -> ndarray:
        """The same memory, flat."""
        return self.reshape(-1)

    def view(self, dtype: npt.DTypeLike | None = None) -> ndarray:
        """The same memory with another dtype."""
        return self._view(self._elements.view(dtype or self.dtype), self.data)

    @property
    def T(self) -> ndarray:
        return self._view(self._elements.T, self.data)

    # ---- to the host and back: these wait ----

    def get(self, stream: Any = None, order: str = "C", out: Any = None, blocking: bool = True) -> npt.NDArray[Any]:
        """A copy on the host, after all that the stream has now (the current one where it is None)."""
        queue = (stream or get_current_stream())._queue
        result: npt.NDArray[Any] = np.empty(self.shape, self.dtype) if out is None else out
        if self.size and self.flags.c_contiguous and result.flags.c_contiguous:
            copy(result.ctypes.data, self.data.ptr, self.nbytes, DEVICE_TO_HOST, queue, waits=blocking)
        else:
            note_copy("device to host")
            note_wait("copy")
            finish_queue(queue)
            result[...] = self._elements
        return result

    def set(self, arr: npt.NDArray[Any], stream: Any = None) -> None:
        """Copy from an array on the host; only pinned memory is read later."""
        if arr.dtype != self.dtype:
            raise TypeError(f"{arr.dtype} array cannot be set to {self.dtype} array")
        if arr.shape != self.shape:
            raise ValueError(f"an array of {self.shape} is set from one of {arr.shape}")
        if not self.flags.c_contiguous:
            raise RuntimeError("Cannot set to non-contiguous array")
        host = np.ascontiguousarray(arr)
        copy(self.data.ptr, host.ctypes.data, self.nbytes, HOST_TO_DEVICE, (stream or get_current_stream())._queue)

    def item(self) -> Any:
        """The only element."""
        return self.get().item()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        return self.get().item().__index__()  # type: ignore[no-any-return]

    def __bool__(self) -> bool:
        return bool(self.item())

    def __array__(self, *_: object, **__: object) -> Any:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct one.")

    def __eq__(self, other: object) -> Any:
        raise TypeError("elementwise == is not emulated: compare what .get() gives")

    # ---- work on the device ----

    def __setitem__(self, index: Any, value: Any) -> None:
        there = self[index]._elements
        source = value._elements if isinstance(value, ndarray) else np.array(value)
        if there.size:  # by a kernel of CuPy's own
            note_launch(f"cupy_copy__{source.dtype}_{there.dtype}" if isinstance(value, ndarray) else "cupy_fill")
        add(current_queue(), Work("assign", lambda: np.copyto(there, source, casting="unsafe")))

    def fill(self, value: Any) -> None:
        """Set every element."""
        self[...] = value

    def copy(self) -> ndarray:
        """The same elements in memory of their own."""
        return self.astype(self.dtype)

    def astype(self, dtype: npt.DTypeLike) -> ndarray:
        """A copy with another dtype."""
        result = ndarray(self.shape, dtype)
        result[...] = self
        return result

    # ---- to other frameworks ----

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "version": 3,
            "strides": None if self.flags.c_contiguous else self.strides,
            "data": (self.data.ptr if self.size else 0, False),
            "stream": get_current_stream().ptr or 1,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return _KDL_CUDA, 0

    def __dlpack__(
        self, *, stream: int | None = None, max_version: Any = None, dl_device: Any = None, copy: Any = None
    ) -> Any:
        """A capsule of this memory; the consumer's stream waits for the current one."""
        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise BufferError("only a view on the same device is given")
        if stream is not None and stream != -1:
            event = Event()
            event.record()
            event._make_wait(Stream.from_external(_Handle(stream))._queue)
        is_bfloat16 = self.dtype.name == "bfloat16"
        lender = _Lender(self._elements.view(np.uint16) if is_bfloat16 else self._elements, self.data)
        capsule = lender.elements.__dlpack__()
        _mark_as_cuda(capsule, is_bfloat16)
        return capsule


class _Handle:
    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer


class _Memory:
    """Memory at an address for NumPy; whoever makes an array of it keeps it alive, and with it its owner."""

    def __init__(self, address: int, size: int, owner: object = None) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}
        self.owner = owner


def _bytes_at(address: int, size: int, owner: object = None) -> Any:
    return np.asarray(_Memory(address, size, owner)) if size else np.empty(0, np.uint8)


class _Lender:
    """A NumPy array of device memory that keeps the memory allocated, for a DLPack capsule to refer to."""

    def __init__(self, elements: npt.NDArray[Any], memory: MemoryPointer) -> None:
        extent = elements.nbytes if elements.flags.c_contiguous else _extent(elements)
        base = _bytes_at(memory.ptr, extent, memory)
        self.elements: npt.NDArray[Any] = np.ndarray(elements.shape, elements.dtype, base, 0, elements.strides)


def _extent(elements: npt.NDArray[Any]) -> int:
    steps = zip(elements.shape, elements.strides, strict=True)
    return int(sum((size - 1) * stride for size, stride in steps)) + elements.itemsize


_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


class _Tensor(ctypes.Structure):  # the head of DLPack's DLTensor
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
    )


def _mark_as_cuda(capsule: Any, is_bfloat16: bool) -> None:
    tensor = _Tensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    tensor.device_type, tensor.device_id = _KDL_CUDA, 0
    if is_bfloat16:
        tensor.code = _KDL_BFLOAT


# ---- making them ----


def alloc(size: int) -> MemoryPointer:
    """Device memory, uninitialised."""
    return MemoryPointer(Memory(int(size), current_queue()), 0)


def empty(shape: int | Sequence[int], dtype: npt.DTypeLike = float) -> ndarray:
    """An array whose elements are NaN until they are written (CuPy's are whatever was there)."""
    return ndarray(shape, dtype)


def zeros(shape: int | Sequence[int], dtype: npt.DTypeLike = float) -> ndarray:
    """An array of zeros; they are written when the current stream's turn comes."""
    array = ndarray(shape, dtype)
    if array.size:
        fill(array.data.ptr, 0, array.nbytes, current_queue())
    return array


def asarray(a: Any, dtype: npt.DTypeLike | None = None) -> ndarray:
    """A device array itself, or a host array's elements in device memory."""
    if isinstance(a, ndarray):
        return a if dtype is None or a.dtype == dtype else a.astype(dtype)
    host = np.ascontiguousarray(a, dtype).reshape(np.shape(a))
    array = ndarray(host.shape, host.dtype)
    if host.size:
        array.set(host)
    return array


array = asarray


def asnumpy(a: Any) -> npt.NDArray[Any]:
    """A host array of the same elements."""
    return a.get() if isinstance(a, ndarray) else np.asarray(a)


__all__ = ["alloc", "array", "asarray", "asnumpy", "empty", "ndarray", "zeros"]
