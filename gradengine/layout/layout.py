"""Layout of a model's gradients in one flat arena, with names, shapes and offsets. No array's elements are read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, get_args

import msgpack

from gradengine.arguments import as_index, checked_rank, refuse_other_kind, said, truth_value, whole_number
from gradengine.arrays.dlpack import MAX_DIMENSIONS
from gradengine.errors import CallerError, LayoutMismatch
from gradengine.layout.components import named_components, refuse_unsupported
from gradengine.layout.shards import TENSOR_PARALLEL, Partition, Shape
from gradengine.layout.slots import Order, Slot, Span, refuse_bad_slots, spans_of
from gradengine.layout.tensor_parallel import TensorParallelConfig

BLOCK_COMPONENTS = ("w_q", "w_k", "w_v", "w_o", "gate", "up", "down", "input_norm", "post_attn_norm")
NON_BLOCK_COMPONENTS = ("lm_head", "final_norm", "embedding")
_MOST_BLOCKS = 1 << 14
_MOST_BYTES = 1 << 62
LORA_COMPONENTS = ("lora_a_q", "lora_b_q", "lora_a_v", "lora_b_v", "input_norm", "post_attn_norm")


class GradientLayout:
    """Layout of one model's gradients in a flat fp32 arena, built by `transformer`, `lora` or `of`.

    Attributes:
        slots: The components' slots, in the order in which sequences of gradients are passed.
        blocks: The transformer blocks.
        spans: The ranges that are exchanged as one, in the order in which backward completes them.
        spans_by_key: The spans by key: a block's index, or the name of a non-block component.
        arena_size: Elements of the arena, padding included.
        tp_rank: The tensor-parallel rank whose shards these are.
        tp_size: Size of the tensor-parallel group, 1 for a whole model.

    Example:
        >>> layout = GradientLayout.of({"layers.0.w": (2, 3), "layers.1.w": (2, 3), "head": (5,)})
        >>> layout.num_elements, len(layout.blocks), layout.slots[0].name
        (17, 2, 'layers.0.w')
        >>> [span.key for span in layout.spans]
        ['head', 1, 0]
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        backward_order: Sequence[int | str] | None = None,
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> None:
        refuse_bad_slots(slots)
        self.tp_rank, self.tp_size = checked_rank(tp_rank, tp_size, TENSOR_PARALLEL)
        by_key = {span.key: span for span in spans_of(slots)}
        self.blocks = tuple(span for span in by_key.values() if isinstance(span.key, int))
        self._by_name = {slot.name: slot for span in by_key.values() for slot in span.slots}
        self.slots = tuple(self._by_name[slot.name] for slot in slots)
        # Models list their parameters from input to output, so backward completes them in reverse.
        order = [*reversed(dict.fromkeys(map(_key_of, self.slots)))] if backward_order is None else backward_order
        if sorted(map(repr, order)) != sorted(map(repr, by_key)):
            raise LayoutMismatch("the backward order does not name each span once", got=order, expected=list(by_key))
        self.spans_by_key = {key: by_key[key] for key in order}
        self.spans = tuple(self.spans_by_key.values())
        self.arena_size = max(span.stop for span in self.spans)
        if self.nbytes > _MOST_BYTES:
            raise LayoutMismatch("a layout is too large", got=f"above {_MOST_BYTES} bytes")

    @staticmethod
    def of(
        gradients: Any,
        *,
        tp_rank: int = 0,
        tp_size: int | None = None,
        partitions: Mapping[str, Partition] | None = None,
    ) -> GradientLayout:
        """Return the layout of a collection of arrays or shapes, or of a torch module.

        A dotted name belongs to the block that ends with its first whole-number part, so "layers.0.wq" is in
        "layers.0". Without such a part the first part that ends in "_" and a number counts, as in flax, so
        "Block_0.kernel" is in "Block_0". Blocks are ordered by stem, then by that number. They are exchanged in
        the reverse of the order in which they first appear.

        Args:
            gradients: Name -> array or shape, or a sequence with names "0", "1", ... Containers may be nested, and
                names are joined by dots. The order is that in which sequences of gradients will be passed. List
                components from the model's input to its output. Or a torch.nn.Module, whose trainable parameters are
                taken with their dimensions in memory order. Or a list of its parameters, named by position, including
                frozen ones. Only shapes and dtypes (for a torch parameter `grad_dtype`) are read. Pass shapes if
                gradients will have a different dtype.
            tp_rank: This rank in its tensor-parallel group. The shapes are those of its shards.
            tp_size: Size of that group, by default 1 for a whole model.
            partitions: Name -> "column", "row" or "replicated", for each component if `tp_size` > 1. The norm treats
                "column" and "row" alike, because only this rank has the component's elements.

        Raises:
            LayoutMismatch: A repeated name, a negative or fractional dimension, an unknown partition, a partition of an
                unknown component, a component without a partition if `tp_size` > 1, a lazy parameter, or no component.
            BufferRefused: The gradients of an array or parameter are not supported (float64, complex, sparse, DTensor).
            CallerError: The rank is out of range, partitions are given without `tp_size`, or a module is not torch's.

        Example:
            >>> [slot.name for slot in GradientLayout.of({"encoder": [{"w": (2,)}], "head": (1,)}).slots]
            ['encoder.0.w', 'head']
            >>> split = {"w": "column", "norm": "replicated"}
            >>> shard = GradientLayout.of({"w": (2, 3), "norm": (4,)}, tp_rank=1, tp_size=2, partitions=split)
            >>> [slot.partition for slot in shard.slots]
            ['column', 'replicated']
        """
        named = named_components(gradients)
        split = {} if partitions is None else partitions
        refuse_other_kind("partitions", split, Mapping)
        rank, size = checked_rank(tp_rank, 1 if tp_size is None else tp_size, TENSOR_PARALLEL)
        _refuse_bad_partitions(split, dict(named), None if tp_size is None else size)
        for name, array in named:
            refuse_unsupported(name, array)
        orders = {name: array.order for name, array in named if isinstance(array, Slot)}
        slots = [
            Slot(name, _shape_of(name, g), _block_name(name), split.get(name, "replicated"), orders.get(name))
            for name, g in named
        ]
        return GradientLayout(slots, tp_rank=rank, tp_size=size)

    @staticmethod
    def transformer(
        num_blocks: int,
        hidden_size: int,
        kv_hidden_size: int,
        intermediate_size: int,
        vocab_size: int,
        *,
        embedding: bool = True,
        tensor_parallel: TensorParallelConfig | None = None,
    ) -> GradientLayout:
        """Return the layout of a transformer: nine components a block, then `lm_head`, `final_norm`, `embedding`.

        Args:
            num_blocks: Transformer layers.
            hidden_size: H. `w_q` and `w_o` are (H, H), `input_norm` and `post_attn_norm` (H,).
            kv_hidden_size: KV, KV heads x head size. `w_k` and `w_v` are (H, KV).
            intermediate_size: I. `gate` and `up` are (H, I), `down` is (I, H).
            vocab_size: V. `lm_head` and `embedding` are (V, H).
            embedding: False if the embedding is tied to the LM head, or frozen.
            tensor_parallel: The configuration of this rank's shards, or None for a whole model. The sizes above are
                always the whole model's.

        Raises:
            LayoutMismatch: A size is not a whole number >= 0, or not the configuration's.
            CallerError: The vocabulary cannot be divided.

        Example:
            >>> layout = GradientLayout.transformer(24, 1024, 256, 4096, 32768, embedding=False)
            >>> layout.nbytes
            1594036224
        """
        h, kv, i, v = hidden_size, kv_hidden_size, intermediate_size, vocab_size
        block_shapes = ((h, h), (h, kv), (h, kv), (h, h), (h, i), (h, i), (i, h), (h,), (h,))
        slots = _block_slots(num_blocks, BLOCK_COMPONENTS, block_shapes)
        count = len(slots) // len(BLOCK_COMPONENTS)
        tail = NON_BLOCK_COMPONENTS if truth_value("embedding", embedding) else NON_BLOCK_COMPONENTS[:2]
        slots += [Slot(name, _shape_of(name, (h,) if name == "final_norm" else (v, h))) for name in tail]
        order = [*tail[:2], *reversed(range(count)), *tail[2:]]
        if tensor_parallel is None:
            return GradientLayout(slots, order)
        refuse_other_kind("tensor_parallel", tensor_parallel, TensorParallelConfig)
        shards = [tensor_parallel.shard_of(slot.name, slot.shape) for slot in slots]
        slots = [
            replace(slot, shape=shard.local_shape, partition=shard.partition)
            for slot, shard in zip(slots, shards, strict=True)
        ]
        return GradientLayout(slots, order, tp_rank=tensor_parallel.tp_rank, tp_size=tensor_parallel.tp_size)

    @staticmethod
    def lora(num_blocks: int, hidden_size: int, kv_hidden_size: int, rank: int) -> GradientLayout:
        """Return the layout of LoRA on the query and value projections, with six trained components a block.

        Args:
            num_blocks: Transformer layers.
            hidden_size: H. `lora_a_q` and `lora_a_v` are (H, rank), `lora_b_q` is (rank, H), the norms are (H,).
            kv_hidden_size: KV. `lora_b_v` is (rank, KV).
            rank: Rank of the two updates.

        Raises:
            LayoutMismatch: A size is not a whole number >= 0.

        Example:
            >>> GradientLayout.lora(28, 1536, 256, 16).blocks[0].slots[3].shape
            (16, 256)
        """
        h, kv = hidden_size, kv_hidden_size
        shapes = ((h, rank), (rank, h), (h, rank), (rank, kv), (h,), (h,))
        return GradientLayout(_block_slots(num_blocks, LORA_COMPONENTS, shapes))

    @cached_property
    def num_elements(self) -> int:
        """Elements of all components, without padding."""
        return sum(slot.size for slot in self.slots)

    @property
    def nbytes(self) -> int:
        """Bytes of the fp32 arena, padding included, which is the memory of an accumulator with this layout."""
        return 4 * self.arena_size

    @property
    def padding(self) -> list[tuple[int, int]]:
        """The ranges of the arena without a component, as pairs of the first element and one past the last."""
        starts = sorted([slot.offset for slot in self.slots] + [self.arena_size])
        stops = sorted(slot.stop for slot in self.slots)
        return [(stop, start) for stop, start in zip(stops, starts[1:], strict=True) if stop < start]

    @cached_property
    def orders(self) -> Mapping[str, Order]:
        """Name -> the order of dimensions in memory, of components whose torch parameter is not contiguous."""
        return {slot.name: slot.order for slot in self.slots if slot.order is not None}

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of `table()` in hexadecimal, which is equal on ranks that can exchange gradients."""
        return hashlib.sha256(self.table()).hexdigest()

    def table(self) -> bytes:
        """Return the layout as msgpack: rows [name, shape, block name or nil], then the spans' keys in backward order.

        The row of a parameter that is not contiguous has its order of dimensions in memory as a fourth item. For shards
        of a model [tp_rank, tp_size, each row's partition] follows, because different shards can have equal shapes and
        must not be summed. The handshake sends and compares this table.
        """
        rows = [[s.name, s.shape, s.block_name, *([] if s.order is None else [s.order])] for s in self.slots]
        part = [[self.tp_rank, self.tp_size, [slot.partition for slot in self.slots]]] if self.tp_size > 1 else []
        packed = msgpack.packb([rows, [span.key for span in self.spans], *part])
        assert isinstance(packed, bytes)  # noqa: S101  (packb's stub says Any)
        return packed

    def slot(self, name: str) -> Slot:
        """Return the slot of that name.

        Raises:
            LayoutMismatch: There is no such component. The message shows the first names.
        """
        if not isinstance(name, str) or name not in self._by_name:
            raise LayoutMismatch(
                "unknown component", got=said(name), expected=_few(self._by_name), do="see layout.slots for all names"
            )
        return self._by_name[name]

    def span_of(self, name: str) -> Span:
        """Return a component's block, or outside of blocks its span. Raises `LayoutMismatch` for an unknown name."""
        return self.spans_by_key[_key_of(self.slot(name))]

    def non_block_span(self, name: str | int) -> Span:
        """Return the span of a component outside the blocks, by name or id, or raise `LayoutMismatch`."""
        if not isinstance(name, str):
            number = as_index(name)
            if number is None or not 0 <= number < len(NON_BLOCK_COMPONENTS):
                expected = f"a name, or 0, 1 or 2 for {NON_BLOCK_COMPONENTS}"
                raise LayoutMismatch("unknown non-block id", got=said(name), expected=expected)
            name = NON_BLOCK_COMPONENTS[number]
        slot = self.slot(name)
        if slot.block is not None:
            raise LayoutMismatch(f"component '{name}' is in block {slot.block}", do="use add_block")
        return self.spans_by_key[name]

    def block(self, index: int) -> Span:
        """Return block `index`, counted from 0.

        Raises:
            LayoutMismatch: There is no such block.
        """
        number = as_index(index)
        if number is None or not 0 <= number < len(self.blocks):
            expected = f"a block in 0..{len(self.blocks) - 1}" if self.blocks else "none, as the layout has no blocks"
            raise LayoutMismatch("unknown block", got=said(index), expected=expected)
        return self.blocks[number]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GradientLayout) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        part = f"part {self.tp_rank} of {self.tp_size}, " if self.tp_size > 1 else ""
        return (
            f"GradientLayout({part}{len(self.slots)} components in {len(self.blocks)} blocks, "
            f"{self.num_elements} elements, {self.fingerprint[:12]})"
        )


