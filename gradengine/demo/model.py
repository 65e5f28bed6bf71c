"""A byte-level Llama in array code: RMSNorm, grouped-query attention with RoPE, SwiGLU, and their backward by hand.

Every layer is a pair: `layer` returns its output and what its backward needs, `layer_backward` takes both from there.
In the shapes below B is the batch, T the sequence, N = B*T the rows, H the hidden size, I the intermediate size, D the
size of one head, K the key-value heads, G the query heads that share one of them, and V the vocabulary.

`xp` is NumPy or CuPy: only functions that both have are used, and nothing here reads a value back from a device. All
arithmetic is in the dtype of the weights: float32 to train, float64 to check gradients.

The weights may be those of a shard (tensor parallelism, Shoeybi et al. 2019, arXiv:1909.08053, section 3): it has its
share of the heads and of the intermediate columns, and all else whole. What a block adds to the residual, and the
gradients of what it read there, are then partial sums, which `all_reduce` adds up over the shards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = [
    "BlockArrays", "LlamaConfig", "backward_blocks", "forward", "forward_backward", "initial_weights", "loss",
    "stream_gradients",
]  # fmt: skip

Array: TypeAlias = Any  # of the module passed as `xp`
ArrayModule: TypeAlias = Any  # NumPy or CuPy
# A shard's partial sum (N, H) to the sum over all shards, maybe in place.
AllReduce: TypeAlias = Callable[[Array], Array]
Saved: TypeAlias = tuple[Any, ...]  # what a layer's backward takes over from its forward
Weights: TypeAlias = "Mapping[str, Any]"  # by name, as `initial_weights` gives them
GradientStream: TypeAlias = "Iterator[tuple[str | int, Any]]"  # a name and its array, or a block's index and its nine


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of the model; the defaults are the demo's, about 250,000 weights.

    Raises:
        ValueError: Heads do not divide what they must divide.

    Example:
        >>> LlamaConfig(hidden_size=96, num_heads=5)
        Traceback (most recent call last):
        ValueError: num_heads must divide hidden_size: 96 / 5 leaves 1
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
        for name, divisor_name in (("hidden_size", "num_heads"), ("num_heads", "num_kv_heads")):
            value, divisor = getattr(self, name), getattr(self, divisor_name)
            if value % divisor:
                raise ValueError(f"{divisor_name} must divide {name}: {value} / {divisor} leaves {value % divisor}")
        if self.head_size % 2:
            raise ValueError(f"RoPE turns pairs: hidden_size / num_heads must be even, got {self.head_size}")

    @property
    def head_size(self) -> int:
        """The size of one head, D."""
        return self.hidden_size // self.num_heads

    @property
    def kv_hidden_size(self) -> int:
        """The columns of w_k and w_v: all key-value heads side by side, K*D."""
        return self.num_kv_heads * self.head_size

    @property
    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every weight by name, in the order of all dictionaries of weights and gradients.

        Matrices of a block are stored (in, out) and used as `x @ w`; lm_head and embedding are (V, H).

        Example:
            >>> list(LlamaConfig(num_blocks=1).weight_shapes)
            ['blocks.0.w_q', 'blocks.0.w_k', 'blocks.0.w_v', 'blocks.0.w_o', 'blocks.0.gate', 'blocks.0.up',
             'blocks.0.down', 'blocks.0.input_norm', 'blocks.0.post_attn_norm', 'lm_head', 'final_norm', 'embedding']
        """
        h, kv, i = self.hidden_size, self.kv_hidden_size, self.intermediate_size
        block = BlockArrays((h, h), (h, kv), (h, kv), (h, h), (h, i), (h, i), (i, h), (h,), (h,))
        shapes: dict[str, tuple[int, ...]] = {}
        for index in range(self.num_blocks):
            shapes |= zip(block_names(index), block, strict=True)
        return shapes | {"lm_head": (self.vocab_size, h), "final_norm": (h,), "embedding": (self.vocab_size, h)}


