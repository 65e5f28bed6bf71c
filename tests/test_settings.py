"""Settings: checked once, told to all workers, and the one of them that may change between windows."""

import math

import numpy as np
import pytest
from ranks import on_ranks

from gradengine import GradientEngine, GradientLayout
from gradengine.engine.settings import refuse_lone_part, shared_settings
from gradengine.errors import CallerError, ExchangeError, WindowError
from gradengine.kernels import ClipPlan

PLAN = ClipPlan((0, 0), (1.0,))
LAYOUT = GradientLayout.of({"w": (3,)})


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("on_non_finite", "warn"),
        ("average", "mean"),
        *(("measure_noise", bad) for bad in (2, None, "yes")),
        *(("micro_batches", bad) for bad in (0, 2.0, True)),
        *(("loss_scale", bad) for bad in (0.0, math.nan, 2.0**127, 2.0**-127, "1")),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(name, bad):
    do = {"mean": "'weighted' is the mean", "1": r"pass scaler\.get_scale\(\)"}.get(str(bad), "")
    with pytest.raises(CallerError, match=f"{name}.*{do}"):
        GradientEngine(LAYOUT, **{name: bad})


@pytest.mark.parametrize("number", [np.int64(2), np.float32(2), np.array(2)])
def test_numpys_numbers_are_numbers(number):
    found = GradientEngine(LAYOUT, loss_scale=number, micro_batches=np.int64(2))
    assert (found.loss_scale, found.micro_batches) == (2.0, 2)
    assert (type(found.loss_scale), type(found.micro_batches)) == (float, int)


def test_what_all_workers_are_told():
    found = shared_settings(PLAN, "raise", "weighted", 2.0, None)
    assert set(found) == {"max_norm", "groups", "average", "on_non_finite", "on_spike", "loss_scale"}
    assert found["loss_scale"] == "a number"
    assert all(isinstance(value, str) for value in found.values())


@pytest.mark.parametrize("on_non_finite", ["raise", "skip", "propagate"])
def test_a_part_of_a_model_is_neither_clipped_nor_skipped_by_itself(on_non_finite):
    part = GradientLayout.of({"w": (3,)}, tp_rank=1, tp_size=2, partitions={"w": "row"})
    refuse_lone_part(LAYOUT, None, PLAN, on_non_finite, None)
    unclipped = ClipPlan((0,), (math.inf,))
    for plan in [PLAN, ClipPlan((0, 1), (math.inf, 2.0)), *([unclipped] if on_non_finite == "skip" else [])]:
        with pytest.raises(CallerError, match="got part 1 of 2, and no tp_exchange"):
            refuse_lone_part(part, None, plan, on_non_finite, None)
    if on_non_finite != "skip":
        refuse_lone_part(part, None, unclipped, on_non_finite, None)


def test_each_window_has_its_own_loss_scale_and_an_open_one_keeps_it():
    engine = GradientEngine(LAYOUT, loss_scale=4.0)
    for scale in (4.0, 1024.0, 0.5):
        engine.loss_scale = scale
        engine.add([np.full(3, 3 * scale, np.float32)])
        with pytest.raises(WindowError, match="after 1 micro-batches"):
            engine.loss_scale = 2.0
        engine.loss_scale = scale
        assert engine.step().gradients["w"].tolist() == [3, 3, 3]
    with pytest.raises(CallerError, match="loss_scale"):
        engine.loss_scale = math.inf
    assert engine.loss_scale == 0.5


def test_a_worker_that_changes_its_loss_scale_alone_is_found_at_its_first_step():
    def work(exchange):
        engine = GradientEngine(LAYOUT, exchange=exchange)
        engine.loss_scale = 1.0 + exchange.rank
        engine.add([np.ones(3, np.float32)])
        with pytest.raises(ExchangeError, match=r"rank 1 has .*loss_scale"):
            engine.step()

    assert on_ranks(work, 2) == [None, None]
