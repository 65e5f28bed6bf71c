"""The demo's model in shards: 1, 2 and 4 of them are the model in one piece, and a group ends together."""

import dataclasses
import functools
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transports import SOON

from gradengine.demo import model
from gradengine.demo.model import LlamaConfig, forward_backward
from gradengine.demo.settings import Settings
from gradengine.demo.shards import cut, run_threads, tensor_parallel_group, united
from gradengine.demo.worker import layout_of
from gradengine.engine import GradientEngine
from gradengine.errors import CallerError, DeadlineExceeded, PeerLost

MODEL = LlamaConfig(
    num_blocks=2, hidden_size=32, num_heads=8, num_kv_heads=4, intermediate_size=64, vocab_size=40, sequence_length=12
)
REPLICATED = ["blocks.0.input_norm", "blocks.1.post_attn_norm", "lm_head", "final_norm", "embedding"]

# A shard's product is a part of the whole one's sum, so that the sums are rounded in another order: 2^-24 for each
# rounding, a few dozen of them one after another, and the softmax makes up to ten times of it. Measured: 6e-6 at most.
TOLERANCE = 2e-5
MISSING = 1e-2  # what a missing all-reduce changes at least, of the largest element; measured: 0.34 and more


def in_shards(tp_size, config=MODEL):
    return Settings(tensor_parallel=tp_size, model=config)


def rough_weights(config, seed=0):
    """Norms are not all 1, so that their gradients tell shards apart."""
    rng = np.random.default_rng(seed)
    return {
        name: ((len(shape) == 1) + rng.standard_normal(shape) * 0.3).astype(np.float32)
        for name, shape in config.weight_shapes.items()
    }


def tokens_of(config, batch=3):
    return np.random.default_rng(1).integers(0, config.vocab_size, (batch, config.sequence_length + 1))


def on_group(work, tp_size):
    """`work(shard)` on each of `tp_size` threads."""

    def run(tp):
        with tp:
            return work(tp)

    return run_threads([functools.partial(run, tp) for tp in tensor_parallel_group(tp_size)])


def apart(array, expected):
    """The largest difference, in parts of the largest element."""
    return float(np.abs(array - expected).max() / np.abs(expected).max())


# ---- cut and united ----


@settings(max_examples=25)
@given(
    tp_size=st.sampled_from([1, 2, 4]),
    kv=st.integers(1, 2),
    groups=st.integers(1, 2),
    pairs=st.integers(1, 2),
    columns=st.integers(1, 5),
)
def test_what_is_cut_and_united_is_the_same_and_computes_the_same(tp_size, kv, groups, pairs, columns):
    heads = tp_size * kv * groups
    config = LlamaConfig(
        num_blocks=1, hidden_size=heads * 2 * pairs, num_heads=heads, num_kv_heads=tp_size * kv,
        intermediate_size=tp_size * columns, vocab_size=7, sequence_length=4,
    )  # fmt: skip
    asked, weights, tokens = in_shards(tp_size, config), rough_weights(config), tokens_of(config)
    parts = [cut(asked, weights, tp_rank) for tp_rank in range(tp_size)]
    again = united(asked, parts)
    assert list(again) == list(weights)
    assert all(np.array_equal(again[name], weights[name]) for name in weights)
    for tp_rank, part in enumerate(parts):
        assert {n: w.shape for n, w in part.items()} == {s.name: s.shape for s in layout_of(asked, tp_rank).slots}
        assert all(w.flags.c_contiguous and not np.shares_memory(w, weights[n]) for n, w in part.items())
    found = on_group(lambda tp: forward_backward(parts[tp.tp_rank], tokens, config, tp.all_reduce)[1], tp_size)
    expected = forward_backward(weights, tokens, config)[1]
    for name, gradient in united(asked, found).items():
        # Of a few elements the largest may itself be what cancelling left, so that rounding is larger in parts of it.
        assert apart(gradient, expected[name]) <= (10 * TOLERANCE if tp_size > 1 else 0), name


def test_a_model_that_cannot_be_cut_is_refused_with_both_numbers():
    for tp_size, numbers in ((3, "8 / 3"), (8, "4 / 8")):
        with pytest.raises(CallerError, match=numbers):
            MODEL.sharded(0, tp_size)


# ---- shards are the whole, and need each all-reduce for it ----


class Recording:
    """An all-reduce that notes what went in and what came out, and may leave one of four calls out."""

    def __init__(self, all_reduce, left_out=None):
        self._all_reduce, self._left_out, self.calls = all_reduce, left_out, []

    def __call__(self, partial):
        before = partial.copy()
        total = partial if len(self.calls) % 4 == self._left_out else self._all_reduce(partial)
        self.calls.append((before, total.copy()))
        return total