class BlockArrays(NamedTuple):
    """The nine components of a block, weights or gradients, in the order they are exchanged."""

    w_q: Array
    w_k: Array
    w_v: Array
    w_o: Array
    gate: Array
    up: Array
    down: Array
    input_norm: Array
    post_attn_norm: Array


def block_names(index: int) -> list[str]:
    """The names of the nine weights of block `index`, in order."""
    return [f"blocks.{index}.{component}" for component in BlockArrays._fields]


def initial_weights(config: LlamaConfig, seed: int, xp: ArrayModule = np) -> dict[str, Array]:
    """Draw fp32 weights: norms are 1, matrices normal with variance 1 / inputs, those that write the residual smaller.

    They are drawn by NumPy and then moved, so that a seed means the same bytes on every device.
    """
    generator = np.random.default_rng(seed)
    drawn = {name: generator.standard_normal(shape, np.float32) for name, shape in config.weight_shapes.items()}
    return {name: xp.asarray(_scaled(name, values, config)) for name, values in drawn.items()}


def _scaled(name: str, values: Array, config: LlamaConfig) -> Array:
    """Give standard normal values the deviation that suits their place."""
    if values.ndim == 1:
        return np.ones_like(values)
    if name == "embedding":
        return values * np.float32(0.5)
    if name == "lm_head":
        return values * np.float32(0.5 / config.hidden_size)  # logits near 0: training starts at ln V, not above
    writes = 2 * config.num_blocks if name.endswith(("w_o", "down")) else 1  # all writes to the residual add up to 1
    return values * np.float32((values.shape[0] * writes) ** -0.5)


def only_shard(partial: Array) -> Array:
    """The all-reduce of a model in one piece: its partial sums are whole."""
    return partial


class Context(NamedTuple):
    """What all blocks of one forward and its backward share: `turns` (T, D/2) complex, `mask` (T, T) of 0 and -inf."""

    config: LlamaConfig
    xp: ArrayModule
    turns: Array
    mask: Array
    all_reduce: AllReduce


def make_context(config: LlamaConfig, length: int, dtype: Any, xp: ArrayModule, all_reduce: AllReduce) -> Context:
    """Build the tables for sequences of `length` tokens: turns e^(i t theta^(-2j/D)), and who may look at whom."""
    positions = xp.arange(length)
    angles = positions[:, None] * config.rope_theta ** (-xp.arange(0, config.head_size, 2) / config.head_size)
    mask = xp.where(positions[:, None] >= positions, 0.0, -xp.inf).astype(dtype)
    turns = xp.exp(1j * angles).astype(xp.result_type(dtype, xp.complex64))
    return Context(config, xp, turns, mask, all_reduce)


def linear_backward(gradient: Array, x: Array, weight: Array) -> tuple[Array, Array]:
    """Backward of y = x w, x (N, in), w (in, out): dx = dy w^T, dw = x^T dy."""
    return gradient @ weight.T, x.T @ gradient


def rms_norm(x: Array, weight: Array, context: Context) -> tuple[Array, Saved]:
    """Give rows (N, H) the size w (H,): y = w * x / rms(x), rms(x) = sqrt(mean(x^2) + epsilon)."""
    inverse_rms = 1.0 / context.xp.sqrt((x * x).mean(axis=-1, keepdims=True) + context.config.norm_epsilon)
    scaled = x * inverse_rms
    return scaled * weight, (scaled, inverse_rms)


def rms_norm_backward(gradient: Array, weight: Array, saved: Saved) -> tuple[Array, Array]:
    """With s = x / rms(x) and u = dy * w: dx = (u - s mean(u * s)) / rms(x), dw = sum over rows of dy * s."""
    scaled, inverse_rms = saved
    product = gradient * scaled
    mean = (product * weight).mean(axis=-1, keepdims=True)
    return (gradient * weight - scaled * mean) * inverse_rms, product.sum(axis=0)


