"""Trainers wrap modules; the wrappers show in parameter names. This takes them off again.

Wrappers are whole dot-segments, wherever they stand, so a layer called `my_module` keeps its name. The
last segment is the parameter itself and never a wrapper.

    _orig_mod.module.lm_head.weight                               -> lm_head.weight
    model.layers.0._fsdp_wrapped_module.mlp.gate_proj.weight      -> model.layers.0.mlp.gate_proj.weight
    base_model.model.model.norm.modules_to_save.default.weight    -> model.norm.weight
    base_model.model.model.layers.0.q_proj.base_layer.weight      -> model.layers.0.q_proj.weight
"""

from __future__ import annotations

_WRAPPERS = frozenset(
    {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "base_layer"}
)
_ADAPTER_SEGMENTS = frozenset(
    {
        "lora_A",
        "lora_B",
        "lora_embedding_A",
        "lora_embedding_B",
        "lora_magnitude_vector",
        "original_module",
    }
)


def clean_name(name: str) -> str:
    """The Hugging Face name under the wrappers of torch.compile, DDP, FSDP, checkpointing and PEFT."""
    *path, leaf = name.split(".")
    path = [segment for segment in path if segment not in _WRAPPERS]
    if path[:2] == ["base_model", "model"]:
        del path[:2]
    if "modules_to_save" in path:
        at = path.index("modules_to_save")
        del path[at : at + 2]  # the segment after it names the adapter
    return ".".join([*path, leaf])


def is_adapter_name(name: str) -> bool:
    """Whether `name` belongs to an adapter (LoRA's factors), or to the frozen copy that PEFT keeps of a
    module that is trained whole; neither is a weight of the merged model.
    """
    return not _ADAPTER_SEGMENTS.isdisjoint(name.split("."))
