"""The layout: known sizes, places in the arena, names and order, and what it refuses."""

import copy
import hashlib
import itertools
import pickle
import re

import msgpack
import numpy as np
import pytest
import strategies as draw
from hostile_values import ENDLESS
from hypothesis import given
from hypothesis import strategies as st

from gradengine import TensorParallelConfig
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


class TestTransformer:
    def test_component_sizes(self):
        block = GradientLayout.transformer(**LARGE).blocks[0]
        assert [slot.size for slot in block.slots] == [
            *(1048576, 262144, 262144, 1048576),
            *(4194304, 4194304, 4194304),
            *(1024, 1024),
        ]
        assert [slot.name for slot in block.slots] == [f"blocks.0.{name}" for name in BLOCK_COMPONENTS]
        assert BLOCK_COMPONENTS == ("w_q", "w_k", "w_v", "w_o", "gate", "up", "down", "input_norm", "post_attn_norm")

    def test_bytes_of_24_blocks(self):
        layout = GradientLayout.transformer(**LARGE, embedding=False)
        assert layout.num_elements == 24 * (2 * 1048576 + 2 * 262144 + 3 * 4194304 + 2048) + 32768 * 1024 + 1024
        assert 1.5e9 <= layout.nbytes <= 1.6e9
        assert layout.nbytes == 4 * layout.arena_size

    def test_shapes(self):
        shapes = {slot.name: slot.shape for slot in SMALL.slots}
        assert [shapes[f"blocks.1.{name}"] for name in BLOCK_COMPONENTS] == [
            *((8, 8), (8, 4), (8, 4), (8, 8)),
            *((8, 12), (8, 12), (12, 8)),
            *((8,), (8,)),
        ]
        assert [shapes[name] for name in NON_BLOCK_COMPONENTS] == [(16, 8), (8,), (16, 8)]

    def test_non_block_ids_are_their_positions(self):
        assert NON_BLOCK_COMPONENTS == ("lm_head", "final_norm", "embedding")
        assert [slot.name for slot in SMALL.slots[-3:]] == list(NON_BLOCK_COMPONENTS)
        assert all(slot.block is None for slot in SMALL.slots[-3:])

    def test_backward_runs_from_the_head_to_the_embedding(self):
        assert [span.key for span in SMALL.spans] == ["lm_head", "final_norm", 1, 0, "embedding"]
        tied = GradientLayout.transformer(2, 8, 4, 12, 16, embedding=False)
        assert [span.key for span in tied.spans] == ["lm_head", "final_norm", 1, 0]

    @pytest.mark.parametrize(("blocks", "vocab"), [(0, 16), (1, 0)])
    def test_a_count_may_be_zero(self, blocks, vocab):
        layout = GradientLayout.transformer(blocks, 8, 4, 12, vocab)
        assert len(layout.blocks) == blocks
        assert layout.slot("lm_head").size == 8 * vocab

    def test_numpy_integers_are_whole_numbers(self):
        assert GradientLayout.transformer(*map(np.int64, (2, 8, 4, 12, 16))) == SMALL
        assert SMALL.block(np.int64(1)) is SMALL.blocks[1]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"num_blocks": -1}, "num_blocks is out of range: got -1"),
            ({"num_blocks": 1.5}, "num_blocks is not a whole number: got 1.5"),
            ({"num_blocks": "2"}, "num_blocks is not a whole number: got '2'"),
            ({"hidden_size": -8}, r"component 'blocks.0.w_q' has a negative dimension: got \(-8, -8\)"),
            ({"kv_hidden_size": 4.0}, r"component 'blocks.0.w_k' has no shape: got \(8, 4.0\)"),
            ({"vocab_size": None}, "component 'lm_head' has no shape"),
        ],
    )
    def test_bad_sizes(self, change, message):
        sizes = {"num_blocks": 1, "hidden_size": 8, "kv_hidden_size": 4, "intermediate_size": 12, "vocab_size": 16}
        with pytest.raises(LayoutMismatch, match=message):
            GradientLayout.transformer(**{**sizes, **change})