def split_heads(rows: Array, kv_heads: int, context: Context) -> Array:
    """Copy rows (N, K*G*D) to heads (B, K, G, T, D); G is 1 for keys and values."""
    size = context.config.head_size
    groups = rows.shape[1] // (kv_heads * size)
    heads = rows.reshape(-1, len(context.mask), kv_heads, groups, size)
    return context.xp.ascontiguousarray(heads.transpose(0, 2, 3, 1, 4))


def merge_heads(heads: Array) -> Array:
    """Undo `split_heads`: heads (B, K, G, T, D) to rows (N, K*G*D)."""
    batch, kv_heads, groups, length, size = heads.shape
    return heads.transpose(0, 3, 1, 2, 4).reshape(batch * length, kv_heads * groups * size)


def rotate(heads: Array, turns: Array) -> Array:
    """RoPE, in place: each pair of neighbours in heads (..., T, D) is a complex number, multiplied by its turn.

    The backward of a turn is the turn back: the same with `turns.conj()`.
    """
    pairs = heads.view(turns.dtype)
    pairs *= turns
    return heads


def causal_softmax(scores: Array, context: Context) -> Array:
    """Softmax of each row of scores + mask, in place; scores (..., T, T)."""
    scores += context.mask
    scores -= scores.max(axis=-1, keepdims=True)
    context.xp.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


def attention(x: Array, w: BlockArrays, context: Context) -> tuple[Array, Saved]:
    """Rows (N, H) look back: softmax(q k^T + mask) v w_o, q = rope(x w_q) / sqrt(D), k = rope(x w_k), v = x w_v."""
    kv_heads = w.w_k.shape[1] // context.config.head_size  # a shard has its share of them
    queries = rotate(split_heads(x @ w.w_q, kv_heads, context), context.turns)
    queries *= context.config.head_size**-0.5
    keys = rotate(split_heads(x @ w.w_k, kv_heads, context), context.turns)
    values = split_heads(x @ w.w_v, kv_heads, context)
    probabilities = causal_softmax(queries @ keys.swapaxes(-1, -2), context)
    attended = probabilities @ values
    return merge_heads(attended) @ w.w_o, (x, queries, keys, values, probabilities, attended)


def attention_backward(gradient: Array, w: BlockArrays, saved: Saved, context: Context) -> tuple[Array, ...]:
    """Return dx, dw_q, dw_k, dw_v, dw_o from dy (N, H)."""
    x, *heads, attended = saved
    attended_gradient, w_o = linear_backward(gradient, merge_heads(attended), w.w_o)
    attended_heads = split_heads(attended_gradient, attended.shape[1], context)
    queries, keys, values = attend_backward(attended_heads, heads, attended, context)
    x_gradient, w_q = linear_backward(merge_heads(queries), x, w.w_q)
    from_keys, w_k = linear_backward(merge_heads(keys), x, w.w_k)
    from_values, w_v = linear_backward(merge_heads(values), x, w.w_v)
    return x_gradient + from_keys + from_values, w_q, w_k, w_v, w_o


def attend_backward(gradient: Array, heads: list[Array], attended: Array, context: Context) -> tuple[Array, ...]:
    """From do, o = p v, p = softmax(q k^T): dv = p^T do, ds = p * (do v^T - rowsum(do * o)), dq = ds k, dk = ds^T q.

    rowsum(do * o) is rowsum(dp * p), but D wide instead of T. Returns dq, dk, dv before RoPE, heads (B, K, ., T, D).
    """
    queries, keys, values, probabilities = heads
    scores = gradient @ values.swapaxes(-1, -2)
    scores -= (gradient * attended).sum(axis=-1, keepdims=True)
    scores *= probabilities
    queries_gradient = scores @ keys
    queries_gradient *= context.config.head_size**-0.5
    keys_gradient = (scores.swapaxes(-1, -2) @ queries).sum(axis=2, keepdims=True)
    values_gradient = (probabilities.swapaxes(-1, -2) @ gradient).sum(axis=2, keepdims=True)
    turns_back = context.turns.conj()
    return rotate(queries_gradient, turns_back), rotate(keys_gradient, turns_back), values_gradient


