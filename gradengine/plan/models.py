"""The transformers that can be planned: four by name, or any Llama-like one from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from gradengine.errors import CallerError
from gradengine.layout import GradientLayout
from gradengine.plan.config import read_config
from gradengine.tensor_parallel import TensorParallelConfig

__all__ = ["NAMED", "Embedding", "Model", "load_model"]

Embedding: TypeAlias = Literal["own", "tied", "frozen"]  # trained by itself; the LM head's; not trained


@dataclass(frozen=True)
class Model:
    """A decoder of blocks with nine components: four of attention, three of a gated feed-forward, two norms.

    Args:
        name: How it is called.
        source: Where its sizes are from.
        hidden_size: H.
        num_blocks: Transformer blocks.
        num_heads: Query heads.
        num_kv_heads: Key-value heads.
        intermediate_size: I.
        vocab_size: V.
        embedding: Whether the embedding is trained by itself, tied to the LM head, or frozen.

    Raises:
        CallerError: Heads do not divide; both numbers are named.
    """

    name: str
    source: str
    hidden_size: int
    num_blocks: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int
    embedding: Embedding = field(default="own", kw_only=True)

    def __post_init__(self) -> None:
        self.sharded(1)

    @property
    def kv_hidden_size(self) -> int:
        """Columns of `w_k` and `w_v`.

        >>> NAMED["350m"].kv_hidden_size
        256
        """
        return self.hidden_size // self.num_heads * self.num_kv_heads

    @property
    def parameters(self) -> int:
        """Weights of the whole model, a frozen embedding among them.

        >>> f"{NAMED['7b'].parameters:,}"
        '6,738,415,616'
        """
        return self.layout().num_elements + self.frozen()

    def sharded(self, tp: int, *, vocab_parallel: bool = False) -> TensorParallelConfig:
        """The part of rank 0 of `tp` tensor-parallel ranks; the others' are as large.

        Raises:
            CallerError: Heads, key-value heads or the intermediate size cannot be divided.
        """
        sizes = self.hidden_size, self.intermediate_size, self.num_heads, self.num_kv_heads
        return TensorParallelConfig(0, tp, *sizes, vocab_parallel=vocab_parallel)

    def layout(self, tp: int = 1, *, vocab_parallel: bool = False) -> GradientLayout:
        """Where the gradients of one of `tp` ranks lie.

        Raises:
            CallerError: Heads, key-value heads, the intermediate size or the vocabulary cannot be divided.

        Example:
            >>> NAMED["350m"].layout().nbytes
            1594036224
        """
        return GradientLayout.transformer(
            self.num_blocks,
            self.hidden_size,
            self.kv_hidden_size,
            self.intermediate_size,
            self.vocab_size,
            embedding=self.embedding == "own",
            tensor_parallel=self.sharded(tp, vocab_parallel=vocab_parallel) if tp > 1 else None,
        )

    def frozen(self, tp: int = 1, *, vocab_parallel: bool = False) -> int:
        """Elements of one of `tp` ranks that are not trained."""
        if self.embedding != "frozen":
            return 0
        vocabulary = self.sharded(tp, vocab_parallel=vocab_parallel).local_vocab_size(self.vocab_size)
        return vocabulary * self.hidden_size


# 350m is this package's benchmark model. The others' sizes are those of the config.json published with TinyLlama-1.1B
# (Zhang et al. 2024, arXiv:2401.02385) and with Llama-2-7B and Llama-2-70B (Touvron et al. 2023, arXiv:2307.09288).
NAMED: Mapping[str, Model] = {
    model.name: model
    for model in (
        Model("350m", "the benchmarks' model", 1024, 24, 16, 4, 4096, 32768, embedding="frozen"),
        Model("1b", "TinyLlama-1.1B", 2048, 22, 32, 4, 5632, 32000),
        Model("7b", "Llama-2-7B", 4096, 32, 32, 32, 11008, 32000),
        Model("70b", "Llama-2-70B", 8192, 80, 64, 8, 28672, 32000),
    )
}


def load_model(name: str) -> Model:
    """A model by its name, or by the path of a config.json in the form that Hugging Face models have.

    Args:
        name: "350m", "1b", "7b", "70b", or a path.

    Raises:
        CallerError: No such name or regular file, no JSON, a key that is missing, twice there or out of range, or a
            model with other components than those nine; the error names file and key.

    Example:
        >>> load_model("1b").num_blocks
        22
    """
    if name.lower() in NAMED:
        return NAMED[name.lower()]
    path = Path(name)
    if not _is_file(path):
        raise CallerError(
            f"there is no model {_shortened(name)}", expected=f"one of {', '.join(NAMED)}, or a config.json"
        )
    config = read_config(path)
    try:
        return Model(path.stem, f"{path.name}, taken as a Llama", **config.sizes, embedding=config.embedding)
    except CallerError as fault:
        raise CallerError(f"{path}: {fault.what}", got=fault.got, expected=fault.expected) from None


def _is_file(path: Path) -> bool:
    """A pipe is none: nobody may ever write to it."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long, or a NUL in it
        return False


def _shortened(name: str) -> str:
    return repr(name) if len(name) <= 200 else f"{name[:40]!r}..."
