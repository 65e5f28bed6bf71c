"""Numbers that decisions read and may change from step to step, on the host or in GPU memory for K2."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt

from gradengine.kernels.arena import PartialSums
from gradengine.kernels.cuda_runtime import CudaRuntime
from gradengine.kernels.decision import Scalar
from gradengine.kernels.streams import StreamOrder

BOUNDS_AT = 8  # offset of the bounds in bytes, after the digest that ranks compare
ADDRESSES_AT = 24  # offset of the addresses in bytes, after the other fields of `drops_of`


def drops_of(components: int) -> np.dtype[Any]:
    """Return the record (struct Drops) of the counts of a window's micro-batches if non-finite ones are dropped."""
    addresses = ("addresses", "<u8", (components,))
    return np.dtype([("weight", "<f8"), ("dropped", "<u8"), ("is_bad", "<f4"), ("unused", "<u4"), addresses])


def bounds_of(groups: int) -> np.dtype[Any]:
    """Return the record of the bounds of so many groups, `ClipPlan.digest` and `ClipPlan.max_norms`."""
    return np.dtype([("digest", "<u8"), ("max_norms", "<f8", (groups,))])


class Kept:
    """A record of numbers that outlives a step. This one is the CPU's.

    Args:
        dtype: The record's fields.
        values: Their initial values.
    """

    def __init__(self, dtype: np.dtype[Any], *values: Any) -> None:
        self._dtype, self._values = dtype, values

    def field(self, name: str) -> Scalar:
        """Return one field. On a GPU this is always the same 0-d array, ordered after the steps that change it."""
        assert self._dtype.names is not None  # noqa: S101  (a record has names)
        return self._values[self._dtype.names.index(name)]

    def read(self) -> tuple[Any, ...]:
        """Return the fields' values. On a GPU this waits for the steps that change them."""
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

    def field(self, name: str) -> Any:
        """See `Kept.field`."""
        self._order.follow()
        return self._fields[name]

    @cached_property
    def _fields(self) -> dict[str, Any]:
        places = {name: field[:2] for name, field in (self._dtype.fields or {}).items() if not field[0].shape}
        return {
            name: self.memory[at:][: dtype.itemsize].view(dtype).reshape(()) for name, (dtype, at) in places.items()
        }

    def read(self) -> tuple[Any, ...]:
        found: tuple[Any, ...] = self._order.read(self.memory).view(self._dtype)[0].item()
        return found

    def write(self, *values: Any) -> None:
        with self._order.use():
            self._runtime.copied_into(self.memory, self._bytes(*values))

    def _bytes(self, *values: Any) -> npt.NDArray[np.uint8]:
        return np.array([values], self._dtype).view(np.uint8)


class Drops(NamedTuple):
    """The counts of a window's micro-batches if non-finite ones are dropped."""

    kept: Kept  # record of `drops_of`
    sums: PartialSums  # squared sums of the judged micro-batch's gradients, with the arena's sizes