def feed_forward(x: Array, w: BlockArrays, xp: ArrayModule) -> tuple[Array, Saved]:
    """SwiGLU: y = (silu(x gate) * (x up)) down, silu(a) = a sigmoid(a); x and y (N, H)."""
    gate, up = x @ w.gate, x @ w.up
    sigmoid = 0.5 + 0.5 * xp.tanh(0.5 * gate)  # cannot overflow, unlike 1 / (1 + exp(-gate))
    silu = gate * sigmoid
    return (silu * up) @ w.down, (x, sigmoid, silu, up)


def feed_forward_backward(gradient: Array, w: BlockArrays, saved: Saved) -> tuple[Array, ...]:
    """Return dx, dgate, dup, ddown from dy (N, H); silu'(a) = s + silu(a) (1 - s) with s = sigmoid(a)."""
    x, sigmoid, silu, up = saved
    hidden, down_gradient = linear_backward(gradient, silu * up, w.down)
    x_gradient, gate_gradient = linear_backward(hidden * up * (sigmoid + silu * (1.0 - sigmoid)), x, w.gate)
    from_up, up_gradient = linear_backward(hidden * silu, x, w.up)
    return x_gradient + from_up, gate_gradient, up_gradient, down_gradient


def block(x: Array, w: BlockArrays, context: Context) -> tuple[Array, Saved]:
    """One transformer layer: h = x + attention(norm(x)), y = h + feed_forward(norm(h)); all (N, H)."""
    normed, input_norm = rms_norm(x, w.input_norm, context)
    attended, attention_saved = attention(normed, w, context)
    residual = context.all_reduce(attended)
    residual += x
    normed, post_attn_norm = rms_norm(residual, w.post_attn_norm, context)
    fed, feed_forward_saved = feed_forward(normed, w, context.xp)
    y = context.all_reduce(fed)
    y += residual
    return y, (input_norm, attention_saved, post_attn_norm, feed_forward_saved)


def block_backward(gradient: Array, w: BlockArrays, saved: Saved, context: Context) -> tuple[Array, BlockArrays]:
    """Return dx and the nine gradients from dy (N, H)."""
    input_saved, attention_saved, post_attn_saved, feed_forward_saved = saved
    inner, gate, up, down = feed_forward_backward(gradient, w, feed_forward_saved)
    residual, post_attn_norm = rms_norm_backward(context.all_reduce(inner), w.post_attn_norm, post_attn_saved)
    residual += gradient
    inner, w_q, w_k, w_v, w_o = attention_backward(residual, w, attention_saved, context)
    x_gradient, input_norm = rms_norm_backward(context.all_reduce(inner), w.input_norm, input_saved)
    x_gradient += residual
    return x_gradient, BlockArrays(w_q, w_k, w_v, w_o, gate, up, down, input_norm, post_attn_norm)


def embedding_backward(gradient: Array, tokens: Array, vocab_size: int, xp: ArrayModule) -> Array:
    """Sum the rows of dy (N, H) that belong to each token: (V, H).

    As a product with the one-hot matrix (V, N): a scatter-add would sum in no fixed order on a GPU, and be slower.
    """
    one_hot = xp.arange(vocab_size)[:, None] == tokens
    return one_hot.astype(gradient.dtype) @ gradient


def cross_entropy(logits: Array, targets: Array, xp: ArrayModule) -> tuple[Array, Array]:
    """Return the mean over rows of -ln p(target) in nats, p = softmax(logits), and dlogits = (p - one_hot(target)) / N.

    Logits (N, V), targets (N,); the loss is a scalar of `xp`.
    """
    rows = xp.arange(len(targets))
    shifted = logits - logits.max(axis=-1, keepdims=True)
    gradient = xp.exp(shifted)
    total = gradient.sum(axis=-1, keepdims=True)
    gradient /= total
    gradient[rows, targets] -= 1.0
    gradient /= len(targets)
    return (xp.log(total[:, 0]) - shifted[rows, targets]).mean(), gradient