def _key_of(slot: Slot) -> int | str:
    """Return the key of a slot's span."""
    return slot.name if slot.block is None else slot.block


def refuse_no_layout(layout: object) -> None:
    """Raise `CallerError` unless this is a layout."""
    do = "pass GradientLayout.of(...), or gradengine.torch.layout_of(model)"
    refuse_other_kind("layout", layout, GradientLayout, do=do)


def layout_from_table(table: bytes) -> GradientLayout:
    """Return the layout that a rank's table describes, or raise `LayoutMismatch` if the table is not valid."""
    refuse_other_kind("a layout table", table, bytes)
    try:
        table_rows, order, *part = msgpack.unpackb(table, max_ext_len=0)
        tp_rank, tp_size, partitions = part[0] if part else (0, 1, ["replicated"] * len(table_rows))
        slots = [
            _slot(str(name), shape, None if block is None else str(block), partition, orders)
            for (name, shape, block, *orders), partition in zip(table_rows, partitions, strict=True)
        ]
        return GradientLayout(slots, order, tp_rank=tp_rank, tp_size=tp_size)
    except LayoutMismatch:
        raise
    except (ValueError, TypeError, RecursionError, CallerError) as fault:
        raise LayoutMismatch(f"a layout table cannot be read ({fault})") from None


