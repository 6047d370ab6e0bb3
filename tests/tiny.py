"""Tiny random models made with transformers: the reference of the parity tests, and quick to serve."""

from __future__ import annotations

from pathlib import Path

import torch

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
VOCAB_SIZE = 128
CONTEXT_LENGTH = 2048
EOS = 2


def _config(name: str, tied: bool, head_dim: int, context_length: int, changes: dict):
    import transformers

    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": context_length,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        "pad_token_id": 0,
    } | changes
    if name == "llama":
        return transformers.LlamaConfig(**common, head_dim=head_dim or 16)
    if name == "mistral":
        return transformers.MistralConfig(**common, head_dim=head_dim or 16, sliding_window=None)
    if name == "qwen2":
        return transformers.Qwen2Config(**common, **({"head_dim": head_dim} if head_dim else {}))
    return transformers.Qwen3Config(**common, head_dim=head_dim or 32)


def make_tiny(
    directory: Path,
    name: str = "llama",
    *,
    tied: bool = False,
    seed: int = 0,
    head_dim: int = 0,
    context_length: int = CONTEXT_LENGTH,
    dtype: torch.dtype = torch.float32,
    **changes: int,
) -> Path:
    """Save a model of `name` (one of ARCHITECTURES) to `directory`, and return it.

    Weights are larger than an untrained model's (std 0.2; biases and norms random too), so that a wrong
    one shows in the logits.

    Args:
        head_dim: 0 takes 16 (Qwen3: 32); attention kernels of GPUs want 64 or 128.
        dtype: the weights are drawn in float32 and rounded to it.
        changes: of the configuration: num_attention_heads, vocab_size ...
    """
    import transformers

    config = _config(name, tied, head_dim, context_length, changes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, param in model.named_parameters():
            param.normal_(1.0 if "norm" in key else 0.0, 0.2, generator=generator)
    model.to(dtype).save_pretrained(directory)
    return directory


def load_reference(directory: Path, dtype: torch.dtype = torch.float32):
    """The transformers model of `directory` on the CPU, for comparison."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
