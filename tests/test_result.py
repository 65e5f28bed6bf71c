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

from gradengine import GradientEngine, GradientLayout, NonFiniteGradient
from gradengine.errors import CallerError

LAYOUT = GradientLayout.of({"layers.0.w": (3, 5), "layers.1.w": (7,), "head": (1,)})
HOST = available("host-1")
SCALARS = ("norm", "scale", "factor", "inverse_factor", "skipped")


def stepped(backend, gradients=None, **options):
    engine = GradientEngine(LAYOUT, backend.kernels, **{"max_norm": 0.5, **options})
    engine.add(put_all(backend, gradients or draw.random_gradients(0, LAYOUT.slots)), 2.0)
    return engine.step()


def bad():
    gradients = draw.random_gradients(0, LAYOUT.slots)
    gradients[0][1, 2] = math.inf
    return gradients


class TestCurrent:
    """A result's gradients are views of memory that the next calls write."""

    def test_until_the_engine_is_called_again(self, backend):
        engine = GradientEngine(LAYOUT, backend.kernels, max_norm=1.0)
        gradients = put_all(backend, draw.random_gradients(0, LAYOUT.slots))
        engine.add(gradients)
        first = engine.step()
        assert first.is_current
        engine.discard()
        assert first.is_current
        engine.add(gradients)
        assert not first.is_current
        second = engine.step(deferred=True)
        assert second.is_current
        assert not first.is_current

    def test_of_replays(self, device):
        engine = GradientEngine(LAYOUT, device.kernels, max_norm=1.0)
        gradients = put_all(device, draw.random_gradients(0, LAYOUT.slots))
        with engine.capture() as graph:
            engine.add(gradients)
            engine.step()
        first, second = graph.replay(), graph.replay()
        assert [first.is_current, second.is_current] == [False, True]


class TestNumbers:
    def test_on_the_cpu_are_numbers(self):
        engine = GradientEngine(LAYOUT, max_norm=0.5)
        engine.add(draw.random_gradients(0, LAYOUT.slots))
        result = engine.step()
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

    @pytest.mark.parametrize("groups", [None, "block", "component"])
    def test_each_number_is_what_it_says(self, backend, groups):
        gradients = draw.random_gradients(0, LAYOUT.slots)
        result = stepped(backend, groups=groups)
        norms = [draw.exact_norm([gradient]) for gradient in gradients]
        assert float(result.norm) == pytest.approx(math.hypot(*norms), rel=1e-6)
        assert [float(norm) for norm in result.component_norms] == pytest.approx(norms, rel=1e-6)
        assert [float(norm) for norm in result.block_norms] == pytest.approx(norms[:2], rel=1e-6)
        names = {None: ["all"], "block": ["block 0", "block 1", "rest"], "component": [s.name for s in LAYOUT.slots]}
        assert list(result.group_norms) == list(result.group_scales) == names[groups]
        wanted = norms if groups else [math.hypot(*norms)]
        assert [float(norm) for norm in result.group_norms.values()] == pytest.approx(wanted, rel=1e-6)
        scales = [min(1.0, 0.5 / norm) for norm in wanted]
        assert [float(scale) for scale in result.group_scales.values()] == pytest.approx(scales, rel=1e-6)
        assert float(result.scale) == pytest.approx(min(scales), rel=1e-6)
        assert float(result.factor) == pytest.approx(scales[0] / 2, rel=1e-6)  # the micro-batch weighs 2
        assert float(result.inverse_factor) == pytest.approx(2 / scales[0], rel=1e-6)
        assert (result.weight, result.micro_batches, result.step, result.deferred) == (2.0, 1, 0, False)

    @pytest.mark.parametrize("groups", [None, "block"])
    def test_metrics_are_the_numbers_flat(self, backend, groups):
        norms = [draw.exact_norm([gradient]) for gradient in draw.random_gradients(0, LAYOUT.slots)]
        metrics = stepped(backend, groups=groups).metrics()
        assert all(type(number) is float for number in metrics.values())
        wanted = {
            "grad_norm": math.hypot(*norms),
            "clip_scale": min(min(1.0, 0.5 / norm) for norm in (norms if groups else [math.hypot(*norms)])),
            **dict.fromkeys(("clipped", "micro_batches"), 1),
            **dict.fromkeys(("skipped", "exchange_seconds", "exchange_hidden_seconds"), 0),
            "weight": 2,
        }
        if groups:
            wanted |= {f"group_norm/{n}": norm for n, norm in zip(("block 0", "block 1", "rest"), norms, strict=True)}
        assert metrics == pytest.approx(wanted, rel=1e-6)
        wanted |= {f"grad_norm/{n}": norm for n, norm in zip(("layers.0", "layers.1", "head"), norms, strict=True)}
        assert stepped(backend, groups=groups).metrics(blocks=True) == pytest.approx(wanted, rel=1e-6)

    def test_metrics_of_a_step_that_clips_nothing_or_is_skipped(self, backend):
        engine = GradientEngine(LAYOUT, backend.kernels, max_norm=1e6, on_non_finite="skip")
        for value, clipped, skipped in ((1.0, 0.0, 0.0), (np.nan, 0.0, 1.0)):
            engine.add(put_all(backend, [np.full(slot.shape, value, np.float32) for slot in LAYOUT.slots]))
            metrics = engine.step().metrics()
            assert (metrics["clipped"], metrics["skipped"]) == (clipped, skipped)

    def test_sums_are_no_gradients_and_gradients_no_sums(self, backend):
        """An optimizer would take sums for gradients, and move by the whole window's weight too far."""
        engine = GradientEngine(LAYOUT, backend.kernels, max_norm=0.5)
        for step in range(2):
            engine.add(put_all(backend, draw.random_gradients(0, LAYOUT.slots)), 4.0)
            result = engine.step(deferred=step == 0)
            if result.deferred:
                assert list(result.sums) == [slot.name for slot in LAYOUT.slots]
                with pytest.raises(CallerError, match=r"step 0 was deferred .* result\.sums .* result\.factor"):
                    result.gradients  # noqa: B018
            else:
                with pytest.raises(CallerError, match=r"step 1 has scaled its gradients already.* result\.gradients"):
                    result.sums  # noqa: B018

    def test_it_cannot_be_changed(self, backend):
        result = stepped(backend)
        with pytest.raises(dataclasses.FrozenInstanceError):
            result.norm = 1.0
        with pytest.raises(TypeError):
            result.gradients["head"] = None


