"""Models by name against their published sizes; config files, also hostile ones."""

import json
import os

import pytest
from hostile_values import refusal_of
from hypothesis import given, settings
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
}
ABSENT = object()


@pytest.fixture
def config(tmp_path):
    def load(**changes):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({key: value for key, value in (LLAMA | changes).items() if value is not ABSENT}))
        return load_model(str(path))

    return load


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("350m", 398_509_056 + 32768 * 1024),  # 24 blocks, LM head, final norm; and the embedding, not trained
        ("1b", 1_100_048_384),  # as published with TinyLlama-1.1B
        ("7B", 6_738_415_616),  # Llama-2-7B
        ("70b", 68_976_648_192),  # Llama-2-70B
    ],
)
def test_named_models_have_their_published_number_of_parameters(name, parameters):
    assert load_model(name).parameters == parameters


def test_the_arena_of_350m_is_the_known_one():
    model = load_model("350m")
    assert (model.layout().nbytes, model.kv_hidden_size) == (1594036224, 256)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("vocab_parallel", [False, True])
def test_what_a_rank_has_is_its_fraction_of_the_weights(name, vocab_parallel):
    model = load_model(name)
    whole, part = model.sharded(4, vocab_parallel=vocab_parallel), model.layout(4, vocab_parallel=vocab_parallel)
    fraction = whole.weight_memory_fraction(model.num_blocks, model.vocab_size, embedding=model.embedding == "own")
    assert part.num_elements == pytest.approx(fraction * model.layout().num_elements, rel=1e-12)


def test_a_frozen_embedding_is_no_gradient_and_is_cut_with_the_vocabulary():
    model = load_model("350m")
    assert "embedding" not in {slot.name for slot in model.layout().slots}
    assert model.frozen() == model.frozen(2) == 32768 * 1024
    assert model.frozen(2, vocab_parallel=True) == 16384 * 1024
    assert load_model("1b").frozen() == 0


# ---- from a file ----


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_config_is_the_model_of_that_name(config, family):
    model = config(model_type=family)
    assert (model.layout(), model.parameters) == (NAMED["1b"].layout(), NAMED["1b"].parameters)


def test_what_a_config_leaves_out_or_says_by_the_way_is_taken(config):
    assert config(num_key_value_heads=ABSENT).num_kv_heads == config(num_key_value_heads=None).num_kv_heads == 32
    assert config(head_dim=64).hidden_size == 2048
    assert config(attention_bias=False, mlp_bias=None, hidden_act=ABSENT).num_blocks == 22


def test_a_published_tied_model_has_its_published_number_of_parameters(config):
    """Llama-3.2-1B: 1,235,814,400."""
    sizes = {"intermediate_size": 8192, "num_hidden_layers": 16, "num_key_value_heads": 8, "vocab_size": 128256}
    tied = config(**sizes, tie_word_embeddings=True)
    assert (tied.parameters, tied.embedding) == (1_235_814_400, "tied")
    assert config(**sizes, tie_word_embeddings=ABSENT).embedding == "own"


SIZES = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
REFUSED = [
    *((key, value) for key in SIZES for value in (ABSENT, 0, 1.5, True, "1024", [8], 10**8)),
    *(("head_dim", value) for value in (128, "64", [64])),
    *(("model_type", value) for value in ("qwen2", "mixtral", ["llama"], 7, None, ABSENT)),
    *((key, value) for key in ("attention_bias", "mlp_bias") for value in (True, "no")),
    *(("hidden_act", value) for value in ("gelu", ["silu"])),
    ("tie_word_embeddings", "yes " * 1000),
]


def test_sizes_out_of_range_and_other_components_are_refused_by_key(config):
    for key, value in REFUSED:
        with pytest.raises(CallerError, match=rf"config\.json: .*'{key}'") as refusal:
            config(**{key: value})
        assert len(str(refusal.value)) < 600


def test_heads_that_do_not_divide_name_the_file_and_both_numbers(config):
    with pytest.raises(CallerError, match=r"config\.json: .*2048.*31"):
        config(num_attention_heads=31, num_key_value_heads=31)
    with pytest.raises(CallerError, match=r"config\.json: .*32.*5"):
        config(num_key_value_heads=5)
    with pytest.raises(CallerError, match=r"16 / 3"):
        load_model("350m").layout(3)


NO_MODELS = [b"", b"[]", b"\x00", b"{'a': 1}", b"[" * 100_000, b'{"hidden_size": ' + b"9" * 5000 + b"}"]


def test_files_that_are_no_model_are_refused_by_name(tmp_path):
    path = tmp_path / "config.json"
    for text in NO_MODELS:
        path.write_bytes(text)
        with pytest.raises(CallerError, match=r"config\.json") as refusal:
            load_model(str(path))
        assert len(str(refusal.value)) < 600


@pytest.mark.timeout(60)
def test_what_is_neither_name_nor_file_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in (str(tmp_path / "pipe"), "/dev/zero", str(tmp_path), "", "3b", "no/such.json", "a\0b", "x" * 5000):
        with pytest.raises(CallerError, match=r"there is no such model.*350m, 1b, 7b, 70b|too long"):
            load_model(name)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=25)
@given(st.dictionaries(st.sampled_from([*LLAMA, "head_dim", "mlp_bias"]), json_values))
def test_any_json_is_a_model_or_an_error_of_the_caller(tmp_path_factory, changes):
    path = tmp_path_factory.mktemp("any") / "config.json"
    path.write_text(json.dumps(LLAMA | changes))
    assert "config.json" in (refusal_of(lambda: load_model(str(path))) or "config.json")
