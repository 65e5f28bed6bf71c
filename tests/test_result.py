"""What a step hands back: numbers on the CPU, arrays there on a GPU, and one way to ask either what went wrong."""

import dataclasses
import math
from types import SimpleNamespace

import cuda_emulator
import numpy as np
import pytest
import strategies as draw
from backends import available
from devices import on_host, put_all

from gradengine import GradientEngine, GradientLayout
from gradengine.errors import CallerError
from gradengine.exchange.exchange import Sums

LAYOUT = GradientLayout.of({"layers.0.w": (3, 5), "layers.1.w": (7,), "head": (1,)})
HOST = available("host")
SCALARS = ("norm", "scale", "factor", "inverse_factor", "skipped")


def gradients_of(value=None):
    if value is None:
        return draw.random_gradients(0, LAYOUT.slots)
    return [np.full(slot.shape, value, np.float32) for slot in LAYOUT.slots]


def stepped(backend, value=None, deferred=False, **options):
    engine = GradientEngine(LAYOUT, backend.kernels, **{"max_norm": 0.5, **options})
    engine.add(put_all(backend, gradients_of(value)), 2.0)
    return engine.step(deferred=deferred)


def test_gradients_are_current_until_the_engine_is_called_again():
    engine = GradientEngine(LAYOUT)
    engine.add(gradients_of())
    first = engine.step()
    engine.discard()
    assert first.is_current
    engine.add(gradients_of())
    assert not first.is_current
    second = engine.step(deferred=True)
    assert (first.is_current, second.is_current) == (False, True)


def test_replays_make_those_before_stale(device):
    engine, gradients = GradientEngine(LAYOUT, device.kernels), put_all(device, gradients_of())
    with engine.capture() as graph:
        engine.add(gradients)
        engine.step()
    first, second = graph.replay(), graph.replay()
    assert [first.is_current, second.is_current] == [False, True]


class TestNumbers:
    def test_on_the_cpu_are_numbers(self):
        result = stepped(HOST)
        assert all(isinstance(getattr(result, name), (float, np.float32, bool)) for name in SCALARS)
        assert type(result.skipped) is bool

    def test_on_a_gpu_are_arrays_of_no_dimension_there(self, device):
        result = stepped(device)
        for number in (*(getattr(result, name) for name in SCALARS), *result.group_norms.values()):
            assert isinstance(number, device.xp.ndarray)
            assert number.shape == ()
        assert on_host(result.skipped).dtype == np.float32  # as torch's fused optimizers take found_inf
        assert on_host(result.factor).dtype == np.float32

    def test_handing_them_out_waits_for_nothing(self, emulated):
        with cuda_emulator.recorded() as record:
            result = stepped(emulated)
            before = list(record.waits)  # for what the engine brought to the device when it was made
            assert len(result.component_norms) == 3
            assert result.group_norms
            assert record.waits == before
            assert float(result.norm) > 0
            assert len(record.waits) > len(before)

    @pytest.mark.parametrize("groups", [None, "block"])
    def test_metrics_are_the_numbers_flat(self, backend, groups):
        norms = [draw.exact_norm([gradient]) for gradient in gradients_of()]
        metrics = stepped(backend, groups=groups).metrics()
        assert all(type(number) is float for number in metrics.values())
        wanted = {
            "grad_norm": math.hypot(*norms),
            "clip_scale": min(min(1.0, 0.5 / norm) for norm in (norms if groups else [math.hypot(*norms)])),
            **dict.fromkeys(("clipped", "micro_batches"), 1),
            **dict.fromkeys(("skipped", "dropped", "exchange_seconds", "exchange_hidden_seconds"), 0),
            "weight": 2,
        }
        if groups:
            wanted |= {f"group_norm/{n}": norm for n, norm in zip(("block 0", "block 1", "rest"), norms, strict=True)}
        assert metrics == pytest.approx(wanted, rel=1e-6)
        wanted |= {f"grad_norm/{n}": norm for n, norm in zip(("layers.0", "layers.1", "head"), norms, strict=True)}
        assert stepped(backend, groups=groups).metrics(blocks=True) == pytest.approx(wanted, rel=1e-6)

    @pytest.mark.parametrize("value", [1.0, np.nan])
    def test_metrics_of_a_step_that_clips_nothing_or_is_skipped(self, backend, value):
        metrics = stepped(backend, value, max_norm=1e6, on_non_finite="skip").metrics()
        assert (metrics["clipped"], metrics["skipped"]) == (0.0, float(math.isnan(value)))


def test_seconds_of_the_exchange_for_which_the_step_waited_are_not_hidden():
    result = stepped(HOST)
    metrics = dataclasses.replace(result, _sums=Sums(np.ones(1), [], 3.0, 1.0)).metrics()
    assert (metrics["exchange_seconds"], metrics["exchange_hidden_seconds"]) == (3.0, 2.0)


def test_sums_are_no_gradients_and_gradients_no_sums():
    """An optimizer would take sums for gradients, and move by the whole window's weight too far."""
    deferred, other = stepped(HOST, deferred=True), stepped(HOST)
    assert list(deferred.sums) == list(other.gradients) == [slot.name for slot in LAYOUT.slots]
    with pytest.raises(CallerError, match=r"step 0 was deferred .*result\.sums"):
        deferred.gradients  # noqa: B018
    with pytest.raises(CallerError, match=r"step 0 .*result\.gradients"):
        other.sums  # noqa: B018


def test_it_cannot_be_changed():
    result = stepped(HOST)
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.norm = 1.0
    with pytest.raises(TypeError):
        result.gradients["head"] = None


def test_whoever_asks_is_told_of_this_step():
    """The step's number goes to what finds it, so that a replay's result asks for its own."""
    asked, result = [], stepped(HOST)
    decision = dataclasses.replace(result._decision, bad=None)
    late = SimpleNamespace(of_step=asked.append)
    result = dataclasses.replace(result, step=3, _decision=decision, _late=late)
    assert result.non_finite is None
    assert result.of_replay(4, stop=False).non_finite is None
    assert asked == [3, 4]


def test_it_says_all_that_it_knows_but_no_gradients():
    """Of a model they would be a million numbers."""
    engine = GradientEngine(GradientLayout.of({"w": (2,)}), max_norm=1.0)
    engine.add({"w": np.array([0, 4], np.float32)}, 2.0)
    text = repr(engine.step())
    facts = ("step=0", "deferred=False", "'grad_norm': 4.0", "'clip_scale': 0.25", "'weight': 2.0", "'skipped': 0.0")
    assert all(fact in text for fact in facts)
    assert "gradients=" not in text