def shard_results(config, tp_size, left_out=None):
    """Each rank's loss, gradients, and the recorded all-reduces of its forward and backward."""

    def work(tp):
        mine, recording = cut(in_shards(tp_size, config), weights, tp.tp_rank), Recording(tp.all_reduce, left_out)
        _, stream = model.stream_gradients(mine, tokens, config, recording)
        counts = [len(recording.calls), *(len(recording.calls) for _ in stream)]
        recording.calls.clear()
        return *forward_backward(mine, tokens, config, recording), recording.calls, counts

    weights, tokens = rough_weights(config), tokens_of(config)
    return on_group(work, tp_size)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_loss_and_gradients_are_the_whole_models_and_equal_on_all_ranks(tp_size):
    weights, tokens = rough_weights(MODEL), tokens_of(MODEL)
    value, gradients = forward_backward(weights, tokens, MODEL)
    results = shard_results(MODEL, tp_size)
    assert results[0][0] == pytest.approx(value, rel=TOLERANCE)
    assert len({loss for loss, *_ in results}) == 1
    found = united(in_shards(tp_size), [each[1] for each in results])
    assert all(apart(found[name], gradient) <= TOLERANCE for name, gradient in gradients.items())
    for name in REPLICATED:
        assert len({each[1][name].tobytes() for each in results}) == 1, name
    for *_, counts in results:
        assert counts == [4, 4, 4, 6, 8, 8]  # forward of both blocks; lm_head, final_norm, block 1, block 0, embedding
    for calls in zip(*(each[2] for each in results), strict=True):
        partials, totals = zip(*calls, strict=True)
        assert len({total.tobytes() for total in totals}) == 1
        assert np.array_equal(totals[0], functools.reduce(np.add, partials))
        assert tp_size == 1 or min(apart(partial, totals[0]) for partial in partials) > MISSING


@pytest.mark.parametrize(
    ("left_out", "wrong"),
    [
        pytest.param(0, {"blocks.0.w_q", "blocks.0.gate", "lm_head", "embedding"}, id="forward-attention"),
        pytest.param(1, {"blocks.0.w_q", "blocks.0.gate", "lm_head", "embedding"}, id="forward-feed-forward"),
        pytest.param(2, {"blocks.0.w_q", "blocks.0.post_attn_norm", "embedding"}, id="backward-feed-forward"),
        pytest.param(3, {"blocks.0.input_norm", "embedding"}, id="backward-attention"),
    ],
)
def test_a_missing_all_reduce_is_noticed(left_out, wrong):
    config = dataclasses.replace(MODEL, num_blocks=1)
    gradients = forward_backward(rough_weights(config), tokens_of(config), config)[1]
    found = united(in_shards(2, config), [each[1] for each in shard_results(config, 2, left_out)])
    assert {name for name in gradients if apart(found[name], gradients[name]) > MISSING} >= wrong


# ---- a group ----


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_every_shard_gets_the_rank_ordered_sum_in_every_round(tp_size):
    """Numbers of many magnitudes, so that the order of a sum shows."""
    rng = np.random.default_rng(0)
    shape = (20, tp_size, 5, 7)
    rounds = (rng.standard_normal(shape) * 10.0 ** rng.integers(-5, 6, shape)).astype(np.float32)
    results = on_group(lambda tp: [tp.all_reduce(parts[tp.tp_rank]) for parts in rounds], tp_size)
    for mine in results:
        assert all(
            np.array_equal(total, functools.reduce(np.add, parts)) for total, parts in zip(mine, rounds, strict=True)
        )


def test_shards_have_an_exchange_in_the_order_of_their_ranks_and_a_whole_model_has_none():
    group = tensor_parallel_group(3)
    assert [(tp.tp_rank, tp.exchange.rank) for tp in group] == [(0, 0), (1, 1), (2, 2)]
    for tp in group:
        tp.exchange.close()
    assert [tp.exchange for tp in tensor_parallel_group(1)] == [None]


WAITS = {
    "for partial sums": lambda tp: tp.all_reduce(np.ones(4)),
    "for an engine": lambda tp: GradientEngine(layout_of(in_shards(4), tp.tp_rank), tp_exchange=tp.exchange),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_a_shard_that_fails_ends_all_that_the_others_wait_for(wait):
    lost = []

    def work(tp):
        if tp.tp_rank == 1:
            raise ZeroDivisionError("of shard 1")
        try:
            wait(tp)
        except PeerLost:
            lost.append(tp.tp_rank)
            raise

    with pytest.raises(ZeroDivisionError, match="of shard 1"):
        on_group(work, 4)
    assert sorted(lost) == [0, 2, 3]


def test_works_run_together_and_their_results_come_in_order():
    meeting = threading.Barrier(3)
    assert run_threads([lambda i=i: (meeting.wait(SOON), i)[1] for i in range(3)]) == [0, 1, 2]


def fail(error):
    raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), DeadlineExceeded("late"), CallerError("wrong")])
def test_who_is_at_fault_is_raised_and_not_who_missed_it(error):
    for works in ([PeerLost("gone"), error], [error, PeerLost("gone")]):
        with pytest.raises(type(error)):
            run_threads([functools.partial(fail, work) for work in works] + [lambda: 1])
    with pytest.raises(PeerLost, match="first"):
        run_threads([lambda: fail(PeerLost("first")), lambda: fail(PeerLost("second"))])
