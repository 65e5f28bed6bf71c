"""A byte-level Llama in NumPy, with RMSNorm, grouped-query attention with RoPE, SwiGLU, and their backward by hand.

Every layer returns its output and its backward. The backward takes the gradient of the output and returns the gradients
of the inputs. In the shapes below B is the batch, T the sequence, N = B*T the rows and H the hidden size. I is the
intermediate size and D the size of one head. K is the key-value heads, G the query heads that share one of them, and V
the vocabulary. All arithmetic is in the dtype of the weights, float32 for training and float64 for gradient checks.

The weights may be those of a shard (tensor parallelism, Shoeybi et al. 2019, arXiv:1909.08053, section 3). A shard has
its part of the heads and of the intermediate columns, and the rest of the model whole. The output that a block adds to
the residual, and the gradient of the block's input, are then partial sums, which `all_reduce` adds up over the shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from gradengine.errors import CallerError
from gradengine.layout.tensor_parallel import TensorParallelConfig

Array: TypeAlias = Any  # NumPy array of float32 or float64
Weights: TypeAlias = dict[str, Array]  # weights or gradients, by the names of `LlamaConfig.weight_shapes`
AllReduce: TypeAlias = Callable[[Array], Array]  # a shard's partial sum (N, H) to the sum over all, maybe in place
Layer: TypeAlias = tuple[Array, Callable[[Array], Any]]  # output and backward
GradientStream: TypeAlias = Iterator[tuple["str | int", Any]]  # a name and its array, or a block's index and its nine

COMPONENTS = ("w_q", "w_k", "w_v", "w_o", "gate", "up", "down", "input_norm", "post_attn_norm")
"""The weights of a block, in the order of their exchange."""


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of the model. The demo uses the defaults, which give about 250,000 weights.

    Raises:
        CallerError: Heads do not divide the sizes that they must divide. The error names both numbers.
    """

    num_blocks: int = 2
    hidden_size: int = 96
    num_heads: int = 4
    num_kv_heads: int = 2
    intermediate_size: int = 256
    vocab_size: int = 256
    sequence_length: int = 64
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        self.sharded(0, 1)
        if self.head_size % 2:
            what = "hidden_size / num_heads must be even"
            raise CallerError(what, got=f"{self.hidden_size} / {self.num_heads} = {self.head_size}")

    def sharded(self, tp_rank: int, tp_size: int) -> TensorParallelConfig:
        """Return the configuration of one of `tp_size` shards. Raises `CallerError` if the model cannot be cut so."""
        sizes = (self.hidden_size, self.intermediate_size, self.num_heads, self.num_kv_heads)
        return TensorParallelConfig(tp_rank, tp_size, *sizes)

    @property
    def head_size(self) -> int:
        """The size of one head, D."""
        return self.hidden_size // self.num_heads

    @property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every weight by name, in the order of all dictionaries of weights and gradients.

        Matrices of a block are stored (in, out) and used as `x @ w`. lm_head and embedding are (V, H).
        """
        h, kv, i = self.hidden_size, self.num_kv_heads * self.head_size, self.intermediate_size
        block = ((h, h), (h, kv), (h, kv), (h, h), (h, i), (h, i), (i, h), (h,), (h,))
        shapes: dict[str, tuple[int, ...]] = {}
        for index in range(self.num_blocks):
            shapes |= zip(block_names(index), block, strict=True)
        return shapes | {"lm_head": (self.vocab_size, h), "final_norm": (h,), "embedding": (self.vocab_size, h)}


def block_names(index: int) -> list[str]:
    """Return the names of the nine weights of block `index`, in order."""
    return [f"blocks.{index}.{component}" for component in COMPONENTS]


def initial_weights(config: LlamaConfig, seed: int) -> Weights:
    """Draw fp32 weights. Norms are 1. Matrices are normal with variance 1 / inputs, less if they write the residual."""
    generator = np.random.default_rng(seed)
    return {
        name: generator.standard_normal(shape, np.float32) * np.float32(_deviation(name, shape, config))
        if len(shape) > 1 else np.ones(shape, np.float32)
        for name, shape in config.weight_shapes.items()
    }  # fmt: skip


def _deviation(name: str, shape: tuple[int, ...], config: LlamaConfig) -> float:
    """Return the standard deviation of a matrix by its place."""
    if name in {"embedding", "lm_head"}:  # small logits, so that training starts at a loss of ln V
        return 0.5 if name == "embedding" else 0.5 / config.hidden_size
    writes = 2 * config.num_blocks if name.endswith(("w_o", "down")) else 1  # writes to the residual add up to 1
    return float((shape[0] * writes) ** -0.5)


def alone(partial: Array) -> Array:
    """Return the partial sum itself, which is the all-reduce of a model in one piece."""
    return partial


class Context(NamedTuple):
    """Tables that all blocks of one forward share. `turns` is (T, D/2) complex, `mask` is (T, T) of 0 and -inf."""

    config: LlamaConfig
    turns: Array
    mask: Array
    all_reduce: AllReduce


def make_context(config: LlamaConfig, length: int, dtype: Any, all_reduce: AllReduce) -> Context:
    """Build the tables for sequences of `length` tokens, with turns e^(i t theta^(-2j/D)) and the causal mask."""
    positions = np.arange(length)
    angles = positions[:, None] * config.rope_theta ** (-np.arange(0, config.head_size, 2) / config.head_size)
    mask = np.where(positions[:, None] >= positions, 0.0, -np.inf).astype(dtype)
    return Context(config, np.exp(1j * angles).astype(np.result_type(dtype, np.complex64)), mask, all_reduce)


def rms_norm(x: Array, weight: Array, epsilon: float) -> Layer:
    """Scale rows (N, H) by w (H,) with y = w * x / rms(x), rms(x) = sqrt(mean(x^2) + epsilon)."""
    inverse_rms = 1.0 / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon)
    scaled = x * inverse_rms

    def backward(gradient: Array) -> tuple[Array, Array]:
        """Return dx = (u - s mean(u * s)) / rms(x) and dw, the sum of dy * s over rows. s = x / rms(x), u = dy * w."""
        product = gradient * scaled
        mean = (product * weight).mean(axis=-1, keepdims=True)
        return (gradient * weight - scaled * mean) * inverse_rms, product.sum(axis=0)

    return scaled * weight, backward


def split_heads(rows: Array, length: int, kv_heads: int, size: int) -> Array:
    """Copy rows (N, K*G*D) to heads (B, K, G, T, D). G is 1 for keys and values."""
    heads = rows.reshape(-1, length, kv_heads, rows.shape[1] // (kv_heads * size), size)
    return np.ascontiguousarray(heads.transpose(0, 2, 3, 1, 4))


def merge_heads(heads: Array) -> Array:
    """Copy heads (B, K, G, T, D) to rows (N, K*G*D), the inverse of `split_heads`."""
    batch, kv_heads, groups, length, size = heads.shape
    return heads.transpose(0, 3, 1, 2, 4).reshape(batch * length, kv_heads * groups * size)


def rotate(heads: Array, turns: Array) -> Array:
    """Apply RoPE in place. Each pair of neighbours in heads (..., T, D) is a complex number, multiplied by its turn.

    The backward of a turn is the turn back, which is the same call with `turns.conj()`.
    """
    pairs = heads.view(turns.dtype)
    pairs *= turns
    return heads


def softmax(scores: Array) -> Array:
    """Replace each row of scores (..., T, T) by its softmax, in place."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


