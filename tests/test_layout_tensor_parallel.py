"""The configuration of a tensor-parallel rank: known values, sizes that cannot be divided, who cuts what."""

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gradengine import GradientLayout, TensorParallelConfig
from gradengine.errors import CallerError, LayoutMismatch
from gradengine.layout import BLOCK_COMPONENTS

LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "num_kv_heads": 4}


def config(tp_rank=0, tp_size=2, **changed):
    return TensorParallelConfig(tp_rank, tp_size, **{**LARGE, **changed})


def local_sizes(c):
    return (
        *(c.local_num_heads, c.local_num_kv_heads, c.local_q_size, c.local_kv_size, c.local_intermediate_size),
        c.head_size,
    )


@st.composite
def configs(draw):
    """Any legal configuration; its rank is the group's last."""
    tp_size, kv_heads, groups = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    num_kv_heads = kv_heads * tp_size
    num_heads = num_kv_heads * groups
    hidden_size, intermediate_size = num_heads * draw(st.integers(1, 3)), tp_size * draw(st.integers(1, 5))
    return TensorParallelConfig(
        *(tp_size - 1, tp_size, hidden_size, intermediate_size, num_heads, num_kv_heads),
        vocab_parallel=draw(st.booleans()),
    )


@pytest.mark.parametrize(
    ("tp_size", "sizes"), [(1, (16, 4, 1024, 256, 4096)), (2, (8, 2, 512, 128, 2048)), (4, (4, 1, 256, 64, 1024))]
)
def test_known_values(tp_size, sizes):
    assert local_sizes(config(tp_size=tp_size)) == (*sizes, 64)
    assert TensorParallelConfig(0, tp_size, 1024, 4096, 16, 4) == config(tp_size=tp_size)


class TestMemoryFraction:
    def test_known_values(self):
        """Of the 350M model on four ranks with a replicated vocabulary: more than a third and not a quarter."""
        matrices, norms = 2 * 1024 * 1024 + 2 * 1024 * 256 + 3 * 1024 * 4096, 2048
        expected = (matrices / 4 + norms) / (matrices + norms)
        assert config(tp_size=4).weight_memory_fraction() == pytest.approx(expected, rel=1e-15)
        cut = config(tp_size=4, vocab_parallel=True)
        assert config(tp_size=4).weight_memory_fraction(24, 32768) == pytest.approx(0.36658, abs=1e-5)
        assert cut.weight_memory_fraction(24, 32768) == pytest.approx(0.2501, abs=1e-4)
        assert config(tp_size=1).weight_memory_fraction(24, 32768) == 1.0

    @given(c=configs(), num_blocks=st.integers(0, 3), vocab=st.integers(1, 5), embedding=st.booleans())
    def test_is_what_the_layouts_say(self, c, num_blocks, vocab, embedding):
        sizes = (num_blocks, c.hidden_size, c.kv_hidden_size, c.intermediate_size, vocab * c.tp_size)
        whole = GradientLayout.transformer(*sizes, embedding=embedding)
        part = GradientLayout.transformer(*sizes, embedding=embedding, tensor_parallel=c)
        fraction = c.weight_memory_fraction(num_blocks, vocab * c.tp_size, embedding=embedding)
        assert fraction == part.num_elements / whole.num_elements
        assert fraction >= 1 / c.tp_size

    @pytest.mark.parametrize("arguments", [(-1,), (0,), (1.5,), (1, -1), (1, "2")])
    def test_of_no_model_is_refused(self, arguments):
        with pytest.raises(CallerError, match=r"(num_blocks|vocab_size) is (out|not) "):
            config().weight_memory_fraction(*arguments)


