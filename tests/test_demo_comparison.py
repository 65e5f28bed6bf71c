"""Shards against the model in one piece: figures are small, and what is wrong makes them large or is refused."""

import dataclasses

import numpy as np
import pytest

from gradengine.demo import worker
from gradengine.demo.comparison import LIMITS, compare
from gradengine.demo.model import LlamaConfig
from gradengine.demo.proofs import shards_are_whole
from gradengine.demo.settings import Settings
from gradengine.demo.shards import TensorParallelRank
from gradengine.demo.text import Texts, split, standard_library_text
from gradengine.demo.worker import Learner, layout_of
from gradengine.engine import GradientEngine
from gradengine.errors import ExchangeError
from gradengine.layout import GradientLayout

MODEL = LlamaConfig(num_blocks=1, hidden_size=32, num_heads=8, num_kv_heads=4, intermediate_size=32, sequence_length=16)
SETTINGS = Settings(steps=6, batch_size=2, model=MODEL)
TEXTS = Texts(*split(standard_library_text(100_000)), "the standard library")
SHARD, NORM, STEP = LIMITS["gradients"], LIMITS["norm"], LIMITS["AdamW step"]


def compared(tp_size, **changes):
    reports = []
    compare(dataclasses.replace(SETTINGS, tensor_parallel=tp_size, **changes), TEXTS, reports.append)
    assert set(reports[:-1]) == {None}
    name, figures = reports[-1]
    assert (name, list(figures)) == ("shards", list(LIMITS))
    return figures


def is_proved(found):
    return shards_are_whole(found).holds


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tp_size", [2, 4])
def test_shards_are_the_model_in_one_piece_within_the_tolerances(tp_size, seed):
    found = compared(tp_size, seed=seed)
    assert all(figure <= LIMITS[name] for name, figure in found.items())
    assert all(found[name] > 0 for name in ("outputs", "gradients", "clipped", "AdamW step"))
    assert is_proved(found)


def test_one_shard_is_the_model_in_one_piece_bit_for_bit():
    assert compared(1) == dict.fromkeys(LIMITS, 0.0)


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e9])
def test_the_gradient_is_clipped_whatever_the_bound_of_the_run(monkeypatch, max_norm):
    scales = []
    altered(monkeypatch, lambda layout, result: scales.append(result.scale) or result)
    assert is_proved(compared(2, max_norm=max_norm))
    assert len(scales) == 2
    assert all(0 < scale < 0.1 for scale in scales)


@pytest.mark.parametrize("steps", [1, 60])
@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize(("batch_size", "length"), [(1, 1), (8, 1), (1, 2)])
def test_a_batch_whose_attention_has_nothing_to_choose_from_is_no_fault_of_the_shards(
    batch_size, length, tp_size, steps
):
    """With one byte in a sequence the gradients of w_q and w_k are nothing but rounding."""
    model = dataclasses.replace(MODEL, num_blocks=2, sequence_length=length)
    for seed in range(3):
        found = compared(tp_size, batch_size=batch_size, model=model, seed=seed, steps=steps)
        assert is_proved(found), found


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
    assert found["clipped"] > SHARD
    assert not is_proved(found)
    assert found["gradients"] <= SHARD  # backward's own are right


def test_a_wrong_scale_alone_fails_proof_4(monkeypatch):
    altered(monkeypatch, lambda layout, result: decided(result, scale=result.scale * 1.00001))
    found = compared(2)
    assert found["clip scale"] > NORM
    assert not is_proved(found)


def test_a_wrong_norm_on_one_shard_fails_proof_4(monkeypatch):
    altered(monkeypatch, lambda layout, result: decided(result, norm=result.norm * (1 + 1e-5 * layout.tp_rank)))
    found = compared(2)
    assert found["norm"] > NORM
    assert not is_proved(found)


def test_an_optimizer_that_leaves_a_component_behind_fails_proof_4(monkeypatch):
    """Of the gradients nothing is wrong, so only the weights after AdamW's step can tell."""
    sound = Learner.apply_gradients

    def partly(self, gradients):
        before = self.weights["blocks.0.w_k"].copy()
        sound(self, gradients)
        if before.shape != MODEL.weight_shapes["blocks.0.w_k"]:
            self.weights["blocks.0.w_k"][...] = before

    monkeypatch.setattr(Learner, "apply_gradients", partly)
    found = compared(2)
    assert found["clipped"] <= SHARD
    assert found["AdamW step"] > STEP
    assert not is_proved(found)


