"""The demo's Llama: 1, 2 and 4 shards are the model in one piece, and each all-reduce is needed for it."""

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradengine.demo import model
from gradengine.demo.model import LlamaConfig, forward, forward_backward, initial_weights
from gradengine.demo.settings import Settings
from gradengine.demo.shards import cut, run_threads, tensor_parallel_group, united

CONFIG = LlamaConfig(
    num_blocks=2, hidden_size=32, num_heads=8, num_kv_heads=4, intermediate_size=64, vocab_size=40, sequence_length=12
)
SIZES = [1, 2, 4]
REPLICATED = ["blocks.0.input_norm", "blocks.1.post_attn_norm", "lm_head", "final_norm", "embedding"]

# A shard's product is a part of the whole one's sum, so that the sums are rounded in another order: 2^-24 for each
# rounding, a few dozen of them one after another, and the softmax makes up to ten times of it. Measured: 6e-6 at most.
TOLERANCE = 2e-5
MISSING = 1e-2  # what a missing all-reduce changes at least, of the largest element; measured: 0.34 and more


def rough_weights(config, seed=0):
    """Norms are not all 1, so that their gradients tell shards apart."""
    rng = np.random.default_rng(seed)
    return {
        name: ((len(shape) == 1) + rng.standard_normal(shape) * 0.3).astype(np.float32)
        for name, shape in config.weight_shapes.items()
    }


def tokens_of(config, batch=3, seed=1):
    return np.random.default_rng(seed).integers(0, config.vocab_size, (batch, config.sequence_length + 1))


def in_shards(config, tp_size):
    return Settings(tensor_parallel=tp_size, model=config)


def sharded(weights, config, tp_rank, tp_size):
    return cut(in_shards(config, tp_size), weights, tp_rank)


def merged(parts, config):
    return united(in_shards(config, len(parts)), parts)


def on_shards(work, tp_size):
    """`work(rank, all_reduce)` on each of `tp_size` threads."""

    def run(tp):
        with tp:
            return work(tp.tp_rank, tp.all_reduce)

    return run_threads([functools.partial(run, tp) for tp in tensor_parallel_group(tp_size)])


def apart(array, expected):
    """The largest difference, in parts of the largest element."""
    return float(np.abs(array - expected).max() / np.abs(expected).max())


def shard_results(weights, config, tp_size, tokens, wrap=lambda all_reduce: all_reduce):
    """Each rank's logits, loss and gradients."""

    def work(rank, all_reduce):
        mine, all_reduce = sharded(weights, config, rank, tp_size), wrap(all_reduce)
        logits = forward(mine, tokens[:, :-1], config, all_reduce)[0]
        return (logits, *forward_backward(mine, tokens, config, all_reduce))

    return on_shards(work, tp_size)


def largest_difference(weights, config, tp_size, wrap=lambda all_reduce: all_reduce):
    """Over loss and all gradients, between the shards merged and the whole model."""
    tokens = tokens_of(config)
    value, gradients = forward_backward(weights, tokens, config)
    results = shard_results(weights, config, tp_size, tokens, wrap)
    found = merged([gradient for _, _, gradient in results], config)
    return max(abs(results[0][1] / value - 1), *(apart(found[name], gradients[name]) for name in gradients))


# ---- shards are the whole ----


@pytest.mark.parametrize("tp_size", SIZES)
def test_a_blocks_output_is_the_whole_ones_and_equal_on_all_ranks(tp_size):
    weights = rough_weights(CONFIG)
    x = np.random.default_rng(3).standard_normal((24, CONFIG.hidden_size)).astype(np.float32)

    def output(weights, all_reduce):
        context = model.make_context(CONFIG, CONFIG.sequence_length, np.float32, all_reduce)
        return model.block(x.copy(), model.block_weights(weights, 0), context)[0]

    def work(rank, all_reduce):
        return output(sharded(weights, CONFIG, rank, tp_size), all_reduce)

    outputs = on_shards(work, tp_size)
    assert apart(outputs[0], output(weights, model.alone)) <= TOLERANCE
    assert {array.tobytes() for array in outputs} == {outputs[0].tobytes()}


@pytest.mark.parametrize("tp_size", SIZES)
def test_logits_and_loss_are_the_whole_models_and_equal_on_all_ranks(tp_size):
    weights, tokens = rough_weights(CONFIG), tokens_of(CONFIG)
    results = shard_results(weights, CONFIG, tp_size, tokens)
    assert apart(results[0][0], forward(weights, tokens[:, :-1], CONFIG)[0]) <= TOLERANCE
    assert results[0][1] == pytest.approx(forward_backward(weights, tokens, CONFIG)[0], rel=TOLERANCE)
    assert len({(logits.tobytes(), value) for logits, value, _ in results}) == 1


@pytest.mark.parametrize("tp_size", SIZES)
def test_all_gradients_are_the_whole_models(tp_size):
    weights, tokens = rough_weights(CONFIG), tokens_of(CONFIG)
    expected = forward_backward(weights, tokens, CONFIG)[1]
    results = shard_results(weights, CONFIG, tp_size, tokens)
    found = merged([gradients for _, _, gradients in results], CONFIG)
    for name, gradient in expected.items():
        assert found[name].shape == gradient.shape
        assert apart(found[name], gradient) <= TOLERANCE, name


@pytest.mark.parametrize("tp_size", SIZES)
def test_gradients_of_what_is_replicated_are_whole_and_equal_on_all_ranks(tp_size):
    results = shard_results(rough_weights(CONFIG), CONFIG, tp_size, tokens_of(CONFIG))
    for name in REPLICATED:
        assert len({gradients[name].tobytes() for _, _, gradients in results}) == 1, name


