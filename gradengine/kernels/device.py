"""A device as one interface: its memory, streams and graphs. Computations are in `interface.py`."""

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
    """A context in which work is recorded, not done; each replay does it.

    Attributes:
        kept: Memory that the work reads or writes: kept alive until the last run is over, even if the graph is dropped.
    """

    kept: list[Any]

    @abstractmethod
    def replay(self) -> None:
        """Queue the work on the current stream."""


class Order:
    """The order of work on some memory, over all streams on which it is queued. The host's, where work is done at once.

    It is the base class of a device's order.
    """

    def use(self) -> AbstractContextManager[None]:
        """Return a context in which work is ordered after all earlier and before all later work on this memory."""
        return _IN_ORDER

    def follow(self) -> None:
        """Make the current streams, of any device, wait for all work queued on this memory."""

    def read(self, array: Any) -> npt.NDArray[Any]:
        """Copy an array in this memory to the host, after the work queued on it; wait for that work only."""
        return np.array(array)


class Device(ABC):
    """Memory, streams and graphs of one device; its current stream is the calling thread's.

    The methods with a body are those of a device without streams or graphs.

    Attributes:
        name: "cpu", "cuda:0", ...
        array_type: The class of the device's own arrays: NumPy's or CuPy's.
    """

    name: str
    array_type: type

    def graph(self) -> Graph | None:
        """A new graph to be recorded; None if the device has none, as the CPU."""
        return None

    @abstractmethod
    def on(self, stream: object) -> AbstractContextManager[object]:
        """A context in which work is queued on a stream; None is the current one. `CallerError` without streams."""

    def refuse_failed(self, *, asks: bool = False) -> None:  # noqa: B027  (the CPU has nothing to do)
        """Raise `DeviceFailed` if the device is known to have failed; with `asks`, if it has, as its driver says."""

    def relaxed(self, call: Callable[..., Answer], *arguments: Any) -> Answer:
        """Make a call that may wait for the device or its driver, and voids no graph that another thread records."""
        return call(*arguments)

    def is_capturing(self) -> bool:
        """Whether the current stream records a graph instead of working."""
        return False

    @abstractmethod
    def views(self, sources: Sequence[object], components: Sequence[str]) -> list[Buffer]:
        """Flat views of arrays on this device; work that is queued next waits for their producers' work.

        Raises:
            BufferRefused: An array's dtype, device, strides or memory is not supported.
        """

    def view(self, source: object, component: str) -> Buffer:
        """A flat view of one array, as `views`; raises `BufferRefused`."""
        return self.views([source], [component])[0]

    def writable_views(self, destinations: Sequence[object], components: Sequence[str]) -> list[Buffer]:
        """Flat views of memory that will be written; raises `BufferRefused`."""
        views = self.views(destinations, components)
        for view, destination, component in zip(views, destinations, components, strict=True):
            refuse_read_only(view, destination, component)
        return views

    def writable_view(self, destination: object, component: str) -> Buffer:
        """A flat view of memory that will be written; raises `BufferRefused`."""
        return self.writable_views([destination], [component])[0]

    def wait_for(self, producers: Iterable[ProducerStream]) -> None:  # noqa: B027  (the CPU has nothing to do)
        """Make work that is queued next wait for all work queued on these producers' streams."""

    def hand_over(self, producers: Iterable[ProducerStream]) -> None:  # noqa: B027  (the CPU has nothing to do)
        """Make these producers' streams wait for all work queued here, so that they may read a step's results."""

    @abstractmethod
    def allocate(self, size: int, *, is_shared: bool = False) -> Buffer:
        """An fp32 buffer of `size` elements, 128-byte aligned, its contents undefined; raises `OutOfDeviceMemory`.

        On the CPU a buffer with `is_shared` can be mapped by other processes of this host.
        """

    @abstractmethod
    def array(self, buffer: Buffer, shape: tuple[int, ...]) -> Any:
        """One of our fp32 buffers as the device's own kind of array (NumPy, CuPy), in that shape; no copy."""

    @abstractmethod
    def write(self, buffer: Buffer, values: npt.NDArray[np.float32]) -> None:
        """Queue a copy of host values, as they are now, to one of our fp32 buffers."""

    def order(self, memory: Buffer | None = None) -> Order:
        """The order of work on memory of this device; keeps `memory`, if given, alive until work on it is done."""
        return Order()

    def in_parts(self, arena: Buffer) -> Any:
        """A `DeviceArena`, which copies parts of an arena to the host and back; on the CPU the arena itself."""
        return arena.data
