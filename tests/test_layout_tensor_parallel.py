"""The configuration of a tensor-parallel rank: known values, sizes that cannot be divided, who cuts what."""

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gradengine import GradientLayout, TensorParallelConfig
from gradengine.errors import CallerError, LayoutMismatch
from gradengine.layout import BLOCK_COMPONENTS, NON_BLOCK_COMPONENTS

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


class TestKnownValues:
    def test_two_ranks(self):
        assert local_sizes(config()) == (8, 2, 512, 128, 2048, 64)

    def test_four_ranks(self):
        assert local_sizes(config(tp_size=4)) == (4, 1, 256, 64, 1024, 64)

    def test_one_rank_is_the_whole(self):
        assert local_sizes(config(tp_size=1)) == (16, 4, 1024, 256, 4096, 64)
        assert config(tp_size=1).weight_memory_fraction(24, 32768) == 1.0

    def test_sixteen_heads_are_not_divided_by_three(self):
        with pytest.raises(CallerError, match="num_heads cannot be divided by tp_size: got 16 / 3, which leaves 1"):
            config(tp_size=3)

    def test_positional_as_in_the_documentation(self):
        assert TensorParallelConfig(1, 4, 1024, 4096, 16, 4) == config(1, 4)


class TestMemoryFraction:
    def test_of_a_block_is_a_little_more_than_its_share(self):
        matrices, norms = 2 * 1024 * 1024 + 2 * 1024 * 256 + 3 * 1024 * 4096, 2048
        expected = (matrices / 4 + norms) / (matrices + norms)
        assert config(tp_size=4).weight_memory_fraction() == pytest.approx(expected, rel=1e-15)
        assert expected > 0.25

    def test_a_replicated_vocabulary_is_what_most_of_it_is(self):
        """Of the 350M model on four ranks: more than a third and not a quarter."""
        assert config(tp_size=4).weight_memory_fraction(24, 32768) == pytest.approx(0.36658, abs=1e-5)
        assert config(tp_size=4, vocab_parallel=True).weight_memory_fraction(24, 32768) == pytest.approx(
            0.2501, abs=1e-4
        )

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

    def test_a_vocabulary_that_cannot_be_divided_names_both_numbers(self):
        c = config(vocab_parallel=True)
        for use in (lambda: c.local_vocab_size(50257), lambda: c.shard_of("lm_head", (50257, 1024))):
            with pytest.raises(
                CallerError, match="vocab_size cannot be divided by tp_size: got 50257 / 2, which leaves 1"
            ):
                use()

    def test_a_shape_of_another_model(self):
        with pytest.raises(
            LayoutMismatch, match=r"'blocks.0.w_q' is not of this model: got \(512, 512\), expected \(1024, 1024\)"
        ):
            config().shard_of("blocks.0.w_q", (512, 512))

    @pytest.mark.parametrize("shape", [(), (5,), (1024,), (8, 1024, 1), (8, 512)])
    def test_a_vocabulary_of_another_shape(self, shape):
        with pytest.raises(LayoutMismatch, match="'lm_head' is not of this model"):
            config().shard_of("lm_head", shape)

    @pytest.mark.parametrize("name", ["w_x", "", "blocks.0", "w_q.weight"])
    def test_an_unknown_component(self, name):
        with pytest.raises(LayoutMismatch, match=r"unknown component: got .*expected one of w_q, w_k"):
            config().shard_of(name, (1024, 1024))

    @given(c=configs(), seed=st.integers(0, 2**32 - 1))
    def test_a_model_is_cut_and_put_together_again(self, c, seed):
        sizes = (1, c.hidden_size, c.kv_hidden_size, c.intermediate_size, 2 * c.tp_size)
        rng = np.random.default_rng(seed)
        weights = {slot.name: rng.standard_normal(slot.shape) for slot in GradientLayout.transformer(*sizes).slots}
        ranks = [dataclasses.replace(c, tp_rank=rank) for rank in range(c.tp_size)]
        for name, weight in weights.items():
            shards = [rank.shard_of(name, weight.shape) for rank in ranks]
            merged = shards[0].merge_shards([shard.extract_shard(weight) for shard in shards])
            assert merged.tobytes() == weight.tobytes()


