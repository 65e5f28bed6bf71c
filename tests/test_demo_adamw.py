"""AdamW against its formula, against torch's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradengine.demo.adamw import AdamW, warmup_cosine

SHAPES = {"matrix": (5, 3), "norm": (4,), "wide": (2, 7)}
OPTIONS = {"betas": (0.8, 0.9), "epsilon": 1e-6, "weight_decay": 0.3}


def random_arrays(seed, dtype):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


def formula(weights, steps, learning_rate, betas, epsilon, weight_decay, factor=lambda step: 1.0):
    """The paper's algorithm 2 as it is written there, in float64; decay on matrices only."""
    updated = {}
    for name, weight in weights.items():
        w = weight.astype(np.float64)
        m, v = np.zeros_like(w), np.zeros_like(w)
        for t, gradients in enumerate(steps, start=1):
            g, rate = gradients[name].astype(np.float64), learning_rate * factor(t - 1)
            m = betas[0] * m + (1 - betas[0]) * g
            v = betas[1] * v + (1 - betas[1]) * g**2
            m_hat, v_hat = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
            decay = weight_decay * w if w.ndim > 1 else 0.0
            w = w - rate * (m_hat / (np.sqrt(v_hat) + epsilon) + decay)
        updated[name] = w
    return updated


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 3e-6), (np.float64, 1e-13)])
@pytest.mark.parametrize("schedule", [lambda step: 1.0, lambda step: 1.0 / (1 + step)])
def test_follows_the_formula(dtype, tolerance, schedule):
    weights, steps = random_arrays(0, dtype), [random_arrays(seed, dtype) for seed in range(1, 7)]
    expected = formula(weights, steps, 0.02, **OPTIONS, factor=schedule)
    optimizer = AdamW(weights, **OPTIONS)
    for number, gradients in enumerate(steps):
        optimizer.step(gradients, 0.02 * schedule(number))
    assert optimizer.step_count == 6
    for name, weight in weights.items():
        assert weight.dtype == dtype
        np.testing.assert_allclose(weight, expected[name], rtol=tolerance, atol=tolerance, err_msg=name)


def test_updates_the_callers_arrays_and_only_reads_gradients():
    weights, gradients = random_arrays(0, np.float32), random_arrays(1, np.float32)
    before = {name: weight.copy() for name, weight in weights.items()}
    for gradient in gradients.values():
        gradient.flags.writeable = False
    AdamW(weights).step(gradients, 6e-3)
    assert all((weights[name] != before[name]).all() for name in weights)


@given(warmup=st.integers(0, 50), total=st.integers(1, 200), final=st.floats(0, 1), step=st.integers(0, 300))
def test_schedule_rises_then_falls_between_its_bounds(warmup, total, final, step):
    here, following = (warmup_cosine(at, warmup, total, final) for at in (step, step + 1))
    assert 0.0 < here <= 1.0 + 1e-12 or here == final
    if step + 1 < warmup:
        assert following > here
    if step >= warmup:
        assert final - 1e-12 <= following <= here


def test_schedule_ends():
    assert warmup_cosine(0, 0, 100) == 1.0
    assert warmup_cosine(9, 10, 100) == 1.0
    assert warmup_cosine(55, 10, 100, final=0.2) == pytest.approx(0.6)
    assert warmup_cosine(100, 10, 100, final=0.2) == pytest.approx(0.2)
    assert warmup_cosine(10**6, 10, 100, final=0.2) == pytest.approx(0.2)
