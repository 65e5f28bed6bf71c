"""The demo's model in shards: cut and united is the same, sums are in rank order, a group ends together."""

import dataclasses
import threading
import time
from functools import partial, reduce

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transports import SOON

from gradengine.demo.model import LlamaConfig, initial_weights
from gradengine.demo.settings import Settings
from gradengine.demo.shards import cut, replicated_part, run_threads, tensor_parallel_group, united
from gradengine.demo.worker import layout_of
from gradengine.engine import GradientEngine
from gradengine.errors import CallerError, DeadlineExceeded, PeerLost

MODEL = LlamaConfig(
    num_blocks=2, hidden_size=32, num_heads=8, num_kv_heads=4, intermediate_size=24, vocab_size=256, sequence_length=12
)
SETTINGS = Settings(steps=4, batch_size=2, model=MODEL)


def with_shards(tp_size, settings=SETTINGS):
    return dataclasses.replace(settings, tensor_parallel=tp_size)


# ---- cut and united ----


@given(
    tp_size=st.sampled_from([1, 2, 4]),
    kv=st.integers(1, 2),
    groups=st.integers(1, 2),
    pairs=st.integers(1, 2),
    columns=st.integers(1, 5),
)
def test_what_is_cut_and_united_is_the_same(tp_size, kv, groups, pairs, columns):
    heads = tp_size * kv * groups
    model = LlamaConfig(
        num_blocks=1, hidden_size=heads * 2 * pairs, num_heads=heads, num_kv_heads=tp_size * kv,
        intermediate_size=tp_size * columns, vocab_size=7, sequence_length=4,
    )  # fmt: skip
    settings = with_shards(tp_size, Settings(model=model))
    weights = initial_weights(model, 0)
    parts = [cut(settings, weights, tp_rank) for tp_rank in range(tp_size)]
    again = united(settings, parts)
    assert list(again) == list(weights)
    assert all(np.array_equal(again[name], weights[name]) for name in weights)
    for tp_rank, part in enumerate(parts):
        assert {n: w.shape for n, w in part.items()} == {s.name: s.shape for s in layout_of(settings, tp_rank).slots}


def test_a_shards_weights_are_its_own_memory():
    weights = initial_weights(MODEL, 0)
    before = {name: weight.copy() for name, weight in weights.items()}
    for tp_size in (1, 2):
        for weight in cut(with_shards(tp_size), weights, 0).values():
            assert weight.flags.c_contiguous
            weight[...] = 1
    assert all(np.array_equal(weights[name], before[name]) for name in weights)


def test_norms_embedding_and_lm_head_are_on_every_shard():
    part = replicated_part(with_shards(2), cut(with_shards(2), initial_weights(MODEL, 0), 1))
    norms = [f"blocks.{block}.{norm}" for block in range(2) for norm in ("input_norm", "post_attn_norm")]
    assert sorted(part) == sorted([*norms, "lm_head", "final_norm", "embedding"])
    assert {name: w.shape for name, w in part.items()} == {name: MODEL.weight_shapes[name] for name in part}


@pytest.mark.parametrize(
    ("tp_size", "message"), [(3, "num_heads.*got 8 / 3"), (8, "num_kv_heads.*got 4 / 8"), (16, "num_heads.*8 / 16")]
)
def test_a_model_that_cannot_be_cut_is_refused_with_both_numbers(tp_size, message):
    with pytest.raises(CallerError, match=message):
        MODEL.sharded(0, tp_size)


def test_layouts_of_shards_know_which_part_they_are():
    layouts = [layout_of(with_shards(2), tp_rank) for tp_rank in range(2)]
    assert [(layout.tp_rank, layout.tp_size) for layout in layouts] == [(0, 2), (1, 2)]
    assert layouts[0] != layouts[1]
    assert layout_of(SETTINGS, 0).num_elements == sum(int(np.prod(shape)) for shape in MODEL.weight_shapes.values())


# ---- the sum over shards ----


def on_group(work, tp_size):
    def run(tp):
        with tp:
            return work(tp)

    return run_threads([partial(run, tp) for tp in tensor_parallel_group(tp_size)])


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_every_shard_gets_the_rank_ordered_sum_in_every_round(tp_size):
    """Numbers of many magnitudes, so that the order of a sum shows."""
    rng = np.random.default_rng(0)
    shape = (50, tp_size, 5, 7)
    rounds = (rng.standard_normal(shape) * 10.0 ** rng.integers(-5, 6, shape)).astype(np.float32)
    results = on_group(lambda tp: [tp.all_reduce(parts[tp.tp_rank]) for parts in rounds], tp_size)
    for mine in results:
        assert all(np.array_equal(total, reduce(np.add, parts)) for total, parts in zip(mine, rounds, strict=True))
    assert tp_size < 3 or not np.array_equal(results[0][0], reduce(np.add, rounds[0][::-1]))


def test_shards_have_an_exchange_in_the_order_of_their_ranks_and_a_whole_model_has_none():
    assert [(tp.tp_rank, tp.exchange.rank) for tp in tensor_parallel_group(3)] == [(0, 0), (1, 1), (2, 2)]
    assert [tp.exchange for tp in tensor_parallel_group(1)] == [None]


WAITS = {
    "for partial sums": lambda tp: tp.all_reduce(np.ones(4)),
    "for an engine": lambda tp: GradientEngine(layout_of(with_shards(4), tp.tp_rank), tp_exchange=tp.exchange),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_a_shard_that_fails_ends_all_that_the_others_wait_for(wait):
    lost = []

    def work(tp):
        if tp.tp_rank == 1:
            raise ZeroDivisionError("of shard 1")
        try:
            wait(tp)
        except PeerLost as fault:
            lost.append(str(fault))
            raise

    begin = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="of shard 1"):
        on_group(work, 4)
    assert time.monotonic() - begin < SOON
    assert len(lost) == 3
    assert all("left the group" in message or "is gone" in message for message in lost)


# ---- threads ----


def fail(error, after=0.0):
    time.sleep(after)
    raise error


def test_results_come_in_the_order_of_the_works_and_each_work_has_a_thread():
    assert run_threads([lambda s=s: (time.sleep(s), s)[1] for s in (0.1, 0.0, 0.05)]) == [0.1, 0.0, 0.05]
    meeting = threading.Barrier(3)
    assert sorted(run_threads([lambda: meeting.wait(SOON)] * 3)) == [0, 1, 2]


@pytest.mark.parametrize("lost_first", [True, False])
def test_who_is_at_fault_is_raised_and_not_who_missed_it(lost_first):
    at_fault, missed = (0.1, 0.0) if lost_first else (0.0, 0.1)
    works = [lambda: fail(PeerLost("gone"), missed), lambda: fail(CallerError("mistaken"), at_fault), lambda: 1]
    with pytest.raises(CallerError, match="mistaken"):
        run_threads(works)


def test_where_all_miss_a_peer_one_of_them_is_raised():
    with pytest.raises(PeerLost):
        run_threads([lambda: fail(PeerLost("first")), lambda: fail(PeerLost("second"))])


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), DeadlineExceeded("late"), ZeroDivisionError()])
def test_every_kind_of_failure_comes_through(error):
    with pytest.raises(type(error)):
        run_threads([lambda: fail(error), lambda: 1])