class TestLinearAlgebra:
    @given(c=configs(), seed=st.integers(0, 2**32 - 1))
    def test_row_parallel_partials_add_up_to_the_whole_output(self, c, seed):
        """Of one layer: y = f(x A) B = sum over ranks of f(x A_r) B_r, for any f that acts on each element."""
        rng = np.random.default_rng(seed)
        x = rng.standard_normal((3, c.hidden_size))
        gate, down = (
            rng.standard_normal(s) for s in ((c.hidden_size, c.intermediate_size), (c.intermediate_size, c.hidden_size))
        )
        partials = []
        for rank in range(c.tp_size):
            mine = dataclasses.replace(c, tp_rank=rank)
            inner = np.tanh(x @ mine.shard_of("gate", gate.shape).extract_shard(gate))
            partials.append(inner @ mine.shard_of("down", down.shape).extract_shard(down))
        np.testing.assert_allclose(sum(partials), np.tanh(x @ gate) @ down, rtol=1e-10, atol=1e-12)

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
        ("changed", "message"),
        [
            ({"num_heads": 15}, "hidden_size cannot be divided by num_heads: got 1024 / 15, which leaves 4"),
            ({"num_kv_heads": 5}, "num_heads cannot be divided by num_kv_heads: got 16 / 5, which leaves 1"),
            (
                {"num_kv_heads": 1},
                "num_kv_heads cannot be divided by tp_size: got 1 / 2, which leaves 1, .*ranks cannot share",
            ),
            (
                {"intermediate_size": 4097},
                "intermediate_size cannot be divided by tp_size: got 4097 / 2, which leaves 1",
            ),
            ({"tp_rank": 2}, r"tp_rank of tp_size=2 is out of range: got 2, expected .* in 0\.\.1"),
            ({"tp_rank": -1}, r"tp_rank of tp_size=2 is out of range: got -1, expected .* in 0\.\.1"),
            ({"tp_size": 0}, r"tp_size is out of range: got 0, expected a whole number in 1\.\.65536"),
            ({"hidden_size": 0}, "hidden_size is out of range: got 0, expected a whole number >= 1"),
            ({"num_heads": 16.0}, r"num_heads is not a whole number: got 16\.0"),
            ({"num_kv_heads": "4"}, "num_kv_heads is not a whole number: got '4'"),
            ({"intermediate_size": None}, "intermediate_size is not a whole number: got None"),
            ({"num_heads": True}, "num_heads is not a whole number: got True"),
        ],
    )
    def test_both_numbers_are_named(self, changed, message):
        with pytest.raises(CallerError, match=message):
            TensorParallelConfig(**{"tp_rank": 0, "tp_size": 2, **LARGE, **changed})

    def test_the_vocabulary_is_a_word_of_its_own(self):
        with pytest.raises(TypeError):
            TensorParallelConfig(0, 2, 1024, 4096, 16, 4, True)

    @pytest.mark.parametrize("word", ["no", 1, None])
    def test_and_a_truth_value(self, word):
        with pytest.raises(CallerError, match="vocab_parallel is not a bool: got "):
            config(vocab_parallel=word)

    @pytest.mark.parametrize("integer", [np.int16, np.int32, np.uint64])
    def test_numpys_integers_do_not_overflow(self, integer):
        large = TensorParallelConfig(*map(integer, (0, 8, 8192, 28672, 64, 8)))
        assert large == TensorParallelConfig(0, 8, 8192, 28672, 64, 8)
        fraction = large.weight_memory_fraction(integer(80), np.int32(128256))
        assert fraction == TensorParallelConfig(0, 8, 8192, 28672, 64, 8).weight_memory_fraction(80, 128256)

    def test_it_cannot_be_changed(self):
        with pytest.raises(dataclasses.FrozenInstanceError):
            config().tp_rank = 1


def test_every_component_of_a_transformer_is_known():
    layout = GradientLayout.transformer(1, 8, 8, 8, 8)
    c = TensorParallelConfig(0, 2, 8, 8, 2, 2)
    assert [c.shard_of(slot.name, slot.shape).partition for slot in layout.slots[-3:]] == ["replicated"] * 3
    assert [slot.name for slot in layout.slots[-3:]] == list(NON_BLOCK_COMPONENTS)
