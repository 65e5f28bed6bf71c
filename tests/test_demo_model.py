"""The demo's Llama: its gradients against finite differences and against other people's automatic differentiation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from gradengine.demo.model import (
    COMPONENTS,
    LlamaConfig,
    block_weights,
    forward,
    forward_backward,
    initial_weights,
    stream_gradients,
)
from gradengine.errors import CallerError

GROUPED = LlamaConfig(
    num_blocks=2, hidden_size=16, num_heads=4, num_kv_heads=2, intermediate_size=24, vocab_size=32, sequence_length=8
)
ONE_KV_HEAD = LlamaConfig(
    num_blocks=1, hidden_size=12, num_heads=3, num_kv_heads=1, intermediate_size=20, vocab_size=17, sequence_length=5
)
NO_GROUPS = LlamaConfig(
    num_blocks=1, hidden_size=8, num_heads=2, num_kv_heads=2, intermediate_size=8, vocab_size=300, sequence_length=6
)
CONFIGS = [
    pytest.param(GROUPED, id="grouped"),
    pytest.param(ONE_KV_HEAD, id="one-kv-head"),
    pytest.param(NO_GROUPS, id="no-groups"),
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


def five_point(function, step=1e-3):
    """The derivative at 0, with an error of order step^4."""
    near, far = function(step) - function(-step), function(2 * step) - function(-2 * step)
    return (8 * near - far) / (12 * step)


# The configuration.


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_heads": 5}, "hidden_size cannot be divided by num_heads: got 128 / 5, which leaves 3"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_heads cannot be divided by num_kv_heads: got 4 / 3, which leaves 1"),
        (
            {"hidden_size": 12, "num_heads": 4, "num_kv_heads": 4},
            "RoPE turns pairs: hidden_size / num_heads must be even: got 12 / 4 = 3",
        ),
    ],
)
def test_config_refuses(changed, message):
    with pytest.raises(CallerError, match=message):
        LlamaConfig(**{"hidden_size": 128, "num_heads": 4, "num_kv_heads": 2} | changed)


def test_config_derives_sizes():
    config = LlamaConfig(hidden_size=1024, num_heads=16, num_kv_heads=4, intermediate_size=4096, rope_theta=500_000)
    assert config.head_size == 64
    sizes = [math.prod(shape) for shape in config.weight_shapes.values()]
    assert sizes[:9] == [1048576, 262144, 262144, 1048576, 4194304, 4194304, 4194304, 1024, 1024]


# The weights.


def test_weights_come_in_exchange_order():
    components = ["w_q", "w_k", "w_v", "w_o", "gate", "up", "down", "input_norm", "post_attn_norm"]
    expected = [f"blocks.{block}.{component}" for block in range(2) for component in components]
    weights = initial_weights(GROUPED, seed=0)
    assert list(weights) == [*expected, "lm_head", "final_norm", "embedding"]
    assert {name: weight.shape for name, weight in weights.items()} == GROUPED.weight_shapes
    assert {weight.dtype for weight in weights.values()} == {np.dtype(np.float32)}


def test_weights_follow_the_seed():
    first, again, other = (initial_weights(GROUPED, seed) for seed in (0, 0, 1))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["embedding"], other["embedding"])


def test_training_starts_at_uniform():
    assert loss(initial_weights(LlamaConfig(), 0), random_tokens(LlamaConfig()), LlamaConfig()) == pytest.approx(
        math.log(256), rel=0.01
    )


# Gradients: finite differences.


@pytest.mark.parametrize("name", list(GROUPED.weight_shapes))
def test_gradient_of_each_weight(name):
    weights, tokens = rough_weights(GROUPED), random_tokens(GROUPED)
    gradient = forward_backward(weights, tokens, GROUPED)[1][name].reshape(-1)
    largest = np.argsort(-abs(gradient))
    for element in largest[[0, len(largest) // 4, len(largest) // 2]]:
        assert gradient[element] == pytest.approx(slope_at(weights, tokens, name, element), rel=1e-6, abs=1e-10)


def slope_at(weights, tokens, name, element):
    flat = weights[name].reshape(-1)
    middle = flat[element]

    def shifted(distance):
        flat[element] = middle + distance
        value = loss(weights, tokens, GROUPED)
        flat[element] = middle
        return value

    return five_point(shifted)


@pytest.mark.parametrize("length", [None, 1, 3])
@pytest.mark.parametrize("config", CONFIGS)
def test_gradient_along_a_direction_through_all_weights(config, length):
    weights, tokens = rough_weights(config), random_tokens(config, length=length)
    direction = {name: 0.1 * array for name, array in rough_weights(config, seed=2).items()}
    gradients = forward_backward(weights, tokens, config)[1]
    slope = sum(float((gradients[name] * direction[name]).sum()) for name in weights)
    measured = five_point(
        lambda h: loss({name: weights[name] + h * direction[name] for name in weights}, tokens, config)
    )
    assert slope == pytest.approx(measured, rel=1e-7)


# Gradients: the automatic differentiation of others, on a model written in their terms.


@pytest.mark.parametrize("config", CONFIGS)
def test_same_as_torch_autograd(config):
    torch = pytest.importorskip("torch")
    weights, tokens = rough_weights(config), random_tokens(config)
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
        w = block_weights(weights, index)
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


@pytest.mark.parametrize("config", CONFIGS)
def test_same_as_jax_autograd(config):
    jax = pytest.importorskip("jax")
    weights, tokens = rough_weights(config, dtype=np.float32), random_tokens(config)
    with jax.default_matmul_precision("highest"):
        differentiated = jax.jit(jax.value_and_grad(lambda w: jax_loss(jax, w, tokens, config)))
        expected, expected_gradients = differentiated(weights)
    value, gradients = forward_backward(weights, tokens, config)
    assert value == pytest.approx(float(expected), rel=1e-5)
    for name, gradient in expected_gradients.items():
        size = float(abs(gradient).max())
        np.testing.assert_allclose(gradients[name], gradient, rtol=2e-3, atol=2e-5 * size, err_msg=name)


def jax_loss(jax, weights, tokens, config):
    jnp = jax.numpy
    inputs, size = tokens[:, :-1], config.head_size
    batch, length = inputs.shape

    def norm(x, weight):
        return weight * x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + config.norm_epsilon)

    def rope(x):
        angles = np.arange(length)[:, None, None] * config.rope_theta ** (-np.arange(0, size, 2) / size)
        pairs = jax.lax.complex(x[..., 0::2], x[..., 1::2]) * np.exp(1j * angles).astype(np.complex64)
        return jnp.stack([pairs.real, pairs.imag], axis=-1).reshape(x.shape)

    def attend(x, w):
        queries, keys, values = (
            (x @ weight).reshape(batch, length, -1, size) for weight in (w["w_q"], w["w_k"], w["w_v"])
        )
        queries = rope(queries).reshape(batch, length, config.num_kv_heads, -1, size)
        scores = jnp.einsum("btkgd,bskd->bkgts", queries, rope(keys)) / math.sqrt(size)
        seen = jnp.where(np.tril(np.ones((length, length), bool)), scores, -jnp.inf)
        attended = jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(seen, axis=-1), values)
        return attended.reshape(batch, length, -1) @ w["w_o"]

    x = weights["embedding"][inputs]
    for index in range(config.num_blocks):
        w = block_weights(weights, index)
        x = x + attend(norm(x, w["input_norm"]), w)
        normed = norm(x, w["post_attn_norm"])
        x = x + (jax.nn.silu(normed @ w["gate"]) * (normed @ w["up"])) @ w["down"]
    log_probabilities = jax.nn.log_softmax(norm(x, weights["final_norm"]) @ weights["lm_head"].T)
    return -jnp.take_along_axis(log_probabilities, tokens[:, 1:, None], axis=-1).mean()


# What the model promises besides.


def logits_of(weights, tokens):
    return forward(weights, tokens, GROUPED)[0].reshape(*tokens.shape, -1)


def test_no_prediction_sees_the_future():
    weights, tokens = rough_weights(GROUPED, dtype=np.float32), random_tokens(GROUPED, length=7)
    changed = tokens.copy()
    changed[:, 5] = (tokens[:, 5] + 1) % GROUPED.vocab_size
    before, after = (logits_of(weights, each) for each in (tokens, changed))
    assert np.array_equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).any(axis=-1).all()


def test_order_of_tokens_matters():
    weights, tokens = rough_weights(GROUPED), random_tokens(GROUPED)[:, :4]
    swapped = tokens[:, [1, 0, 2, 3]]
    assert not np.allclose(logits_of(weights, tokens)[:, -1], logits_of(weights, swapped)[:, -1])


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


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gradients_lie_as_the_weights_do(dtype):
    weights = rough_weights(GROUPED, dtype=dtype)
    gradients = forward_backward(weights, random_tokens(GROUPED), GROUPED)[1]
    assert list(gradients) == list(weights)
    for name, gradient in gradients.items():
        assert (gradient.shape, gradient.dtype) == (weights[name].shape, weights[name].dtype), name
        assert gradient.flags.c_contiguous, name


def test_weights_are_only_read():
    weights, tokens = rough_weights(GROUPED), random_tokens(GROUPED).astype(np.uint8)
    for array in (*weights.values(), tokens):
        array.flags.writeable = False
    first, again = (forward_backward(weights, tokens, GROUPED) for _ in range(2))
    assert first[0] == again[0]
    assert all(np.array_equal(first[1][name], again[1][name]) for name in weights)


def test_extreme_activations_stay_finite():
    weights = {name: 100.0 * weight for name, weight in rough_weights(GROUPED, dtype=np.float32).items()}
    value, gradients = forward_backward(weights, random_tokens(GROUPED), GROUPED)
    assert math.isfinite(value)
    assert all(np.isfinite(gradient).all() for gradient in gradients.values())
