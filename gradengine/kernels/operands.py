"""K1's operands, on every device: gradients of one or several micro-batches for some of an arena's targets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gradengine.arrays.buffer import Buffer
from gradengine.arrays.dtypes import DTYPES
from gradengine.arrays.host import address_of
from gradengine.arrays.streams import NamedStream, ProducerStream
from gradengine.layout.slots import Span
from gradengine.threads import cached_property

ADDRESS = (1 << 56) - 1  # mask of a tagged address; the byte above it is the tag
OVERWRITE = 1 << 60  # flag of a target's first address in a pass: its target is written without being read
_DTYPE_SHIFT = 56  # bits 56..59 of an address hold its dtype


@dataclass(frozen=True, eq=False)
class AddressCheck:
    """The addresses of arrays when they were passed, to be compared with those when they are read."""

    read: Callable[[Sequence[Any]], list[Any]]  # reads arrays' addresses now: an answer for each
    sources: Sequence[Any]
    then: Sequence[Any]  # what `read` returned when they were passed

    def moved(self, columns: Sequence[int]) -> int | None:
        """The first of these columns whose array is at another address now, or was freed; None if none is."""
        now = self.read([self.sources[column] for column in columns])
        return next((c for c, here in zip(columns, now, strict=True) if here != self.then[c]), None)


def tagged(buffer: Buffer) -> int:
    """The buffer's address with its dtype in the upper byte, as common.cuh reads it."""
    return buffer.pointer | DTYPES[buffer.dtype].tag << _DTYPE_SHIFT


def producers_of(views: Iterable[Buffer | None]) -> frozenset[ProducerStream]:
    """The streams on which these buffers are produced, each once."""
    return frozenset([view.producer for view in views if view is not None and view.producer is not None])


def as_of_now(producers: frozenset[ProducerStream]) -> frozenset[ProducerStream]:
    """The producers with their current streams, which may have changed by the time our work is queued."""
    handles = [producer.stream() for producer in producers]
    return producers.union(NamedStream(handle) for handle in handles if handle is not None)


@dataclass(eq=False)
class Contribution:
    """One micro-batch's gradients for some targets."""

    slots: Span
    views: Sequence[Buffer | None]  # None for a target without a gradient
    producers: frozenset[ProducerStream] = frozenset()
    sources: Sequence[Any] = ()  # the arrays themselves, to be kept alive, where the views do not do that
    address_check: AddressCheck | None = None  # where they are held and may move meanwhile

    @staticmethod
    def of(slots: Span, views: Sequence[Buffer | None]) -> Contribution:
        """The contribution of checked views."""
        return Contribution(slots, views, producers_of(views))

    @staticmethod
    def of_fp32(slots: Span, arrays: list[npt.NDArray[np.float32]]) -> Contribution:
        """The contribution of flat host arrays, one for each target, which are used themselves."""
        found = Contribution(slots, ())
        found.fp32, found.given = arrays, slots.where
        found.present = slots.all_present
        return found

    @staticmethod
    def at(
        slots: Span,
        addresses: npt.NDArray[np.uint64],
        producers: frozenset[ProducerStream],
        sources: Sequence[Any],
        address_check: AddressCheck | None,
    ) -> Contribution:
        """The contribution of a GPU's arrays, one for each target, of which only the addresses are used."""
        found = Contribution(slots, (), producers, sources, address_check)
        found.addresses, found.present, found.given = addresses, slots.all_present, slots.where
        return found

    @cached_property
    def addresses(self) -> npt.NDArray[np.uint64]:
        """The address of each gradient, tagged with its dtype; 0 for none."""
        if self.views or self.fp32 is None:
            addresses = [tagged(view) if view is not None and view.size else 0 for view in self.views]
        else:  # fp32's tag is 0
            addresses = [address_of(array) if array.size else 0 for array in self.fp32]
        return np.array(addresses, np.uint64)

    @cached_property
    def present(self) -> npt.NDArray[np.bool_]:
        """Flags of the targets that get a gradient."""
        return np.array([view is not None for view in self.views], np.bool_)

    @cached_property
    def given(self) -> slice | npt.NDArray[np.intp]:
        """The positions of the targets that get a gradient, as an index for NumPy."""
        return self.slots.places[self.present] if None in self.views else self.slots.where

    @cached_property
    def fp32(self) -> list[npt.NDArray[np.float32]] | None:
        """On the host the gradients, if none is missing and all are fp32; else None."""
        if any(view is None or view.dtype != "float32" for view in self.views):
            return None
        return [view.data for view in self.views if view is not None]


class Destinations(dict[int, Buffer]):
    """The buffers that targets are handed back to, by position.

    The same object means the same memory, so that a device's kernels may keep in `work` what they made for it.
    """

    work: Any = None


@dataclass(frozen=True, eq=False)
class FoldPass:
    """One pass of K1: `target = [target +] w0*s0 + w1*s1 + ...`, rounded after each operation."""

    slots: Span
    overwrite: npt.NDArray[np.bool_]  # of each target, whether it is written without being read: the window's first
    contributions: Sequence[Contribution]  # all for these targets, in the order they came
    weights: Sequence[np.float32]  # one for each; exactly 1 multiplies nothing

    @cached_property
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
        """The addresses of each launch of K1 that the pass takes: a row for each of `columns` micro-batches, flat."""
        is_empty = self.overwrite.copy()
        for first in range(0, len(self.contributions), columns):
            addresses = np.zeros((columns, is_empty.size), np.uint64)
            for row, contribution in zip(addresses, self.contributions[first:], strict=False):
                row[:] = contribution.addresses
            gets_none = ~addresses.any(axis=0)
            addresses[0] |= (is_empty & ~gets_none) * np.uint64(OVERWRITE)
            is_empty &= gets_none  # a target's first gradient need not be among the first four
            yield addresses.reshape(-1)
