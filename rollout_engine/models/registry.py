"""Architectures that can be served. Adding one is a file here and a line in the table."""

from __future__ import annotations

import importlib

from torch import nn

MODELS = {
    "LlamaForCausalLM": "rollout_engine.models.llama:LlamaForCausalLM",
    "MistralForCausalLM": "rollout_engine.models.llama:LlamaForCausalLM",
    "Qwen2ForCausalLM": "rollout_engine.models.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "rollout_engine.models.qwen3:Qwen3ForCausalLM",
}


def model_class(architecture: str) -> type[nn.Module]:
    """The class for a key of MODELS; its module is imported now."""
    module, _, name = MODELS[architecture].partition(":")
    found: type[nn.Module] = getattr(importlib.import_module(module), name)
    return found
