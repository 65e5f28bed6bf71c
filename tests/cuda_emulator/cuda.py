"""What stands in cupy.cuda."""

from types import SimpleNamespace

from . import memory, nvrtc, queues, runtime
from .arrays import alloc
from .device import Device
from .memory import (
    BaseMemory,
    MemoryPointer,
    PinnedMemory,
    PinnedMemoryPointer,
    UnownedMemory,
    alloc_pinned_memory,
)
from .settings import settings
from .streams import Event, ExternalStream, Graph, Stream, get_current_stream

__all__ = [
    "BaseMemory",
    "Device",
    "Event",
    "ExternalStream",
    "Graph",
    "MemoryPointer",
    "PinnedMemory",
    "PinnedMemoryPointer",
    "Stream",
    "UnownedMemory",
    "alloc",
    "alloc_pinned_memory",
    "get_current_stream",
    "is_available",
    "libcuda",
    "memory",
    "nvrtc",
    "runtime",
]


libcuda = SimpleNamespace(cuThreadExchangeStreamCaptureMode=queues.exchange_mode)


def is_available() -> bool:
    """Whether there is a device."""
    return settings().device_count > 0
