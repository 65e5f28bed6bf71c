"""How addresses travel with a launch: by value where they fit, else through memory of the stream's own.

By value there is no copy to order and nothing that a captured graph could lose: 4 KB of arguments on any driver, 32 KB
where NVRTC and the driver are of CUDA 12.1 or later. More addresses than fit (4000, for thousands of experts, or 480)
go by one copy before the launch, from pinned memory that stays until it is done.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gradengine.kernels.cuda_runtime import CudaRuntime

__all__ = ["CAPACITIES", "Addresses"]

CAPACITIES = {"small": 480, "large": 4000}


class Addresses:
    """The way of addresses to the kernels of one device.

    Args:
        device: Where they are needed.
        capacities: How many the kernels' variants take by value, from the smallest on.
    """

    def __init__(self, device: CudaRuntime, capacities: Mapping[str, int] = CAPACITIES) -> None:
        self._device, self._capacities = device, capacities

    def arguments(self, addresses: npt.NDArray[np.uint64], weights: Sequence[Any] = ()) -> tuple[str, tuple[Any, ...]]:
        """What carries addresses (and weights), and the name of the kernel's variant that takes it.

        Args:
            addresses: As the kernel reads them, flat.
            weights: One for each source.
        """
        for size, capacity in self._capacities.items():
            if addresses.size <= capacity:
                return size, (_by_value(addresses, weights, capacity),)
        return "table", (*_weights_by_value(weights), self._device.sent(addresses))


def _by_value(addresses: npt.NDArray[np.uint64], weights: Sequence[Any], capacity: int) -> Any:
    argument = np.zeros(1, _argument_type(capacity, len(weights)))
    argument["address"][0, : addresses.size] = addresses
    if weights:
        argument["weight"][0, :] = weights
    return argument


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
