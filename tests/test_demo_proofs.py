"""Shards against the model in one piece: figures are small, and what is wrong makes them large or is refused."""

import dataclasses
import re

import numpy as np
import pytest
from test_demo_run import replay_of

from gradengine.demo import worker
from gradengine.demo.model import LlamaConfig
from gradengine.demo.proofs import LIMITS, shards_are_whole
from gradengine.demo.settings import Settings
from gradengine.demo.shards import TensorParallelRank
from gradengine.demo.worker import Learner, layout_of
from gradengine.engine import GradientEngine
from gradengine.errors import ExchangeError
from gradengine.layout import GradientLayout

MODEL = LlamaConfig(num_blocks=1, hidden_size=32, num_heads=8, num_kv_heads=4, intermediate_size=32, sequence_length=16)
SETTINGS = Settings(
    steps=6, workers=1, micro_batches=1, batch_size=2, compared_steps=1, max_norm=0.01, model=MODEL
)  # of which the first gradient is clipped
GRADIENTS = LIMITS["gradients"]


def compared(tp_size, **changes):
    settings = dataclasses.replace(SETTINGS, **changes)
    return shards_are_whole(replay_of(settings, tensor_parallel=tp_size), replay_of(settings))


def figures_of(proof):
    return {name: float(figure) for name, figure in re.findall(r"^(\w+) (\S+), limit", proof.measured, re.MULTILINE)}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tp_size", [2, 4])
def test_shards_are_the_model_in_one_piece_within_the_limits(tp_size, seed):
    found = compared(tp_size, seed=seed)
    assert found.holds
    assert figures_of(found).keys() == LIMITS.keys()
    assert figures_of(found)["gradients"] > 0


def test_one_shard_is_the_model_in_one_piece_bit_for_bit():
    assert figures_of(compared(1)) == dict.fromkeys(LIMITS, 0.0)


@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize(("batch_size", "length"), [(1, 1), (8, 1), (1, 2)])
def test_a_batch_whose_attention_has_nothing_to_choose_from_is_no_fault_of_the_shards(batch_size, length, tp_size):
    """With one byte in a sequence the gradients of w_q and w_k are nothing but rounding."""
    model = dataclasses.replace(MODEL, num_blocks=2, sequence_length=length)
    for seed in range(3):
        found = compared(tp_size, batch_size=batch_size, model=model, seed=seed)
        assert found.holds, found


# ---- what the engine hands back ----


def altered(monkeypatch, change):
    """Have the engines of shards hand back another result; that of the model in one piece is sound."""
    sound = GradientEngine.step

    def step(self, *arguments, **options):
        result = sound(self, *arguments, **options)
        return change(self.layout, result) if self.layout.tp_size > 1 else result

    monkeypatch.setattr(GradientEngine, "step", step)


def decided(result, *, scale=None, norm=None):
    """The same result, whose scale or norm is said to be another."""
    decision = result._decided.decision
    decision = dataclasses.replace(
        decision,
        scales=decision.scales if scale is None else (scale,),
        norm=decision.norm if norm is None else norm,
    )
    return dataclasses.replace(result, _decided=dataclasses.replace(result._decided, decision=decision))


def multiplied(result, factors):
    gradients = {name: gradient * np.float32(factors(name)) for name, gradient in result.gradients.items()}
    return dataclasses.replace(result, _arrays=gradients)


def doubled_where_sharded(layout, result):
    partitions = {slot.name: slot.partition for slot in layout.slots}
    return multiplied(result, lambda name: 1 if partitions[name] == "replicated" else 2)


def not_clipped(layout, result):
    return multiplied(result, lambda name: 1 / result.scale)


def not_clipped_and_said_so(layout, result):
    return decided(not_clipped(layout, result), scale=1.0)


def one_shard_times_7(layout, result):
    return multiplied(result, lambda name: 7 if layout.tp_rank == 1 else 1)


def scale_off_by_a_hundred_thousandth(layout, result):
    return decided(multiplied(result, lambda name: 1.00002), scale=result.scale * 1.00002)


def one_component_forgotten(layout, result):
    return multiplied(result, lambda name: 0 if name.endswith("w_k") else 1)


