"""The layout: known sizes, places in the arena, names and order, parts of a model, and what it refuses."""

import copy
import hashlib
import itertools
import pickle
import re
import sys
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest
import strategies as draw
from hypothesis import given
from hypothesis import strategies as st

from gradengine import TensorParallelConfig
from gradengine.arrays.dlpack import MAX_DIMENSIONS
from gradengine.errors import BufferRefused, CallerError, LayoutMismatch
from gradengine.exchange.handshake import differing_rows
from gradengine.layout import (
    BLOCK_COMPONENTS,
    LORA_COMPONENTS,
    NON_BLOCK_COMPONENTS,
    GradientLayout,
    Slot,
    layout_from_table,
)

LARGE = {"num_blocks": 24, "hidden_size": 1024, "kv_hidden_size": 256, "intermediate_size": 4096, "vocab_size": 32768}
SMALL = GradientLayout.transformer(2, 8, 4, 12, 16)
BASE = {"layers.0.a": (2, 3), "layers.0.b": (4,), "head": (5,)}
TP = {"hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "num_kv_heads": 4}


def vars_of(span):
    """What a span says, whatever else was asked of it; spans are compared by identity."""
    return type(span), span.key, span.positions, span.slots, span.start, span.stop, span.called


@st.composite
def parts(draw_one):
    """A layout, whole or a part of a model."""
    shapes, size = draw_one(draw.named_shapes), draw_one(st.integers(1, 3))
    cuts = ("column", "row", "replicated") if size > 1 else ("replicated",)
    partitions = {name: draw_one(st.sampled_from(cuts)) for name in shapes}
    return GradientLayout.of(shapes, tp_rank=draw_one(st.integers(0, size - 1)), tp_size=size, partitions=partitions)


class TestTransformer:
    def test_known_values(self):
        layout = GradientLayout.transformer(**LARGE, embedding=False)
        assert [slot.name for slot in layout.blocks[0].slots] == [f"blocks.0.{name}" for name in BLOCK_COMPONENTS]
        assert layout.num_elements == 24 * (2 * 1048576 + 2 * 262144 + 3 * 4194304 + 2048) + 32768 * 1024 + 1024
        assert layout.nbytes == 4 * layout.arena_size == 1594036224

    def test_shapes_names_and_backward_order(self):
        block = [(8, 8), (8, 4), (8, 4), (8, 8), (8, 12), (8, 12), (12, 8), (8,), (8,)]
        names = "w_q", "w_k", "w_v", "w_o", "gate", "up", "down", "input_norm", "post_attn_norm"
        assert (BLOCK_COMPONENTS, [slot.shape for slot in SMALL.blocks[1].slots]) == (names, block)
        assert NON_BLOCK_COMPONENTS == ("lm_head", "final_norm", "embedding")
        assert [(slot.name, slot.shape) for slot in SMALL.slots if slot.block is None] == [
            *(("lm_head", (16, 8)), ("final_norm", (8,)), ("embedding", (16, 8)))
        ]
        assert [span.key for span in SMALL.spans] == ["lm_head", "final_norm", 1, 0, "embedding"]
        tied = GradientLayout.transformer(*map(np.int64, (2, 8, 4, 12, 16)), embedding=False)
        assert list(map(vars_of, tied.spans)) == list(map(vars_of, SMALL.spans[:-1]))
        layout = GradientLayout.transformer(0, 8, 4, 12, 0)  # a count may be zero
        assert (layout.blocks, layout.slot("lm_head").size) == ((), 0)

    def test_lora(self):
        layout = GradientLayout.lora(num_blocks=3, hidden_size=8, kv_hidden_size=4, rank=2)
        assert [slot.name for slot in layout.blocks[2].slots] == [f"blocks.2.{name}" for name in LORA_COMPONENTS]
        assert [slot.shape for slot in layout.blocks[0].slots] == [(8, 2), (2, 8), (8, 2), (2, 4), (8,), (8,)]
        assert [span.key for span in layout.spans] == [2, 1, 0]
        with pytest.raises(LayoutMismatch, match="at least one component"):
            GradientLayout.lora(0, 8, 4, 2)

    def test_bad_sizes(self):
        sizes = {"num_blocks": 1, "hidden_size": 8, "kv_hidden_size": 4, "intermediate_size": 12, "vocab_size": 16}
        for name, values, says in (
            ("num_blocks", (-1, 2**14 + 1), "num_blocks is out of range"),
            ("num_blocks", (1.5, "2"), "num_blocks is not a whole number"),
            ("hidden_size", (-8,), r"'blocks.0.w_q' .*\(-8, -8\)"),
            ("kv_hidden_size", (4.0,), r"'blocks.0.w_k' .*\(8, 4.0\)"),
            ("vocab_size", (None,), "'lm_head'"),
        ):
            for value in values:
                with pytest.raises(LayoutMismatch, match=says):
                    GradientLayout.transformer(**{**sizes, name: value})


class TestPlaces:
    @given(draw.named_shapes)
    def test_slots_are_aligned_and_disjoint_blocks_come_first_and_spans_partition_the_arena(self, shapes):
        layout = GradientLayout.of(shapes)
        assert [(slot.name, slot.shape) for slot in layout.slots] == list(shapes.items())
        assert [layout.slot(name).name for name in shapes] == list(shapes)
        placed = sorted(layout.slots, key=lambda slot: (slot.offset, slot.stop))
        assert placed[0].offset == 0
        for slot, following in itertools.zip_longest(placed, placed[1:]):
            after = layout.arena_size if following is None else following.offset
            assert slot.offset % 32 == after % 32 == 0
            assert slot.stop <= after < slot.stop + 32  # no hole but padding
        assert layout.num_elements == sum(slot.size for slot in layout.slots)
        covered = 0
        for span in sorted(layout.spans, key=lambda span: (span.start, span.stop)):
            assert span.start == covered == span.slots[0].offset
            assert span.stop >= span.slots[-1].stop
            covered = span.stop
        assert covered == layout.arena_size
        assert sorted(s.name for span in layout.spans for s in span.slots) == sorted(shapes)
        for index, block in enumerate(layout.blocks):
            assert (block.key, layout.block(np.int64(index))) == (index, block)
            assert all(slot.block == index and slot.name.startswith(f"{block.name}.") for slot in block.slots)
        first = min((slot.offset for slot in layout.slots if slot.block is None), default=layout.arena_size)
        assert all(block.stop <= first for block in layout.blocks)
        inside = np.zeros(layout.arena_size, bool)
        for slot in layout.slots:
            inside[slot.offset : slot.stop] = True
        padded = [index for start, stop in layout.padding for index in range(start, stop)]
        assert sorted(padded) == np.flatnonzero(~inside).tolist()

    def test_sizes_beyond_32_bits(self):
        size = 2**40 + 33
        layout = GradientLayout.of({"layers.0.a": (size,), "layers.0.b": (2, size), "head": (3,)})
        assert layout.slot("layers.0.b").offset == size + 31
        assert layout.nbytes == 4 * (layout.slot("head").offset + 32) == 4 * (3 * size + 31 + 30 + 32)
        assert GradientLayout.of({"w": (np.int32(2**16),) * 3}).num_elements == 2**48
        assert GradientLayout.of({"w": (2**60,)}).nbytes == 2**62

    def test_a_slot_of_no_dimensions_has_one_element(self):
        assert GradientLayout.of({"temperature": ()}).slots[0].size == 1
        assert Slot("w", (4, 0)).size == 0


class TestBlockNames:
    @pytest.mark.parametrize(
        "name",  # what is its block, in brackets
        [
            *("[encoder.layers.3].attention.w", "[layers.0].experts.7.w", "[0].weight", "[layers.1].5e3.w"),
            *("[params.Block_0].Dense_1.kernel", "[layers_11].w", "[_0].w"),  # as flax names them
            "[encoder_1.layers.3].w",  # a number alone comes first
            *("layers.0", "Block_0"),  # a number at the end is no block but the component's own
            *("layer0.w", "block_.w", "block_x1.w", "layers.-1.w", ""),
        ],
    )
    def test_which_block_a_name_lies_in(self, name):
        layout = GradientLayout.of({name.replace("[", "").replace("]", ""): (2,)})
        assert [block.name for block in layout.blocks] == re.findall(r"\[(.*)\]", name)

    @pytest.mark.parametrize(
        ("names", "blocks"),
        [
            ("e.layers.10 e.layers.9 d.layers.0 e.layers.0", "e.layers.0 e.layers.9 e.layers.10 d.layers.0"),
            ("p.Block_10 p.Block_9 p.out p.Head_0", "p.Block_9 p.Block_10 p.Head_0"),
            ("layers.12 layers.13 layers.40", "layers.12 layers.13 layers.40"),  # a gap in the numbers is none
        ],
    )
    def test_blocks_are_numbered_by_stem_then_number(self, names, blocks):
        layout = GradientLayout.of({f"{name}.w": (2,) for name in names.split()})
        assert [(block.key, block.name) for block in layout.blocks] == list(enumerate(blocks.split()))

    def test_components_of_a_block_may_be_listed_apart_and_backward_is_the_reverse_of_first_appearance(self):
        names = ["embedding", "layers.0.a", "layers.1.a", "layers.0.b", "head"]
        layout = GradientLayout.of(dict.fromkeys(names, (2,)))
        assert [slot.name for slot in layout.blocks[0].slots] == ["layers.0.a", "layers.0.b"]
        assert [slot.name for slot in layout.slots] == names
        assert [span.key for span in layout.spans] == ["head", 1, 0, "embedding"]


REFUSED = [  # what makes no layout, and what the error says
    ({}, r"at least one component: got 0"),
    ([], r"at least one component: got 0"),
    ({"a": {}}, r"at least one component"),
    ({"w": (2, -1)}, r"'w' has no shape: got \(2, -1\)"),
    ({"w": (2.0,)}, r"'w' has no shape: got \(2.0,\)"),
    ({"w": 5}, r"'w' has no shape: got 5"),
    ({"w": b"ab"}, r"'w' has no shape: got bytes"),  # two whole numbers, 97 and 98
    ({"w": {2, 3}}, r"'w' has no shape: got set"),  # in which order?
    ({"a": {"b": 5}}, r"'a\.b' has no shape: got 5"),
    ({"a": {7: (2,)}}, r"not text: got 7"),
    ("ab", r"several arrays or shapes: got str"),
    (b"ab", r"several arrays or shapes: got bytes"),
    (None, r"several arrays or shapes: got NoneType"),
    (np.zeros((3, 4)), r"several arrays or shapes: got ndarray"),
    ({"a": {"b": (2,)}, "a.b": (3,)}, r"one name: got 'a\.b'"),
    ({"layers." + "9" * 19 + ".w": (2,)}, r"does not end in a number"),
    ({"w": (2**60 + 1,)}, r"too large"),  # 2**62 bytes, and more
    ({"w": (1,) * 65}, r"at most 64 whole numbers"),
    ([itertools.count()], r"'0' has no shape: got count"),
]


class TestOf:
    def test_arrays_and_shapes_in_mappings_and_sequences_within_each_other(self):
        shapes = [(2, 3), (4,), ()]
        arrays = [np.zeros(shape, np.float16) for shape in shapes]
        expected = GradientLayout.of({"0": (2, 3), "1": (4,), "2": ()})
        for given_ in (shapes, arrays, iter(arrays), dict(zip("012", arrays, strict=True)), [[2, 3], [4], []]):
            assert GradientLayout.of(given_) == expected
        assert GradientLayout.of({"layers." + "9" * 18 + ".w": (2,)}).blocks
        nested = {"encoder": [{"w": arrays[0], "b": arrays[1]}, {"w": (4, 1)}], "head": {"scale": ()}}
        expected = {"encoder.0.w": (2, 3), "encoder.0.b": (4,), "encoder.1.w": (4, 1), "head.scale": ()}
        assert GradientLayout.of(nested) == GradientLayout.of(expected)
        assert GradientLayout.of([[(2,), (3,)], (4,)]) == GradientLayout.of({"0.0": (2,), "0.1": (3,), "1": (4,)})

    @pytest.mark.parametrize(("gradients", "says"), REFUSED)
    def test_refused(self, gradients, says):
        with pytest.raises(LayoutMismatch, match=says):
            GradientLayout.of(gradients)

    def test_as_many_dimensions_are_taken_as_arrays_may_have(self):
        assert GradientLayout.of({"w": (1,) * MAX_DIMENSIONS}).slot("w").size == 1

    @pytest.mark.parametrize("dtype", [np.float64, np.complex64, np.int32, np.bool_, np.dtype(">f4")])
    def test_arrays_whose_gradients_cannot_be_taken_are_refused_by_name_and_dtype(self, dtype):
        with pytest.raises(BufferRefused, match=rf"'a.w' .*{np.dtype(dtype).name}"):
            GradientLayout.of({"a": {"w": np.zeros(2, dtype)}})

    @pytest.mark.parametrize("torch", [None, SimpleNamespace(Tensor=str)], ids=["absent", "here"])
    def test_another_frameworks_module_is_refused_and_its_parameters_by_name_are_taken(self, monkeypatch, torch):
        monkeypatch.setitem(sys.modules, "torch", torch)
        weight = SimpleNamespace(shape=[2, 3], dtype="paddle.float32", requires_grad=True)
        layer = SimpleNamespace(named_parameters=lambda: iter([("layers.0.w", weight)]))
        with pytest.raises(CallerError, match=r"torch.* dict\(module.named_parameters\(\)\)"):
            GradientLayout.of(layer)
        assert GradientLayout.of(dict(layer.named_parameters())) == GradientLayout.of({"layers.0.w": (2, 3)})

    def test_what_is_looked_up_and_not_there(self):
        with pytest.raises(LayoutMismatch, match=r"'blocks.0.w_q', .*\.\.\.") as caught:
            SMALL.slot("w_x")
        assert caught.value.got == "'w_x'"
        for layout, index, expected in ((GradientLayout.of([(2,)]), 0, "none"), *((SMALL, i, r"0..1") for i in _BAD)):
            with pytest.raises(LayoutMismatch, match="unknown block") as caught:
                layout.block(index)
            assert expected in caught.value.expected


_BAD = (-1, 2, 1.0, "0", None)


class TestFingerprint:
    @pytest.mark.parametrize(
        "other",
        [
            *({**BASE, "layers.0.a": (6,)}, {**BASE, "empty": (0,)}, dict(reversed(BASE.items()))),
            *({"layers.0.a": (2, 3), name: (4,), "head": (5,)} for name in ("layers.0.c", "layers.1.b")),
            {"layers.0.b": (4,), "layers.0.a": (2, 3), "head": (5,)},
        ],
        ids=["shape", "one more", "backward", "name", "block", "order"],
    )
    def test_changes_with(self, other):
        one, two = GradientLayout.of(BASE), GradientLayout.of(other)
        assert one.fingerprint == hashlib.sha256(one.table()).hexdigest() != two.fingerprint
        assert one not in (two, BASE)

    def test_changes_with_the_block_alone_and_with_backward_order_alone(self):
        rows, order = msgpack.unpackb(GradientLayout.of(BASE).table())
        layouts = [layout_from_table(msgpack.packb(t)) for t in ([rows, order], [rows, order[::-1]])]
        loose = layout_from_table(msgpack.packb([[[n, s, None] for n, s, _ in rows], [n for n, _, _ in rows]]))
        assert len({layout.fingerprint for layout in (*layouts, loose)}) == 3
        assert layouts[0] != layouts[1]  # equality sees what the fingerprint sees
        assert loose not in layouts

    @given(draw.named_shapes, draw.dtypes)
    def test_does_not_change_with_dtype_or_container(self, shapes, dtype):
        arrays = {name: np.zeros(shape, draw.DTYPES[dtype]) for name, shape in shapes.items()}
        one, two = GradientLayout.of(shapes), GradientLayout.of(arrays)
        assert (one, hash(one), one.fingerprint) == (two, hash(two), two.fingerprint)


ROW = ["w", [2], None]
BAD_TABLES = [
    *(7, [], [[], []], [[["w", [2]]], ["w"]], [[["w", 2, None]], ["w"]], [[["w", [-2], None]], ["w"]]),
    *([[["w", [2.5], None]], ["w"]], [[ROW], []], [[ROW], ["w", "w"]], [[ROW], ["v"]], [[ROW], [0]]),
    *([[ROW], [["w"]]], [[ROW, ROW], ["w"]], [[["w", [2], "no number"]], [0]]),
    *([[ROW], ["w"], [0]], [[ROW], ["w"], [0, 2]], [[ROW], ["w"], [2, 2, ["row"]]], [[ROW], ["w"], [0, 0, ["row"]]]),
    *([[ROW], ["w"], [0, 2, ["rows"]]], [[ROW], ["w"], [0, 2, []]], [[ROW], ["w"], [0, 2, ["row", "row"]]]),
    *([[[*ROW, order]], ["w"]] for order in ([1], [0, 0], [], None, 0, "0")),
    *([[ROW], ["w"], "x"], [[ROW], ["w"], 7], [[ROW], ["w"], None], [[ROW], ["w"], [0, 2, [[]]]]),
    *([[ROW], ["w"], [0.5, 2, ["row"]]], [[ROW], ["w"], [0, 2, 3]], [[ROW], ["w"], [True, 2, ["row"]]]),
]


DEEP = b"\x91" * 1000 + b"\xc0"  # Python's own limit is about as deep
DEEP_TABLES = [
    *(b"\x91" * 10**6, b"\x92\x91\x93" + DEEP + b"\x91\x02\xc0\x91\xa1w", b"\x92\x91\x93\xa1w\x91\x02\xc0\x91" + DEEP),
    *(b"\x92\x91\x94\xa1w\x91\x02\xc0" + DEEP + b"\x91\xa1w", b"\x92\x91\x93\xa1w" + DEEP + b"\xc0\x91\xa1w"),
]


class TestTable:
    @given(parts())
    def test_it_is_read_back_pickled_and_copied_whatever_was_asked_of_it(self, layout):
        assert layout.spans_by_key
        for made in (layout_from_table(layout.table()), pickle.loads(pickle.dumps(layout)), copy.deepcopy(layout)):
            assert made == layout
            assert (made.slots, list(map(vars_of, made.spans))) == (layout.slots, list(map(vars_of, layout.spans)))
            assert (made.tp_rank, made.tp_size, made.arena_size) == (layout.tp_rank, layout.tp_size, layout.arena_size)

    def test_a_transformers_own_order_is_kept_and_the_table_of_a_whole_model_is_what_it_was(self):
        assert list(map(vars_of, layout_from_table(SMALL.table()).spans)) == list(map(vars_of, SMALL.spans))
        assert msgpack.unpackb(GradientLayout.of({"w": (2, 3)}).table()) == [[["w", [2, 3], None]], ["w"]]

    @pytest.mark.parametrize(
        "table",
        [b"", b"\xc1", SMALL.table()[:-1], SMALL.table() + b"\x00", *DEEP_TABLES, *map(msgpack.packb, BAD_TABLES)],
    )
    def test_bad_tables_are_refused(self, table):
        with pytest.raises(LayoutMismatch):
            layout_from_table(table)

    @given(st.integers(0, len(SMALL.table()) - 1), st.integers(0, 255))
    def test_any_byte_changed_gives_another_layout_or_a_refusal(self, position, value):
        table = bytearray(SMALL.table())
        table[position] = value
        try:
            layout = layout_from_table(bytes(table))
        except LayoutMismatch:
            return
        assert (layout == SMALL) == (table == SMALL.table())


MANY, NAMES = [[f"w{i}", [1], None] for i in range(20)], [f"w{i}" for i in range(20)]
ONE, TWO, LARGER = [[ROW], ["w"]], [[ROW, ["b", [3], None]], ["w", "b"]], [[["w", [4], None]], ["w"]]
PART, OTHER_PART = ([*ONE, [rank, 2, ["row"]]] for rank in (0, 1))


@pytest.mark.parametrize(
    ("here", "there", "shown"),
    [
        (TWO, TWO, []),
        (ONE, TWO, ["row 1: here nothing, there 'b' (3,)"]),
        (TWO, ONE, ["row 1: here 'b' (3,), there nothing"]),
        (
            [MANY, NAMES],
            [[[n, [2], None] for n in NAMES], NAMES],
            [*(f"row {i}: here 'w{i}' (1,), there 'w{i}' (2,)" for i in range(3)), "and 17 more"],
        ),
        (
            [MANY, NAMES],
            [MANY, [*NAMES[:-2], "w19", "w18"]],
            ["backward order at 18: here 'w18', there 'w19'", "backward order at 19: here 'w19', there 'w18'"],
        ),
        (ONE, [[["w", [2], "layers.0"]], [0]], ["row 0: here 'w' (2,), there 'w' (2,) in 'layers.0'"]),
        (PART, OTHER_PART, ["part of a model: here tp_rank 0 of 2 (1 row), there tp_rank 1 of 2 (1 row)"]),
        (
            PART,
            LARGER,
            ["part of a model: here tp_rank 0 of 2 (1 row), there the whole", "row 0: here 'w' (2,), there 'w' (4,)"],
        ),
    ],
)
def test_where_two_tables_differ_is_shown(here, there, shown):
    assert differing_rows(msgpack.packb(here), msgpack.packb(there), limit=3).splitlines() == shown


class TestPartOfAModel:
    @pytest.mark.parametrize("vocab_parallel", [False, True])
    def test_each_component_is_marked_and_has_its_local_shape_and_the_models_place(self, vocab_parallel):
        config = TensorParallelConfig(1, 2, **TP, vocab_parallel=vocab_parallel)
        whole, part = (GradientLayout.transformer(**LARGE, tensor_parallel=each) for each in (None, config))
        cut = [(slot.name, config.shard_of(slot.name, slot.shape)) for slot in whole.slots]
        assert [(slot.name, slot.shape, slot.partition) for slot in part.slots] == [
            (name, shard.local_shape, shard.partition) for name, shard in cut
        ]
        assert [span.key for span in part.spans] == [span.key for span in whole.spans]
        assert [(each.tp_rank, each.tp_size) for each in (part, whole)] == [(1, 2), (0, 1)]
        alone = TensorParallelConfig(0, 1, **TP, vocab_parallel=vocab_parallel)
        assert GradientLayout.transformer(**LARGE, tensor_parallel=alone) == whole
        with pytest.raises(LayoutMismatch, match=r"'blocks.0.w_k' .*\(1024, 512\), expected \(1024, 256\)"):
            GradientLayout.transformer(**{**LARGE, "kv_hidden_size": 512}, tensor_parallel=config)

    def test_parts_of_equal_shapes_have_different_fingerprints(self):
        """Workers may sum equal parts only; which part it is no shape says."""
        made = [
            GradientLayout.of(BASE, tp_rank=rank, tp_size=np.int64(2), partitions=dict.fromkeys(BASE, cut))
            for rank in (0, 1)
            for cut in ("row", "column")
        ]
        assert len({part.fingerprint for part in made}) == 4
        assert {slot.partition for slot in made[0].slots} == {"row"}
        assert repr(made[2]).startswith("GradientLayout(part 1 of 2, 3 components")
        assert GradientLayout.of({"w": (2,)}, tp_size=1, partitions={"w": "row"}) == GradientLayout.of({"w": (2,)})

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            ({"partitions": {"tail": "row"}}, "'tail', expected one of 'layers.0.a'"),
            ({"partitions": {**dict.fromkeys(BASE, "row"), "head": "rows"}}, "'head' .*got 'rows'"),
            ({"partitions": {**dict.fromkeys(BASE, "row"), "head": None}}, "'head' .*got None"),
            # A shard that was forgotten would be counted once, or summed with another.
            ({"partitions": {"layers.0.a": "row"}}, "'layers.0.b' of a part has no partition"),
            ({"tp_size": None, "partitions": {"head": "row"}}, "no tp_size"),
            ({"tp_rank": 2}, "tp_rank of tp_size=2 is out of range: got 2"),
            ({"tp_size": 0}, "tp_size is out of range: got 0"),
        ],
    )
    def test_what_is_no_part_is_refused(self, arguments, says):
        with pytest.raises(CallerError, match=says):
            GradientLayout.of(BASE, **{"tp_rank": 0, "tp_size": 2, "partitions": {}, **arguments})
