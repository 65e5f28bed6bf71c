"""Weights of micro-batches in a GPU's memory: each is copied as its micro-batch begins, without a wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, final

import numpy as np

from gradengine.arrays.device import NUMBERS, DeviceNumber
from gradengine.kernels.cuda_device import CudaDevice
from gradengine.kernels.operands import DeviceWeight, as_of_now
from gradengine.kernels.streams import StreamOrder

_TOGETHER = 64  # weights in one piece of memory
_NULL = np.uint64(0)

Launch: TypeAlias = Callable[[tuple[Any, ...]], None]


@final
class DeviceWeights:
    """The weights of an accumulator's windows, each at its micro-batch's place: a window overwrites the one before.

    Args:
        device: The GPU.
        order: The order of the work on the arena, which reads them.
        weigh: Launches the kernel of weigh.cu.
    """

    def __init__(self, device: CudaDevice, order: StreamOrder, weigh: Launch) -> None:
        self._device, self._order, self._weigh = device, order, weigh
        self._pieces: list[Any] = []

    def number(self, weight: object) -> DeviceNumber | None:
        """The number in a caller's array on this device; None if the weight is not such an array."""
        return self._device.number(weight, "a micro-batch's weight")

    def place(self, index: int, given: np.float32 | DeviceNumber, before: float | DeviceWeight) -> DeviceWeight:
        """Queue a copy of weight number `index`, and its sum with those before it: given as a sum, or the last one."""
        so_far = (before.memory, np.float64(0)) if isinstance(before, DeviceWeight) else (_NULL, np.float64(before))
        if not isinstance(given, DeviceNumber):
            placed = DeviceWeight(given, self._memory(index))
            self._queue((_NULL, np.uint32(0), given, *so_far, placed.memory))
            return placed
        placed = DeviceWeight(given.source, self._memory(index), as_of_now(given.producers))
        self._device.wait_for(placed.producers)  # refuses one that records a graph, before anything is done
        source = np.uint64(given.pointer), np.uint32(NUMBERS[given.dtype]), np.float32(0)
        self._queue((*source, *so_far, placed.memory))
        self._device.keep(given.source)
        self._device.give_back(placed.producers, (), (given.source, given.owner))
        return placed

    def _queue(self, arguments: tuple[Any, ...]) -> None:
        with self._order.use():
            self._weigh(arguments)

    def _memory(self, index: int) -> Any:
        """Sixteen bytes for a weight, the same for each window's micro-batch of that number."""
        piece, place = divmod(index, _TOGETHER)
        while piece >= len(self._pieces):
            self._pieces.append(self._device.upload(np.zeros(_TOGETHER * DeviceWeight.NBYTES, np.uint8)))
            self._order.keep(self._pieces[-1])
        start = place * DeviceWeight.NBYTES
        return self._pieces[piece][start : start + DeviceWeight.NBYTES]
