"""K1's operands on every device, gradients of one or several micro-batches for some targets of an arena."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from gradengine.arrays.buffer import Buffer
from gradengine.arrays.dtypes import DTYPES
from gradengine.arrays.frameworks import memories_of
from gradengine.arrays.host import address_of
from gradengine.arrays.streams import NamedStream, ProducerStream
from gradengine.layout.slots import Span

ADDRESS = (1 << 56) - 1  # mask of the address in a tagged address, whose upper byte is the tag
OVERWRITE = 1 << 60  # flag of a target's first address in a pass, which writes the target without reading it
_DTYPE_SHIFT = 56  # bits 56..59 of an address hold its dtype


def tagged(buffer: Buffer) -> int:
    """Return the buffer's address with its dtype in the upper byte, as common.cuh reads it."""
    return buffer.pointer | DTYPES[buffer.dtype].tag << _DTYPE_SHIFT


def producers_of(views: Iterable[Buffer | None]) -> frozenset[ProducerStream]:
    """Return the streams on which these buffers are produced, each once."""
    return frozenset([view.producer for view in views if view is not None and view.producer is not None])


def as_of_now(producers: frozenset[ProducerStream]) -> frozenset[ProducerStream]:
    """Return the producers with their current streams, which may have changed before work is queued."""
    handles = [producer.stream() for producer in producers]
    return producers.union(NamedStream(handle) for handle in handles if handle is not None)


@dataclass(eq=False)
class Contribution:
    """One micro-batch's gradients for some targets."""

    slots: Span
    views: Sequence[Buffer | None]  # None for a target without a gradient
    present: npt.NDArray[np.bool_]  # flags of the targets that get a gradient
    given: slice | npt.NDArray[np.intp]  # positions of these targets, as an index for NumPy
    fp32: list[npt.NDArray[np.float32]] | None  # gradients on the host, if none is missing and all are fp32
    producers: frozenset[ProducerStream] = frozenset()
    sources: Sequence[Any] = ()  # arrays that are kept alive

    @staticmethod
    def of(slots: Span, views: Sequence[Buffer | None]) -> Contribution:
        """Return the contribution of checked views."""
        present, given = slots.all_present, slots.where
        if None in views:
            present = np.array([view is not None for view in views], np.bool_)
            given = slots.places[present]
        fp32 = [v.data for v in views if v is not None and v.dtype == "float32" and v.data is not None]
        is_fp32 = len(fp32) == len(views)
        return Contribution(slots, views, present, given, fp32 if is_fp32 else None, producers_of(views))

    @staticmethod
    def of_fp32(slots: Span, arrays: list[npt.NDArray[np.float32]]) -> Contribution:
        """Return the contribution of flat host arrays, one for each target, which are not copied."""
        return Contribution(slots, (), slots.all_present, slots.where, arrays)

    def moved(self, pointers: Sequence[int]) -> Contribution:
        """Return the contribution of GPU arrays like these at different addresses. 0 stands for no array."""
        found = copy.copy(self)
        found.addresses = self.addresses & ~np.uint64(ADDRESS) | np.array(pointers, np.uint64)
        return found

    def passed(self, sources: Sequence[Any]) -> Contribution:
        """Return the contribution as passed now, with its producers' current streams and with its arrays kept alive."""
        found = copy.copy(self)
        found.producers, found.sources = as_of_now(self.producers), tuple(sources)
        return found

    def hold(self) -> None:
        """Keep the gradients as they were passed, even if an array gets a different shape, dtype or memory later."""
        self.sources = memories_of(self.sources)
        if self.fp32 is not None:
            self.fp32 = [array[:] for array in self.fp32]

    @cached_property
    def addresses(self) -> npt.NDArray[np.uint64]:
        """The address of each gradient, tagged with its dtype, or 0 for none."""
        if self.views or self.fp32 is None:
            addresses = [tagged(view) if view is not None and view.size else 0 for view in self.views]
        else:  # The tag of fp32 is 0.
            addresses = [address_of(array) if array.size else 0 for array in self.fp32]
        return np.array(addresses, np.uint64)


class Destinations(dict[int, Buffer]):
    """The buffers that K3 writes, by the position of their targets.

    The same object means the same memory, so a device's kernels may keep its operands in `work`.
    """

    work: Any = None

    @cached_property
    def producers(self) -> frozenset[ProducerStream]:
        """The streams on which the buffers are produced."""
        return producers_of(self.values())


# It is not frozen, since one is made for each micro-batch. This takes 0.4 us instead of 1.0.
@dataclass(eq=False)
class FoldPass:
    """One pass of K1, which computes `target = [target +] w0*s0 + w1*s1 + ...` and rounds after each operation."""

    slots: Span
    overwrite: npt.NDArray[np.bool_]  # flags of the targets that are written without being read (the window's first)
    contributions: Sequence[Contribution]  # contributions to these targets, in the order of the calls
    weights: Sequence[np.float32]  # weight of each contribution, 1 for no multiplication
    # Whether nothing is added and the overwritten targets are zeroed. On a GPU this is the memory of `Drops.kept`.
    dropped: Any = False

    @property
    def present(self) -> npt.NDArray[np.bool_]:
        """Flags of the targets that get a gradient from any of the micro-batches."""
        if len(self.contributions) == 1:
            return self.contributions[0].present
        found: npt.NDArray[np.bool_] = np.logical_or.reduce([c.present for c in self.contributions])
        return found

    @property
    def given(self) -> slice | npt.NDArray[np.intp]:
        """The positions of the targets that get a gradient from any, as an index for NumPy."""
        return self.contributions[0].given if len(self.contributions) == 1 else self.slots.places[self.present]

    def addresses(self, columns: int) -> Iterator[npt.NDArray[np.uint64]]:
        """Yield the flat addresses of each launch of K1, with a row for each of `columns` micro-batches."""
        is_empty = self.overwrite.copy()
        for first in range(0, len(self.contributions), columns):
            addresses = np.zeros((columns, is_empty.size), np.uint64)
            for row, contribution in zip(addresses, self.contributions[first:], strict=False):
                row[:] = contribution.addresses
            gets_none = ~addresses.any(axis=0)
            addresses[0] |= (is_empty & ~gets_none) * np.uint64(OVERWRITE)
            is_empty &= gets_none  # a target's first gradient need not be among the first four
            yield addresses.reshape(-1)
