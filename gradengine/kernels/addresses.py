"""How addresses travel with a launch: by value where they fit, else through pinned memory, in stream order.

By value there is no copy to order and nothing that a captured graph could lose: 4 KB of arguments on any driver, 32 KB
from CUDA 12.1 on. More than 4000 addresses (thousands of experts) go by one copy before the launch.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gradengine.kernels.device import CudaDevice

__all__ = ["CAPACITIES", "Addresses"]

CAPACITIES = {"small": 480, "large": 4000}
_SLOTS = 8  # copies that may be under way before the host waits for the oldest


class Addresses:
    """The way of addresses to the kernels of one device.

    Args:
        device: Where they are needed.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._staged: dict[tuple[int, int], _Staged] = {}
        self.turn = threading.RLock()  # held from here to the launch: two threads' copies must not come between

    def arguments(self, addresses: npt.NDArray[np.uint64], weights: Sequence[Any] = ()) -> tuple[str, tuple[Any, ...]]:
        """What carries addresses (and weights), and the name of the kernel's variant that takes it.

        Args:
            addresses: As the kernel reads them, flat.
            weights: One for each source.
        """
        if addresses.size <= CAPACITIES["large"]:
            size, argument = _by_value(addresses, weights)
            return size, (argument,)
        return "table", (*_weights_by_value(weights), self._sent(addresses))

    def _sent(self, addresses: npt.NDArray[np.uint64]) -> Any:
        if self._device.is_capturing():
            return self._device.sent_in_graph(addresses)
        key = (self._device.current_stream().ptr, addresses.size)
        if key not in self._staged:
            self._staged[key] = _Staged(self._device, addresses.size)
        return self._staged[key].sent(addresses)


class _Staged:
    """Device memory for so many addresses, and pinned memory to write them to while older ones are under way."""

    def __init__(self, device: CudaDevice, count: int) -> None:
        self._device = device
        self._there = device.upload(np.zeros(count, np.uint64))
        self._here = [device.pinned(count, np.uint64) for _ in range(_SLOTS)]
        self._sent = [device.event() for _ in range(_SLOTS)]
        self._turn = 0

    def sent(self, addresses: npt.NDArray[np.uint64]) -> Any:
        slot = self._turn % _SLOTS
        if self._turn >= _SLOTS:
            self._sent[slot].synchronize()
        self._turn += 1
        self._here[slot][:] = addresses
        self._device.copy_to(self._there, self._here[slot])
        with self._device.active():
            self._sent[slot].record(self._device.current_stream())
        return self._there


def _by_value(addresses: npt.NDArray[np.uint64], weights: Sequence[Any]) -> tuple[str, Any]:
    name = next(name for name, capacity in CAPACITIES.items() if addresses.size <= capacity)
    argument = np.empty(1, _argument_type(CAPACITIES[name], len(weights)))
    argument["address"][0, : addresses.size] = addresses
    if weights:
        argument["weight"][0, :] = weights
    return name, argument


def _weights_by_value(weights: Sequence[Any]) -> tuple[Any, ...]:
    if not weights:
        return ()
    argument = np.empty(1, np.dtype([("weight", "<f4", (len(weights),))]))
    argument["weight"][0, :] = weights
    return (argument,)


@functools.cache
def _argument_type(capacity: int, weights: int) -> np.dtype[Any]:
    fields: list[Any] = [("address", "<u8", (capacity,))]
    if weights:
        fields.append(("weight", "<f4", (weights,)))
    return np.dtype(fields, align=True)  # padded as the C++ struct is
