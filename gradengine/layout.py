"""Where each component of a gradient set lies in the arena: integers and names only, no array is touched.

Blocks come first and are contiguous, so that one block is one stretch of memory to exchange; every slot starts on a
128-byte boundary, so that vector loads stay aligned whatever the sizes are. The padding between slots is always zero.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeAlias, runtime_checkable

import msgpack

from gradengine.errors import LayoutMismatch

__all__ = ["BLOCK_COMPONENTS", "NON_BLOCK_COMPONENTS", "Block", "GradientLayout", "Slot", "Span"]

ALIGNMENT = 32  # elements: 128 bytes, a GPU's cache line and two of a CPU's
BLOCK_COMPONENTS = ("w_q", "w_k", "w_v", "w_o", "gate", "up", "down", "input_norm", "post_attn_norm")
NON_BLOCK_COMPONENTS = ("lm_head", "final_norm", "embedding")
LORA_COMPONENTS = ("lora_a_q", "lora_b_q", "lora_a_v", "lora_b_v", "input_norm", "post_attn_norm")

Shape: TypeAlias = tuple[int, ...]


@runtime_checkable
class Shaped(Protocol):
    """Anything with a shape: an array of any framework."""

    @property
    def shape(self) -> Iterable[int]: ...


@dataclass(frozen=True)
class Slot:
    """A component's place in the arena; `offset` and `size` count fp32 elements."""

    name: str
    shape: Shape
    offset: int
    block: int | None

    @property
    def size(self) -> int:
        """Elements of the component.

        >>> Slot("w", (2, 3), 0, None).size
        6
        """
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        """One past the component's last element in the arena."""
        return self.offset + self.size


