"""Tiny random models made with transformers: the reference of the parity tests, and quick to serve."""

from __future__ import annotations

from pathlib import Path

import torch

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
VOCAB_SIZE = 128
CONTEXT_LENGTH = 512
EOS = 2


def _config(name: str, tied: bool):
    import transformers

    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT_LENGTH,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "pad_token_id": 0,
    }
    if name == "llama":
        return transformers.LlamaConfig(**common, head_dim=16)
    if name == "mistral":
        return transformers.MistralConfig(**common, head_dim=16, sliding_window=None)
    if name == "qwen2":
        return transformers.Qwen2Config(**common)
    return transformers.Qwen3Config(**common, head_dim=32)


def make_tiny(directory: Path, name: str = "llama", *, tied: bool = False, seed: int = 0) -> Path:
    """Save a float32 model of `name` (one of ARCHITECTURES) to `directory`, and return it.

    Weights are larger than an untrained model's (std 0.2; biases and norms random too), so that a wrong
    one shows in the logits.
    """
    import transformers

    model = transformers.AutoModelForCausalLM.from_config(_config(name, tied), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, param in model.named_parameters():
            param.normal_(1.0 if "norm" in key else 0.0, 0.2, generator=generator)
    model.save_pretrained(directory)
    return directory


def load_reference(directory: Path):
    """The transformers model of `directory` in float32, for comparison."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
