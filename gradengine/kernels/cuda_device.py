"""A GPU as a device: streams and borrowed memory, over CuPy's memory and events.

Our work and the producers' own are ordered by events; the host never waits. A known producer stream waits for our work,
so that its memory may be freed at any time: later work on that stream comes after ours. Memory of a producer whose
stream is unknown is kept alive until our work is done.
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
    """One GPU; work is queued on the calling thread's current CuPy stream."""

    def graph(self) -> CudaGraph:
        """See `Device.graph`; recorded on a separate stream, one at a time."""
        return CudaGraph(self)

    def on(self, stream: object) -> AbstractContextManager[object]:
        """See `Device.on`; a CuPy stream, an object with `__cuda_stream__` or `cuda_stream` (torch), or a handle."""
        if stream is None:
            return nullcontext()
        is_cupys = isinstance(stream, self.xp.cuda.Stream)
        entered: Any = stream if is_cupys else self.stream_of(stream_handle(stream), stream)
        return Entered(self.active(), entered)

    def views(self, sources: Sequence[object], components: Sequence[str]) -> list[Buffer]:
        """See `Device.views`; memory of this device only."""
        with self.active():  # DLPack exports from the current device only, and CuPy names its current stream
            current = self.current_stream()
            # As DLPack counts them: 1 is the default one; -1, in a capture, asks for no ordering.
            stream = -1 if current.is_capturing() else int(current.ptr) or 1
            named = list(zip(sources, components, strict=True))
            views = [
                device_buffer(source, component, self.name, self.array_type, stream) for source, component in named
            ]
            behind = set(producers_of(views))
            for (source, component), view in zip(named, views, strict=True):
                if isinstance(source, RawBuffer) or not hasattr(source, "__dlpack__"):
                    self.refuse_foreign(view, component)  # only an address says where it is
                    named_stream = exporting_stream(source)
                    behind |= {named_stream} if named_stream else set()
        self.wait_for(behind)
        return views

    def wait_for(self, producers: Iterable[ProducerStream]) -> None:
        """See `Device.wait_for`. While a graph is recorded nothing is ordered: the graph is, when it runs."""
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
        """Make the producers' streams wait for what was queued so far; if one is unknown, keep the borrowed memory.

        To bound what a host that runs ahead keeps, this waits for the oldest work when much is kept (`Kept.lent`).
        """
        self.let_go()
        streams = [producer.stream() for producer in producers]
        handles, is_kept = self._others(streams), borrowed is not None and None in streams
        if not (handles or is_kept) or self.is_capturing():
            return
        self._refuse_recording(handles)  # to wait would void the graph that is recorded there
        done = self.record()
        for handle in handles:
            with self.active():
                self.stream_of(handle).wait_event(done)
        if borrowed is not None and is_kept:
            nbytes = sum([buffer.nbytes for buffer in borrowed if buffer is not None])
            self.kept.lent(done, (borrowed, owners), nbytes)

    def storage_array(self, buffer: Buffer) -> Any:
        """Any buffer as a flat CuPy array of its bits: fp32 as it is, the short dtypes as uint16; no copy."""
        return self.array(buffer, (buffer.size,), np.float32 if buffer.dtype == "float32" else np.uint16)

    def order(self, memory: Buffer | None = None) -> StreamOrder:
        return StreamOrder(self, memory.owner if memory else None)

    def in_parts(self, arena: Buffer) -> DeviceArena:
        """See `Device.in_parts`; on streams of their own."""
        return DeviceArena(self, arena)

    def _refuse_recording(self, handles: Iterable[int]) -> None:
        for handle in handles:
            if self.records(handle):
                raise CallerError(
                    "the framework that made the gradients is recording a graph on its stream",
                    got=f"stream {handle:#x}",
                    do="call the engine outside of that capture; engine.capture() records another graph",
                )

    def _others(self, streams: Iterable[int | None]) -> set[int]:
        """The streams among these that are not the current one; none if the current one records a graph."""
        handles = {handle for handle in streams if handle is not None} - {self.current_stream().ptr}
        return set() if not handles or self.is_capturing() else handles


class DeviceArena:
    """A GPU's arena. Its parts are copied to pinned memory and back while work on other parts continues.

    Each direction has a separate stream.
    """

    def __init__(self, device: CudaRuntime, arena: Buffer) -> None:
        self._device, self._arena = device, device.array(arena, (arena.size,))
        with device.active():
            self._streams = [device.xp.cuda.Stream(non_blocking=True) for _ in range(2)]
        self._noted: dict[int | str, Any] = {}  # events
        self._begun: list[tuple[Any, Any]] = []  # an event after each copy, and the copy's name

    @property
    def is_copying(self) -> bool:
        """Whether a copy was begun that `poll` has not returned."""
        return bool(self._begun)

    def rows(self, count: int, size: int) -> Sequence[npt.NDArray[np.float32]]:
        """Pinned memory for copies: `count` rows of `size` elements."""
        return list(self._device.pinned(count * size, np.float32).reshape(count, size)) if count * size else []

    def note(self, key: int | str) -> None:
        """Make copies whose `behind` is this key wait for all work queued on the current stream now."""
        self._noted[key] = self._device.record()

    def copy(
        self, name: Any, row: npt.NDArray[np.float32], start: int, *, is_to_arena: bool, behind: int | str
    ) -> None:
        """Begin a copy between a row and as many elements of the arena, starting at `start`; never waits."""
        stream, part = self._streams[is_to_arena], self._arena[start : start + row.size]
        with self._device.active(), stream:
            stream.wait_event(self._noted[behind])
            (self._device.copy_to if is_to_arena else self._device.copy_from)(part, row)
            self._begun.append((self._device.record(), name))

    def poll(self, *, waits: bool = False) -> list[Any]:
        """The names of the copies that have ended since the last call; with `waits`, after all that were begun."""
        events = self._device.events
        if waits:
            for event, _ in self._begun:
                events.wait(event)
        over = [copy for copy in self._begun if waits or events.is_done(copy[0])]
        self._begun = [copy for copy in self._begun if copy not in over]
        return [name for _, name in over]