class TestShards:
    @pytest.mark.parametrize("tp_size", [1, 2, 4])
    def test_who_cuts_what(self, tp_size):
        c = config(tp_size - 1, tp_size)
        h, kv, i = 1024, 256, 4096
        full = dict(
            zip(BLOCK_COMPONENTS, [(h, h), (h, kv), (h, kv), (h, h), (h, i), (h, i), (i, h), (h,), (h,)], strict=True)
        )
        shards = {name: c.shard_of(f"blocks.7.{name}", shape) for name, shape in full.items()}
        assert {name: shard.partition for name, shard in shards.items()} == {
            **dict.fromkeys(("w_q", "w_k", "w_v", "gate", "up"), "column"),
            **dict.fromkeys(("w_o", "down"), "row"),
            **dict.fromkeys(("input_norm", "post_attn_norm"), "replicated"),
        }
        assert [shards[name].local_shape for name in ("w_q", "w_k", "w_o", "gate", "down", "input_norm")] == [
            *((h, h // tp_size), (h, kv // tp_size), (h // tp_size, h)),
            *((h, i // tp_size), (i // tp_size, h), (h,)),
        ]
        assert {(shard.tp_rank, shard.tp_size) for shard in shards.values()} == {(tp_size - 1, tp_size)}

    def test_the_vocabulary_is_cut_where_it_is_asked_for(self):
        shape = (32768, 1024)
        assert config().shard_of("lm_head", shape).partition == "replicated"
        for name in ("lm_head", "embedding"):
            shard = config(vocab_parallel=True).shard_of(name, shape)
            assert (shard.partition, shard.local_shape) == ("row", (16384, 1024))
        assert config(vocab_parallel=True).local_vocab_size(32768) == 16384
        assert config().local_vocab_size(32767) == 32767

    @pytest.mark.parametrize(
        ("name", "shape", "says"),
        [
            ("blocks.0.w_q", (512, 512), r"'blocks.0.w_q' .*\(512, 512\), expected \(1024, 1024\)"),
            *(("lm_head", shape, "'lm_head'") for shape in ((), (5,), (1024,), (8, 1024, 1), (8, 512))),
            *((name, (1024, 1024), "expected one of w_q, w_k") for name in ("w_x", "", "blocks.0", "w_q.weight")),
        ],
    )
    def test_what_is_not_of_this_model(self, name, shape, says):
        with pytest.raises(LayoutMismatch, match=says):
            config().shard_of(name, shape)

    def test_a_vocabulary_that_cannot_be_divided_names_both_numbers(self):
        c = config(vocab_parallel=True)
        for use in (lambda: c.local_vocab_size(50257), lambda: c.shard_of("lm_head", (50257, 1024))):
            with pytest.raises(CallerError, match="vocab_size cannot be divided by tp_size: got 50257 / 2"):
                use()


class TestLinearAlgebra:
    @given(c=configs(), seed=st.integers(0, 2**32 - 1))
    def test_the_columns_of_a_rank_are_whole_heads(self, c, seed):
        """A query head finds the key-value head that it shares on its own rank."""
        assume(c.tp_size > 1)
        heads = np.repeat(np.arange(c.num_heads), c.head_size)[None].repeat(c.hidden_size, 0)
        kv_heads = np.repeat(np.arange(c.num_kv_heads), c.head_size)[None].repeat(c.hidden_size, 0)
        groups = c.num_heads // c.num_kv_heads
        mine = set(c.shard_of("w_q", heads.shape).extract_shard(heads)[0].tolist())
        shared = set(c.shard_of("w_k", kv_heads.shape).extract_shard(kv_heads)[0].tolist())
        assert len(mine) == c.local_num_heads
        assert {head // groups for head in mine} == shared


class TestRefused:
    @pytest.mark.parametrize(
        ("changed", "says"),
        [
            ({"tp_size": 3}, "num_heads cannot be divided by tp_size: got 16 / 3"),
            ({"num_heads": 15}, "hidden_size cannot be divided by num_heads: got 1024 / 15"),
            ({"num_kv_heads": 5}, "num_heads cannot be divided by num_kv_heads: got 16 / 5"),
            ({"num_kv_heads": 1}, "num_kv_heads cannot be divided by tp_size: got 1 / 2"),
            ({"intermediate_size": 4097}, "intermediate_size cannot be divided by tp_size: got 4097 / 2"),
            ({"tp_rank": 2}, "tp_rank of tp_size=2 is out of range: got 2"),
            ({"tp_rank": -1}, "tp_rank of tp_size=2 is out of range: got -1"),
            ({"tp_size": 0}, "tp_size is out of range: got 0"),
            ({"hidden_size": 0}, "hidden_size is out of range: got 0"),
            ({"num_heads": 16.0}, "num_heads is not"),
            ({"num_kv_heads": "4"}, "num_kv_heads is not"),
            ({"intermediate_size": None}, "intermediate_size is not"),
            ({"num_heads": True}, "num_heads is not"),
            ({"vocab_parallel": 1}, "vocab_parallel is not a bool"),
            ({"vocab_parallel": None}, "vocab_parallel is not a bool"),
        ],
    )
    def test_both_numbers_are_named(self, changed, says):
        with pytest.raises(CallerError, match=says):
            TensorParallelConfig(**{"tp_rank": 0, "tp_size": 2, **LARGE, **changed})

    def test_the_vocabulary_is_a_word_of_its_own_and_nothing_can_be_changed(self):
        with pytest.raises(TypeError):
            TensorParallelConfig(0, 2, 1024, 4096, 16, 4, True)
        with pytest.raises(dataclasses.FrozenInstanceError):
            config().tp_rank = 1

    @pytest.mark.parametrize("integer", [np.int16, np.int32, np.uint64])
    def test_numpys_integers_do_not_overflow(self, integer):
        large = TensorParallelConfig(*map(integer, (0, 8, 8192, 28672, 64, 8)))
        assert large == TensorParallelConfig(0, 8, 8192, 28672, 64, 8)
        fraction = large.weight_memory_fraction(integer(80), np.int32(128256))
        assert fraction == TensorParallelConfig(0, 8, 8192, 28672, 64, 8).weight_memory_fraction(80, 128256)
