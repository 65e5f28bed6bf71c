"""A dynamic loss scale: torch's rule, on the host and on the device, by the verdicts of the steps alone."""

import math

import numpy as np
import pytest
from devices import assign, bits_of, number_of, put_all
from hypothesis import given
from hypothesis import strategies as st
from ranks import on_ranks

from gradengine import DynamicLossScale, GradientEngine, GradientLayout
from gradengine.errors import CallerError, WindowError

LAYOUT = GradientLayout.of({"w": (40,), "b": (3,)})
SHORT = DynamicLossScale(initial=1024.0, growth_interval=3)


class GradScaler:
    """What torch's `_amp_update_scale_` says: a scale in fp32, factors in fp64; growth ends at 2**64."""

    def __init__(self, rule):
        self.rule, self.scale, self.tracker = rule, np.float32(rule.initial), 0

    def update(self, is_finite):
        with np.errstate(over="ignore"):
            if not is_finite:
                self.scale, self.tracker = np.float32(np.float64(self.scale) * self.rule.backoff_factor), 0
            elif self.tracker + 1 == self.rule.growth_interval:
                grown = np.float32(np.float64(self.scale) * self.rule.growth_factor)
                self.scale, self.tracker = (grown if grown <= 2.0**64 else self.scale), 0
            else:
                self.tracker += 1


def new_engine(backend, rule=SHORT, **options):
    options = {"max_norm": 1.0, "on_non_finite": "skip", **options}
    return GradientEngine(LAYOUT, backend.kernels, loss_scale=rule, **options)


def gradients(scale, is_finite=True):
    """What backward makes of a loss that was multiplied by the scale."""
    values = [np.arange(slot.size, dtype=np.float32).reshape(slot.shape) * np.float32(scale) for slot in LAYOUT.slots]
    if not is_finite:
        values[1][1] = math.inf
    return values


def made(backend, engine, is_finite=True):
    """A step; what the loss was multiplied by, and the result."""
    scale = number_of(engine.loss_scale)
    engine.add(put_all(backend, gradients(scale, is_finite)), 2.0)
    return scale, engine.step()


@pytest.mark.parametrize(
    "rule",
    [
        SHORT,
        DynamicLossScale(growth_factor=1.1, backoff_factor=0.3, growth_interval=2),
        DynamicLossScale(initial=2.0**63, growth_interval=1),
        DynamicLossScale(initial=2.0**63, growth_factor=2.0**64, growth_interval=1),
    ],
)
def test_each_step_moves_it_as_grad_scaler_does_and_its_gradients_are_those_of_a_scale_that_is_set(backend, rule):
    engine, expected = new_engine(backend, rule), GradScaler(rule)
    fixed = GradientEngine(LAYOUT, backend.kernels, max_norm=1.0, on_non_finite="skip")
    for is_finite in (np.random.default_rng(5).random(16) < 0.7).tolist():
        scale, result = made(backend, engine, is_finite)
        assert scale == result.metrics()["loss_scale"] == expected.scale
        fixed.loss_scale = scale
        fixed.add(put_all(backend, gradients(scale, is_finite)), 2.0)
        other = fixed.step()
        assert bits_of(result) == bits_of(other)
        for name in ("factor", "inverse_factor", "scale", "skipped", *(["norm"] if is_finite else [])):
            assert number_of(getattr(result, name)) == number_of(getattr(other, name)), name
        assert bool(number_of(result.skipped)) is not is_finite
        expected.update(is_finite)
        assert number_of(engine.loss_scale) == expected.scale
    engine.check()


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 4), st.sampled_from([1.5, 2.0, 1.1]))
def test_the_rule_is_grad_scalers(verdicts, interval, growth):
    rule = DynamicLossScale(growth_factor=growth, growth_interval=interval)
    expected, now = GradScaler(rule), (np.float32(rule.initial), 0)
    for is_finite in verdicts:
        now = rule.after(*now, is_finite=is_finite)
        expected.update(is_finite)
        assert now == (expected.scale, expected.tracker)


def test_on_a_device_it_is_one_array(emulated):
    engine = new_engine(emulated)
    scale = engine.loss_scale
    for _ in range(3):
        engine.add(put_all(emulated, gradients(1.0)))
        engine.step()
        assert engine.loss_scale is scale
    assert number_of(scale) == 2048.0


@pytest.mark.usefixtures("lazy")
def test_any_stream_reads_it_after_the_step_that_changes_it(emulated):
    engine = new_engine(emulated)
    engine.add(put_all(emulated, gradients(1.0, is_finite=False)))
    engine.step()
    with emulated.xp.cuda.Stream(non_blocking=True):
        assert (engine.loss_scale * 1).get() == 512.0


