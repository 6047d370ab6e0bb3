"""PEFT models for tests of adapters, and pushes of theirs to an engine at a desk (tests/desk.py)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from tests.desk import Desk
from tests.tiny import load_reference
from tests.ways import Ways
from trainers_adapters import AdapterSource
from weight_updater.requests import UpdateReply

SEEDS = itertools.count(1)


def lora(**config: Any) -> LoraConfig:
    return LoraConfig(
        task_type="CAUSAL_LM", **{"r": 4, "lora_alpha": 6, "target_modules": "all-linear"} | config
    )


def adapted(directory: Path, **config: Any) -> PeftModel:
    """The model of `directory` with an adapter that has learned something; never the same twice."""
    model = get_peft_model(load_reference(directory), lora(**config)).eval()
    learn(model)
    return model


def learn(model: PeftModel) -> None:
    """As an optimizer step would: only the active adapter's matrices change."""
    generator = torch.Generator().manual_seed(next(SEEDS))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)


@torch.no_grad()
def greedy(model: Any, prompt: Sequence[int], num_tokens: int = 8) -> tuple[list[int], list[float]]:
    """Tokens and their log-probabilities by PEFT's own forward pass."""
    tokens, logprobs = list(prompt), []
    for _ in range(num_tokens):
        values = model(torch.tensor([tokens])).logits[0, -1].float().log_softmax(-1)
        tokens.append(int(values.argmax()))
        logprobs.append(float(values.max()))
    return tokens[len(prompt) :], logprobs


def push(desk: Desk, ways: Ways, source: AdapterSource, way: str = "ipc", **fields: Any) -> UpdateReply:
    """Begin, send and commit in one call, as push_weights does."""
    spec = source.spec(desk.runner.target.arena.layout)
    return ways.push(way, dict(source), **{"adapter": spec} | fields)