@pytest.mark.parametrize(
    "change",
    [
        doubled_where_sharded,
        not_clipped,
        not_clipped_and_said_so,
        one_shard_times_7,
        scale_off_by_a_hundred_thousandth,
        one_component_forgotten,
    ],
)
@pytest.mark.parametrize("tp_size", [2, 4])
def test_a_wrong_gradient_of_the_shards_engines_fails_proof_4(monkeypatch, tp_size, change):
    altered(monkeypatch, change)
    found = compared(tp_size)
    assert figures_of(found)["gradients"] > GRADIENTS
    assert not found.holds


@pytest.mark.parametrize("figure", ["norm", "scale"])
def test_a_wrong_norm_or_scale_fails_proof_4(monkeypatch, figure):
    altered(monkeypatch, lambda layout, result: decided(result, **{figure: getattr(result, figure) * (1 + 1e-5)}))
    found = compared(2)
    assert [name for name, value in figures_of(found).items() if value > LIMITS[name]] == [figure]
    assert not found.holds


# ---- not a number ----


@pytest.mark.parametrize("figure", ["norm", "scale", "gradients"])
def test_nan_in_what_a_shards_engine_says_is_its_figure_and_fails_proof_4(monkeypatch, figure):
    """In a component that comes neither first nor last, and on one shard only."""

    def spoilt(layout, result):
        if figure != "gradients":
            return decided(result, **{figure: np.float32(np.nan)})
        gradients = {name: gradient.copy() for name, gradient in result.gradients.items()}
        gradients["blocks.0.up"][1, 1] = np.nan if layout.tp_rank == 1 else gradients["blocks.0.up"][1, 1]
        return dataclasses.replace(result, _arrays=gradients)

    altered(monkeypatch, spoilt)
    found = compared(2)
    assert [name for name, value in figures_of(found).items() if np.isnan(value)] == [figure]
    assert not found.holds


def test_nan_in_the_loss_fails_proof_4(monkeypatch):
    sound = Learner.forward_backward
    monkeypatch.setattr(Learner, "forward_backward", lambda self, index: (float("nan"), sound(self, index)[1]))
    found = compared(2)
    assert np.isnan(figures_of(found)["loss"])
    assert not found.holds


# ---- what the model computes ----


def one_wrong(monkeypatch, position, outcome):
    """Have one of the block's four all-reduces be another: forward attention, feed-forward, then both backward."""
    whole = TensorParallelRank.all_reduce
    counts = {}

    def some(self, partial):
        count = counts[id(self)] = counts.get(id(self), -1) + 1
        is_it = self.exchange is not None and count % 4 == position
        return outcome(self, partial, whole) if is_it else whole(self, partial)

    monkeypatch.setattr(TensorParallelRank, "all_reduce", some)


@pytest.mark.parametrize("position", range(4))
def test_a_missing_all_reduce_leaves_other_replicas_and_the_engine_refuses_them(monkeypatch, position):
    one_wrong(monkeypatch, position, lambda all_reduce, partial, whole: partial)
    with pytest.raises(ExchangeError, match=r"replicated gradient '.*' is not the same on ranks 0 and 1"):
        compared(2)


@pytest.mark.parametrize("position", range(4))
def test_an_all_reduce_that_all_shards_get_wrong_alike_is_in_the_figures(monkeypatch, position):
    one_wrong(monkeypatch, position, lambda all_reduce, partial, whole: 2 * whole(all_reduce, partial))
    found = figures_of(compared(2))
    assert (found["loss"] > 10 * LIMITS["loss"]) == (position < 2)
    assert found["gradients"] > 1000 * GRADIENTS
    assert found["norm"] > 100 * LIMITS["norm"]


def test_parts_that_are_passed_for_the_whole_are_refused_and_never_compared(monkeypatch):
    def undivided(settings, tp_rank):
        shapes = {slot.name: slot.shape for slot in layout_of(settings, tp_rank).slots}
        whole = dict.fromkeys(shapes, "replicated")
        return GradientLayout.of(shapes, tp_rank=tp_rank, tp_size=settings.tensor_parallel, partitions=whole)

    monkeypatch.setattr(worker, "layout_of", undivided)
    with pytest.raises(ExchangeError, match=r"replicated gradient 'blocks\.0\.w_q' is not the same"):
        compared(2)