@settings(max_examples=20)
@given(
    tp_size=st.sampled_from([2, 3, 4]),
    kv_heads=st.integers(1, 2),
    groups=st.integers(1, 3),
    pairs=st.integers(1, 2),
    intermediate=st.integers(1, 9),
    seed=st.integers(0, 1000),
)
def test_any_legal_model_is_its_shards(tp_size, kv_heads, groups, pairs, intermediate, seed):
    heads = tp_size * kv_heads * groups
    config = LlamaConfig(
        num_blocks=1, hidden_size=heads * 2 * pairs, num_heads=heads, num_kv_heads=tp_size * kv_heads,
        intermediate_size=tp_size * intermediate, vocab_size=11, sequence_length=4,
    )  # fmt: skip
    # Of a few elements the largest may itself be what cancelling left, so that rounding is larger in parts of it.
    assert largest_difference(rough_weights(config, seed), config, tp_size) <= 10 * TOLERANCE


# ---- the model in one piece has not changed ----


def test_without_shards_the_all_reduce_is_the_very_array_that_goes_in():
    array = np.ones(3, np.float32)
    assert model.alone(array) is array


def test_one_shard_over_an_exchange_has_the_bits_of_the_whole_model():
    weights, tokens = rough_weights(CONFIG), tokens_of(CONFIG)
    value, gradients = forward_backward(weights, tokens, CONFIG)
    ((_, shard_value, shard_gradients),) = shard_results(weights, CONFIG, 1, tokens)
    assert shard_value == value
    assert all(np.array_equal(shard_gradients[name], gradients[name]) for name in gradients)


# ---- two all-reduces in each block each way, and none that could be left out ----


class Recording:
    """An all-reduce that notes what went in and what came out."""

    def __init__(self, all_reduce):
        self._all_reduce, self.calls = all_reduce, []

    def __call__(self, partial):
        before = partial.copy()
        total = self._all_reduce(partial)
        self.calls.append((before, total.copy()))
        return total


@pytest.mark.parametrize("tp_size", SIZES)
def test_there_are_two_all_reduces_in_each_block_each_way(tp_size):
    weights, tokens = rough_weights(CONFIG), tokens_of(CONFIG)

    def work(rank, all_reduce):
        recording, mine = Recording(all_reduce), sharded(weights, CONFIG, rank, tp_size)
        _, stream = model.stream_gradients(mine, tokens, CONFIG, recording)
        forward_calls = len(recording.calls)
        return [forward_calls, *(len(recording.calls) for _ in stream)]

    for counts in on_shards(work, tp_size):
        assert counts == [4, 4, 4, 6, 8, 8]  # forward of both blocks; lm_head, final_norm, block 1, block 0, embedding


@pytest.mark.parametrize("tp_size", [2, 4])
def test_partial_sums_are_parts_and_their_sums_are_the_same_bytes_on_all_ranks(tp_size):
    weights, tokens = rough_weights(CONFIG), tokens_of(CONFIG)

    def work(rank, all_reduce):
        recording = Recording(all_reduce)
        forward_backward(sharded(weights, CONFIG, rank, tp_size), tokens, CONFIG, recording)
        return recording.calls

    for calls in zip(*on_shards(work, tp_size), strict=True):
        partials, totals = zip(*calls, strict=True)
        assert len({total.tobytes() for total in totals}) == 1
        assert np.array_equal(totals[0], functools.reduce(np.add, partials))
        for partial in partials:
            assert apart(partial, totals[0]) > MISSING


class Leaving:
    """An all-reduce that one of a step's calls does not reach."""

    def __init__(self, all_reduce, left_out):
        self._all_reduce, self._left_out, self._count = all_reduce, left_out, 0

    def __call__(self, partial):
        self._count += 1
        return partial if self._count % 4 == self._left_out else self._all_reduce(partial)


ONE_BLOCK = LlamaConfig(
    num_blocks=1, hidden_size=32, num_heads=8, num_kv_heads=4, intermediate_size=64, vocab_size=40, sequence_length=12
)


def missing_in_gradients(left_out, tp_size):
    weights, tokens = rough_weights(ONE_BLOCK), tokens_of(ONE_BLOCK)
    gradients = forward_backward(weights, tokens, ONE_BLOCK)[1]

    def work(rank, all_reduce):
        mine = sharded(weights, ONE_BLOCK, rank, tp_size)
        return forward_backward(mine, tokens, ONE_BLOCK, Leaving(all_reduce, left_out))[1]

    found = merged(on_shards(work, tp_size), ONE_BLOCK)
    return {name for name in gradients if apart(found[name], gradients[name]) > MISSING}


@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize(
    ("left_out", "wrong"),
    [
        pytest.param(1, {"blocks.0.w_q", "blocks.0.gate", "lm_head", "embedding"}, id="forward-attention"),
        pytest.param(2, {"blocks.0.w_q", "blocks.0.gate", "lm_head", "embedding"}, id="forward-feed-forward"),
        pytest.param(3, {"blocks.0.w_q", "blocks.0.post_attn_norm", "embedding"}, id="backward-feed-forward"),
        pytest.param(0, {"blocks.0.input_norm", "embedding"}, id="backward-attention"),
    ],
)
def test_a_missing_all_reduce_is_noticed(left_out, wrong, tp_size):
    assert missing_in_gradients(left_out, tp_size) >= wrong


def test_with_none_missing_nothing_is_noticed():
    assert missing_in_gradients(left_out=-1, tp_size=2) == set()


def test_what_a_shard_gets_from_the_demos_first_weights_is_the_whole():
    config = LlamaConfig()
    assert largest_difference(initial_weights(config, 0), config, 2) <= TOLERANCE
