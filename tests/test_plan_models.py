"""Models by name against their published sizes; config files, also hostile ones."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradengine.errors import CallerError
from gradengine.plan.models import NAMED, load_model

LLAMA = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_hidden_layers": 22,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
    "attention_bias": False,
    "rope_scaling": None,
}


@pytest.fixture
def config(tmp_path):
    def write(**changes):
        path = tmp_path / "config.json"
        kept = {key: value for key, value in (LLAMA | changes).items() if value != "left out"}
        path.write_text(json.dumps(kept))
        return str(path)

    return write


# ---- by name ----


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("350m", 398_509_056 + 32768 * 1024),  # 24 blocks, LM head, final norm; and the embedding, not trained
        ("1b", 1_100_048_384),  # as published with TinyLlama-1.1B
        ("7b", 6_738_415_616),  # Llama-2-7B
        ("70b", 68_976_648_192),  # Llama-2-70B
    ],
)
def test_named_models_have_their_published_number_of_parameters(name, parameters):
    assert load_model(name).parameters == parameters


def test_the_arena_of_350m_is_the_known_one():
    model = load_model("350m")
    assert model.layout().nbytes == 1594036224
    assert (model.hidden_size, model.num_blocks, model.num_heads, model.num_kv_heads) == (1024, 24, 16, 4)
    assert (model.kv_hidden_size, model.intermediate_size, model.vocab_size) == (256, 4096, 32768)


def test_names_are_found_in_any_case():
    assert load_model("70B") is NAMED["70b"]


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("vocab_parallel", [False, True])
def test_what_a_rank_has_is_its_fraction_of_the_weights(name, tp, vocab_parallel):
    model = load_model(name)
    config = model.sharded(tp, vocab_parallel=vocab_parallel)
    own = model.embedding == "own"
    fraction = config.weight_memory_fraction(model.num_blocks, model.vocab_size, embedding=own)
    elements = model.layout(tp, vocab_parallel=vocab_parallel).num_elements
    assert elements == pytest.approx(fraction * model.layout().num_elements, rel=1e-12)


def test_a_frozen_embedding_is_no_gradient_and_is_cut_with_the_vocabulary():
    model = load_model("350m")
    assert "embedding" not in {slot.name for slot in model.layout().slots}
    assert model.frozen() == model.frozen(2) == 32768 * 1024
    assert model.frozen(2, vocab_parallel=True) == 16384 * 1024


def test_a_model_that_cannot_be_cut_names_both_numbers():
    with pytest.raises(CallerError, match=r"16 / 3"):
        load_model("350m").layout(3)
    with pytest.raises(CallerError, match=r"8 / 16"):
        load_model("70b").layout(16)


# ---- from a file ----


def test_a_config_is_the_model_of_that_name(config):
    model, named = load_model(config()), NAMED["1b"]
    assert model.layout() == named.layout()
    assert model.parameters == named.parameters


def test_key_value_heads_default_to_heads(config):
    assert load_model(config(num_key_value_heads="left out")).num_kv_heads == 32
    assert load_model(config(num_key_value_heads=None)).num_kv_heads == 32


def test_tied_embeddings_are_one_matrix(config):
    tied, own = load_model(config(tie_word_embeddings=True)), load_model(config(tie_word_embeddings="left out"))
    assert (tied.embedding, own.embedding) == ("tied", "own")
    assert own.parameters - tied.parameters == 32000 * 2048


def test_a_published_tied_model_has_its_published_number_of_parameters(config):
    """Llama-3.2-1B: 1,235,814,400."""
    sizes = {"intermediate_size": 8192, "num_hidden_layers": 16, "num_key_value_heads": 8, "vocab_size": 128256}
    assert load_model(config(**sizes, head_dim=64, tie_word_embeddings=True)).parameters == 1_235_814_400


def test_a_head_size_that_is_the_quotient_is_taken(config):
    assert load_model(config(head_dim=64)).hidden_size == 2048


@pytest.mark.parametrize("head_dim", [128, "64", [64]])
def test_another_head_size_is_refused_with_both_numbers(config, head_dim):
    with pytest.raises(CallerError, match=r"'head_dim'.*(128|64).*= 64"):
        load_model(config(head_dim=head_dim))


@pytest.mark.parametrize(
    "key", ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
)
class TestSizes:
    def test_a_missing_one_is_named(self, config, key):
        with pytest.raises(CallerError, match=rf"config\.json: there is no '{key}'"):
            load_model(config(**{key: "left out"}))

    @pytest.mark.parametrize("value", [0, -1, 1.5, 1e9, "1024", True, [1024], {"a": 1}, 10**8, 10**30, float("nan")])
    def test_one_out_of_range_is_named_with_its_value(self, config, key, value):
        with pytest.raises(CallerError, match=rf"'{key}' cannot be planned with: got .*expected a whole number, 1\.\."):
            load_model(config(**{key: value}))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"num_experts": [8]}, "num_experts"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": {"a": 1}}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"hidden_act": ["silu"]}, "hidden_act"),
        ({"hidden_activation": "gelu_pytorch_tanh"}, "hidden_activation"),
        ({"activation_function": "relu"}, "activation_function"),
        ({"kv_lora_rank": 512}, "kv_lora_rank"),
        ({"q_lora_rank": 768}, "q_lora_rank"),
        *(
            ({key: True}, key)
            for key in ("use_bias", "bias", "use_qkv_bias", "qkv_bias", "qk_layernorm", "use_qk_norm")
        ),
        *(({key: 2}, key) for key in ("n_shared_experts", "num_experts_per_tok", "moe_intermediate_size")),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"tie_word_embeddings": "yes " * 1000}, "tie_word_embeddings"),
    ],
)
def test_models_with_other_components_are_refused_by_key(config, changes, named):
    with pytest.raises(CallerError, match=rf"config\.json: '{named}'") as refusal:
        load_model(config(**changes))
    assert len(str(refusal.value)) < 600


@pytest.mark.parametrize("family", ["llama", "mistral", None, "left out"])
def test_llamas_are_taken_by_their_type_and_others_by_their_keys(config, family):
    assert load_model(config(model_type=family)).layout() == NAMED["1b"].layout()


@pytest.mark.parametrize("family", ["qwen2", "gemma", "mixtral", "a-new-one", ["llama"], 7])
def test_other_families_are_refused_by_type_though_their_keys_are_a_llamas(config, family):
    with pytest.raises(CallerError, match=r"config\.json: 'model_type'.*one of llama, mistral.*nine components"):
        load_model(config(model_type=family))


def test_keys_that_say_no_are_no_mistake(config):
    keys = ("attention_bias", "use_bias", "bias", "use_qkv_bias", "qk_norm")
    nulls = dict.fromkeys(("kv_lora_rank", "q_lora_rank", "num_experts", "hidden_activation", "moe_intermediate_size"))
    assert load_model(config(**dict.fromkeys(keys, False), **nulls)).num_blocks == 22


@pytest.mark.parametrize("text", ['{"hidden_size": 64, "hidden_size": 128}', '{"a": {"b": 1, "b": 2}}'])
def test_a_key_that_is_there_twice_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CallerError, match=r'config\.json .*"(hidden_size|b)" is given twice'):
        load_model(str(tmp_path / "config.json"))


@pytest.mark.timeout(60)
def test_what_is_no_regular_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    for name in (tmp_path / "config.json", "/dev/zero", tmp_path):
        with pytest.raises(CallerError, match="there is no model"):
            load_model(str(name))


def test_a_model_with_other_keys_is_refused_by_the_missing_one(tmp_path):
    (tmp_path / "gpt2.json").write_text(json.dumps({"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}))
    with pytest.raises(CallerError, match=r"gpt2\.json: there is no 'hidden_size'"):
        load_model(str(tmp_path / "gpt2.json"))


def test_heads_that_do_not_divide_name_the_file_and_both_numbers(config):
    with pytest.raises(CallerError, match=r"config\.json: .*2048.*31"):
        load_model(config(num_attention_heads=31, num_key_value_heads=31))
    with pytest.raises(CallerError, match=r"config\.json: .*32.*5"):
        load_model(config(num_key_value_heads=5))


NO_MODELS = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"3",
    b'"llama"',
    b"\x00",
    b"\xff\xfe{}",
    b"{'a': 1}",
    b"[" * 100_000,
    b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    b'{"hidden_size": ' + b"9" * 5000 + b"}",
    b" " * (1 << 20) + b"{}",
]


@pytest.mark.parametrize("text", NO_MODELS, ids=range(len(NO_MODELS)))
def test_files_that_are_no_model_are_refused_by_name(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_bytes(text)
    with pytest.raises(CallerError, match=r"config\.json") as refusal:
        load_model(str(path))
    assert len(str(refusal.value)) < 600


@pytest.mark.parametrize("name", ["", ".", "3b", "no/such/config.json", "a\0b", "x" * 5000])
def test_what_is_neither_name_nor_file_is_refused(name):
    with pytest.raises(CallerError, match=r"there is no model .*350m, 1b, 7b, 70b"):
        load_model(name)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([*LLAMA, "head_dim", "num_experts"]), json_values))
def test_any_json_is_a_model_or_an_error_of_the_caller(tmp_path_factory, changes):
    path = tmp_path_factory.mktemp("any") / "config.json"
    path.write_text(json.dumps(LLAMA | changes))
    refusal = None
    try:
        model = load_model(str(path))
    except CallerError as fault:
        refusal = fault
    assert "config.json" in str(refusal) if refusal else model.num_blocks >= 1