class TestVerdict:
    def test_a_good_step(self, backend):
        result = stepped(backend)
        assert result.non_finite is None
        result.check()
        assert not float(result.skipped)

    @pytest.mark.parametrize("policy", ["skip", "pass"])
    def test_a_bad_one(self, backend, policy):
        result = stepped(backend, bad(), on_non_finite=policy)
        for _ in range(2):
            with pytest.raises(NonFiniteGradient) as caught:
                result.check()
            found = caught.value
            assert (found.component, found.index, found.value, found.step) == ("layers.0.w", 7, math.inf, 0)
        assert float(result.skipped) == (policy == "skip")
        assert not math.isfinite(float(result.norm))

    def test_whoever_asks_is_told_of_this_step(self):
        """The step's number goes to what finds it, so that a replay's result asks for its own."""
        asked, result = [], stepped(HOST)
        decision = dataclasses.replace(result._decided.decision, bad=None)
        late = SimpleNamespace(of_step=asked.append)
        decided = dataclasses.replace(result._decided, decision=decision)
        result = dataclasses.replace(result, step=3, _decided=decided, _errors=late)
        assert result.non_finite is None
        assert result.of_replay(4).non_finite is None
        assert asked == [3, 4]


def test_it_says_all_that_it_knows():
    """But no gradients: of a model they would be a million numbers."""
    engine = GradientEngine(GradientLayout.of({"w": (2,)}), max_norm=1.0)
    engine.add({"w": np.array([0, 4], np.float32)}, 2.0)
    result = engine.step()
    assert repr(result) == (
        f"StepResult(norm=4.0, scale=0.25, factor={np.float32(0.125)!r}, inverse_factor={np.float32(8)!r}, weight=2.0, "
        "micro_batches=1, unused=frozenset(), skipped=False, group_norms={'all': 4.0}, group_scales={'all': 0.25}, "
        "block_norms=(), component_norms=(4.0,), deferred=False, step=0)"
    )