# ---- not a number ----


def with_nan(monkeypatch, where):
    """Have shard 1 hold NaN, in a component that comes neither first nor last."""
    begin = Learner.__init__

    def noting(self, settings, texts, tp, report):
        self.tp_rank = tp.tp_rank
        begin(self, settings, texts, tp, report)

    def spoilt(self, *arguments):
        found = sound(self, *arguments)
        if self.tp_rank == 1:
            spoil(self, found)
        return found

    monkeypatch.setattr(Learner, "__init__", noting)
    name, spoil = {
        "outputs": ("logits", lambda learner, logits: logits.__setitem__((1, 2), np.nan)),
        "AdamW step": (
            "apply_gradients",
            lambda learner, _: learner.weights["blocks.0.up"].__setitem__((1, 1), np.nan),
        ),
        "gradients": ("forward_backward", spoil_first_gradients),
    }[where]
    sound = getattr(Learner, name)
    monkeypatch.setattr(Learner, name, spoilt)


def spoil_first_gradients(learner, found):
    """Those that are compared; the engine would refuse the next ones."""
    if not hasattr(learner, "is_spoilt"):
        learner.is_spoilt = True
        found[1]["blocks.0.up"][1, 1] = np.nan


@pytest.mark.parametrize("figure", ["outputs", "gradients", "AdamW step"])
def test_nan_in_what_a_shard_computes_is_its_figure_and_fails_proof_4(monkeypatch, figure):
    with_nan(monkeypatch, figure)
    found = compared(2)
    assert [name for name, value in found.items() if np.isnan(value)] == [figure]
    assert not is_proved(found)


@pytest.mark.parametrize("figure", ["norm", "clip scale", "clipped"])
def test_nan_in_what_a_shards_engine_says_is_its_figure_and_fails_proof_4(monkeypatch, figure):
    def spoilt(layout, result):
        if layout.tp_rank == 0:
            return result
        if figure == "clipped":
            gradients = {name: gradient.copy() for name, gradient in result.gradients.items()}
            gradients["blocks.0.up"][1, 1] = np.nan
            return dataclasses.replace(result, _arrays=gradients)
        return decided(result, **{figure.split()[-1]: np.float32(np.nan)})

    altered(monkeypatch, spoilt)
    found = compared(2)
    are_nan = [name for name, value in found.items() if np.isnan(value)]
    assert [name for name in are_nan if name != "AdamW step"] == [figure]  # AdamW moves by what it was handed
    assert not is_proved(found)


# ---- what the model computes ----


def one_wrong(monkeypatch, position, outcome):
    """Have one of the block's four all-reduces be another: forward attention, feed-forward, then both backward."""
    whole = TensorParallelRank.all_reduce
    counts = {}

    def some(self, partial):
        count = counts[id(self)] = counts.get(id(self), -1) + 1
        # The logits take two of their own before the four of forward and backward.
        is_it = self.exchange is not None and (count if count < 2 else (count - 2) % 4) == position
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
    found = compared(2)
    assert (found["outputs"] > 1000 * SHARD) == (position < 2)
    assert min(found["gradients"], found["clipped"]) > 1000 * SHARD
    assert found["norm"] > 100 * NORM
    assert found["AdamW step"] > STEP


def test_parts_that_are_passed_for_the_whole_are_refused_and_never_compared(monkeypatch):
    def undivided(settings, tp_rank):
        shapes = {slot.name: slot.shape for slot in layout_of(settings, tp_rank).slots}
        whole = dict.fromkeys(shapes, "replicated")
        return GradientLayout.of(shapes, tp_rank=tp_rank, tp_size=settings.tensor_parallel, partitions=whole)

    monkeypatch.setattr(worker, "layout_of", undivided)
    with pytest.raises(ExchangeError, match=r"replicated gradient 'blocks\.0\.w_q' is not the same"):
        compared(2)
