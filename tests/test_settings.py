"""Settings: checked once, told to all workers, and the one of them that may change between windows."""

import math
import threading

import numpy as np
import pytest
from devices import on_host, put_all

from gradengine import GradientEngine, GradientLayout, local_group
from gradengine.errors import CallerError, ExchangeError, WindowError
from gradengine.kernels import ClipPlan
from gradengine.settings import Settings

PLAN = ClipPlan((0, 0), (1.0,))
LAYOUT = GradientLayout.of({"w": (3,)})


def settings(**change):
    defaults = {"on_non_finite": "raise", "average": "weighted", "micro_batches": None, "loss_scale": 1.0}
    return Settings(PLAN, **{**defaults, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"on_non_finite": "warn"}, "unknown on_non_finite: got 'warn', expected one of 'raise', 'skip', 'pass'"),
        ({"average": "mean"}, "unknown average: got 'mean', expected one of 'weighted', 'per_worker', 'sum'"),
        ({"micro_batches": 0}, "micro_batches is out of range: got 0, expected a whole number >= 1"),
        ({"micro_batches": 2.0}, "got 2.0"),
        ({"loss_scale": 0.0}, r"loss_scale is out of range: got 0.0, expected 2\*\*-64..2\*\*64"),
        ({"loss_scale": float("nan")}, "got nan"),
        ({"loss_scale": 2.0**65}, "loss_scale is out of range"),
        ({"loss_scale": "1"}, "loss_scale is not a number: got '1'"),
    ],
)
def test_refused(change, message):
    with pytest.raises(CallerError, match=message):
        settings(**change)


@pytest.mark.parametrize("number", [np.int64(2), np.uint8(2), np.float32(2), np.float64(2), np.array(2)])
def test_numpys_numbers_are_numbers(number):
    found = settings(loss_scale=number, micro_batches=np.int64(2))
    assert (found.loss_scale, found.micro_batches) == (2.0, 2)
    assert (type(found.loss_scale), type(found.micro_batches)) == (float, int)
    assert found.shared["loss_scale"] == "2.0"


@pytest.mark.parametrize(
    ("on_non_finite", "raises", "zero_if_bad"), [("raise", True, True), ("skip", False, True), ("pass", False, False)]
)
def test_what_each_word_leads_to(on_non_finite, raises, zero_if_bad):
    found = settings(on_non_finite=on_non_finite)
    assert (found.raises, found.zero_if_bad) == (raises, zero_if_bad)


def test_what_all_workers_are_told():
    found = settings(loss_scale=1024)
    assert set(found.shared) == {"max_norm", "groups", "average", "on_non_finite", "loss_scale"}
    assert found.shared["loss_scale"] == "1024.0"
    assert all(isinstance(value, str) for value in found.shared.values())
    found.loss_scale = 512
    assert found.shared["loss_scale"] == "512.0"


class TestPartOfAModel:
    PART = GradientLayout.of({"w": (3,)}, tp_rank=1, tp_size=2, partitions={"w": "row"})

    @pytest.mark.parametrize("plan", [PLAN, ClipPlan((0, 1), (math.inf, 2.0))])
    def test_is_not_clipped_alone(self, plan):
        with pytest.raises(CallerError, match="got part 1 of 2, and no tp_exchange, expected tp_exchange="):
            Settings(plan, "raise", "weighted", None, 1.0).refuse_lone_part(self.PART)

    @pytest.mark.parametrize(("on_non_finite", "is_refused"), [("skip", True), ("raise", False), ("pass", False)])
    def test_is_not_skipped_alone(self, on_non_finite, is_refused):
        unclipped = Settings(ClipPlan((0,), (math.inf,)), on_non_finite, "weighted", None, 1.0)
        if is_refused:
            with pytest.raises(
                CallerError,
                match="one part of a model cannot be clipped or skipped by itself",
            ):
                unclipped.refuse_lone_part(self.PART)
        else:
            unclipped.refuse_lone_part(self.PART)

    def test_a_whole_model_is_clipped_as_ever(self):
        settings(on_non_finite="skip").refuse_lone_part(LAYOUT)


class TestDynamicLossScale:
    def test_each_window_has_its_own(self, backend):
        engine = GradientEngine(LAYOUT, backend.kernels, max_norm=None, loss_scale=4.0)
        for scale in (4.0, 1024.0, 0.5):
            engine.loss_scale = scale
            engine.add(put_all(backend, [np.full(3, 3 * scale, np.float32)]))
            assert on_host(engine.step().gradients["w"]).tolist() == [3, 3, 3]

    def test_an_open_window_keeps_its_own(self, backend):
        engine = GradientEngine(LAYOUT, backend.kernels, max_norm=None, loss_scale=4.0)
        engine.add(put_all(backend, [np.full(3, 8, np.float32)]))
        with pytest.raises(WindowError, match=r"cannot be changed: got 2\.0 after 1 micro-batches"):
            engine.loss_scale = 2.0
        engine.loss_scale = 4.0
        assert on_host(engine.step().gradients["w"]).tolist() == [2, 2, 2]
        engine.loss_scale = 2.0
        assert engine.loss_scale == 2.0

    def test_out_of_range(self):
        engine = GradientEngine(LAYOUT)
        with pytest.raises(CallerError, match="loss_scale is out of range"):
            engine.loss_scale = float("inf")
        assert engine.loss_scale == 1.0

    def test_workers_must_agree_on_it(self):
        """One that adjusts it alone is found at its first step."""
        outcomes = {}

        def work(exchange):
            engine = GradientEngine(LAYOUT, exchange=exchange)
            if exchange.rank == 1:
                engine.loss_scale = 2.0
            engine.add([np.ones(3, np.float32)])
            with pytest.raises(ExchangeError, match=r"rank 1 has another loss_scale than rank 0"):
                engine.step()
            outcomes[exchange.rank] = True
            exchange.close()

        threads = [threading.Thread(target=work, args=(exchange,)) for exchange in local_group(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert outcomes == {0: True, 1: True}
