"""Tensor parallelism of a transformer, with the local sizes of one rank and the shard of each component.

The partition is that of Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3). Attention and feed-forward each
need one all-reduce in the forward and one in the backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from gradengine.arguments import checked_rank, listed, refuse_other_kind, truth_value, whole_number
from gradengine.errors import LayoutMismatch
from gradengine.layout.shards import TENSOR_PARALLEL, ColumnParallelShard, RowParallelShard, Shape, Shard, divided


@final
@dataclass(frozen=True)
class TensorParallelConfig:
    """Sizes of a transformer on one rank of a tensor-parallel group.

    Attention heads and the intermediate size are divided evenly. Norms are replicated. `lm_head` and `embedding` are
    replicated too, unless `vocab_parallel` shards their rows (V, H).

    Args:
        tp_rank: This rank in the group, 0..tp_size - 1.
        tp_size: Size of the group.
        hidden_size: H of the whole model, a multiple of `num_heads`.
        intermediate_size: I of the whole model.
        num_heads: Query heads of the whole model.
        num_kv_heads: Key-value heads of the whole model, a divisor of `num_heads`.
        vocab_parallel: Whether the vocabulary is divided too.

    Raises:
        CallerError: A size is not a whole number above 0 or cannot be divided, or the rank is out of range. The message
            has both numbers.

    Example:
        >>> config = TensorParallelConfig(0, 2, hidden_size=1024, intermediate_size=4096, num_heads=16, num_kv_heads=4)
        >>> config.local_num_heads, config.local_num_kv_heads, config.local_q_size, config.local_kv_size
        (8, 2, 512, 128)
        >>> config.shard_of("blocks.3.w_q", (1024, 1024))
        ColumnParallelShard(full_shape=(1024, 1024), tp_rank=0, tp_size=2)
    """

    tp_rank: int
    tp_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    vocab_parallel: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        ranks = checked_rank(self.tp_rank, self.tp_size, TENSOR_PARALLEL)
        plain = dict(zip(TENSOR_PARALLEL, ranks, strict=True))
        for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads"):
            plain[name] = whole_number(name, getattr(self, name), 1)
        plain["vocab_parallel"] = truth_value("vocab_parallel", self.vocab_parallel)
        for name, value in plain.items():  # Python integers, because NumPy's would overflow in products
            object.__setattr__(self, name, value)
        divided("hidden_size", self.hidden_size, self.num_heads, "num_heads")
        divided("num_heads", self.num_heads, self.num_kv_heads, "num_kv_heads")
        divided("num_heads", self.num_heads, self.tp_size)
        divided("num_kv_heads", self.num_kv_heads, self.tp_size, do="use a smaller group of a size that divides it")
        divided("intermediate_size", self.intermediate_size, self.tp_size)

    @property
    def head_size(self) -> int:
        """Columns of one head, hidden_size / num_heads."""
        return self.hidden_size // self.num_heads

    @property
    def kv_hidden_size(self) -> int:
        """Columns of the whole `w_k` and `w_v`."""
        return self.num_kv_heads * self.head_size

    @property
    def local_num_heads(self) -> int:
        """Query heads of this rank."""
        return self.num_heads // self.tp_size

    @property
    def local_num_kv_heads(self) -> int:
        """Key-value heads of this rank."""
        return self.num_kv_heads // self.tp_size

    @property
    def local_q_size(self) -> int:
        """Columns of this rank's `w_q`, rows of its `w_o`."""
        return self.local_num_heads * self.head_size

    @property
    def local_kv_size(self) -> int:
        """Columns of this rank's `w_k` and `w_v`."""
        return self.local_num_kv_heads * self.head_size

    @property
    def local_intermediate_size(self) -> int:
        """Columns of this rank's `gate` and `up`, rows of its `down`."""
        return self.intermediate_size // self.tp_size

    def local_vocab_size(self, vocab_size: int) -> int:
        """Return the rows of this rank's `lm_head` and `embedding`.

        Raises:
            CallerError: The vocabulary is sharded and cannot be divided.
        """
        rows = whole_number("vocab_size", vocab_size, 0)
        return divided("vocab_size", rows, self.tp_size) if self.vocab_parallel else rows

    def weight_memory_fraction(self, num_blocks: int = 1, vocab_size: int = 0, *, embedding: bool = True) -> float:
        """Return the fraction of the model's weights on this rank, with 1 / tp_size of the sharded weights.

        Args:
            num_blocks: Transformer blocks of the model.
            vocab_size: V. 0 excludes the LM head, the final norm and the embedding.
            embedding: Whether there is an embedding in addition to the LM head.

        Returns:
            Elements of this rank / elements of the model. It is above 1 / tp_size if a component is replicated.

        Raises:
            CallerError: A number is out of range, or the vocabulary cannot be divided.

        Example:
            >>> config = TensorParallelConfig(0, 4, 1024, 4096, 16, 4)
            >>> f"{config.weight_memory_fraction():.4f} {config.weight_memory_fraction(24, 32768):.4f}"
            '0.2501 0.3666'
        """
        local_vocab, vocab_size = self.local_vocab_size(vocab_size), whole_number("vocab_size", vocab_size, 0)
        blocks = whole_number("num_blocks", num_blocks, 0 if vocab_size else 1)
        h, kv, i = self.hidden_size, self.kv_hidden_size, self.intermediate_size
        matrices, norms = blocks * (2 * h * h + 2 * h * kv + 3 * h * i), blocks * 2 * h
        tail = 1 + truth_value("embedding", embedding) if vocab_size else 0
        final_norm = h if vocab_size else 0
        local = matrices // self.tp_size + norms + final_norm + tail * local_vocab * h
        return local / (matrices + norms + final_norm + tail * vocab_size * h)

    def shard_of(self, name: str, shape: Sequence[int]) -> Shard:
        """Return this rank's shard of a component of the transformer.

        Args:
            name: The component's name as in `GradientLayout.transformer`, such as "w_q", "blocks.3.w_q" or "lm_head".
            shape: The whole component's shape.

        Raises:
            LayoutMismatch: The model has no such component, or the shape is not that of this model.
            CallerError: The vocabulary is sharded and cannot be divided.

        Example:
            >>> TensorParallelConfig(1, 2, 8, 16, 2, 2).shard_of("down", (16, 8)).local_shape
            (8, 8)
        """
        refuse_other_kind("a component's name", name, str)
        component = name.rpartition(".")[2]
        given = tuple(whole_number("a dimension", n, 0, kind=LayoutMismatch) for n in listed("a shape", shape))
        h, kv, i = self.hidden_size, self.kv_hidden_size, self.intermediate_size
        columns = {"w_q": (h, h), "w_k": (h, kv), "w_v": (h, kv), "gate": (h, i), "up": (h, i)}
        rows = {"w_o": (h, h), "down": (i, h)}
        vocabulary = dict.fromkeys(("lm_head", "embedding"), (*given[:1], h))  # V is the model's choice
        norms = dict.fromkeys(("input_norm", "post_attn_norm", "final_norm"), (h,))
        known: dict[str, Shape] = {**columns, **rows, **vocabulary, **norms}
        if component not in known:
            raise LayoutMismatch("unknown component", got=repr(component), expected=f"one of {', '.join(known)}")
        if given != known[component]:
            raise LayoutMismatch(f"component '{name}' is not of this model", got=given, expected=known[component])
        ranks = self.tp_rank, self.tp_size
        if component in columns:
            return ColumnParallelShard(*columns[component], *ranks)
        if component in vocabulary and self.vocab_parallel:
            self.local_vocab_size(given[0])  # raises an error with the argument's name if it cannot be divided
            return RowParallelShard(given[0], h, *ranks)
        return RowParallelShard(*rows[component], *ranks) if component in rows else Shard(given, *ranks)
