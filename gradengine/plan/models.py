"""Transformers that can be planned: four by name, and any Llama by its config.json in the form of Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from gradengine.arguments import as_index
from gradengine.errors import CallerError
from gradengine.layout import GradientLayout
from gradengine.layout.tensor_parallel import TensorParallelConfig

__all__ = ["NAMED", "Embedding", "Model", "load_model"]

Embedding: TypeAlias = Literal["own", "tied", "frozen"]  # trained by itself; the LM head's; not trained


@dataclass(frozen=True)
class Model:
    """A decoder of blocks with nine components: four of attention, three of a gated feed-forward, two norms.

    Raises:
        CallerError: Heads cannot be divided; both numbers are named.
    """

    name: str  # how it is called
    source: str  # where its sizes are from
    hidden_size: int  # H
    num_blocks: int  # transformer blocks
    num_heads: int  # query heads
    num_kv_heads: int  # key-value heads
    intermediate_size: int  # I
    vocab_size: int  # V
    # Whether the embedding is trained by itself, tied to the LM head, or frozen.
    embedding: Embedding = field(default="own", kw_only=True)

    def __post_init__(self) -> None:
        self.sharded(1)

    @property
    def kv_hidden_size(self) -> int:
        """Columns of `w_k` and `w_v`."""
        return self.hidden_size // self.num_heads * self.num_kv_heads

    @property
    def parameters(self) -> int:
        """Weights of the whole model, a frozen embedding among them.

        >>> f"{NAMED['7b'].parameters:,}"
        '6,738,415,616'
        """
        return self.layout().num_elements + self.frozen()

    def sharded(self, tp: int, *, vocab_parallel: bool = False) -> TensorParallelConfig:
        """The part of rank 0 of `tp` tensor-parallel ranks, as large as any; `CallerError` if it cannot be cut so."""
        sizes = self.hidden_size, self.intermediate_size, self.num_heads, self.num_kv_heads
        return TensorParallelConfig(0, tp, *sizes, vocab_parallel=vocab_parallel)

    def layout(self, tp: int = 1, *, vocab_parallel: bool = False) -> GradientLayout:
        """The layout of the gradients on one of `tp` ranks; raises `CallerError` if the model cannot be cut so.

        >>> NAMED["350m"].layout().nbytes
        1594036224
        """
        sizes = (self.num_blocks, self.hidden_size, self.kv_hidden_size, self.intermediate_size, self.vocab_size)
        config = self.sharded(tp, vocab_parallel=vocab_parallel) if tp > 1 else None
        return GradientLayout.transformer(*sizes, embedding=self.embedding == "own", tensor_parallel=config)

    def frozen(self, tp: int = 1, *, vocab_parallel: bool = False) -> int:
        """Elements of one of `tp` ranks that are not trained."""
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

_LARGEST_FILE = 1 << 20
_LARGEST_SIZE = 10_000_000
_LARGEST_DEPTH = 10_000  # blocks: each is nine rows of a layout
# A family's code may build what no key says: only those are taken whose blocks are known to be a Llama's.
_LLAMAS = ("llama", "mistral")
_NINE = "the nine components of a Llama's block: four of attention, three of a gated feed-forward, two norms"
_OTHER_COMPONENTS = (  # keys that a Llama lacks, or has as false
    *("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "moe_num_experts"),
    *("num_experts_per_tok", "num_experts_per_token", "moe_intermediate_size", "first_k_dense_replace"),
    *("shared_expert_intermediate_size", "decoder_sparse_step", "moe_layer_freq", "kv_lora_rank", "q_lora_rank"),
    *("attention_bias", "mlp_bias", "use_bias", "bias", "use_qkv_bias", "qkv_bias", "lm_head_bias", "use_qk_norm"),
    *("qk_norm", "qk_layernorm", "use_parallel_residual", "parallel_attn"),
)
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")


def load_model(name: str) -> Model:
    """A model by its name, or by the path of a config.json in the form that Hugging Face models have.

    Raises:
        CallerError: No such name or regular file, no JSON, a key that is missing, repeated or out of range, or a model
            with other components than those nine; the error names file and key.

    Example:
        >>> load_model("1b").num_blocks
        22
    """
    if name.lower() in NAMED:
        return NAMED[name.lower()]
    path = Path(name)
    if not _is_file(path):
        shown = repr(name) if len(name) <= 200 else f"{name[:40]!r}..."
        raise CallerError(f"there is no model {shown}", expected=f"one of {', '.join(NAMED)}, or a config.json")
    config = _read(path)
    try:
        return _llama(config, path)
    except CallerError as fault:
        raise CallerError(f"{path}: {fault.what}", got=fault.got, expected=fault.expected) from None


def _is_file(path: Path) -> bool:
    """Whether this is a regular file: a pipe is refused, as reading it might wait for ever."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long, or a NUL in it
        return False


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(_LARGEST_FILE + 1)
        config = json.loads(text, object_pairs_hook=_without_duplicates) if len(text) <= _LARGEST_FILE else None
    except (OSError, ValueError, RecursionError) as fault:
        raise CallerError(f"{path} cannot be read as JSON: {fault}", expected="a config.json") from None
    if len(text) > _LARGEST_FILE:
        raise CallerError(f"{path} is too large", got=f"over {_LARGEST_FILE} bytes", expected="a config.json")
    if not isinstance(config, dict):
        raise CallerError(f"{path} is not a model", got=type(config).__name__, expected="a JSON object of sizes")
    return config


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object, with `ValueError` for a repeated key: JSON's readers take the last value, a person the first."""
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise ValueError(f"{_shown(key)} is given twice")
        seen[key] = value
    return seen


