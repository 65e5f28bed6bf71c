"""Slots, which are the offsets of components in the arena, and the blocks that they form.

Blocks are first and contiguous, so that a block is one range of memory to exchange. Each slot starts on a 128-byte
boundary, so that vector loads are aligned for all sizes. The padding between slots is always zero.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from gradengine.arguments import said
from gradengine.errors import LayoutMismatch
from gradengine.layout.shards import Partition, Shape

_MOST_DIGITS = 18  # digits in a block's number
Order: TypeAlias = tuple[int, ...]  # the parameter's dimensions in their order in memory
ALIGNMENT = 32  # elements, 128 bytes in fp32, one cache line of a GPU and two of a CPU


@dataclass(frozen=True)
class Slot:
    """A component, and its range in the arena of a layout. `offset` and `size` count fp32 elements."""

    name: str
    shape: Shape  # the shape of this rank's shard under tensor parallelism
    block_name: str | None = None  # such as "layers.0", or None outside the blocks
    partition: Partition = "replicated"  # partition over a tensor-parallel group
    order: Order | None = None  # order of `shape` if a torch parameter is not contiguous (channels_last, transposed)
    # The layout sets the following fields.
    offset: int = 0  # the component's first element in the arena
    block: int | None = None  # index of the component's block
    position: int = 0  # index among the layout's slots

    @cached_property
    def size(self) -> int:
        """Elements of the component."""
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """One past the component's last element in the arena."""
        return self.offset + self.size


@dataclass(frozen=True, eq=False)
class Span:
    """Some components, in order, whose gradients are added in one pass. Equality is identity, for fast keys of caches.

    A span of a layout is exchanged as one. It is a block (key: index) or a component outside the blocks (key: name).
    """

    key: int | str
    positions: tuple[int, ...]  # indices among the layout's slots, or among the targets of an arena
    slots: tuple[Slot, ...] = ()
    start: int = 0  # first element in the arena, if the components are contiguous
    stop: int = 0
    called: str = ""  # name in errors, such as "block 0" or "component 'head'"
    name: str = ""  # name of a block, such as "layers.0"

    @staticmethod
    def of(slots: Iterable[Slot], called: str) -> Span:
        """Return a span of any components, which is not exchanged as one."""
        slots = tuple(slots)
        return Span(called, tuple([slot.position for slot in slots]), slots, called=called)

    @staticmethod
    def at(positions: Iterable[int]) -> Span:
        """Return a span of an arena's targets, for use without a layout."""
        return Span("", tuple(positions))

    @cached_property
    def places(self) -> npt.NDArray[np.intp]:
        """The positions, for NumPy."""
        return np.array(self.positions, np.intp)

    @cached_property
    def where(self) -> slice | npt.NDArray[np.intp]:
        """The positions, as a slice if they are consecutive, so that indexing with it makes no copy."""
        first, count = next(iter(self.positions), 0), len(self.positions)
        return slice(first, first + count) if self.positions == tuple(range(first, first + count)) else self.places

    @cached_property
    def all_present(self) -> npt.NDArray[np.bool_]:
        """Flags that each component gets a gradient. They are never written to."""
        return np.ones(len(self.positions), np.bool_)

    @cached_property
    def column(self) -> dict[int, int]:
        """Mapping from each position to its index in this span."""
        return {position: i for i, position in enumerate(self.positions)}


def refuse_bad_slots(slots: Sequence[Slot]) -> None:
    """Raise `LayoutMismatch` if there are no slots, or for a repeated name or an unknown partition."""
    if not slots:
        raise LayoutMismatch("a layout needs at least one component", got=0, do="pass the arrays that get gradients")
    name, count = Counter(slot.name for slot in slots).most_common(1)[0]
    if count > 1:
        raise LayoutMismatch("two components have one name", got=repr(name), expected="names that differ")
    known = get_args(Partition)
    for slot in slots:
        if not isinstance(slot.partition, str) or slot.partition not in known:
            what = f"component '{slot.name}' has an unknown partition"
            raise LayoutMismatch(what, got=said(slot.partition), expected=f"one of {known}")


def refuse_other_order(name: str, order: Order | None, expected: Order | None) -> None:
    """Raise `LayoutMismatch` if the dimensions of a component's memory are not in the order of the layout."""
    if order != expected:
        raise LayoutMismatch(
            f"component '{name}' has a different memory format than in the layout",
            got=f"dimensions {order}" if order else "contiguous",
            expected=f"dimensions {expected}" if expected else "contiguous",
            do="undo .to(memory_format=...), or build a new engine with layout_of(module)",
        )


def spans_of(slots: Sequence[Slot]) -> Iterator[Span]:
    """Place the slots in the arena, first the blocks by their numbers, then the other components in the given order."""
    members: dict[str, list[int]] = {}
    for position, slot in enumerate(slots):
        if slot.block_name is not None:
            members.setdefault(slot.block_name, []).append(position)
    start = 0
    for index, name in enumerate(_numbered(members)):
        span = Span(index, tuple(members[name]), *_placed(slots, members[name], start, index), f"block {index}", name)
        start = span.stop
        yield span
    for position, slot in enumerate(slots):
        if slot.block_name is None:
            span = Span(slot.name, (position,), *_placed(slots, [position], start), f"component '{slot.name}'")
            start = span.stop
            yield span


def _placed(
    slots: Sequence[Slot], positions: Sequence[int], start: int, block: int | None = None
) -> tuple[tuple[Slot, ...], int, int]:
    placed, stop = [], start
    for position in positions:
        placed.append(replace(slots[position], offset=stop, block=block, position=position))
        stop = -(-placed[-1].stop // ALIGNMENT) * ALIGNMENT
    return tuple(placed), start, stop


def _numbered(block_names: Iterable[str]) -> list[str]:
    stems: dict[str, int] = {}
    keys = {}
    for name in block_names:
        number = name.rpartition(".")[2].rpartition("_")[2]
        if not number.isdecimal() or len(number) > _MOST_DIGITS:
            raise LayoutMismatch("a block's name does not end in a number", got=repr(name[-80:]), expected="'layers.0'")
        keys[name] = (stems.setdefault(name.removesuffix(number), len(stems)), int(number))
    return sorted(keys, key=keys.__getitem__)
