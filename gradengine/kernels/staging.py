"""The arena as the exchange sees it: in host memory. The CPU's is the arena, a GPU's has a copy in pinned memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, final

import numpy as np
import numpy.typing as npt

from gradengine.arrays.buffer import Buffer


class StagingBuffer(ABC):
    """Host memory that stands for an arena.

    Attributes:
        data: The arena's elements, in host memory.
        is_arena: Whether this is the arena itself, so that nothing is ever copied.
    """

    data: npt.NDArray[np.float32]
    is_arena: bool

    @abstractmethod
    def fetch(self, start: int, stop: int) -> None:
        """Have elements start..stop - 1 of the arena here; waits for the device."""

    @abstractmethod
    def put_back(self) -> None:
        """Have the arena be what is here, before any work that is queued from now on."""


@final
class NoStaging(StagingBuffer):
    """A host arena."""

    is_arena = True

    def __init__(self, arena: Buffer) -> None:
        self.data = arena.data

    def fetch(self, start: int, stop: int) -> None:
        """Nothing: it is there."""

    def put_back(self) -> None:
        """Nothing: it is there."""


@final
class PinnedStaging(StagingBuffer):
    """Pinned host memory beside a GPU's arena: as many bytes again, but of the host's.

    Args:
        xp: CuPy.
        arena: The arena on the device.
        pinned: As many elements of pinned memory.
    """

    is_arena = False

    def __init__(self, xp: Any, arena: Buffer, pinned: npt.NDArray[np.float32]) -> None:
        self._xp, self._arena, self.data = xp, arena, pinned

    def fetch(self, start: int, stop: int) -> None:
        """Copy a stretch from the device behind the current stream's work, and wait for it."""
        here, there, nbytes = self._stretch(start, stop)
        self._copy(here, there, nbytes, self._xp.cuda.runtime.memcpyDeviceToHost)

    def put_back(self) -> None:
        """Copy all of it to the device on the current stream, and wait: what is here may be written at once."""
        here, there, nbytes = self._stretch(0, self._arena.size)
        self._copy(there, here, nbytes, self._xp.cuda.runtime.memcpyHostToDevice)

    def _copy(self, target: int, source: int, nbytes: int, kind: int) -> None:
        with self._xp.cuda.Device(int(self._arena.device.partition(":")[2])):
            stream = self._xp.cuda.get_current_stream()
            self._xp.cuda.runtime.memcpyAsync(target, source, nbytes, kind, stream.ptr)
            stream.synchronize()

    def _stretch(self, start: int, stop: int) -> tuple[int, int, int]:
        part = self._arena.part(start, stop)
        return int(self.data[start:].ctypes.data), part.pointer, part.nbytes
