"""Numbers that decisions read, and may change, from step to step: on the host, or in a GPU's memory for K2."""

from __future__ import annotations

from functools import cached_property
from typing import Any, final

import numpy as np
import numpy.typing as npt

from gradengine.kernels.cuda_runtime import CudaRuntime
from gradengine.kernels.decision import Scalar
from gradengine.kernels.streams import StreamOrder

BOUNDS_AT = 8  # bytes: before the bounds are those by which workers compare them


def bounds_of(groups: int) -> np.dtype[Any]:
    """The record of the bounds of so many groups: `ClipPlan.digest` and `ClipPlan.max_norms`."""
    return np.dtype([("digest", "<u8"), ("max_norms", "<f8", (groups,))])


class Kept:
    """A record of numbers that outlives a step; this one is the CPU's.

    Args:
        dtype: The record's fields.
        values: Their first values.
    """

    def __init__(self, dtype: np.dtype[Any], *values: Any) -> None:
        self._dtype, self._values = dtype, values

    @property
    def first(self) -> Scalar:
        """The first field: a float; on a GPU always the same 0-d array, ordered after the steps that change it."""
        return float(self._values[0])

    def read(self) -> tuple[Any, ...]:
        """Return the fields' values; on a GPU this waits for the steps that change them."""
        return self._values

    def write(self, *values: Any) -> None:
        """Replace the fields' values, after all queued work."""
        self._values = values


@final
class DeviceKept(Kept):
    """A record of numbers in a GPU's memory.

    Attributes:
        memory: The record's bytes, as K2 takes them.
    """

    def __init__(self, runtime: CudaRuntime, order: StreamOrder, dtype: np.dtype[Any], *values: Any) -> None:
        super().__init__(dtype, *values)
        self._runtime, self._order = runtime, order
        self.memory: Any = runtime.upload(self._bytes(*values))
        order.keep(self.memory)

    @property
    def first(self) -> Any:
        """See `Kept.first`."""
        self._order.follow()
        return self._first

    @cached_property
    def _first(self) -> Any:
        return self.memory[: self._dtype[0].itemsize].view(self._dtype[0]).reshape(())

    def read(self) -> tuple[Any, ...]:
        found: tuple[Any, ...] = self._order.read(self.memory).view(self._dtype)[0].item()
        return found

    def write(self, *values: Any) -> None:
        with self._order.use():
            self._runtime.copied_into(self.memory, self._bytes(*values))

    def _bytes(self, *values: Any) -> npt.NDArray[np.uint8]:
        return np.array([values], self._dtype).view(np.uint8)
