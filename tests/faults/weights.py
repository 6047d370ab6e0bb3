"""The model of the rounds, and the weights that a seed stands for: the same in every process."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from trainers_adapters import ModuleSource

PROMPT = [5, 9, 77, 31, 8, 120, 64, 3] * 5
NUM_GREEDY = 8


def load_model(directory: Path) -> torch.nn.Module:
    """The saved model of transformers, built without the threads that its own loader uses."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    missing, unexpected = model.load_state_dict(load_file(directory / "model.safetensors"), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model.requires_grad_(False)


def weights_of(base: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """New weights near enough to the base that the logits stay finite; seed 0 is the base itself."""
    if not seed:
        return dict(base)
    generator = torch.Generator().manual_seed(seed)
    return {name: t + torch.randn(t.shape, generator=generator) * 0.05 for name, t in base.items()}


def base_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in ModuleSource(model)}


def write_into(model: torch.nn.Module, named: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in ModuleSource(model):
            tensor.copy_(named[name])


def greedy_tokens(model: torch.nn.Module) -> list[int]:
    """The first greedy tokens after PROMPT by the model of transformers."""
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(NUM_GREEDY):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]
