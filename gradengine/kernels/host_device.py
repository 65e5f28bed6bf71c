"""The CPU as a device. It has memory but no streams or graphs, since the host works in order."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import final

import numpy as np
import numpy.typing as npt

from gradengine.arguments import said
from gradengine.arrays.buffer import Array, Buffer
from gradengine.arrays.host import host_buffer
from gradengine.arrays.shared import shared_array
from gradengine.errors import CallerError, OutOfDeviceMemory
from gradengine.kernels.device import Device


@final
class HostDevice(Device):
    """The CPU as a `Device`."""

    name, array_type = "cpu", np.ndarray

    def on(self, stream: object) -> AbstractContextManager[object]:
        """Raise `CallerError` for a stream, since the CPU has none."""
        if stream is not None:
            raise CallerError("the CPU has no streams", got=said(stream), expected="stream=None")
        return nullcontext()

    def views(self, sources: Sequence[object], components: Sequence[str]) -> list[Buffer]:
        """See `Device.views`. Takes host memory only."""
        return [host_buffer(source, component) for source, component in zip(sources, components, strict=True)]

    def allocate(self, size: int, *, is_shared: bool = False) -> Buffer:
        """See `Device.allocate`. The pages are touched when they are first written."""
        if is_shared:
            data = shared_array(size)
            return Buffer(data.ctypes.data, size, "float32", (size,), True, data, data=data)
        try:
            memory = np.empty(4 * size + 128, np.uint8)
        except (MemoryError, ValueError):  # NumPy raises ValueError beyond the range of addresses.
            raise OutOfDeviceMemory("the CPU has too little memory", got=f"{4 * size} bytes requested") from None
        start = -memory.ctypes.data % 128
        data = memory[start : start + 4 * size].view(np.float32)
        return Buffer(data.ctypes.data, size, "float32", (size,), True, memory, data=data)

    def array(self, buffer: Buffer, shape: tuple[int, ...]) -> Array:
        """See `Device.array`. Returns a NumPy view."""
        view: Array = buffer.data.reshape(shape)
        return view

    def write(self, buffer: Buffer, values: npt.NDArray[np.float32]) -> None:
        """See `Device.write`. The copy is done when this returns."""
        buffer.data[:] = values
