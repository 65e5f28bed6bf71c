"""Weights of one accumulator's micro-batches: numbers of the host's, or on a GPU also of an array there."""

from __future__ import annotations

from typing import SupportsFloat, final

import numpy as np

from gradengine.accumulate.window import Window, checked_weight
from gradengine.arrays.device import DeviceNumber
from gradengine.errors import CallerError
from gradengine.kernels import Arena, DeviceWeight, Kernels, SlotSet, Weight


@final
class Weighing:
    """Checks the weights that an accumulator is given, and reads those that are on the device."""

    def __init__(self, kernels: Kernels, arena: Arena) -> None:
        self._device, self._arena, self._there = kernels.device, arena, kernels.weights(arena)

    def checked(self, weight: SupportsFloat) -> np.float32 | DeviceNumber:
        """A micro-batch's weight as fp32; for an array on this GPU the number's address, without a wait.

        Raises:
            WindowError: On the host, it is not a finite number above 0.
            BufferRefused: The array lies on another GPU, or holds no number.
        """
        number = None if self._there is None else self._there.number(weight)
        return checked_weight(weight) if number is None else number

    def kept(self, weight: SupportsFloat) -> SupportsFloat:
        """A weight to be passed later: the number as it is now, or the array; raises as `checked`."""
        checked = self.checked(weight)
        return weight if isinstance(checked, DeviceNumber) else float(checked)

    def placed(self, given: np.float32 | DeviceNumber, window: Window, slot_set: SlotSet, *, begins: bool) -> Weight:
        """The weight of the micro-batch that these slots' gradients are of, as it is folded.

        Behind one that lies on the device each of the window is copied there, which adds them up.
        """
        if isinstance(given, np.float32) and not (window.weights and isinstance(window.weights[-1], DeviceWeight)):
            return given
        micro_batch = window.micro_batch_of(slot_set, begins=begins)
        if micro_batch < len(window.weights):
            return window.weights[micro_batch]
        assert self._there is not None  # noqa: S101  (it made what is given, or the weight before)
        return self._there.place(micro_batch, given, window.weight)

    def read(self, weight: Weight) -> float:
        """A weight as a number of the host; waits for one that is on the device."""
        return self._read(weight.value) if isinstance(weight, DeviceWeight) else float(weight)

    def read_sum(self, weight: float | DeviceWeight) -> float:
        """A window's weight as a number of the host, NaN if one of its weights was bad; waits as `read`."""
        return self._read(weight.total) if isinstance(weight, DeviceWeight) else weight

    def _read(self, number: object) -> float:
        if self._device.is_capturing():
            raise CallerError("a weight on the device is not known while a window is captured")
        return float(self._arena.read(number))
