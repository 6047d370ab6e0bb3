"""A tiny random chat model, for the tests of trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

ENDING_IDS = list(range(8192))
"""What ends a completion of a model with SmolLM2's tokenizer."""

CHAT_TEMPLATE = (
    "{% for one in messages %}<|im_start|>{{ one.role }}\n{{ one.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Any:
    """A tokenizer of 258 ids with a chat template: one for each byte, and the two marks of a message."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    made.chat_template = CHAT_TEMPLATE
    return made


def make_chat_model(directory: Path, tokenizer: Any) -> Path:
    """Save a random float32 Llama with that tokenizer, and return `directory`.

    A sixth of the vocabulary, from id 0 on, ends a completion, so that completions have all lengths.
    """
    import transformers

    config = transformers.LlamaConfig(
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
    model = transformers.LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
    model.generation_config.eos_token_id = list(range(len(tokenizer) // 6))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