def test_each_replay_follows_its_verdict(device):
    engine, expected = new_engine(device), GradScaler(SHORT)
    arrays = put_all(device, gradients(1.0))
    with engine.capture() as graph:
        engine.add(arrays)
        engine.step()
    plain = np.sqrt(sum(float((values.astype(np.float64) ** 2).sum()) for values in gradients(1.0)))
    for is_finite in (True, True, True, False, True):
        assert number_of(engine.loss_scale) == expected.scale
        for array, values in zip(arrays, gradients(expected.scale, is_finite), strict=True):
            assign(array, device.put(values))
        result = graph.replay()
        assert result.metrics()["loss_scale"] == expected.scale
        assert not is_finite or number_of(result.norm) == pytest.approx(plain, rel=1e-6)
        expected.update(is_finite)
    assert number_of(engine.loss_scale) == expected.scale


def test_a_weight_that_makes_no_divisor_is_no_verdict_on_it(device):
    engine = new_engine(device)
    engine.add(put_all(device, gradients(1.0)), 8e37)
    assert number_of(engine.step().skipped) == 1
    with pytest.raises(WindowError, match=r"weight .*got 8e\+37 in all"):
        engine.check()
    assert number_of(engine.loss_scale) == 1024.0
    assert engine.state_dict()["loss_scale_tracker"] == 0


def test_one_that_came_down_to_nothing_divides_nothing(backend):
    engine = new_engine(backend, DynamicLossScale(initial=2.0**-60, backoff_factor=2.0**-64))
    for _ in range(2):
        made(backend, engine, False)
    assert number_of(engine.loss_scale) == 0
    with pytest.raises(WindowError, match="out of range"):
        made(backend, engine)[1].check()


def test_a_resumed_run_goes_on_with_scale_and_tracker(backend):
    engine, resumed = new_engine(backend), new_engine(backend)
    for is_finite in (False, True, True):
        made(backend, engine, is_finite)
    state = engine.state_dict()
    assert (state["loss_scale"], state["loss_scale_tracker"]) == (512.0, 2)
    resumed.load_state_dict(state)
    number = GradientEngine(LAYOUT, backend.kernels, on_non_finite="skip")
    number.load_state_dict(state)
    assert number.loss_scale == 512.0
    for each in (engine, resumed):
        assert made(backend, each)[0] == 512.0
        assert number_of(each.loss_scale) == 1024.0


def test_workers_follow_one_verdict(backend):
    verdicts = [(True, True), (True, False), (True, True), (True, True), (True, True), (False, True)]

    def worker(exchange):
        engine, seen = new_engine(backend, exchange=exchange), []
        for finite in verdicts:
            scale, result = made(backend, engine, finite[exchange.rank])
            assert result.metrics()["loss_scale"] == scale
            seen.append(scale)
        return [*seen, number_of(engine.loss_scale)]

    expected = GradScaler(SHORT)
    scales = [expected.scale]
    for finite in verdicts:
        expected.update(all(finite))
        scales.append(expected.scale)
    assert on_ranks(worker, 2) == [scales, scales]


def test_workers_with_other_scales_are_told(backend):
    def worker(exchange):
        engine = new_engine(backend, DynamicLossScale(initial=2.0 ** (4 + exchange.rank)), exchange=exchange)
        made(backend, engine)

    for outcome in on_ranks(worker, 2):
        assert "loss_scale" in str(outcome)


def test_it_is_not_set_nor_used_by_an_engine_that_does_not_skip(backend):
    engine = new_engine(backend)
    engine.add(put_all(backend, gradients(1.0)))
    for scale in (1.0, 2.0):
        with pytest.raises(CallerError, match="dynamic loss scale"):
            engine.loss_scale = scale
        with pytest.raises(CallerError, match="dynamic loss scale"):
            engine.step(loss_scale=scale)
    engine.step()
    for policy in ("raise", "propagate"):
        with pytest.raises(CallerError, match="skip"):
            new_engine(backend, on_non_finite=policy)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *(("initial", bad) for bad in (0, -1, math.nan, math.inf, 1e-30, "x", True)),
        *(("growth_factor", bad) for bad in (1.0, 0.5, math.nan, math.inf)),
        *(("backoff_factor", bad) for bad in (1.0, 0.0, -0.5, 2.0, math.nan)),
        *(("growth_interval", bad) for bad in (0, 1.5, 2**31, True)),
    ],
)
def test_a_rule_that_cannot_be_is_refused_by_name(name, bad):
    with pytest.raises(CallerError, match=name):
        DynamicLossScale(**{name: bad})
