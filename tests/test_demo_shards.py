"""The demo's model in shards: cut and united is the same, mirrored is the same function, a group ends together."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradengine.demo.model import LlamaConfig, forward, forward_backward, initial_weights, only_shard
from gradengine.demo.settings import Settings, divide
from gradengine.demo.shards import (
    WHOLE,
    ActivationAllReduce,
    cut,
    mirrored,
    replicated_part,
    run_threads,
    tensor_parallel_group,
    united,
)
from gradengine.demo.text import standard_library_text
from gradengine.demo.worker import Learner, layout_of
from gradengine.errors import CallerError, PeerLost

MODEL = LlamaConfig(
    num_blocks=2, hidden_size=32, num_heads=8, num_kv_heads=4, intermediate_size=24, vocab_size=256, sequence_length=12
)
SETTINGS = Settings(steps=4, batch_size=2, model=MODEL)
TEXTS = divide(standard_library_text(50_000), "the standard library", MODEL.sequence_length)


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
        with_shards(tp_size).shard(0)


def test_layouts_of_shards_know_which_part_they_are():
    layouts = [layout_of(with_shards(2), tp_rank) for tp_rank in range(2)]
    assert [(layout.tp_rank, layout.tp_size) for layout in layouts] == [(0, 2), (1, 2)]
    assert layouts[0] != layouts[1]
    assert layout_of(SETTINGS).num_elements == sum(int(np.prod(shape)) for shape in MODEL.weight_shapes.values())


# ---- mirrored ----


def test_a_mirrored_model_is_the_same_function_rounded_otherwise():
    weights = initial_weights(MODEL, 0)
    other = mirrored(weights, MODEL)
    tokens = np.random.default_rng(1).integers(0, MODEL.vocab_size, (3, MODEL.sequence_length + 1))
    logits, mirrored_logits = (forward(w, tokens[:, :-1], MODEL)[0] for w in (weights, other))
    assert not np.array_equal(logits, mirrored_logits)
    np.testing.assert_allclose(mirrored_logits, logits, atol=1e-5 * abs(logits).max())
    gradients = forward_backward(weights, tokens, MODEL)[1]
    for name, gradient in mirrored(forward_backward(other, tokens, MODEL)[1], MODEL).items():
        np.testing.assert_allclose(gradient, gradients[name], rtol=0, atol=1e-5 * abs(gradients[name]).max())


def test_mirrored_twice_is_as_it_was_and_shares_no_memory():
    weights = initial_weights(MODEL, 0)
    once = mirrored(weights, MODEL)
    assert all(not np.shares_memory(once[name], weights[name]) for name in weights)
    assert all(np.array_equal(array, weights[name]) for name, array in mirrored(once, MODEL).items())
    moved = {name.rpartition(".")[2] for name in weights if not np.array_equal(once[name], weights[name])}
    assert moved == {"w_q", "w_k", "w_v", "w_o", "gate", "up", "down"}


# ---- the group ----


def test_a_model_in_one_piece_needs_no_exchange():
    assert tensor_parallel_group(1) == [WHOLE]
    assert WHOLE.all_reduce(4) is only_shard
    with WHOLE as rank:
        assert (rank.tp_rank, rank.activations, rank.gradients) == (0, None, None)


def test_shards_have_two_exchanges_in_the_order_of_their_ranks():
    group = tensor_parallel_group(3)
    for tp_rank, rank in enumerate(group):
        assert (rank.tp_rank, rank.activations.rank, rank.gradients.rank) == (tp_rank,) * 3
        assert rank.activations is not rank.gradients
    assert len({id(rank.activations._group) for rank in group}) == 1


def test_whoever_leaves_the_block_ends_both_exchanges_of_the_others():
    def work(rank):
        with rank:
            if rank.tp_rank == 1:
                return None
            failures = []
            for exchange in (rank.activations, rank.gradients):
                with pytest.raises(PeerLost) as lost:
                    ActivationAllReduce(exchange, 4)
                failures.append(str(lost.value))
            return failures

    failures, _ = run_threads([lambda r=r: work(r) for r in tensor_parallel_group(2)])
    assert all("rank 1 left the group" in failure for failure in failures)


# ---- the learner ----


def test_a_learner_of_one_shard_is_the_learner():
    assert all(
        np.array_equal(weight, initial_weights(MODEL, SETTINGS.seed)[name])
        for name, weight in Learner(SETTINGS, TEXTS).weights.items()
    )


def test_shards_predict_held_out_text_as_the_model_in_one_piece_does():
    settings = with_shards(4)

    def work(rank):
        with rank:
            learner = Learner(settings, TEXTS, rank)
            return learner.held_out_loss(), learner.logits(0).tobytes()

    results = run_threads([lambda r=r: work(r) for r in tensor_parallel_group(4)])
    assert len(set(results)) == 1
    assert results[0][0] == pytest.approx(Learner(SETTINGS, TEXTS).held_out_loss(), rel=1e-6)


def test_a_learner_starts_from_the_weights_it_is_given():
    initial = {name: np.full_like(weight, 2.0) for name, weight in initial_weights(MODEL, 0).items()}
    assert all((weight == 2).all() for weight in Learner(SETTINGS, TEXTS, WHOLE, initial).weights.values())