def attention(x: Array, w: Weights, context: Context) -> Layer:
    """Return softmax(q k^T + mask) v w_o, with q = rope(x w_q) / sqrt(D), k = rope(x w_k), v = x w_v, and x (N, H)."""
    size, length, turns = context.config.head_size, len(context.mask), context.turns
    kv_heads = w["w_k"].shape[1] // size  # key-value heads of this shard
    queries, keys, values = (
        split_heads(x @ matrix, length, kv_heads, size) for matrix in (w["w_q"], w["w_k"], w["w_v"])
    )
    queries, keys = rotate(queries, turns) * size**-0.5, rotate(keys, turns)
    probabilities = softmax(queries @ keys.swapaxes(-1, -2) + context.mask)
    attended = probabilities @ values
    rows = merge_heads(attended)

    def backward(gradient: Array) -> tuple[Array, list[Array]]:
        """Return dx, dw_q, dw_k, dw_v, dw_o.

        With ds = p * (do v^T - rowsum(do * o)) they follow from dq = ds k, dk = ds^T q and dv = p^T do.
        """
        out = split_heads(gradient @ w["w_o"].T, length, kv_heads, size)
        scores = out @ values.swapaxes(-1, -2) - (out * attended).sum(axis=-1, keepdims=True)
        scores *= probabilities
        dq = rotate((scores @ keys) * size**-0.5, turns.conj())
        dk = rotate((scores.swapaxes(-1, -2) @ queries).sum(axis=2, keepdims=True), turns.conj())
        dv = (probabilities.swapaxes(-1, -2) @ out).sum(axis=2, keepdims=True)
        q_rows, k_rows, v_rows = merge_heads(dq), merge_heads(dk), merge_heads(dv)
        dx = q_rows @ w["w_q"].T + k_rows @ w["w_k"].T + v_rows @ w["w_v"].T
        return dx, [x.T @ q_rows, x.T @ k_rows, x.T @ v_rows, rows.T @ gradient]

    return rows @ w["w_o"], backward


