"""A device: its memory, its streams and its graphs, as one interface. What is computed there is the kernels' affair."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt

from gradengine.arrays.buffer import Buffer, refuse_read_only
from gradengine.arrays.streams import ProducerStream
from gradengine.kernels.operands import Contribution, Destinations


class Graph(AbstractContextManager["Graph"], ABC):
    """Work that is recorded within the `with` of it, and not done; each replay does it.

    Attributes:
        kept: Memory that it reads or writes: it outlives the last run, also where this is dropped before.
        lent: The callers' arrays among that, in whose place `repoint` puts others.
    """

    kept: list[Any]
    lent: list[Any]

    @abstractmethod
    def replay(self) -> None:
        """Queue the work on the current stream."""

    @abstractmethod
    def repoint(
        self, contributions: Sequence[Contribution], destinations: Destinations | None, lent: Sequence[Any]
    ) -> None:
        """Queue one copy after which replays read these contributions, in the recorded ones' order, and write there.

        Each has gradients for the same components as the recorded one; None leaves the destinations as they are.
        """


class Order(ABC):
    """The order of work on some memory, over all streams that it is queued on."""

    @abstractmethod
    def use(self) -> AbstractContextManager[None]:
        """Work queued in it comes behind what was queued on the memory before, and before what will be."""

    @abstractmethod
    def follow(self) -> None:
        """Have whoever reads next come behind what was queued, whatever stream and device are current."""

    @abstractmethod
    def read(self, array: Any) -> npt.NDArray[Any]:
        """A copy on the host of an array in this memory, behind what was queued; waits for that alone."""


class DeviceArena(ABC):
    """A device's arena, parts of which are copied to host memory and back while work on other parts goes on."""

    @property
    @abstractmethod
    def is_copying(self) -> bool:
        """Whether a copy was begun that `poll` has not returned."""

    @abstractmethod
    def rows(self, count: int, size: int) -> Sequence[npt.NDArray[np.float32]]:
        """Host memory for copies: `count` rows of `size` elements."""

    @abstractmethod
    def note(self, key: int | str) -> None:
        """Have copies `behind` this key, of a span perhaps, come behind what the current stream has to do now."""

    @abstractmethod
    def copy(
        self, name: Any, row: npt.NDArray[np.float32], start: int, *, is_to_arena: bool, behind: int | str
    ) -> None:
        """Begin a copy between a row and as many elements of the arena, from `start` on; never waits."""

    @abstractmethod
    def poll(self, *, waits: bool = False) -> list[Any]:
        """The names of the copies that are over since the last call; `waits` for all that were begun."""


class Device(ABC):
    """Memory, streams and graphs of one device; its current stream is the calling thread's.

    Attributes:
        name: "cpu", "cuda:0", ...
    """

    name: str

    @abstractmethod
    def graph(self) -> Graph | None:
        """A graph to be recorded; None where there are none, as on the CPU."""

    @abstractmethod
    def on(self, stream: object) -> AbstractContextManager[object]:
        """Within it, work is queued on that stream; None is the current one. Raises `CallerError` without streams."""

    @abstractmethod
    def is_capturing(self) -> bool:
        """Whether the current stream records a graph instead of working."""

    @abstractmethod
    def views(self, sources: Sequence[object], components: Sequence[str]) -> list[Buffer]:
        """Flat views of arrays on this device; what is queued next comes behind their producers' work.

        Raises:
            BufferRefused: One cannot be taken as it lies.
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

    @abstractmethod
    def wait_for(self, producers: Iterable[ProducerStream]) -> None:
        """Have what is queued next come behind what these producers' streams have to do now."""

    @abstractmethod
    def hand_over(self, producers: Iterable[ProducerStream]) -> None:
        """Have these producers' streams wait for all that was queued: a step's results are theirs to read."""

    @abstractmethod
    def allocate(self, size: int, *, is_shared: bool = False) -> Buffer:
        """An fp32 buffer of `size` elements, 128-byte aligned, its contents undefined; raises `OutOfDeviceMemory`.

        On the CPU one that `is_shared` can be mapped by other processes of this host.
        """

    @abstractmethod
    def refuse_to_exceed(self, nbytes: int, what: str) -> None:
        """Raise `OutOfDeviceMemory` where a GPU has not so many bytes left; before anything is taken."""

    @abstractmethod
    def array(self, buffer: Buffer, shape: tuple[int, ...]) -> Any:
        """One of our fp32 buffers as the device's own kind of array (NumPy, CuPy), in that shape; no copy."""

    @abstractmethod
    def write(self, buffer: Buffer, values: npt.NDArray[np.float32]) -> None:
        """Queue a copy of host values, as they are now, into one of our fp32 buffers."""

    @abstractmethod
    def order(self, memory: Buffer | None = None) -> Order:
        """The order of work on memory of this device; ours stays alive until that is done, whoever drops it before."""

    @abstractmethod
    def in_parts(self, arena: Buffer) -> npt.NDArray[np.float32] | DeviceArena:
        """An arena whose parts are copied to the host and back; the CPU's as it is."""
