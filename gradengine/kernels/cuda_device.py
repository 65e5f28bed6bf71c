"""A GPU as a device, with streams and borrowed memory, over CuPy's memory and events.

Events order the engine's work and the producers' work, so the host need not wait. A known producer stream waits for the
engine's work. Its memory may be freed at any time, since later work on that stream runs afterwards. Memory of a
producer whose stream is unknown is kept alive until the engine's work is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import numpy as np
import numpy.typing as npt

from gradengine.arrays.buffer import Buffer, RawBuffer
from gradengine.arrays.device import device_buffer, exporting_stream
from gradengine.arrays.streams import ProducerStream, stream_handle
from gradengine.errors import CallerError
from gradengine.kernels.cuda_runtime import CudaRuntime
from gradengine.kernels.events import Entered
from gradengine.kernels.graphs import CudaGraph
from gradengine.kernels.operands import producers_of
from gradengine.kernels.streams import StreamOrder


@final
class CudaDevice(CudaRuntime):
    """One GPU. Work is queued on the calling thread's current CuPy stream."""

    def graph(self) -> CudaGraph:
        """See `Device.graph`. The graph is recorded on a separate stream, one at a time."""
        return CudaGraph(self)

    def on(self, stream: object) -> AbstractContextManager[object]:
        """See `Device.on`. Takes a CuPy stream, an object with `__cuda_stream__` or `cuda_stream`, or a handle."""
        if stream is None:
            return nullcontext()
        is_cupys = isinstance(stream, self.xp.cuda.Stream)
        entered: Any = stream if is_cupys else self.stream_of(stream_handle(stream), stream)
        return Entered(self.active(), entered)

    def views(self, sources: Sequence[object], components: Sequence[str]) -> list[Buffer]:
        """See `Device.views`. Takes memory of this device only."""
        # DLPack exports from the current device only, and CuPy's interface has the current stream.
        with self.active():
            current = self.current_stream()
            # In DLPack's numbering 1 is the default stream, and -1 (in a capture) means no ordering.
            stream = -1 if current.is_capturing() else int(current.ptr) or 1
            named = list(zip(sources, components, strict=True))
            views = [
                device_buffer(source, component, self.name, self.array_type, stream) for source, component in named
            ]
            behind = set(producers_of(views))
            for (source, component), view in zip(named, views, strict=True):
                if isinstance(source, RawBuffer) or not hasattr(source, "__dlpack__"):
                    self.refuse_foreign(view, component)  # Only the address shows the device.
                    named_stream = exporting_stream(source)
                    behind |= {named_stream} if named_stream else set()
        self.wait_for(behind)
        return views

    def wait_for(self, producers: Iterable[ProducerStream]) -> None:
        """See `Device.wait_for`. Orders nothing while a graph is recorded, since the graph is ordered when it runs."""
        self.let_go()
        handles = self._others(producer.stream() for producer in producers)
        self._refuse_recording(handles)
        for handle in handles:
            with self.active():
                self.current_stream().wait_event(self.behind(handle))

    def hand_over(self, producers: Iterable[ProducerStream]) -> None:
        self.give_back(producers, None)

    def give_back(
        self, producers: Iterable[ProducerStream], borrowed: Sequence[Buffer | None] | None, owners: object = None
    ) -> None:
        """Make the producers' streams wait for the work queued so far. If one is unknown, keep the borrowed memory.

        If much memory is kept, this waits for the oldest work, so that a host that runs ahead keeps a bounded amount
        (`Kept.lent`).
        """
        self.let_go()
        streams = [producer.stream() for producer in producers]
        handles, is_kept = self._others(streams), borrowed is not None and None in streams
        if not (handles or is_kept) or self.is_capturing():
            return
        self._refuse_recording(handles)  # A wait would void the graph that is recorded there.
        done = self.record()
        for handle in handles:
            with self.active():
                self.stream_of(handle).wait_event(done)
        if borrowed is not None and is_kept:
            nbytes = sum([buffer.nbytes for buffer in borrowed if buffer is not None])
            self.kept.lent(done, (borrowed, owners), nbytes)

    def storage_array(self, buffer: Buffer) -> Any:
        """Return any buffer as a flat CuPy array of its bits (fp32 or uint16), without a copy."""
        return self.array(buffer, (buffer.size,), np.float32 if buffer.dtype == "float32" else np.uint16)

    def order(self, memory: Buffer | None = None) -> StreamOrder:
        return StreamOrder(self, memory.owner if memory else None)

    def in_parts(self, arena: Buffer) -> DeviceArena:
        """See `Device.in_parts`. The copies run on separate streams."""
        return DeviceArena(self, arena)

    def _refuse_recording(self, handles: Iterable[int]) -> None:
        for handle in handles:
            if self.records(handle):
                raise CallerError(
                    "the framework that made the gradients is recording a graph on its stream",
                    got=f"stream {handle:#x}",
                    do="call the engine outside of that capture (engine.capture() records a separate graph)",
                )

    def _others(self, streams: Iterable[int | None]) -> set[int]:
        """Return the streams among these that are not the current one, or none if the current one records a graph."""
        handles = {handle for handle in streams if handle is not None} - {self.current_stream().ptr}
        return set() if not handles or self.is_capturing() else handles


class DeviceArena:
    """A GPU's arena, whose parts are copied to pinned memory and back while work on other parts continues.

    Each direction has a separate stream.
    """

    def __init__(self, device: CudaRuntime, arena: Buffer) -> None:
        self._device, self._arena = device, device.array(arena, (arena.size,))
        with device.active():
            self._streams = [device.xp.cuda.Stream(non_blocking=True) for _ in range(2)]
        self._noted: dict[int | str, Any] = {}  # events by key
        self._begun: list[tuple[Any, Any]] = []  # the event after each copy, and the copy's name

    @property
    def is_copying(self) -> bool:
        """Whether a copy was begun that `poll` has not returned."""
        return bool(self._begun)

    def rows(self, count: int, size: int) -> Sequence[npt.NDArray[np.float32]]:
        """Return `count` rows of `size` elements of pinned memory for copies."""
        return list(self._device.pinned(count * size, np.float32).reshape(count, size)) if count * size else []

    def note(self, key: int | str) -> None:
        """Make copies whose `behind` is this key wait for all work queued on the current stream now."""
        self._noted[key] = self._device.record()

    def copy(
        self, name: Any, row: npt.NDArray[np.float32], start: int, *, is_to_arena: bool, behind: int | str
    ) -> None:
        """Begin a copy between a row and as many elements of the arena from `start` on, without waiting."""
        stream, part = self._streams[is_to_arena], self._arena[start : start + row.size]
        with self._device.active(), stream:
            stream.wait_event(self._noted[behind])
            (self._device.copy_to if is_to_arena else self._device.copy_from)(part, row)
            self._begun.append((self._device.record(), name))

    def poll(self, *, waits: bool = False) -> list[Any]:
        """Return the names of the copies that have ended since the last call. With `waits`, wait for all copies."""
        events = self._device.events
        if waits:
            for event, _ in self._begun:
                events.wait(event)
        over = [copy for copy in self._begun if waits or events.is_done(copy[0])]
        self._begun = [copy for copy in self._begun if copy not in over]
        return [name for _, name in over]
