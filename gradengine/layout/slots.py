"""Slots: the offset of each component in the arena, and the blocks that they form.

Blocks come first and are contiguous, so that a block is one range of memory to exchange. Each slot starts on a 128-byte
boundary, so that vector loads are aligned whatever the sizes are. The padding between slots is always zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from gradengine.arguments import said
from gradengine.errors import LayoutMismatch
from gradengine.layout.shards import Partition, Shape
from gradengine.threads import cached_property

_MOST_DIGITS = 18  # in a block's number
Order: TypeAlias = tuple[int, ...]  # the parameter's dimensions, as they follow each other in memory
ALIGNMENT = 32  # elements: 128 bytes, a GPU's cache line and two of a CPU's


@dataclass(frozen=True)
class Slot:
    """A component's range in the arena; `offset` and `size` count fp32 elements."""

    name: str
    shape: Shape  # under tensor parallelism that of this rank's shard
    offset: int  # its first element in the arena
    block: int | None  # the index of its block
    partition: Partition = "replicated"  # over a tensor-parallel group
    order: Order | None = None  # of `shape`, if a torch parameter is not contiguous (channels_last, transposed)
    position: int = 0  # among the layout's slots

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
    """Some components, in order, whose gradients are added in one pass; compared by identity, as a fast key of caches.

    Each span of a layout is exchanged as one: a block (key: index), or a component outside the blocks (key: name).
    """

    key: int | str
    positions: tuple[int, ...]  # among the layout's slots, or the targets of an arena
    slots: tuple[Slot, ...] = ()
    start: int = 0  # elements of the arena, where the components are contiguous
    stop: int = 0
    called: str = ""  # its name in errors: "block 0", "component 'head'"

    @staticmethod
    def of(slots: Iterable[Slot], called: str) -> Span:
        """Return a span of any components, which is not exchanged as one."""
        slots = tuple(slots)
        return Span(called, tuple([slot.position for slot in slots]), slots, called=called)

    @staticmethod
    def at(positions: Iterable[int]) -> Span:
        """Return a span of an arena's targets, where there is no layout."""
        return Span("", tuple(positions))

    @cached_property
    def places(self) -> npt.NDArray[np.intp]:
        """The positions, for NumPy."""
        return np.array(self.positions, np.intp)

    @cached_property
    def where(self) -> slice | npt.NDArray[np.intp]:
        """The positions as a slice where they stand in a row, so that what is taken by it is no copy."""
        first, count = next(iter(self.positions), 0), len(self.positions)
        return slice(first, first + count) if self.positions == tuple(range(first, first + count)) else self.places

    @cached_property
    def all_present(self) -> npt.NDArray[np.bool_]:
        """Flags that each component gets a gradient; never written to."""
        return np.ones(len(self.positions), np.bool_)

    @cached_property
    def column(self) -> dict[int, int]:
        """Position -> its index in this span."""
        return {position: i for i, position in enumerate(self.positions)}


@dataclass(frozen=True, eq=False)
class Block(Span):
    """The components of one transformer layer, contiguous in the arena (padding included)."""

    name: str = ""

    @property
    def index(self) -> int:
        """The block's number, counted from 0."""
        assert isinstance(self.key, int)  # noqa: S101  (a block's key is its index by construction)
        return self.key


@dataclass(frozen=True)
class Row:
    """A row of the layout table, which identifies a slot on every worker."""

    name: str
    shape: Shape
    block_name: str | None
    partition: Partition = "replicated"
    order: Order | None = None


def refuse_bad_rows(rows: Sequence[Row]) -> None:
    """Raise `LayoutMismatch` if there are no rows, or for a repeated or not UTF-8 name, or an unknown partition."""
    if not rows:
        raise LayoutMismatch("a layout needs at least one component", got=0)
    seen: set[str] = set()
    for row in rows:
        if not isinstance(row.partition, str) or row.partition not in get_args(Partition):
            what, known = f"component '{row.name}' has an unknown partition", get_args(Partition)
            raise LayoutMismatch(what, got=said(row.partition), expected=f"one of {known}")
        try:
            row.name.encode()
        except UnicodeEncodeError:  # half of a surrogate pair
            what = "a component's name is not UTF-8"
            raise LayoutMismatch(what, got=said(row.name), expected="text in UTF-8") from None
        if row.name in seen:
            raise LayoutMismatch("two components have one name", got=repr(row.name), expected="names that differ")
        seen.add(row.name)


def refuse_other_order(name: str, order: Order | None, expected: Order | None) -> None:
    """Raise `LayoutMismatch` if a component's memory has its dimensions in another order than in the layout."""
    if order != expected:
        raise LayoutMismatch(
            f"component '{name}' has another memory format than in the layout",
            got=f"dimensions {order}" if order else "contiguous",
            expected=f"dimensions {expected}" if expected else "contiguous",
            do="undo .to(memory_format=...), or build a new engine with layout_of(module)",
        )


def slots_of(rows: Sequence[Row]) -> tuple[tuple[Block, ...], tuple[Span, ...]]:
    """Aligned slots: blocks first, by their numbers, then the other components in the order given."""
    members: dict[str, list[int]] = {}
    for position, row in enumerate(rows):
        if row.block_name is not None:
            members.setdefault(row.block_name, []).append(position)
    blocks, cursor = [], 0
    for index, name in enumerate(_numbered(members)):
        slots, stop = _slots(rows, members[name], cursor, index)
        blocks.append(Block(index, tuple(members[name]), slots, cursor, stop, f"block {index}", name))
        cursor = stop
    non_block = []
    for position, row in enumerate(rows):
        if row.block_name is None:
            slots, stop = _slots(rows, [position], cursor, None)
            non_block.append(Span(row.name, (position,), slots, cursor, stop, f"component '{row.name}'"))
            cursor = stop
    return tuple(blocks), tuple(non_block)


def _slots(
    rows: Sequence[Row], positions: Iterable[int], start: int, block: int | None
) -> tuple[tuple[Slot, ...], int]:
    slots = []
    for position in positions:
        row = rows[position]
        slots.append(Slot(row.name, row.shape, start, block, row.partition, row.order, position))
        start = -(-slots[-1].stop // ALIGNMENT) * ALIGNMENT
    return tuple(slots), start


def _numbered(block_names: Iterable[str]) -> list[str]:
    stems: dict[str, int] = {}
    keys = {}
    for name in block_names:
        number = name.rpartition(".")[2].rpartition("_")[2]
        if not number.isdecimal() or len(number) > _MOST_DIGITS:
            raise LayoutMismatch("a block's name does not end in a number", got=repr(name[-80:]), expected="'layers.0'")
        keys[name] = (stems.setdefault(name.removesuffix(number), len(stems)), int(number))
    return sorted(keys, key=keys.__getitem__)