class TestLora:
    def test_shapes_and_order(self):
        layout = GradientLayout.lora(num_blocks=3, hidden_size=8, kv_hidden_size=4, rank=2)
        assert [slot.name for slot in layout.blocks[2].slots] == [f"blocks.2.{name}" for name in LORA_COMPONENTS]
        assert [slot.shape for slot in layout.blocks[0].slots] == [(8, 2), (2, 8), (8, 2), (2, 4), (8,), (8,)]
        assert [span.key for span in layout.spans] == [2, 1, 0]

    def test_no_blocks_is_no_layout(self):
        with pytest.raises(LayoutMismatch, match="at least one component"):
            GradientLayout.lora(0, 8, 4, 2)


class TestPlaces:
    @given(draw.layouts)
    def test_slots_are_aligned_disjoint_and_cover_the_arena(self, layout):
        placed = sorted(layout.slots, key=lambda slot: (slot.offset, slot.stop))
        assert placed[0].offset == 0
        for slot, following in zip(placed, [*placed[1:], None], strict=True):
            assert slot.offset % 32 == 0
            after = layout.arena_size if following is None else following.offset
            assert slot.stop <= after < slot.stop + 32  # no hole but padding
        assert layout.arena_size % 32 == 0
        assert layout.num_elements == sum(slot.size for slot in layout.slots)

    @given(draw.layouts)
    def test_spans_are_contiguous_and_partition_slots_and_arena(self, layout):
        assert sorted(slot.name for span in layout.spans for slot in span.slots) == sorted(
            slot.name for slot in layout.slots
        )
        covered = 0
        for span in sorted(layout.spans, key=lambda span: (span.start, span.stop)):
            assert span.start == covered == span.slots[0].offset
            assert span.stop >= span.slots[-1].stop
            covered = span.stop
        assert covered == layout.arena_size

    @given(draw.layouts)
    def test_blocks_come_first_and_know_their_slots(self, layout):
        for index, block in enumerate(layout.blocks):
            assert (block.key, block.index) == (index, index)
            assert all(slot.block == index and slot.name.startswith(f"{block.name}.") for slot in block.slots)
        first = min((slot.offset for slot in layout.slots if slot.block is None), default=layout.arena_size)
        assert all(block.stop <= first for block in layout.blocks)

    @given(draw.named_shapes)
    def test_slots_keep_the_order_given(self, shapes):
        layout = GradientLayout.of(shapes)
        assert [(slot.name, slot.shape) for slot in layout.slots] == list(shapes.items())
        assert [layout.slot(name).name for name in shapes] == list(shapes)

    def test_a_block_may_have_any_number_of_components(self):
        shapes = {f"layers.{b}.c{i}": (i + 1,) for b in range(3) for i in range(10 * b + 1)}
        layout = GradientLayout.of(shapes)
        assert [len(block.slots) for block in layout.blocks] == [1, 11, 21]

    @pytest.mark.parametrize("size", [2**31 + 1, 2**40 + 33])
    def test_sizes_beyond_32_bits(self, size):
        layout = GradientLayout.of({"layers.0.a": (size,), "layers.0.b": (2, size), "head": (3,)})
        padded = -(-size // 32) * 32
        assert layout.slot("layers.0.b").offset == padded
        assert layout.slot("head").offset == padded + -(-2 * size // 32) * 32
        assert layout.num_elements == 3 * size + 3
        assert layout.nbytes == 4 * (layout.slot("head").offset + 32)

    def test_sizes_beyond_32_bits_from_small_dimensions(self):
        layout = GradientLayout.of({"w": tuple(np.int32(2**16) for _ in range(3))})
        assert layout.slots[0].size == 2**48

    def test_a_slot_of_no_dimensions_has_one_element(self):
        assert GradientLayout.of({"temperature": ()}).slots[0].size == 1
        assert Slot("w", (4, 0), 0, None).size == 0


class TestBlockNames:
    @pytest.mark.parametrize(
        ("name", "block"),
        [
            ("layers.0.w", "layers.0"),
            ("encoder.layers.3.attention.w", "encoder.layers.3"),
            ("layers.0.experts.7.w", "layers.0"),
            ("0.weight", "0"),
            ("layers.0", None),  # a number at the end is no block but the component's own
            ("layer0.w", None),
            ("params.Block_0.Dense_1.kernel", "params.Block_0"),  # as flax names them
            ("layers_11.w", "layers_11"),
            ("encoder_1.layers.3.w", "encoder_1.layers.3"),  # a number alone comes first
            ("Block_0", None),
            ("_0.w", "_0"),
            ("block_.w", None),
            ("block_x1.w", None),
            ("layers.-1.w", None),
            ("layers.1.5e3.w", "layers.1"),
            ("head", None),
            ("", None),
        ],
    )
    def test_which_block_a_name_lies_in(self, name, block):
        layout = GradientLayout.of({name: (2,)})
        assert [b.name for b in layout.blocks] == ([] if block is None else [block])

    def test_blocks_are_numbered_by_stem_then_number(self):
        names = ["encoder.layers.10.w", "encoder.layers.9.w", "decoder.layers.0.w", "encoder.layers.0.w"]
        layout = GradientLayout.of(dict.fromkeys(names, (2,)))
        assert [block.name for block in layout.blocks] == [
            "encoder.layers.0",
            "encoder.layers.9",
            "encoder.layers.10",
            "decoder.layers.0",
        ]

    def test_flaxs_blocks_too(self):
        layout = GradientLayout.of({f"params.{name}.kernel": (2,) for name in ("Block_10", "Block_9", "out", "Head_0")})
        assert [block.name for block in layout.blocks] == ["params.Block_9", "params.Block_10", "params.Head_0"]
        assert GradientLayout.of({f"params.{name}.kernel": (2,) for name in ("out",)}).blocks == ()

    def test_a_gap_in_the_numbers_is_none_in_the_indices(self):
        layout = GradientLayout.of({f"layers.{n}.w": (2,) for n in (12, 13, 40)})
        assert [(block.index, block.name) for block in layout.blocks] == [
            (0, "layers.12"),
            (1, "layers.13"),
            (2, "layers.40"),
        ]

    def test_components_of_a_block_may_be_listed_apart(self):
        layout = GradientLayout.of({"layers.0.a": (40,), "head": (5,), "layers.1.a": (2,), "layers.0.b": (7,)})
        assert [slot.name for slot in layout.blocks[0].slots] == ["layers.0.a", "layers.0.b"]
        assert [slot.name for slot in layout.slots] == ["layers.0.a", "head", "layers.1.a", "layers.0.b"]

    def test_backward_order_is_the_reverse_of_first_appearance(self):
        layout = GradientLayout.of({"embedding": (2,), "layers.0.a": (2,), "layers.1.a": (2,), "head": (2,)})
        assert [span.key for span in layout.spans] == ["head", 1, 0, "embedding"]


class TestOf:
    def test_arrays_and_shapes_mappings_and_sequences(self):
        shapes = [(2, 3), (4,), ()]
        arrays = [np.zeros(shape, np.float16) for shape in shapes]
        expected = GradientLayout.of({"0": (2, 3), "1": (4,), "2": ()})
        for given_ in (shapes, arrays, tuple(shapes), dict(zip("012", arrays, strict=True)), [[2, 3], [4], []]):
            assert GradientLayout.of(given_) == expected

    def test_torch_tensors_and_modules(self):
        torch = pytest.importorskip("torch")
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU(), torch.nn.Linear(2, 1))
        layout = GradientLayout.of(dict(model.named_parameters()))
        assert [(slot.name, slot.shape) for slot in layout.slots][:2] == [("0.weight", (2, 3)), ("0.bias", (2,))]
        assert [block.name for block in layout.blocks] == ["0", "2"]

    def test_containers_within_are_taken_apart(self):
        arrays = {
            "encoder": [{"w": np.zeros((2, 3), np.float32), "b": np.zeros(3, np.float16)}, {"w": (4, 1)}],
            "head": {"scale": ()},
        }
        expected = {"encoder.0.w": (2, 3), "encoder.0.b": (3,), "encoder.1.w": (4, 1), "head.scale": ()}
        assert GradientLayout.of(arrays) == GradientLayout.of(expected)
        assert GradientLayout.of([[(2,), (3,)], (4,)]) == GradientLayout.of({"0.0": (2,), "0.1": (3,), "1": (4,)})
        assert GradientLayout.of(np.zeros(n, np.float32) for n in (2, 3)) == GradientLayout.of([(2,), (3,)])

    def test_one_that_holds_itself_is_refused(self):
        endless = {}
        endless["within"] = [endless]
        with pytest.raises(LayoutMismatch, match=r"nested too deep: got within\.0.*expected at most 64 levels"):
            GradientLayout.of(endless)

    @pytest.mark.parametrize(
        ("gradients", "message"),
        [
            (
                {},
                "at least one component: got 0: a dict without any array or shape; pass the arrays that get gradients",
            ),
            ([], "at least one component: got 0: a list without"),
            ({"a": {}}, "at least one component: got 0: a dict without"),
            ({"w": (2, -1)}, r"component 'w' has a negative dimension: got \(2, -1\), expected dimensions >= 0"),
            ({"w": (2.0,)}, r"component 'w' has no shape: got \(2.0,\)"),
            ({"w": (2.5, 1)}, "component 'w' has no shape"),
            ({"w": ("2",)}, "component 'w' has no shape"),
            ({"w": 5}, "component 'w' has no shape: got 5"),
            ({"w": None}, "component 'w' has no shape: got None"),
            ([(2,), 3], "component '1' has no shape: got 3"),
            ({"w": b"ab"}, "component 'w' has no shape: got bytes"),  # two whole numbers, 97 and 98
            ({"w": {2, 3}}, "component 'w' has no shape: got set"),  # in which order?
            ({7: (2,)}, "a component's name is not text: got 7"),
            ("ab", "made of several arrays or shapes: got str, expected a mapping by name, a sequence, or a torch"),
            (b"ab", "several arrays or shapes: got bytes"),
            (5, "several arrays or shapes: got int"),
            (None, "several arrays or shapes: got NoneType"),
            (np.zeros((3, 4)), r"several arrays or shapes: got ndarray, .* pass one array as \[array\]"),
            ({"a": {"b": 5}}, r"component 'a\.b' has no shape: got 5"),
            ({"a": {7: (2,)}}, "a component's name is not text: got 7"),
            ({"a": {"b": (2,)}, "a.b": (3,)}, r"two components have one name: got 'a\.b'"),
            ({"layers." + "9" * 5000 + ".w": (2,)}, "a block's name does not end in a number"),
            ({"\ud800": (2,)}, r"a component's name is not UTF-8: got '\\ud800', expected text in UTF-8"),
            *((given, "too many components: got more than 1048576, expected at most 1048576") for given in ENDLESS),
            ([itertools.count()], "component '0' has too many dimensions: got more than 64, expected at most 64"),
        ],
    )
    def test_refused(self, gradients, message):
        with pytest.raises(LayoutMismatch, match=message):
            GradientLayout.of(gradients)

    @pytest.mark.parametrize("dtype", [np.float64, np.complex64, np.int32, np.bool_, np.dtype(">f4")])
    def test_arrays_whose_gradients_cannot_be_taken_are_refused_by_name_and_dtype(self, dtype):
        named = re.escape(f"component 'a.w' has an unsupported dtype: got {np.dtype(dtype).name}")
        for components in ({"a": {"w": np.zeros(2, dtype)}}, {"a.w": np.zeros(2, dtype)}):
            with pytest.raises(BufferRefused, match=named):
                GradientLayout.of(components)

    def test_so_are_torchs_tensors(self):
        torch = pytest.importorskip("torch")
        sharded = type("DTensor", (torch.Tensor,), {"to_local": lambda self: self})
        for tensor, fault in (
            (torch.zeros(2, dtype=torch.float64), "unsupported dtype: got float64"),
            (torch.zeros(2, dtype=torch.complex64), "unsupported dtype: got complex64"),
            (torch.zeros(2).to_sparse(), "sparse: got torch.sparse_coo"),
            (torch.zeros(2).as_subclass(sharded), "is a distributed tensor: got DTensor"),
        ):
            with pytest.raises(BufferRefused, match=rf"component 'w' .*{fault}"):
                GradientLayout.of({"w": tensor})


class TestLookUp:
    def test_no_block_of_a_layout_without_blocks(self):
        with pytest.raises(LayoutMismatch, match="unknown block: got 0, expected none: the layout has no blocks"):
            GradientLayout.of([(2,)]).block(0)

    def test_unknown_component_shows_names(self):
        with pytest.raises(
            LayoutMismatch, match=r"unknown component: got 'w_x', expected one of 'blocks.0.w_q', .*\.\.\."
        ):
            SMALL.slot("w_x")

    @pytest.mark.parametrize("index", [-1, 2, 1.0, "0", None])
    def test_unknown_block(self, index):
        with pytest.raises(LayoutMismatch, match=r"unknown block: got .*, expected a block in 0\.\.1"):
            SMALL.block(index)


class TestFingerprint:
    def test_is_the_sha256_of_the_table(self):
        layout = GradientLayout.of(BASE)
        assert layout.fingerprint == hashlib.sha256(layout.table()).hexdigest()

    @pytest.mark.parametrize(
        "other",
        [
            {"layers.0.a": (2, 3), "layers.0.c": (4,), "head": (5,)},
            {"layers.0.a": (3, 2), "layers.0.b": (4,), "head": (5,)},
            {"layers.0.a": (6,), "layers.0.b": (4,), "head": (5,)},
            {"layers.0.b": (4,), "layers.0.a": (2, 3), "head": (5,)},
            {"layers.0.a": (2, 3), "layers.1.b": (4,), "head": (5,)},
            {"layers.0.a": (2, 3), "layers.0.b": (4,), "head": (5,), "empty": (0,)},
            {"layers.0.a": (2, 3), "layers.0.b": (4,)},
            {"head": (5,), "layers.0.a": (2, 3), "layers.0.b": (4,)},
        ],
        ids=["name", "shape", "dimensions", "order", "block", "one-more", "one-less", "backward"],
    )
    def test_changes_with(self, other):
        one, two = GradientLayout.of(BASE), GradientLayout.of(other)
        assert one.fingerprint != two.fingerprint
        assert one != two

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
        assert one.fingerprint == two.fingerprint
        assert one == two
        assert hash(one) == hash(two)

    def test_survives_pickling_and_copying_whatever_was_asked_of_it(self):
        layout = GradientLayout.of(BASE)
        assert layout.spans_by_key
        assert layout.slot("head" if "head" in BASE else layout.slots[0].name)
        for made in (pickle.loads(pickle.dumps(layout)), copy.deepcopy(layout)):
            assert made == layout
            assert made.spans == layout.spans

    def test_is_another_than_anything_else(self):
        assert GradientLayout.of(BASE) != BASE


class TestTable:
    @given(draw.layouts)
    def test_round_trip(self, layout):
        copy = layout_from_table(layout.table())
        assert copy.fingerprint == layout.fingerprint
        assert (copy.slots, copy.blocks, copy.spans) == (layout.slots, layout.blocks, layout.spans)

    def test_round_trip_keeps_the_transformers_own_order(self):
        copy = layout_from_table(SMALL.table())
        assert [span.key for span in copy.spans] == ["lm_head", "final_norm", 1, 0, "embedding"]
        assert copy == SMALL

    @pytest.mark.parametrize(
        "table",
        [
            b"",
            b"\xc1",
            SMALL.table()[:-1],
            SMALL.table() + b"\x00",
            msgpack.packb(7),
            msgpack.packb([]),
            msgpack.packb([[], []]),
            msgpack.packb([[["w", [2]]], ["w"]]),
            msgpack.packb([[["w", 2, None]], ["w"]]),
            msgpack.packb([[["w", [-2], None]], ["w"]]),
            msgpack.packb([[["w", [2.5], None]], ["w"]]),
            msgpack.packb([[["w", [2], None]], []]),
            msgpack.packb([[["w", [2], None]], ["w", "w"]]),
            msgpack.packb([[["w", [2], None]], ["v"]]),
            msgpack.packb([[["w", [2], None]], [0]]),
            msgpack.packb([[["w", [2], None]], [["w"]]]),
            msgpack.packb([[["w", [2], None], ["w", [2], None]], ["w"]]),
            msgpack.packb([[["w", [2], "no number"]], [0]]),
        ],
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


class TestDifferingRows:
    def table(self, **shapes):
        return GradientLayout.of(shapes).table()

    def test_equal_tables_differ_in_nothing(self):
        assert differing_rows(SMALL.table(), SMALL.table()) == ""

    def test_missing_rows_are_shown_on_either_side(self):
        one, two = self.table(a=(2,)), self.table(a=(2,), b=(3,))
        assert differing_rows(one, two) == "row 1: here nothing, there 'b' (3,)"
        assert differing_rows(two, one) == "row 1: here 'b' (3,), there nothing"

    def test_long_lists_are_cut(self):
        one, two = (self.table(**{f"w{i}": (size,) for i in range(20)}) for size in (1, 2))
        lines = differing_rows(one, two, limit=3).splitlines()
        assert lines == [*(f"row {i}: here 'w{i}' (1,), there 'w{i}' (2,)" for i in range(3)), "and 17 more rows"]

    def test_another_backward_order_is_shown(self):
        of = GradientLayout.of({slot.name: slot.shape for slot in SMALL.slots})
        shown = differing_rows(SMALL.table(), of.table())
        assert shown == (
            "backward order from 0: here ['lm_head', 'final_norm', 1, 0, 'embedding'], "
            "there ['embedding', 'final_norm', 'lm_head', 1, 0]"
        )

    def test_a_late_difference_in_long_orders_is_shown(self):
        rows = [[f"w{i}", [1], None] for i in range(20)]
        order = [f"w{i}" for i in range(20)]
        swapped = [*order[:-2], order[-1], order[-2]]
        shown = differing_rows(msgpack.packb([rows, order]), msgpack.packb([rows, swapped]))
        assert shown == "backward order from 18: here ['w18', 'w19'], there ['w19', 'w18']"

    def test_another_block_is_shown(self):
        rows = [["w", [1], None]], [["w", [1], "layers.0"]]
        here, there = (msgpack.packb([r, [key]]) for r, key in zip(rows, ("w", 0), strict=True))
        shown = differing_rows(here, there)
        assert shown == "row 0: here 'w' (1,), there 'w' (1,) in 'layers.0'"


TP = {"hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "num_kv_heads": 4}


class TestPartOfAModel:
    def test_each_component_is_marked_and_has_its_local_shape(self):
        config = TensorParallelConfig(1, 2, **TP)
        part = GradientLayout.transformer(**LARGE, tensor_parallel=config)
        block = {slot.name.rpartition(".")[2]: (slot.shape, slot.partition) for slot in part.blocks[3].slots}
        assert block == {
            **dict.fromkeys(("w_k", "w_v"), ((1024, 128), "column")),
            **dict.fromkeys(("gate", "up"), ((1024, 2048), "column")),
            "w_q": ((1024, 512), "column"),
            "w_o": ((512, 1024), "row"),
            "down": ((2048, 1024), "row"),
            **dict.fromkeys(("input_norm", "post_attn_norm"), ((1024,), "replicated")),
        }
        assert [(slot.shape, slot.partition) for slot in part.slots[-3:]] == [
            *(((32768, 1024), "replicated"), ((1024,), "replicated"), ((32768, 1024), "replicated")),
        ]
        assert (part.tp_rank, part.tp_size) == (1, 2)

    def test_names_blocks_and_backward_order_are_the_models(self):
        whole, part = (
            GradientLayout.transformer(**LARGE, tensor_parallel=c) for c in (None, TensorParallelConfig(0, 4, **TP))
        )
        assert [slot.name for slot in part.slots] == [slot.name for slot in whole.slots]
        assert [span.key for span in part.spans] == [span.key for span in whole.spans]
        assert (whole.tp_rank, whole.tp_size) == (0, 1)
        assert {slot.partition for slot in whole.slots} == {"replicated"}

    def test_a_vocabulary_is_cut_by_rows_where_it_is_asked_for(self):
        config = TensorParallelConfig(0, 4, **TP, vocab_parallel=True)
        part = GradientLayout.transformer(**LARGE, tensor_parallel=config)
        assert [(slot.shape, slot.partition) for slot in part.slots[-3:]] == [
            *(((8192, 1024), "row"), ((1024,), "replicated"), ((8192, 1024), "row")),
        ]
        with pytest.raises(CallerError, match="vocab_size cannot be divided by tp_size: got 32766 / 4, which leaves 2"):
            GradientLayout.transformer(**{**LARGE, "vocab_size": 32766}, tensor_parallel=config)

    def test_sizes_are_the_configurations(self):
        config = TensorParallelConfig(0, 2, **TP)
        with pytest.raises(
            LayoutMismatch, match=r"'blocks.0.w_k' is not of this model: got \(1024, 512\), expected \(1024, 256\)"
        ):
            GradientLayout.transformer(**{**LARGE, "kv_hidden_size": 512}, tensor_parallel=config)

    def test_a_group_of_one_has_the_whole_layout(self):
        assert GradientLayout.transformer(**LARGE, tensor_parallel=TensorParallelConfig(0, 1, **TP)) == (
            GradientLayout.transformer(**LARGE)
        )

    def test_parts_of_equal_shapes_have_different_fingerprints(self):
        """Workers may sum equal parts only; which part it is no shape says."""
        parts = [
            GradientLayout.transformer(2, 8, 4, 12, 16, tensor_parallel=TensorParallelConfig(r, 2, 8, 12, 4, 2))
            for r in (0, 1)
        ]
        assert [slot.shape for slot in parts[0].slots] == [slot.shape for slot in parts[1].slots]
        assert parts[0].fingerprint != parts[1].fingerprint

    @pytest.mark.parametrize("embedding", [True, False])
    def test_its_table_is_read_back(self, embedding):
        config = TensorParallelConfig(1, 2, 8, 12, 4, 2)
        part = GradientLayout.transformer(2, 8, 4, 12, 16, embedding=embedding, tensor_parallel=config)
        read = layout_from_table(part.table())
        assert read == part
        assert [slot.partition for slot in read.slots] == [slot.partition for slot in part.slots]
        assert (read.tp_rank, read.tp_size, read.arena_size) == (1, 2, part.arena_size)

    def test_the_table_of_a_whole_model_is_what_it_was(self):
        assert msgpack.unpackb(GradientLayout.of({"w": (2, 3)}).table()) == [[["w", [2, 3], None]], ["w"]]

    def test_of_any_arrays(self):
        cut = {"head": "row", "layers.0.a": "column", **dict.fromkeys(("layers.0.b", "bias"), "replicated")}
        part = GradientLayout.of({**BASE, "bias": (4,)}, tp_rank=np.int64(1), tp_size=np.int64(3), partitions=cut)
        assert [slot.partition for slot in part.slots] == ["column", "replicated", "row", "replicated"]
        assert repr(part).startswith("GradientLayout(part 1 of 3, 4 components")
        assert layout_from_table(part.table()) == part

    def test_nothing_of_a_part_is_taken_for_replicated(self):
        """A shard that was forgotten would be counted once, or summed with another."""
        with pytest.raises(
            LayoutMismatch, match=r"component 'layers.0.b' of a part has no partition: expected one of 'col"
        ):
            GradientLayout.of(BASE, tp_rank=0, tp_size=2, partitions={"layers.0.a": "row"})

    def test_nor_a_part_for_the_whole(self):
        with pytest.raises(CallerError, match="partitions need a group's size: got no tp_size"):
            GradientLayout.of({"w": (2,)}, partitions={"w": "row"})
        assert GradientLayout.of({"w": (2,)}, tp_size=1, partitions={"w": "row"}) == GradientLayout.of({"w": (2,)})

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (
                {"partitions": {"tail": "row"}},
                "partitions names an unknown component: got 'tail', expected one of 'layers.0.a'",
            ),
            (
                {"partitions": {**dict.fromkeys(BASE, "row"), "head": "rows"}},
                "component 'head' has an unknown partition: got 'rows'",
            ),
            (
                {"partitions": {**dict.fromkeys(BASE, "row"), "head": None}},
                "component 'head' has an unknown partition: got None",
            ),
            ({"tp_rank": 2}, r"tp_rank of tp_size=2 is out of range: got 2, expected .* in 0\.\.1"),
            ({"tp_size": 0}, "tp_size is out of range: got 0"),
        ],
    )
    def test_what_is_no_part_is_refused(self, arguments, message):
        with pytest.raises(CallerError, match=message):
            GradientLayout.of(BASE, **{"tp_rank": 0, "tp_size": 2, "partitions": {}, **arguments})

    @pytest.mark.parametrize(
        "part",
        [
            *([0], [0, 2], [2, 2, ["row"]], [0, 0, ["row"]], [0, 2, ["rows"]], [0, 2, []], [0, 2, ["row", "row"]]),
            *("x", 7, None, [0, 2, [[]]], [0.5, 2, ["row"]], [0, 2, 3], [0, 2, {"row": 1}, 4], [True, 2, ["row"]]),
        ],
    )
    def test_a_table_of_no_part_is_refused(self, part):
        with pytest.raises(LayoutMismatch):
            layout_from_table(msgpack.packb([[["w", [2, 3], None]], ["w"], part]))

    def test_of_layouts_that_differ_the_part_is_shown_first(self):
        first, second = (
            GradientLayout.of({"w": (2, 3)}, tp_rank=r, tp_size=2, partitions={"w": "row"}) for r in (0, 1)
        )
        whole = GradientLayout.of({"w": (2, 6)})
        assert differing_rows(first.table(), second.table()) == (
            "part of a model: here tp_rank 0 of 2 (1 row), there tp_rank 1 of 2 (1 row)"
        )
        assert differing_rows(first.table(), whole.table()).splitlines() == [
            "part of a model: here tp_rank 0 of 2 (1 row), there the whole",
            "row 0: here 'w' (2, 3), there 'w' (2, 6)",
        ]


def test_padding_is_what_no_component_has():
    layout = GradientLayout.of({"a": (5,), "b": (64,), "c": (0,), "d": (31,)})
    inside = np.zeros(layout.arena_size, bool)
    for slot in layout.slots:
        inside[slot.offset : slot.stop] = True
    padded = [index for start, stop in layout.padding for index in range(start, stop)]
    assert padded == np.flatnonzero(~inside).tolist() != []
