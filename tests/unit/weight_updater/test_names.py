import pytest

from weight_updater.names import clean_name, is_adapter_name


@pytest.mark.case("B006")
@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight", "w"]
)
def test_compile_and_ddp_prefixes_come_off(prefix: str, name: str) -> None:
    assert clean_name(prefix + name) == name


@pytest.mark.case("B007")
def test_fsdp_and_checkpoint_wrappers_come_off_at_every_level() -> None:
    inner = "_fsdp_wrapped_module._checkpoint_wrapped_module.mlp.gate_proj.weight"
    assert clean_name(f"_fsdp_wrapped_module.model.layers.0.{inner}") == "model.layers.0.mlp.gate_proj.weight"


@pytest.mark.case("B009")
@pytest.mark.parametrize(
    ("name", "clean"),
    [
        (
            "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight",
            "model.layers.0.self_attn.q_proj.weight",
        ),
        ("model.layers.0.self_attn.q_proj.base_layer.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("base_model.model.model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("base_model.model.lm_head.modules_to_save.default.weight", "lm_head.weight"),
        ("base_model.model.model.norm.modules_to_save.my_adapter.weight", "model.norm.weight"),
        ("module.base_model.model.model.norm.weight", "model.norm.weight"),
        (
            "_fsdp_wrapped_module.base_model.model.model.layers.1._fsdp_wrapped_module.mlp.up_proj.base_layer.bias",
            "model.layers.1.mlp.up_proj.bias",
        ),
    ],
)
def test_peft_names_are_cleaned(name: str, clean: str) -> None:
    assert clean_name(name) == clean


@pytest.mark.parametrize(
    "name",
    [
        "my_module.weight",
        "model.layers.0.module_list.weight",
        "model.base_layer_norm.weight",
        "model.model.layers.0.weight",
        "encoder.base_model.model.norm.weight",
        "module",
        "model.base_layer",
        "model.modules_to_save_here.weight",
        "",
    ],
)
def test_names_that_only_look_like_wrappers_stay(name: str) -> None:
    assert clean_name(name) == name


def test_cleaning_twice_changes_nothing() -> None:
    name = "module._orig_mod.base_model.model.model.layers.0.q_proj.base_layer.weight"
    assert clean_name(clean_name(name)) == clean_name(name)


@pytest.mark.case("B009")
@pytest.mark.parametrize(
    ("name", "adapter"),
    [
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight", True),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_B.default.weight", True),
        ("base_model.model.model.embed_tokens.lora_embedding_A.default", True),
        ("base_model.model.model.embed_tokens.lora_embedding_B.default", True),
        ("base_model.model.lm_head.original_module.weight", True),
        ("model.layers.0.q_proj.lora_magnitude_vector.default.weight", True),
        ("base_model.model.lm_head.modules_to_save.default.weight", False),
        ("base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight", False),
        ("model.lora_Attention.weight", False),
    ],
)
def test_adapter_names(name: str, adapter: bool) -> None:
    assert is_adapter_name(name) is adapter
