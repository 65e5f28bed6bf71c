"""Contract C-TP-001 as the demo measures it: figures are small, and what is wrong makes them large or is refused."""

import dataclasses

import pytest

from gradengine.demo import comparison
from gradengine.demo.all_reduce import ActivationAllReduce
from gradengine.demo.comparison import compare, report_comparison
from gradengine.demo.learner import layout_of
from gradengine.demo.model import LlamaConfig
from gradengine.demo.proofs import NORM_TOLERANCE, SHARD_TOLERANCE, STEP_TOLERANCE
from gradengine.demo.reports import Compared
from gradengine.demo.settings import Settings, divide
from gradengine.demo.text import standard_library_text
from gradengine.errors import ExchangeError
from gradengine.layout import GradientLayout

MODEL = LlamaConfig(num_blocks=1, hidden_size=32, num_heads=8, num_kv_heads=4, intermediate_size=32, sequence_length=16)
SETTINGS = Settings(steps=6, batch_size=2, model=MODEL)
TEXTS = divide(standard_library_text(50_000), "the standard library", MODEL.sequence_length)


def compared(tp_size, **changes):
    return compare(dataclasses.replace(SETTINGS, tensor_parallel=tp_size, **changes), TEXTS)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tp_size", [2, 4])
def test_shards_are_the_model_in_one_piece_within_the_tolerances(tp_size, seed):
    found = compared(tp_size, seed=seed)
    assert 0 < found.outputs <= SHARD_TOLERANCE
    assert 0 < found.gradients <= SHARD_TOLERANCE
    assert found.norm <= NORM_TOLERANCE
    assert 0 < found.weights <= STEP_TOLERANCE


def test_one_shard_is_the_model_in_one_piece_bit_for_bit():
    assert compared(1) == Compared(0.0, 0.0, 0.0, 0.0)


def test_the_norm_is_compared_where_it_is_not_clipped_too():
    assert compared(2, max_norm=1e9).norm <= NORM_TOLERANCE


def test_the_comparison_is_reported():
    reports = []
    report_comparison(dataclasses.replace(SETTINGS, tensor_parallel=2), TEXTS, reports.append)
    assert reports == [compared(2)]


def one_wrong(monkeypatch, position, outcome):
    """Have one of the block's four all-reduces be another: forward attention, feed-forward, then both backward."""
    whole = ActivationAllReduce.__call__
    counts = {}

    def some(self, partial):
        count = counts[id(self)] = counts.get(id(self), -1) + 1
        # The logits take two of their own before the four of forward and backward.
        is_it = (count if count < 2 else (count - 2) % 4) == position
        return outcome(self, partial, whole) if is_it else whole(self, partial)

    monkeypatch.setattr(ActivationAllReduce, "__call__", some)


@pytest.mark.parametrize("position", range(4))
def test_a_missing_all_reduce_leaves_other_replicas_and_the_engine_refuses_them(monkeypatch, position):
    one_wrong(monkeypatch, position, lambda all_reduce, partial, whole: partial)
    with pytest.raises(ExchangeError, match=r"replicated gradient '.*' is not the same on ranks 0 and 1"):
        compared(2)


@pytest.mark.parametrize("position", range(4))
def test_an_all_reduce_that_all_shards_get_wrong_alike_is_in_the_figures(monkeypatch, position):
    one_wrong(monkeypatch, position, lambda all_reduce, partial, whole: 2 * whole(all_reduce, partial))
    found = compared(2)
    assert (found.outputs > 1000 * SHARD_TOLERANCE) == (position < 2)
    assert found.gradients > 1000 * SHARD_TOLERANCE
    assert found.norm > 100 * NORM_TOLERANCE
    assert found.weights > STEP_TOLERANCE


def test_parts_that_are_passed_for_the_whole_are_refused_and_never_compared(monkeypatch):
    def undivided(settings, tp_rank):
        shapes = {slot.name: slot.shape for slot in layout_of(settings, tp_rank).slots}
        whole = dict.fromkeys(shapes, "replicated")
        return GradientLayout.of(shapes, tp_rank=tp_rank, tp_size=settings.tensor_parallel, partitions=whole)

    monkeypatch.setattr(comparison, "layout_of", undivided)
    with pytest.raises(ExchangeError, match=r"replicated gradient 'blocks\.0\.w_q' is not the same"):
        compared(2)
