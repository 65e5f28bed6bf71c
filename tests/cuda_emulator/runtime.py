"""CUDA's runtime functions, as cupy.cuda.runtime names them."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import copies, queues
from .copies import DEFAULT, DEVICE_TO_DEVICE, DEVICE_TO_HOST, HOST_TO_DEVICE, HOST_TO_HOST
from .errors import CUDARuntimeError, OutOfMemoryError
from .memory import ADDRESSES, DEVICE, HOST, POOL, Memory
from .record import note_wait
from .settings import settings
from .streams import event_at

memcpyHostToHost = HOST_TO_HOST
memcpyHostToDevice = HOST_TO_DEVICE
memcpyDeviceToHost = DEVICE_TO_HOST
memcpyDeviceToDevice = DEVICE_TO_DEVICE
memcpyDefault = DEFAULT
memoryTypeUnregistered = 0
memoryTypeHost = HOST
memoryTypeDevice = DEVICE
hostAllocPortable = 1
streamCaptureModeGlobal = queues.GLOBAL
streamCaptureModeThreadLocal = queues.THREAD_LOCAL
streamCaptureModeRelaxed = queues.RELAXED

__all__ = ["CUDARuntimeError"]


class PointerAttributes(NamedTuple):
    """What CUDA knows of an address."""

    device: int
    devicePointer: int
    hostPointer: int
    type: int


def getDeviceCount() -> int:
    """At least 1, or an error."""
    if settings().device_count < 1:
        raise CUDARuntimeError(100)
    return settings().device_count


def getDevice() -> int:
    """The current device."""
    getDeviceCount()
    return 0


def setDevice(device: int) -> None:
    """There is only device 0."""
    if not 0 <= device < getDeviceCount():
        raise CUDARuntimeError(101)


def getDeviceProperties(device: int) -> dict[str, Any]:
    """Those that matter to launchers."""
    setDevice(device)
    return {
        "name": b"CUDA emulator",
        "totalGlobalMem": settings().device_memory,
        "sharedMemPerBlock": 48 << 10,
        "sharedMemPerBlockOptin": 96 << 10,
        "regsPerBlock": 65536,
        "warpSize": 32,
        "maxThreadsPerBlock": 1024,
        "maxThreadsDim": (1024, 1024, 64),
        "maxGridSize": (2**31 - 1, 65535, 65535),
        "maxThreadsPerMultiProcessor": 2048,
        "multiProcessorCount": 4,
        "major": 8,
        "minor": 0,
        "l2CacheSize": 4 << 20,
        "concurrentKernels": 1,
        "unifiedAddressing": 1,
    }


def driverGetVersion() -> int:
    """12.8, or what the settings say."""
    return settings().driver_version


def runtimeGetVersion() -> int:
    """12.8."""
    return 12080


def deviceSynchronize() -> None:
    """Wait for all streams."""
    note_wait("device")
    queues.finish_all()


def streamSynchronize(stream: int) -> None:
    """Wait for a stream."""
    note_wait("stream")
    queues.finish_queue(queues.queue_at(stream))


def streamIsCapturing(stream: int) -> bool:
    """Whether its work is recorded."""
    return queues.is_capturing(queues.queue_at(stream))


def eventQuery(event: int) -> int:
    """Whether an event is done: 0, 600 where it is not yet, or an error's number, which is not raised."""
    return event_at(event).query()


def eventSynchronize(event: int) -> None:
    """Wait for an event."""
    event_at(event).synchronize()


def memGetInfo() -> tuple[int, int]:
    """Bytes that are free, and all."""
    getDeviceCount()
    return settings().device_memory - POOL.total_bytes(), settings().device_memory


_allocated: dict[int, Memory] = {}  # by address


def malloc(size: int) -> int:
    """The address of memory that stays until `free`; the pool counts it, which CuPy's does not."""
    try:
        memory = Memory(size, queues.NULL)
    except OutOfMemoryError:
        raise CUDARuntimeError(2) from None
    if memory.ptr:
        _allocated[memory.ptr] = memory
    return memory.ptr


def free(ptr: int) -> None:
    """Give back what `malloc` gave, when all streams are done; 0 is nothing."""
    if ptr and ptr not in _allocated:
        raise CUDARuntimeError(1)
    deviceSynchronize()
    _allocated.pop(ptr, None)


def memcpy(dst: int, src: int, size: int, kind: int) -> None:
    """Copy on the default stream, and wait for it."""
    copies.copy(dst, src, size, kind, queues.NULL, waits=True)


def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:
    """Copy on a stream."""
    copies.copy(dst, src, size, kind, queues.queue_at(stream))


def memsetAsync(ptr: int, value: int, size: int, stream: int) -> None:
    """Set bytes on a stream."""
    copies.fill(ptr, value, size, queues.queue_at(stream))


def pointerGetAttributes(ptr: int) -> PointerAttributes:
    """Whose memory an address is."""
    kind = ADDRESSES.kind(ptr)
    if kind == DEVICE:
        return PointerAttributes(0, ptr, 0, DEVICE)
    if kind == HOST:
        return PointerAttributes(0, ptr, ptr, HOST)
    return PointerAttributes(-2, 0, ptr, 0)
