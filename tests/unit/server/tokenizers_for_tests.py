"""A byte-level tokenizer without merges: one token a byte, so that characters and words are cut anywhere."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

SPECIAL = ("<pad>", "<s>", "<unk>", "</s>")
BOS, EOS = 1, 3


def byte_tokenizer(*, bos: bool = True, eos: bool = False) -> Tokenizer:
    """Ids 0 to 3 are special, 4 to 259 are bytes (in the order of the byte-level alphabet)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    template = ["<s>"] * bos + ["$A"] + ["</s>"] * eos
    tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join(template), special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    return tokenizer


def save_tokenizer(directory: Path, **options: bool) -> Tokenizer:
    """Put tokenizer.json into a model directory."""
    tokenizer = byte_tokenizer(**options)
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """The bytes of a text as ids, without special tokens."""
    return tokenizer.encode(text, add_special_tokens=False).ids
