"""A tiny random model that chats: SmolLM2's tokenizer and template over a Llama of a few layers."""

from __future__ import annotations

from pathlib import Path

import torch

ENDING_IDS = list(range(8192))
"""A sixth of the vocabulary ends a completion, so that a random model makes completions of all lengths."""


def make_chat_model(directory: Path, smollm2_dir: Path) -> Path:
    """Save a random Llama of 1.6 million parameters with SmolLM2's tokenizer, and return `directory`."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
    model.generation_config.eos_token_id = ENDING_IDS
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