def block_weights(weights: Weights, index: int) -> BlockArrays:
    """The nine weights of block `index`."""
    return BlockArrays(*(weights[name] for name in block_names(index)))


def forward(
    weights: Weights, tokens: Array, config: LlamaConfig, xp: ArrayModule = np, all_reduce: AllReduce = only_shard
) -> tuple[Array, Saved]:
    """Predict the byte after each byte: return the logits (B, T, V), and what the backward needs.

    Tokens (B, T) are integers below `config.vocab_size`, T at most `config.sequence_length`.
    `all_reduce` adds up the partial sums of all shards: twice in each block here, and twice in its backward.
    """
    tokens = xp.asarray(tokens).astype(xp.int64)
    batch, length = tokens.shape
    context = make_context(config, length, weights["embedding"].dtype, xp, all_reduce)
    x = weights["embedding"][tokens.reshape(-1)]
    saved_blocks = []
    for index in range(config.num_blocks):
        x, saved_block = block(x, block_weights(weights, index), context)
        saved_blocks.append(saved_block)
    normed, final_norm = rms_norm(x, weights["final_norm"], context)
    logits = (normed @ weights["lm_head"].T).reshape(batch, length, -1)
    return logits, (context, tokens.reshape(-1), saved_blocks, final_norm, normed)


def backward_blocks(logits_gradient: Array, saved: Saved, weights: Weights) -> GradientStream:
    """Yield gradients as backward finishes them, so that an exchange can start while it still runs.

    In order: ("lm_head", g), ("final_norm", g), (last block, the nine), ..., (0, the nine), ("embedding", g). Takes the
    gradient of the logits, (N, V) or (B, T, V), and what `forward` saved; the weights must not change until the end.
    """
    context, tokens, blocks, final_norm_saved, normed = saved
    logits_gradient = logits_gradient.reshape(len(normed), -1)
    yield "lm_head", logits_gradient.T @ normed
    gradient = logits_gradient @ weights["lm_head"]
    gradient, final_norm = rms_norm_backward(gradient, weights["final_norm"], final_norm_saved)
    yield "final_norm", final_norm
    for index in reversed(range(context.config.num_blocks)):
        gradient, nine = block_backward(gradient, block_weights(weights, index), blocks[index], context)
        yield index, nine
    yield "embedding", embedding_backward(gradient, tokens, len(weights["embedding"]), context.xp)


def stream_gradients(
    weights: Weights, tokens: Array, config: LlamaConfig, xp: ArrayModule = np, all_reduce: AllReduce = only_shard
) -> tuple[Array, GradientStream]:
    """Run `forward` on `tokens` (B, T+1); return the loss, a scalar of `xp`, and `backward_blocks` yet to run."""
    tokens = xp.asarray(tokens)
    logits, saved = forward(weights, tokens[:, :-1], config, xp, all_reduce)
    targets = tokens[:, 1:].reshape(-1)
    value, logits_gradient = cross_entropy(logits.reshape(len(targets), -1), targets, xp)
    return value, backward_blocks(logits_gradient, saved, weights)


def loss(
    weights: Weights, tokens: Array, config: LlamaConfig, xp: ArrayModule = np, all_reduce: AllReduce = only_shard
) -> float:
    """Return the mean cross-entropy of `tokens` (B, T+1) in nats per byte: each but the first of a row is a target."""
    return float(stream_gradients(weights, tokens, config, xp, all_reduce)[0])


def forward_backward(
    weights: Weights, tokens: Array, config: LlamaConfig, xp: ArrayModule = np, all_reduce: AllReduce = only_shard
) -> tuple[float, dict[str, Array]]:
    """Return the loss of `tokens` (B, T+1) and its gradients, by name, in the order of the weights."""
    value, stream = stream_gradients(weights, tokens, config, xp, all_reduce)
    found: dict[str, Array] = {}
    for key, gradients in stream:
        found |= zip(block_names(key), gradients, strict=True) if isinstance(key, int) else {key: gradients}
    return float(value), {name: found[name] for name in weights}
