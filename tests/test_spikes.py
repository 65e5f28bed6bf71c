"""A policy for spikes of the norm, beside a naive model: on each device, over ranks, captured, and resumed."""

import math

import numpy as np
import pytest
from backends import BACKENDS
from devices import all_on_host, assign, number_of, put_all
from hypothesis import given
from hypothesis import strategies as st
from transports import Transport, group, outcomes

from gradengine import GradientEngine, GradientLayout, SpikePolicy
from gradengine.errors import CallerError, ExchangeError, HandshakeRefused, NonFiniteGradient
from gradengine.kernels.spikes import Norms

LAYOUT = GradientLayout.of({"w": (40,), "b": (3,)})
HOST = BACKENDS["host"]()
POLICIES = [
    SpikePolicy("clip", z_score=2.0, decay=0.9, warm_up=4),
    SpikePolicy("skip", z_score=2.0, decay=0.9, warm_up=4),
    SpikePolicy("skip", z_score=None, threshold=12.0),
    SpikePolicy("clip", z_score=3.0, threshold=11.0, decay=0.8, warm_up=5),
]


class Model:
    """ZClip as its authors wrote it: norms of the warm-up in a list, then exponential means; a threshold beside it."""

    def __init__(self, policy):
        self.policy, self.norms, self.mean, self.variance = policy, [], 0.0, 0.0

    def step(self, norm):
        """What the norm becomes (0 where the step is skipped), and whether it was a spike."""
        policy, z, warm = self.policy, -math.inf, len(self.norms) >= self.policy.warm_up
        most = math.inf if policy.threshold is None else policy.threshold
        if policy.z_score is not None and warm and self.variance > 0:
            z = (norm - self.mean) / self.variance**0.5
        by_score = z > policy.z_score if policy.z_score is not None else False
        spiked, counts = by_score or norm > most, norm
        if spiked and policy.action == "clip":
            clipped = self.mean + policy.z_score * self.variance**0.5 / (z / policy.z_score) if by_score else math.inf
            counts = min(clipped, most)
        elif spiked:
            counts = min(self.mean + policy.z_score * self.variance**0.5 if z > -math.inf else math.inf, most)
        self.norms.append(counts)
        if not warm:
            self.mean, self.variance = np.mean(self.norms), np.var(self.norms)
        else:
            self.mean = policy.decay * self.mean + (1 - policy.decay) * counts
            self.variance = policy.decay * self.variance + (1 - policy.decay) * (counts - self.mean) ** 2
        return (counts if policy.action == "clip" else 0.0) if spiked else norm, spiked


def norms_of(count):
    """Norms about 10, of which each seventh is far too large."""
    random = np.random.default_rng(3)
    return [float(10 + random.standard_normal() + 30 * (step % 7 == 6)) for step in range(count)]


def gradients(norm, rank=0, world_size=1):
    """One rank's part of a mean over ranks of this norm."""
    values = [np.full(slot.shape, norm / math.sqrt(43), np.float32) for slot in LAYOUT.slots]
    return [each * np.float32((rank + 1) * 2 / (world_size + 1)) for each in values]


def figures(result):
    length = math.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in all_on_host(result.gradients).values()))
    return length, bool(number_of(result.spiked)), bool(number_of(result.skipped))


def assert_as(model, norm, found):
    length, spiked, skipped = found
    expected, is_spike = model.step(norm)
    assert length == pytest.approx(expected, rel=1e-5)
    assert (spiked, skipped) == (is_spike, is_spike and model.policy.action == "skip")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("groups", [None, "component"])
def test_each_step_is_as_in_a_naive_model(backend, policy, groups):
    engine, model = GradientEngine(LAYOUT, backend.kernels, on_spike=policy, groups=groups), Model(policy)
    for norm in norms_of(30):
        engine.add(put_all(backend, gradients(norm)), 2.0)
        result = engine.step()
        assert_as(model, norm, figures(result))
        metrics = result.metrics()
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
        assert (metrics["grad_norm"] > metrics["spike_bound"]) == metrics["spiked"] == number_of(result.spiked)
    assert sum(number > 11 for number in norms_of(30)) < 15 < len(model.norms)


