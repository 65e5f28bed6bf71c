"""The transformers that can be planned: four by name, or any Llama-like one from its config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from gradengine.errors import CallerError
from gradengine.layout import GradientLayout
from gradengine.tensor_parallel import TensorParallelConfig

__all__ = ["NAMED", "Embedding", "Model", "load_model"]

Embedding: TypeAlias = Literal["own", "tied", "frozen"]  # trained by itself; the LM head's; not trained

_LARGEST_FILE = 1 << 20
_LARGEST_SIZE = 10_000_000
_LARGEST_DEPTH = 10_000  # blocks: each is nine rows of a layout


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

_KEYS = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_blocks",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_OTHERS = ("n_embd", "n_layer", "d_model", "decoder_layers")  # how models name their sizes that have other components


def load_model(name: str) -> Model:
    """A model by its name, or by the path of a config.json in the form that Hugging Face models have.

    Args:
        name: "350m", "1b", "7b", "70b", or a path.

    Raises:
        CallerError: No such name or file, no JSON, a key that is missing or out of range, or a model with other
            components than those nine; the error names file and key.

    Example:
        >>> load_model("1b").num_blocks
        22
    """
    if name.lower() in NAMED:
        return NAMED[name.lower()]
    path = Path(name)
    config = _read(path)
    _refuse_other_components(config, path)
    sizes = {ours: _size(config, theirs, path) for theirs, ours in _KEYS.items()}
    _refuse_other_head_size(config, sizes, path)
    tied = config.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise _refused(path, "tie_word_embeddings", tied, "true or false")
    try:
        return Model(path.stem, f"{path.name}, taken as a Llama", **sizes, embedding="tied" if tied else "own")
    except CallerError as fault:
        raise CallerError(f"{path}: {fault.what}", got=fault.got, expected=fault.expected) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(_LARGEST_FILE + 1)
    except (OSError, ValueError) as fault:
        reason = getattr(fault, "strerror", None) or fault
        raise CallerError(
            f"there is no model {str(path)!r} ({reason})", expected=f"one of {', '.join(NAMED)}, or a config.json"
        ) from None
    if len(text) > _LARGEST_FILE:
        raise CallerError(f"{path} is too large", got=f"over {_LARGEST_FILE} bytes", expected="a config.json")
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as fault:
        raise CallerError(f"{path} is no JSON ({fault})", expected="a config.json") from None
    if not isinstance(config, dict):
        raise CallerError(f"{path} is no model", got=type(config).__name__, expected="a JSON object of sizes")
    return config


def _refuse_other_components(config: Mapping[str, Any], path: Path) -> None:
    for key in _OTHERS:
        if key in config and "hidden_size" not in config:
            raise _refused(path, key, config[key], "Llama's keys: hidden_size, num_hidden_layers, ...")
    for key in _EXPERTS:
        if config.get(key) not in (None, 0, 1):
            raise _refused(path, key, config[key], "one feed-forward a block, no experts")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key) not in (None, False):
            raise _refused(path, key, config[key], "false: the nine components of a block have no biases")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise _refused(path, "hidden_act", config["hidden_act"], "silu: a gated feed-forward of three matrices")


def _size(config: Mapping[str, Any], key: str, path: Path) -> int:
    value = config.get(key)
    if value is None and key == "num_key_value_heads":
        return _size(config, "num_attention_heads", path)
    largest = _LARGEST_DEPTH if key == "num_hidden_layers" else _LARGEST_SIZE
    if value is None:
        raise CallerError(f"{path} has no '{key}'", expected=f"a whole number, 1..{largest}")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= largest:
        raise _refused(path, key, value, f"a whole number, 1..{largest}")
    return value


def _refuse_other_head_size(config: Mapping[str, Any], sizes: Mapping[str, int], path: Path) -> None:
    given, head_size = config.get("head_dim"), sizes["hidden_size"] / sizes["num_heads"]
    if given is not None and given != head_size:
        raise _refused(path, "head_dim", given, f"hidden_size / num_attention_heads = {head_size:g}")


def _refused(path: Path, key: str, got: object, expected: str) -> CallerError:
    shown = json.dumps(got)
    return CallerError(
        f"{path}: '{key}' cannot be planned with",
        got=shown if len(shown) <= 80 else f"{shown[:40]}...",
        expected=expected,
    )