def feed_forward(x: Array, w: Weights) -> Layer:
    """Return SwiGLU, y = (silu(x gate) * (x up)) down with silu(a) = a sigmoid(a). x and y are (N, H)."""
    gate, up = x @ w["gate"], x @ w["up"]
    sigmoid = 0.5 + 0.5 * np.tanh(0.5 * gate)  # cannot overflow, unlike 1 / (1 + exp(-gate))
    silu = gate * sigmoid
    hidden = silu * up

    def backward(gradient: Array) -> tuple[Array, list[Array]]:
        """Return dx and dgate, dup, ddown, by silu'(a) = s + silu(a) (1 - s) with s = sigmoid(a)."""
        inner = gradient @ w["down"].T
        from_gate, from_up = inner * up * (sigmoid + silu * (1.0 - sigmoid)), inner * silu
        return from_gate @ w["gate"].T + from_up @ w["up"].T, [x.T @ from_gate, x.T @ from_up, hidden.T @ gradient]

    return hidden @ w["down"], backward


def block(x: Array, w: Weights, context: Context) -> Layer:
    """Return a transformer layer, h = x + attention(norm(x)), y = h + feed_forward(norm(h)). All are (N, H)."""
    all_reduce, epsilon = context.all_reduce, context.config.norm_epsilon
    normed, input_norm_backward = rms_norm(x, w["input_norm"], epsilon)
    attended, attention_backward = attention(normed, w, context)
    residual = all_reduce(attended) + x
    normed, post_attn_norm_backward = rms_norm(residual, w["post_attn_norm"], epsilon)
    fed, feed_forward_backward = feed_forward(normed, w)

    def backward(gradient: Array) -> tuple[Array, list[Array]]:
        """Return dx and the nine gradients."""
        inner, last_three = feed_forward_backward(gradient)
        through, post_attn_norm = post_attn_norm_backward(all_reduce(inner))
        through += gradient
        inner, first_four = attention_backward(through)
        dx, input_norm = input_norm_backward(all_reduce(inner))
        return dx + through, [*first_four, *last_three, input_norm, post_attn_norm]

    return all_reduce(fed) + residual, backward


def cross_entropy(logits: Array, targets: Array) -> tuple[float, Array]:
    """Return the mean over rows of -ln p(target) in nats, p = softmax(logits), and dlogits = (p - one_hot(target)) / N.

    Logits (N, V), targets (N,).
    """
    rows = np.arange(len(targets))
    shifted = logits - logits.max(axis=-1, keepdims=True)
    gradient = np.exp(shifted)
    total = gradient.sum(axis=-1, keepdims=True)
    gradient /= total
    gradient[rows, targets] -= 1.0
    gradient /= len(targets)
    return float((np.log(total[:, 0]) - shifted[rows, targets]).mean()), gradient


def stream_gradients(
    weights: Mapping[str, Array], tokens: Array, config: LlamaConfig, all_reduce: AllReduce = alone
) -> tuple[float, GradientStream]:
    """Return the mean cross-entropy of `tokens` (B, T+1) in nats per byte, and the backward yet to run.

    Tokens are integers below `config.vocab_size`. Each token except the first of a row is a target. `all_reduce` adds
    up the partial sums of all shards, twice in the forward of each block and twice in its backward. The backward yields
    gradients as it finishes them, so that an exchange can start while the backward still runs. It yields ("lm_head",
    g), ("final_norm", g), (last block, the nine), ..., (0, the nine), ("embedding", g). The weights must not change
    until its end.
    """
    rows, targets = tokens[:, :-1].reshape(-1), tokens[:, 1:].reshape(-1)
    context = make_context(config, tokens.shape[1] - 1, weights["embedding"].dtype, all_reduce)
    x, backwards = weights["embedding"][rows], []
    for index in range(config.num_blocks):
        x, block_backward = block(x, {each: weights[f"blocks.{index}.{each}"] for each in COMPONENTS}, context)
        backwards.append(block_backward)
    normed, norm_backward = rms_norm(x, weights["final_norm"], config.norm_epsilon)
    value, logits_gradient = cross_entropy(normed @ weights["lm_head"].T, targets)

    def backward() -> GradientStream:
        yield "lm_head", logits_gradient.T @ normed
        gradient, final_norm = norm_backward(logits_gradient @ weights["lm_head"])
        yield "final_norm", final_norm
        for index in reversed(range(config.num_blocks)):
            gradient, nine = backwards[index](gradient)
            yield index, nine
        one_hot = (np.arange(len(weights["embedding"]))[:, None] == rows).astype(gradient.dtype)
        yield "embedding", one_hot @ gradient

    return value, backward()


def forward_backward(
    weights: Mapping[str, Array], tokens: Array, config: LlamaConfig, all_reduce: AllReduce = alone
) -> tuple[float, Weights]:
    """Return the loss of `tokens` (B, T+1) and its gradients, by name, in the order of the weights."""
    value, stream = stream_gradients(weights, tokens, config, all_reduce)
    found: Weights = {}
    for key, gradients in stream:
        found |= zip(block_names(key), gradients, strict=True) if isinstance(key, int) else {key: gradients}
    return value, {name: found[name] for name in weights}
