"""A Llama's config.json, in the form that Hugging Face models have: its sizes, if its components are those nine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gradengine.errors import CallerError

__all__ = ["Config", "read_config"]

_LARGEST_FILE = 1 << 20
_LARGEST_SIZE = 10_000_000
_LARGEST_DEPTH = 10_000  # blocks: each is nine rows of a layout

_KEYS = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_blocks",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
}
_NINE = "the nine components of a Llama's block: four of attention, three of a gated feed-forward, two norms"

# A family's code may build what no key of the file says: only those are taken whose blocks are known to be a Llama's.
_LLAMAS = ("llama", "mistral")
_ELSEWISE = {
    "baichuan": "one matrix for query, key and value",
    "bloom": "biases, two matrices in its feed-forward",
    "chatglm": "one matrix for query, key and value, with biases",
    "cohere": "one norm in a block",
    "cohere2": "one norm in a block",
    "deepseek_v2": "latent attention and experts",
    "deepseek_v3": "latent attention and experts",
    "falcon": "one matrix for query, key and value, two in its feed-forward",
    "gemma": "a tied embedding by its type, GELU and heads of a size of their own",
    "gemma2": "four norms in a block",
    "gemma3": "four norms in a block, and norms of query and key",
    "gemma3_text": "four norms in a block, and norms of query and key",
    "gpt2": "biases, two matrices in its feed-forward",
    "gpt_neox": "biases, two matrices in its feed-forward",
    "internlm2": "one matrix for query, key and value",
    "minicpm3": "latent attention",
    "mixtral": "experts",
    "olmo2": "norms of query and key",
    "opt": "biases, two matrices in its feed-forward",
    "phi": "biases, two matrices in its feed-forward",
    "phi3": "one matrix for query, key and value",
    "qwen": "biases of query, key and value",
    "qwen2": "biases of query, key and value, by its type and no key",
    "qwen2_moe": "biases and experts",
    "qwen3": "norms of query and key",
    "qwen3_moe": "norms of query and key, and experts",
    "stablelm": "norms with biases",
    "starcoder2": "biases, two matrices in its feed-forward",
}

_OTHER_NAMES = ("n_embd", "n_layer", "d_model", "decoder_layers")  # of sizes, in models that have other components
_NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "moe_num_experts")
_BIASES = ("attention_bias", "mlp_bias", "use_bias", "bias", "use_qkv_bias", "qkv_bias", "lm_head_bias")
_NORMS = ("use_qk_norm", "qk_norm", "qk_layernorm", "use_parallel_residual", "parallel_attn")
_ABSENT = (
    *("kv_lora_rank", "q_lora_rank", "num_experts_per_tok", "num_experts_per_token", "moe_intermediate_size"),
    *("first_k_dense_replace", "shared_expert_intermediate_size", "decoder_sparse_step", "moe_layer_freq"),
)
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")


@dataclass(frozen=True)
class Config:
    """What a config.json says.

    Attributes:
        sizes: By the names of `models.Model`.
        embedding: Whether it is trained by itself, or tied to the LM head.
    """

    sizes: Mapping[str, int]
    embedding: Literal["own", "tied"]


def read_config(path: Path) -> Config:
    """Read a regular file and refuse what is no Llama.

    Raises:
        CallerError: It cannot be read, is no JSON object, has a key twice, lacks a size, or is of a model with other
            components; the error names file and key.
    """
    config = _read(path)
    _refuse_other_families(config, path)
    _refuse_other_components(config, path)
    sizes = {ours: _size(config, theirs, path) for theirs, ours in _KEYS.items()}
    _refuse_other_head_size(config, sizes, path)
    tied = config.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise _refused(path, "tie_word_embeddings", tied, "true or false")
    return Config(sizes, "tied" if tied else "own")


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(_LARGEST_FILE + 1)
    except OSError as fault:
        raise CallerError(f"cannot read {str(path)!r}: {fault.strerror}", expected="a config.json") from None
    if len(text) > _LARGEST_FILE:
        raise CallerError(f"{path} is too large", got=f"over {_LARGEST_FILE} bytes", expected="a config.json")
    try:
        config = json.loads(text, object_pairs_hook=_without_duplicates(path))
    except (ValueError, RecursionError) as fault:
        raise CallerError(f"{path} is no JSON ({fault})", expected="a config.json") from None
    if not isinstance(config, dict):
        raise CallerError(f"{path} is no model", got=type(config).__name__, expected="a JSON object of sizes")
    return config


def _without_duplicates(path: Path) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """Of two values of one key JSON's readers take the last, and a person the first."""

    def checked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise CallerError(f"{path} has {_shown(key)} twice", expected="each key once")
            seen[key] = value
        return seen

    return checked


def _refuse_other_families(config: Mapping[str, Any], path: Path) -> None:
    family = config.get("model_type")
    if family is None or family in _LLAMAS:
        return
    has = _ELSEWISE.get(family) if isinstance(family, str) else None
    known = f"one of {', '.join(_LLAMAS)}, or none where the model has {_NINE}"
    raise _refused(path, "model_type", family, f"{known}{f'; that family has {has}' if has else ''}")


def _refuse_other_components(config: Mapping[str, Any], path: Path) -> None:
    for key in _OTHER_NAMES:
        if key in config and "hidden_size" not in config:
            raise _refused(path, key, config[key], "Llama's keys: hidden_size, num_hidden_layers, ...")
    _refuse_all_but(config, path, _NUMBERS_OF_EXPERTS, (None, 0, 1), "one feed-forward a block, no experts")
    _refuse_all_but(config, path, _BIASES, (None, False), f"false: no biases, but {_NINE}")
    _refuse_all_but(config, path, _NORMS, (None, False), f"false: {_NINE}")
    _refuse_all_but(config, path, _ABSENT, (None,), f"no such key, but {_NINE}")
    gated = "silu: a gated feed-forward of three matrices"
    _refuse_all_but(config, path, _ACTIVATIONS, (None, "silu", "swish"), gated)


def _refuse_all_but(
    config: Mapping[str, Any], path: Path, keys: Iterable[str], taken: tuple[object, ...], expected: str
) -> None:
    for key in keys:
        if config.get(key) not in taken:
            raise _refused(path, key, config[key], expected)


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
    return CallerError(f"{path}: '{key}' cannot be planned with", got=_shown(got), expected=expected)


def _shown(value: object) -> str:
    shown = json.dumps(value)
    return shown if len(shown) <= 80 else f"{shown[:40]}..."
