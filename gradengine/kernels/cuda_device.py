"""A GPU as a device: CuPy's memory and streams behind the interface that the core sees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import numpy as np

from gradengine.arrays.buffer import Buffer, RawBuffer
from gradengine.arrays.device import device_buffer, exporting_stream
from gradengine.arrays.streams import ProducerStream
from gradengine.kernels.cuda_runtime import CudaRuntime
from gradengine.kernels.device import Device
from gradengine.kernels.graphs import CudaGraphs
from gradengine.kernels.operands import producers_of
from gradengine.kernels.staging import PinnedStaging
from gradengine.kernels.streams import ForeignStreams, StreamOrder, on_stream


@final
class CudaDevice(Device):
    """One GPU; work is queued on the calling thread's current CuPy stream.

    Args:
        xp: CuPy, or what has its surface.
        ordinal: Which device.

    Attributes:
        runtime: What the kernels ask of it.
    """

    graphs: CudaGraphs

    def __init__(self, xp: Any, ordinal: int) -> None:
        self.runtime = CudaRuntime(xp, ordinal)
        self.name = self.runtime.name
        self.graphs = CudaGraphs(self.runtime)
        self._foreign_streams = ForeignStreams(self.runtime)

    def on(self, stream: object) -> AbstractContextManager[object]:
        """See `Device.on`; a CuPy stream, an object with `__cuda_stream__` or `cuda_stream` (torch), or a handle."""
        return on_stream(self.runtime, stream)

    def is_capturing(self) -> bool:
        """See `Device.is_capturing`."""
        return self.runtime.is_capturing()

    def views(self, sources: Sequence[object], components: Sequence[str]) -> list[Buffer]:
        """See `Device.views`; memory of this device only."""
        runtime = self.runtime
        with runtime.active():  # DLPack exports from the current device only, and CuPy names its current stream
            stream, kind = runtime.stream_for_producers(), runtime.xp.ndarray
            named = list(zip(sources, components, strict=True))
            views = [device_buffer(source, component, self.name, kind, stream) for source, component in named]
            behind = set(producers_of(views))
            for (source, component), view in zip(named, views, strict=True):
                if isinstance(source, RawBuffer) or not hasattr(source, "__dlpack__"):
                    runtime.refuse_foreign(view, component)  # nothing but an address says where it lies
                    named_stream = exporting_stream(source, component)
                    behind |= {named_stream} if named_stream else set()
        self.wait_for(behind)
        return views

    def wait_for(self, producers: Iterable[ProducerStream]) -> None:
        """See `Device.wait_for`; by events."""
        self._foreign_streams.wait_for(producers)

    def hand_over(self, producers: Iterable[ProducerStream]) -> None:
        """See `Device.hand_over`; by events."""
        self._foreign_streams.give_back(producers)

    def give_back(self, producers: Iterable[ProducerStream], borrowed: object) -> None:
        """What was queued so far is our last use of these producers' memory: see `ForeignStreams.give_back`."""
        self._foreign_streams.give_back(producers, borrowed)

    def allocate(self, size: int) -> Buffer:
        """See `Device.allocate`; from CuPy's pool."""
        return self.runtime.allocate(size)

    def refuse_to_exceed(self, nbytes: int, what: str) -> None:
        """See `Device.refuse_to_exceed`; what CuPy's pool holds unused counts as free."""
        self.runtime.refuse_to_exceed(nbytes, what)

    def array(self, buffer: Buffer, shape: tuple[int, ...]) -> Any:
        """See `Device.array`; a CuPy array."""
        return self.runtime.array(buffer, shape, np.float32)

    def storage_array(self, buffer: Buffer) -> Any:
        """Any buffer as a flat CuPy array of its bits: fp32 as it is, the short dtypes as uint16; no copy."""
        return self.runtime.array(buffer, (buffer.size,), np.float32 if buffer.dtype == "float32" else np.uint16)

    def order(self, memory: Buffer | None = None) -> StreamOrder:
        """See `Device.order`."""
        return StreamOrder(self.runtime, memory.owner if memory else None)

    def staging(self, arena: Buffer) -> PinnedStaging:
        """See `Device.staging`; in pinned memory."""
        return PinnedStaging(self.runtime.xp, arena, self.runtime.pinned(arena.size, np.float32))
