"""The demo's Llama: its loss and gradients against torch's."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gradengine.demo.model import (
    COMPONENTS,
    LlamaConfig,
    forward_backward,
    initial_weights,
    stream_gradients,
)

GROUPED = LlamaConfig(
    num_blocks=2, hidden_size=16, num_heads=4, num_kv_heads=2, intermediate_size=24, vocab_size=32, sequence_length=8
)
ONE_KV_HEAD = LlamaConfig(
    num_blocks=1, hidden_size=12, num_heads=3, num_kv_heads=1, intermediate_size=20, vocab_size=17, sequence_length=5
)
CONFIGS = [
    pytest.param(GROUPED, id="grouped"),
    pytest.param(ONE_KV_HEAD, id="one-kv-head"),
]


def rough_weights(config, seed=0, dtype=np.float64):
    """Weights that are all of ordinary size, norms too, so that no gradient is near 0 by the choice of the start."""
    rng = np.random.default_rng(seed)
    return {
        name: ((len(shape) == 1) + rng.standard_normal(shape) * 0.3).astype(dtype)
        for name, shape in config.weight_shapes.items()
    }


def random_tokens(config, batch=3, length=None, seed=1):
    length = config.sequence_length if length is None else length
    return np.random.default_rng(seed).integers(0, config.vocab_size, (batch, length + 1))


def loss(weights, tokens, config):
    return stream_gradients(weights, tokens, config)[0]


# The weights.


def test_weights_come_in_exchange_order():
    components = ["w_q", "w_k", "w_v", "w_o", "gate", "up", "down", "input_norm", "post_attn_norm"]
    expected = [f"blocks.{block}.{component}" for block in range(2) for component in components]
    weights = initial_weights(GROUPED, seed=0)
    assert list(weights) == [*expected, "lm_head", "final_norm", "embedding"]
    assert {name: weight.shape for name, weight in weights.items()} == GROUPED.weight_shapes
    assert {weight.dtype for weight in weights.values()} == {np.dtype(np.float32)}
    again, other = (initial_weights(GROUPED, seed) for seed in (0, 1))
    assert all(np.array_equal(weights[name], again[name]) for name in weights)
    assert not np.array_equal(weights["embedding"], other["embedding"])
    for name, variance in (("blocks.0.w_q", 1), ("blocks.0.down", 1 / 4)):  # of two blocks that write twice each
        assert weights[name].var() * len(weights[name]) == pytest.approx(variance, rel=0.4)


def test_training_starts_at_uniform():
    assert loss(initial_weights(LlamaConfig(), 0), random_tokens(LlamaConfig()), LlamaConfig()) == pytest.approx(
        math.log(256), rel=0.01
    )


# Gradients: the automatic differentiation of torch, on a model written in its terms.


@pytest.mark.parametrize("length", [None, 1])
@pytest.mark.parametrize("config", CONFIGS)
def test_same_as_torch_autograd(config, length):
    torch = pytest.importorskip("torch")
    weights, tokens = rough_weights(config), random_tokens(config, length=length)
    leaves = {name: torch.tensor(weight, requires_grad=True) for name, weight in weights.items()}
    expected = torch_loss(torch, leaves, torch.tensor(tokens), config)
    expected.backward()
    value, gradients = forward_backward(weights, tokens, config)
    assert value == pytest.approx(expected.item(), rel=1e-12)
    for name, leaf in leaves.items():
        np.testing.assert_allclose(gradients[name], leaf.grad.numpy(), rtol=1e-8, atol=1e-12, err_msg=name)


def torch_loss(torch, weights, tokens, config):
    functional = torch.nn.functional
    inputs, size = tokens[:, :-1], config.head_size
    batch, length = inputs.shape

    def norm(x, weight):
        return functional.rms_norm(x, (config.hidden_size,), weight, config.norm_epsilon)

    def rope(x):
        angles = torch.arange(length)[:, None] * config.rope_theta ** (-torch.arange(0, size, 2).double() / size)
        even, odd = x[..., 0::2], x[..., 1::2]
        turned = even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos()
        return torch.stack(turned, dim=-1).flatten(-2)

    def heads(x, weight):
        return (x @ weight).view(batch, length, -1, size).transpose(1, 2)

    x = functional.embedding(inputs, weights["embedding"])
    for index in range(config.num_blocks):
        w = {component: weights[f"blocks.{index}.{component}"] for component in COMPONENTS}
        normed = norm(x, w["input_norm"])
        groups = config.num_heads // config.num_kv_heads
        keys = rope(heads(normed, w["w_k"])).repeat_interleave(groups, dim=1)
        values = heads(normed, w["w_v"]).repeat_interleave(groups, dim=1)
        attended = functional.scaled_dot_product_attention(rope(heads(normed, w["w_q"])), keys, values, is_causal=True)
        x = x + attended.transpose(1, 2).flatten(-2) @ w["w_o"]
        normed = norm(x, w["post_attn_norm"])
        x = x + (functional.silu(normed @ w["gate"]) * (normed @ w["up"])) @ w["down"]
    logits = norm(x, weights["final_norm"]) @ weights["lm_head"].T
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


# What the model promises besides.


def test_stream_gives_the_same_bits_in_backward_order():
    weights, tokens = initial_weights(GROUPED, 0), random_tokens(GROUPED)
    value, gradients = forward_backward(weights, tokens, GROUPED)
    streamed_value, stream = stream_gradients(weights, tokens, GROUPED)
    streamed = dict(stream)
    assert streamed_value == value == loss(weights, tokens, GROUPED)
    assert list(streamed) == ["lm_head", "final_norm", 1, 0, "embedding"]
    for index in (0, 1):
        for component, array in zip(COMPONENTS, streamed[index], strict=True):
            assert np.array_equal(array, gradients[f"blocks.{index}.{component}"])
    assert all(np.array_equal(streamed[name], gradients[name]) for name in ("lm_head", "final_norm", "embedding"))


def test_gradients_lie_as_the_weights_do_which_are_only_read_and_stay_finite_where_activations_are_large():
    weights = {name: 100 * weight for name, weight in rough_weights(GROUPED, dtype=np.float32).items()}
    for array in weights.values():
        array.flags.writeable = False
    value, gradients = forward_backward(weights, random_tokens(GROUPED), GROUPED)
    assert math.isfinite(value)
    assert list(gradients) == list(weights)
    for name, gradient in gradients.items():
        assert (gradient.shape, gradient.dtype) == (weights[name].shape, weights[name].dtype), name
        assert gradient.flags.c_contiguous, name
        assert np.isfinite(gradient).all(), name