def _slot(name: str, shape: Sequence[int], block: str | None, partition: Partition, orders: Sequence[Any]) -> Slot:
    """Return the slot of a table's row, which has one order of dimensions or none."""
    for order in orders:
        if sorted(order) != [*range(len(shape))] or len(orders) > 1:
            raise LayoutMismatch(f"component '{name}' has a bad order of dimensions", got=said(orders))
    return Slot(name, _shape_of(name, shape), block, partition, tuple(orders[0]) if orders else None)


def _block_slots(num_blocks: int, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[Slot]:
    count = whole_number("num_blocks", num_blocks, 0, _MOST_BLOCKS, LayoutMismatch)
    checked = {name: _shape_of(f"blocks.0.{name}", shape) for name, shape in zip(names, shapes, strict=True)}
    return [Slot(f"blocks.{b}.{name}", shape, f"blocks.{b}") for b in range(count) for name, shape in checked.items()]


def _shape_of(name: str, array: Any) -> Shape:
    dimensions = tuple(array.shape) if hasattr(array, "shape") else array
    given = [as_index(dimension) for dimension in dimensions] if isinstance(dimensions, (tuple, list)) else [None]
    shape = tuple(dimension for dimension in given if dimension is not None and dimension >= 0)
    if len(shape) < len(given) or len(shape) > MAX_DIMENSIONS:
        expected = f"an array, or at most {MAX_DIMENSIONS} whole numbers >= 0"
        raise LayoutMismatch(f"component '{name}' has no shape", got=said(array), expected=expected)
    return shape


def _block_name(name: str) -> str | None:
    parts = name.split(".")[:-1]
    numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
    # flax names modules like "Block_0". A name like "layer0" does not count.
    numbers += [i for i, part in enumerate(parts) if "_" in part and part.rpartition("_")[2].isdecimal()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else None


def _refuse_bad_partitions(partitions: Mapping[str, object], named: Mapping[str, object], tp_size: int | None) -> None:
    for name in partitions:
        if name not in named:
            raise LayoutMismatch("partitions names an unknown component", got=said(name), expected=_few(named))
    if partitions and tp_size is None:
        raise CallerError("partitions need a group's size", got="no tp_size", expected="tp_rank= and tp_size= too")
    for name in named if tp_size is not None and tp_size > 1 else ():
        if name not in partitions:  # "replicated" as a default would count a forgotten shard once in the norm
            raise LayoutMismatch(f"component '{name}' of a part has no partition", expected=_few(get_args(Partition)))


def _few(names: Iterable[str]) -> str:
    first, rest = [*names][:4], [*names][4:]
    return f"one of {', '.join(map(repr, first))}{', ...' if rest else ''}"