@pytest.mark.parametrize("transport", [Transport.THREADS, Transport.UNIX, Transport.TCP])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_ranks_decide_alike_also_in_a_resumed_run(transport, world_size):
    policy, norms = POLICIES[world_size % 2], norms_of(20)

    def work(exchange, first, state):
        engine = GradientEngine(LAYOUT, exchange=exchange, on_spike=policy)
        if state is not None:
            engine.load_state_dict(state)
        found = []
        for norm in norms[first : first + 10]:
            engine.add(gradients(norm, exchange.rank, world_size))
            found.append(figures(engine.step()))
        return found, engine.state_dict()

    def run(first, states):
        with group(transport, world_size) as exchanges:
            places = [(exchange, first, state) for exchange, state in zip(exchanges, states, strict=True)]
            return outcomes(lambda place: work(*place), places)

    made = run(0, [None] * world_size)
    resumed = run(10, [state for _, state in made])
    for (first, _), (second, _) in zip(made, resumed, strict=True):
        model = Model(policy)
        for norm, found in zip(norms, first + second, strict=True):
            assert_as(model, norm, found)
    assert all(found == resumed[0][0] for found, _ in resumed)


@pytest.mark.parametrize("policy", POLICIES)
def test_each_replay_is_decided_on_the_device(device, policy):
    engine, model = GradientEngine(LAYOUT, device.kernels, on_spike=policy), Model(policy)
    arrays = put_all(device, gradients(1.0))
    with engine.capture() as graph:
        engine.add(arrays)
        engine.step()
    for norm in norms_of(20):
        for array, values in zip(arrays, gradients(norm), strict=True):
            assign(array, device.put(values))
        assert_as(model, norm, figures(graph.replay()))
    resumed = GradientEngine(LAYOUT, device.kernels, on_spike=policy)
    resumed.load_state_dict(engine.state_dict())
    for norm in norms_of(27)[20:]:
        resumed.add(put_all(device, gradients(norm)))
        assert_as(model, norm, figures(resumed.step()))


@pytest.mark.parametrize("on_non_finite", ["raise", "skip", "propagate"])
def test_a_norm_that_is_not_finite_is_no_spike_and_counts_as_none(backend, on_non_finite):
    engine = GradientEngine(LAYOUT, backend.kernels, on_spike=POLICIES[2], on_non_finite=on_non_finite)
    engine.add(put_all(backend, gradients(5.0)))
    engine.step()
    before = engine.state_dict()
    engine.add(put_all(backend, gradients(math.nan)))
    if on_non_finite == "raise":
        with pytest.raises(NonFiniteGradient):
            engine.step().check()
        if backend.is_host:
            engine.discard()
    else:
        assert figures(engine.step())[1:] == (False, on_non_finite == "skip")
    saved = [float(before[name]) for name in ("norm_mean", "norm_variance", "norm_steps")]
    assert saved == pytest.approx([5, 0, 1])
    assert [float(engine.state_dict()[name]) for name in ("norm_mean", "norm_variance", "norm_steps")] == saved


def test_bounds_of_groups_hold_beside_it(backend):
    policy, bounds = SpikePolicy("clip", z_score=None, threshold=5.0), {"w": 2.0, "b": 100.0}
    engine = GradientEngine(LAYOUT, backend.kernels, on_spike=policy, groups="component", max_norm=bounds)
    engine.add(put_all(backend, gradients(10.0)))
    result = engine.step()
    scales = [number_of(scale) for scale in result.group_scales.values()]
    assert scales == pytest.approx([2.0 / (10 * math.sqrt(40 / 43)), 0.5], rel=1e-5)


@given(st.lists(st.floats(0, 1e30), max_size=40), st.sampled_from(POLICIES))
def test_mean_and_variance_are_those_of_the_model_whatever_the_norms_are(norms, policy):
    model, now = Model(policy), Norms()
    for norm in norms:
        spike = policy.judged(norm, now)
        _, is_spike = model.step(norm)
        if spike.is_found != is_spike:  # the norm is the bound but for a rounding
            assert norm == pytest.approx(spike.bound)
            return
        now = policy.after(spike.held, now)
        assert now.mean == pytest.approx(model.mean, rel=1e-6, abs=1e-300)
        assert math.sqrt(now.variance) == pytest.approx(math.sqrt(model.variance), rel=1e-6, abs=1e-6 * now.mean)
        model.mean, model.variance = now.mean, now.variance
    assert now.steps == len(norms)


