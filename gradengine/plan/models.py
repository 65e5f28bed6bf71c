"""Transformers that can be planned, four by name, and any Llama by its config.json in the form of Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from gradengine.arguments import said, whole_number
from gradengine.errors import CallerError
from gradengine.layout import GradientLayout
from gradengine.layout.tensor_parallel import TensorParallelConfig

Embedding: TypeAlias = Literal["own", "tied", "frozen"]  # trained separately, tied to the LM head, or not trained


@dataclass(frozen=True)
class Model:
    """A decoder of blocks with nine components, four of attention, three of a gated feed-forward, and two norms.

    Raises:
        CallerError: Heads cannot be divided. The error names both numbers.
    """

    name: str  # name of the model
    source: str  # source of its sizes
    hidden_size: int  # H
    num_blocks: int  # transformer blocks
    num_heads: int  # query heads
    num_kv_heads: int  # key-value heads
    intermediate_size: int  # I
    vocab_size: int  # V
    # Whether the embedding is trained separately, tied to the LM head, or frozen.
    embedding: Embedding = field(default="own", kw_only=True)

    def __post_init__(self) -> None:
        self.sharded(1)

    @property
    def kv_hidden_size(self) -> int:
        """The number of columns of `w_k` and `w_v`."""
        return self.hidden_size // self.num_heads * self.num_kv_heads

    @property
    def parameters(self) -> int:
        """The number of weights of the whole model, a frozen embedding included.

        >>> f"{NAMED['7b'].parameters:,}"
        '6,738,415,616'
        """
        return self.layout().num_elements + self.frozen()

    def sharded(self, tp: int, *, vocab_parallel: bool = False) -> TensorParallelConfig:
        """Return the part of rank 0 of `tp` ranks, a largest one. Raises `CallerError` if there is no such cut."""
        sizes = self.hidden_size, self.intermediate_size, self.num_heads, self.num_kv_heads
        return TensorParallelConfig(0, tp, *sizes, vocab_parallel=vocab_parallel)

    def layout(self, tp: int = 1, *, vocab_parallel: bool = False) -> GradientLayout:
        """Return the layout of the gradients on one of `tp` ranks. Raises `CallerError` if the model cannot be cut so.

        >>> NAMED["350m"].layout().nbytes
        1594036224
        """
        sizes = (self.num_blocks, self.hidden_size, self.kv_hidden_size, self.intermediate_size, self.vocab_size)
        config = self.sharded(tp, vocab_parallel=vocab_parallel) if tp > 1 else None
        return GradientLayout.transformer(*sizes, embedding=self.embedding == "own", tensor_parallel=config)

    def frozen(self, tp: int = 1, *, vocab_parallel: bool = False) -> int:
        """Return the number of untrained elements on one of `tp` ranks."""
        if self.embedding != "frozen":
            return 0
        return self.sharded(tp, vocab_parallel=vocab_parallel).local_vocab_size(self.vocab_size) * self.hidden_size


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

_LARGEST = (10_000_000, 10_000)  # largest size, and largest number of blocks, each of which is nine rows of a layout
# A family's code may differ from a Llama without a key for it, so only families with a Llama's blocks are accepted.
_TAKEN: Mapping[str, tuple[object, ...]] = {
    "model_type": ("llama", "mistral"),
    "hidden_act": ("silu", None),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "tie_word_embeddings": (False, True, None),
}


def load_model(name: str) -> Model:
    """Return a model by its name, or by the path of a config.json in the form that Hugging Face models have.

    Raises:
        CallerError: There is no such name or regular file, the file is no JSON, a key is missing or out of range, or
            the model is no Llama. The error names the file and the key.

    Example:
        >>> load_model("1b").num_blocks
        22
    """
    if name.lower() in NAMED:
        return NAMED[name.lower()]
    path = Path(name)
    try:
        config = json.loads(path.read_bytes()) if path.is_file() else None  # reading a pipe may never end
    except (OSError, ValueError, RecursionError) as fault:
        what = f"{said(name)} cannot be read as JSON: {str(fault)[:80]}"
        raise CallerError(what, expected="a Llama's config.json") from None
    if not isinstance(config, dict):
        expected = f"one of {', '.join(NAMED)}, or a Llama's config.json"
        raise CallerError("there is no such model", got=said(name), expected=expected)
    try:
        return _llama(config, path)
    except CallerError as fault:
        raise CallerError(f"{path}: {fault.what}", got=fault.got, expected=fault.expected) from None


def _llama(config: Mapping[str, Any], path: Path) -> Model:
    for key, taken in _TAKEN.items():
        if config.get(key) not in taken:
            raise _refused(key, config.get(key), f"one of {json.dumps(taken)[1:-1]}")
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    hidden, blocks, heads, intermediate, vocabulary = (_size(config, name) for name in names)
    kv_heads = heads if config.get("num_key_value_heads") is None else _size(config, "num_key_value_heads")
    if config.get("head_dim") not in (None, hidden / heads):
        raise _refused("head_dim", config["head_dim"], f"hidden_size / num_attention_heads = {hidden / heads:g}")
    sizes, source = (hidden, blocks, heads, kv_heads, intermediate, vocabulary), f"{path.name}, taken as a Llama"
    return Model(path.stem, source, *sizes, embedding="tied" if config.get("tie_word_embeddings") else "own")


def _size(config: Mapping[str, Any], key: str) -> int:
    return whole_number(f"'{key}'", config.get(key), 1, _LARGEST[key == "num_hidden_layers"])


def _refused(key: str, got: object, expected: str) -> CallerError:
    return CallerError(f"'{key}' cannot be planned", got=said(got), expected=expected)