@dataclass(frozen=True)
class Span:
    """A stretch of the arena that is exchanged as one: a block (key: index) or a non-block component (key: name)."""

    key: int | str
    slots: tuple[Slot, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class Block(Span):
    """The components of one transformer layer, contiguous in the arena (padding included)."""

    name: str

    @property
    def index(self) -> int:
        """The block's number, counted from 0."""
        assert isinstance(self.key, int)  # noqa: S101  (a block's key is its index by construction)
        return self.key


@dataclass(frozen=True)
class _Row:
    """One line of the layout table: what identifies a slot on every worker."""

    name: str
    shape: Shape
    block_name: str | None


class GradientLayout:
    """Ordered slots of one gradient set and the arena they fill.

    Build one with `transformer`, `lora` or `of`. Two workers may exchange gradients when their fingerprints are equal.

    Example:
        >>> layout = GradientLayout.of({"layers.0.w": (2, 3), "layers.1.w": (2, 3), "head": (5,)})
        >>> layout.num_elements, len(layout.blocks), layout.slots[0].name
        (17, 2, 'layers.0.w')
        >>> [span.key for span in layout.spans]
        ['head', 1, 0]
    """

    def __init__(self, rows: Sequence[_Row], backward_order: Sequence[int | str] | None = None) -> None:
        _refuse_bad_rows(rows)
        self._rows = tuple(rows)
        self.blocks, non_block = _place(rows)
        by_key: dict[int | str, Span] = {span.key: span for span in (*self.blocks, *non_block)}
        by_name = {slot.name: slot for span in by_key.values() for slot in span.slots}
        self.slots = tuple(by_name[row.name] for row in rows)
        # Models list their parameters from the input on, so backward finishes them in reverse.
        appearance = dict.fromkeys(slot.name if slot.block is None else slot.block for slot in self.slots)
        order = list(reversed(appearance)) if backward_order is None else backward_order
        _refuse_bad_order(order, by_key)
        self.spans = tuple(by_key[key] for key in order)
        self.arena_size = max(span.stop for span in self.spans)

    @staticmethod
    def of(gradients: Mapping[str, Shaped | Shape] | Sequence[Shaped | Shape]) -> GradientLayout:
        """The layout of arrays (or shapes) as they are given.

        Args:
            gradients: Name -> array or shape, in the order in which sequences of gradients will be passed; a sequence
                names its components "0", "1", .... Up to and including its first whole-number part a dotted name says
                which block it belongs to: "layers.0.wq" lies in block "layers.0". Blocks are numbered by stem, then
                by that number. Workers exchange in the reverse of this order, so give the components from the model's
                input to its output where blocks shall travel while backward runs.

        Raises:
            LayoutMismatch: Two components of one name, a negative or fractional dimension, or nothing at all.

        Example:
            >>> [slot.shape for slot in GradientLayout.of([(2, 3), (4,)]).slots]
            [(2, 3), (4,)]
        """
        named = gradients if isinstance(gradients, Mapping) else {str(i): g for i, g in enumerate(gradients)}
        return GradientLayout([_Row(name, _shape_of(name, g), _block_name(name)) for name, g in named.items()])

    @staticmethod
    def transformer(
        num_blocks: int,
        hidden_size: int,
        kv_hidden_size: int,
        intermediate_size: int,
        vocab_size: int,
        *,
        embedding: bool = True,
    ) -> GradientLayout:
        """The nine components of each transformer block, then `lm_head`, `final_norm` and `embedding`.

        Args:
            num_blocks: Transformer layers.
            hidden_size: H; `w_q` and `w_o` are (H, H), `input_norm` and `post_attn_norm` (H,).
            kv_hidden_size: KV heads x head size; `w_k` and `w_v` are (H, KV).
            intermediate_size: I; `gate` and `up` are (H, I), `down` is (I, H).
            vocab_size: V; `lm_head` and `embedding` are (V, H).
            embedding: False where the embedding is tied to the LM head or frozen.

        Raises:
            LayoutMismatch: A size that is not a whole number >= 0.

        Example:
            >>> layout = GradientLayout.transformer(24, 1024, 256, 4096, 32768, embedding=False)
            >>> layout.nbytes
            1594036224
        """
        h, kv, i, v = hidden_size, kv_hidden_size, intermediate_size, vocab_size
        block_shapes = ((h, h), (h, kv), (h, kv), (h, h), (h, i), (h, i), (i, h), (h,), (h,))
        rows = _block_rows(num_blocks, BLOCK_COMPONENTS, block_shapes)
        tail = dict(zip(NON_BLOCK_COMPONENTS, ((v, h), (h,), (v, h)), strict=True))
        if not embedding:
            del tail["embedding"]
        rows += [_Row(name, _shape_of(name, shape), None) for name, shape in tail.items()]
        order: list[int | str] = [
            "lm_head",
            "final_norm",
            *reversed(range(num_blocks)),
            *(["embedding"] if embedding else []),
        ]
        return GradientLayout(rows, order)

    @staticmethod
    def lora(num_blocks: int, hidden_size: int, kv_hidden_size: int, rank: int) -> GradientLayout:
        """The six trained buffers of each block under LoRA on the query and value projections.

        Args:
            num_blocks: Transformer layers.
            hidden_size: H; `lora_a_q` and `lora_a_v` are (H, rank), `lora_b_q` is (rank, H), the norms are (H,).
            kv_hidden_size: KV; `lora_b_v` is (rank, KV).
            rank: Rank of the two updates.

        Raises:
            LayoutMismatch: A size that is not a whole number >= 0.

        Example:
            >>> GradientLayout.lora(28, 1536, 256, 16).blocks[0].slots[3].shape
            (16, 256)
        """
        h, kv = hidden_size, kv_hidden_size
        shapes = ((h, rank), (rank, h), (h, rank), (rank, kv), (h,), (h,))
        return GradientLayout(_block_rows(num_blocks, LORA_COMPONENTS, shapes))

    @cached_property
    def num_elements(self) -> int:
        """Elements of the gradient set, padding not counted."""
        return sum(slot.size for slot in self.slots)

    @property
    def nbytes(self) -> int:
        """Bytes of the fp32 arena, padding counted: the memory that an accumulator of this layout takes."""
        return 4 * self.arena_size

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over names, shapes, blocks and order, in hexadecimal: equal on workers that may exchange."""
        return hashlib.sha256(self.table()).hexdigest()

    def table(self) -> bytes:
        """The layout as msgpack: rows [name, shape, block name or nil], then the spans' keys in backward order.

        This is what the fingerprint is taken of and what the handshake sends and compares.
        """
        rows = [[row.name, list(row.shape), row.block_name] for row in self._rows]
        packed = msgpack.packb([rows, [span.key for span in self.spans]])
        assert isinstance(packed, bytes)  # noqa: S101  (packb's stub says Any)
        return packed

    def slot(self, name: str) -> Slot:
        """The slot of that name.

        Raises:
            LayoutMismatch: No such component; the first names are shown.
        """
        try:
            return self._by_name[name]
        except KeyError:
            raise LayoutMismatch(
                "unknown component", got=repr(name), expected=_few(self._by_name), do="see layout.slots for all names"
            ) from None

    def block(self, index: int) -> Block:
        """Block `index`, counted from 0.

        Raises:
            LayoutMismatch: No such block.
        """
        if not (hasattr(index, "__index__") and 0 <= index < len(self.blocks)):
            raise LayoutMismatch("unknown block", got=repr(index), expected=f"a block in 0..{len(self.blocks) - 1}")
        return self.blocks[index]

    @cached_property
    def _by_name(self) -> dict[str, Slot]:
        return {slot.name: slot for slot in self.slots}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GradientLayout) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return (
            f"GradientLayout({len(self.slots)} components in {len(self.blocks)} blocks, "
            f"{self.num_elements} elements, {self.fingerprint[:12]})"
        )


def layout_from_table(table: bytes) -> GradientLayout:
    """The layout that a table of rows describes; for a coordinator that has none of its own.

    Raises:
        LayoutMismatch: The rows are not rows of a layout.

    Example:
        >>> layout = GradientLayout.of({"layers.0.w": (2, 3)})
        >>> layout_from_table(layout.table()) == layout
        True
    """
    try:
        table_rows, order = msgpack.unpackb(table)
        rows = [
            _Row(str(name), _shape_of(str(name), tuple(shape)), None if block is None else str(block))
            for name, shape, block in table_rows
        ]
        return GradientLayout(rows, order)
    except (ValueError, TypeError, msgpack.UnpackException) as fault:
        raise LayoutMismatch(f"a layout table cannot be read ({fault})") from None


def _block_rows(num_blocks: int, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[_Row]:
    if not (hasattr(num_blocks, "__index__") and num_blocks >= 0):
        raise LayoutMismatch("num_blocks is not a count", got=repr(num_blocks), expected="a whole number >= 0")
    return [
        _Row(f"blocks.{b}.{name}", _shape_of(f"blocks.{b}.{name}", shape), f"blocks.{b}")
        for b in range(num_blocks)
        for name, shape in zip(names, shapes, strict=True)
    ]


def _shape_of(name: str, array: Shaped | Sequence[int]) -> Shape:
    dimensions = array.shape if isinstance(array, Shaped) else array
    try:
        shape = tuple(d.__index__() for d in dimensions)
    except (AttributeError, TypeError):
        raise LayoutMismatch(
            f"component '{name}' has no shape", got=repr(array), expected="an array or a shape"
        ) from None
    if any(d < 0 for d in shape):
        raise LayoutMismatch(f"component '{name}' has a negative dimension", got=shape, expected="dimensions >= 0")
    return shape


def _block_name(name: str) -> str | None:
    if not isinstance(name, str):
        raise LayoutMismatch("a component's name is no text", got=repr(name), expected="a string")
    parts = name.split(".")
    for i, part in enumerate(parts[:-1]):
        if part.isdecimal():
            return ".".join(parts[: i + 1])
    return None


def _refuse_bad_rows(rows: Sequence[_Row]) -> None:
    if not rows:
        raise LayoutMismatch("a layout needs at least one component", got=0)
    seen: set[str] = set()
    for row in rows:
        if row.name in seen:
            raise LayoutMismatch("two components have one name", got=repr(row.name), expected="names that differ")
        seen.add(row.name)


def _place(rows: Sequence[_Row]) -> tuple[tuple[Block, ...], tuple[Span, ...]]:
    """Blocks first, in the order of their numbers, then the rest in the order given; each slot aligned."""
    members: dict[str, list[_Row]] = {}
    for row in rows:
        if row.block_name is not None:
            members.setdefault(row.block_name, []).append(row)
    blocks, cursor = [], 0
    for index, name in enumerate(_numbered(members)):
        slots, stop = _slots(members[name], cursor, index)
        blocks.append(Block(index, slots, cursor, stop, name))
        cursor = stop
    non_block = []
    for row in rows:
        if row.block_name is None:
            slots, stop = _slots([row], cursor, None)
            non_block.append(Span(row.name, slots, cursor, stop))
            cursor = stop
    return tuple(blocks), tuple(non_block)


def _slots(rows: Sequence[_Row], start: int, block: int | None) -> tuple[tuple[Slot, ...], int]:
    slots = []
    for row in rows:
        slots.append(Slot(row.name, row.shape, start, block))
        start = -(-slots[-1].stop // ALIGNMENT) * ALIGNMENT
    return tuple(slots), start


def _numbered(block_names: Iterable[str]) -> list[str]:
    stems: dict[str, int] = {}
    keys = {}
    for name in block_names:
        stem, _, number = name.rpartition(".")
        keys[name] = (stems.setdefault(stem, len(stems)), int(number))
    return sorted(keys, key=keys.__getitem__)


def _refuse_bad_order(order: Sequence[int | str], spans: Mapping[int | str, Span]) -> None:
    if len(order) != len(spans) or set(order) != set(spans):
        raise LayoutMismatch("the backward order does not name each span once", got=list(order), expected=list(spans))


def _few(names: Iterable[str], limit: int = 4) -> str:
    listed = list(names)
    return "one of " + ", ".join(map(repr, listed[:limit])) + (", ..." if len(listed) > limit else "")