def test_a_lasting_rise_is_accepted_after_some_tens_of_steps():
    engine = GradientEngine(LAYOUT, on_spike=SpikePolicy("skip"))
    skipped = []
    for step, norm in enumerate(norms_of(6) * 20):
        engine.add(gradients(norm * (10 if step >= 60 else 1)))
        skipped.append(engine.step().skipped)
    assert not any(skipped[:25])
    assert all(skipped[60:65])
    assert not any(skipped[110:])


def test_after_equal_norms_a_larger_one_is_no_spike(backend):
    engine = GradientEngine(LAYOUT, backend.kernels, on_spike=SpikePolicy("skip", warm_up=3))
    for norm in [8.0, 8.0, 8.0, 8.5]:
        engine.add(put_all(backend, [np.zeros(40, np.float32), np.array([norm, 0, 0], np.float32)]))
        assert number_of(engine.step().spiked) == 0


def test_ranks_with_another_policy_form_no_group():
    def work(exchange):
        GradientEngine(LAYOUT, exchange=exchange, on_spike=POLICIES[exchange.rank])

    with group(Transport.THREADS, 2) as exchanges:
        for found in outcomes(work, exchanges):
            assert isinstance(found, HandshakeRefused)
            assert "on_spike" in str(found)


@pytest.mark.parametrize("transport", [Transport.THREADS, Transport.UNIX])
def test_ranks_with_another_running_norm_are_told(transport):
    def work(exchange):
        engine = GradientEngine(LAYOUT, on_spike=POLICIES[1])
        for norm in norms_of(3 + exchange.rank):
            engine.add(gradients(norm))
            engine.step()
        state = engine.state_dict()
        engine = GradientEngine(LAYOUT, exchange=exchange, on_spike=POLICIES[1])
        engine.load_state_dict({**state, "step": np.array(0)})
        engine.add(gradients(1.0))
        with pytest.raises(ExchangeError, match=r"rank 1 has .*running norm"):
            engine.step()
        return True

    with group(transport, 2) as exchanges:
        assert outcomes(work, exchanges) == [True, True]


@pytest.mark.parametrize("at", ["begin", "follow"])
def test_a_step_that_is_interrupted_counts_no_norm(monkeypatch, at):
    engine = GradientEngine(LAYOUT, on_spike=POLICIES[1])
    of = engine._reducer if at == "begin" else engine._deciding
    made, interrupted = getattr(type(of), at), []

    def interrupting(self, *given, **named):
        if at == "begin":
            made(self, *given, **named)
        if not interrupted:
            interrupted.append(at)
            raise KeyboardInterrupt
        return made(self, *given, **named)

    engine.add(gradients(5.0))
    monkeypatch.setattr(type(of), at, interrupting)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.discard()
    assert (engine.current_step, int(engine.state_dict()["norm_steps"])) == (0, 0)


def test_one_part_of_a_model_has_no_policy_of_its_own():
    part = GradientLayout.of({"w": (2,)}, tp_size=2, partitions={"w": "column"})
    with pytest.raises(CallerError, match="tp_exchange"):
        GradientEngine(part, on_spike=POLICIES[0])


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *(("action", bad) for bad in ("drop", None, 1)),
        *((name, bad) for name in ("z_score", "threshold") for bad in (0, -1, math.nan, math.inf, "x", True)),
        *(("decay", bad) for bad in (0, 1, math.nan, "x")),
        *(("warm_up", bad) for bad in (1, 2.5, -1, 2**31)),
    ],
)
def test_a_policy_that_cannot_be_is_refused_by_name(name, bad):
    with pytest.raises(CallerError, match=name):
        SpikePolicy(**{name: bad})


def test_a_policy_without_a_bound_and_what_is_no_policy_are_refused():
    with pytest.raises(CallerError, match="z_score or threshold"):
        SpikePolicy("skip", z_score=None)
    with pytest.raises(CallerError, match="on_spike"):
        GradientEngine(LAYOUT, on_spike="skip")
