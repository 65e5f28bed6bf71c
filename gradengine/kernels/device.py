"""The interface of a device, with its memory, streams and graphs. Computations are in `interface.py`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from gradengine.arrays.buffer import Buffer, refuse_read_only
from gradengine.arrays.streams import ProducerStream

Answer = TypeVar("Answer")

_IN_ORDER: AbstractContextManager[None] = nullcontext()


class Graph(AbstractContextManager["Graph"], ABC):
    """A context in which work is recorded and not run. Each replay runs the work.

    Attributes:
        kept: Memory that the work reads or writes. It is kept alive until the last run is over, even if the graph is
            dropped.
    """

    kept: list[Any]

    @abstractmethod
    def replay(self) -> None:
        """Queue the recorded work on the current stream."""


class Order:
    """The order of work on some memory, over all streams. This one is the host's, and the base class of a device's.

    On the host, work is done when a call returns.
    """

    def use(self) -> AbstractContextManager[None]:
        """Return a context in which work is ordered after all earlier and before all later work on this memory."""
        return _IN_ORDER

    def follow(self) -> None:
        """Make the current streams, of any device, wait for all work queued on this memory."""

    def read(self, array: Any) -> npt.NDArray[Any]:
        """Copy an array in this memory to the host, after the work queued on it. Wait for that work only."""
        return np.array(array)


class Device(ABC):
    """Memory, streams and graphs of one device. Its current stream is the calling thread's.

    The methods with a body are those of a device without streams or graphs.

    Attributes:
        name: The name, such as "cpu" or "cuda:0".
        array_type: The class of the device's arrays, NumPy's or CuPy's.
    """

    name: str
    array_type: type

    def graph(self) -> Graph | None:
        """Return a new graph to be recorded, or None on the CPU, which has no graphs."""
        return None

    @abstractmethod
    def on(self, stream: object) -> AbstractContextManager[object]:
        """Return a context in which work is queued on a stream, None for the current one.

        Raises `CallerError` for a stream if the device has no streams.
        """

    def refuse_failed(self, *, asks: bool = False) -> None:  # noqa: B027  (the CPU has nothing to do)
        """Raise `DeviceFailed` if the device is known to have failed. `asks` also queries the driver."""

    def relaxed(self, call: Callable[..., Answer], *arguments: Any) -> Answer:
        """Make a call that may wait for the device, without voiding a graph that another thread records."""
        return call(*arguments)

    def is_capturing(self) -> bool:
        """Return whether the current stream records a graph instead of working."""
        return False

    @abstractmethod
    def views(self, sources: Sequence[object], components: Sequence[str]) -> list[Buffer]:
        """Return flat views of arrays on this device. Work that is queued next waits for the producers' work.

        Raises:
            BufferRefused: An array's dtype, device, strides or memory is not supported.
        """

    def view(self, source: object, component: str) -> Buffer:
        """Return a flat view of one array, as `views`. Raises `BufferRefused`."""
        return self.views([source], [component])[0]

    def writable_views(self, destinations: Sequence[object], components: Sequence[str]) -> list[Buffer]:
        """Return flat views of memory that will be written. Raises `BufferRefused`."""
        views = self.views(destinations, components)
        for view, destination, component in zip(views, destinations, components, strict=True):
            refuse_read_only(view, destination, component)
        return views

    def writable_view(self, destination: object, component: str) -> Buffer:
        """Return a flat view of memory that will be written. Raises `BufferRefused`."""
        return self.writable_views([destination], [component])[0]

    def wait_for(self, producers: Iterable[ProducerStream]) -> None:  # noqa: B027  (the CPU has nothing to do)
        """Make work that is queued next wait for all work queued on these producers' streams."""

    def hand_over(self, producers: Iterable[ProducerStream]) -> None:  # noqa: B027  (the CPU has nothing to do)
        """Make these producers' streams wait for all work queued here, so that they may read a step's results."""

    @abstractmethod
    def allocate(self, size: int, *, is_shared: bool = False) -> Buffer:
        """Return an fp32 buffer of `size` elements, 128-byte aligned, with undefined contents.

        On the CPU, other processes of this host can map a buffer with `is_shared`. Raises `OutOfDeviceMemory`.
        """

    @abstractmethod
    def array(self, buffer: Buffer, shape: tuple[int, ...]) -> Any:
        """Return a buffer from `allocate` as the device's class of array, in that shape, without a copy."""

    @abstractmethod
    def write(self, buffer: Buffer, values: npt.NDArray[np.float32]) -> None:
        """Queue a copy of host values to a buffer from `allocate`. The values may change after the call."""

    def order(self, memory: Buffer | None = None) -> Order:
        """Return the order of work on memory of this device. It keeps `memory` alive until work on it is done."""
        return Order()

    def in_parts(self, arena: Buffer) -> Any:
        """Return a `DeviceArena`, which copies parts of an arena to the host and back. On the CPU return its array."""
        return arena.data