def _llama(config: Mapping[str, Any], path: Path) -> Model:
    _refuse_other_components(config)
    hidden, vocabulary = _size(config, "hidden_size"), _size(config, "vocab_size")
    blocks, heads = _size(config, "num_hidden_layers", _LARGEST_DEPTH), _size(config, "num_attention_heads")
    intermediate = _size(config, "intermediate_size")
    kv_heads = heads if config.get("num_key_value_heads") is None else _size(config, "num_key_value_heads")
    if config.get("head_dim") not in (None, hidden / heads):
        expected = f"hidden_size / num_attention_heads = {hidden / heads:g}"
        raise _refused("head_dim", config["head_dim"], expected)
    tied = config.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise _refused("tie_word_embeddings", tied, "true or false")
    sizes, source = (hidden, blocks, heads, kv_heads, intermediate, vocabulary), f"{path.name}, taken as a Llama"
    return Model(path.stem, source, *sizes, embedding="tied" if tied else "own")


def _refuse_other_components(config: Mapping[str, Any]) -> None:
    if config.get("model_type") not in (None, *_LLAMAS):
        known = f"one of {', '.join(_LLAMAS)}, or none where the model has {_NINE}"
        raise _refused("model_type", config["model_type"], known)
    for key in _OTHER_COMPONENTS:
        if config.get(key) not in (None, False):
            raise _refused(key, config[key], f"false, or no such key: {_NINE}")
    for key in _ACTIVATIONS:
        if config.get(key) not in (None, "silu", "swish"):
            raise _refused(key, config[key], "silu: a gated feed-forward of three matrices")


def _size(config: Mapping[str, Any], key: str, most: int = _LARGEST_SIZE) -> int:
    if config.get(key) is None:
        raise CallerError(f"there is no '{key}'", expected=f"a whole number, 1..{most}")
    number = as_index(config[key])
    if number is None or not 1 <= number <= most:
        raise _refused(key, config[key], f"a whole number, 1..{most}")
    return number


def _refused(key: str, got: object, expected: str) -> CallerError:
    return CallerError(f"'{key}' cannot be planned with", got=_shown(got), expected=expected)


def _shown(value: object) -> str:
    shown = json.dumps(value)
    return shown if len(shown) <= 80 else f"{shown[:40]}..."
