"""The adapters of the rounds: a PEFT model whose base weights and adapter follow from two seeds, and what an
engine's bank must hold of it.
"""

from __future__ import annotations

from pathlib import Path

import torch

from tests.faults.weights import greedy_tokens, load_model, weights_of
from trainers_adapters import AdapterSource, ModuleSource
from weight_updater.checksum import checksum

MAX_RANK = 4
"""Of an engine's bank."""
FORMS = ("whole", "small")
"""Of a rank and layers of their own each, so that what a slot held before would show in it."""

Lies = dict[str, tuple[int, int, float]]
"""Layer -> checksums of the stacked A and B in a slot, all of their rows, and the scaling."""


class Adapted:
    """A model of which `become` makes any base weights with any adapter over them."""

    def __init__(self, directory: Path) -> None:
        from peft import LoraConfig, get_peft_model

        plain = load_model(directory)
        self._live = dict(ModuleSource(plain))  # its own parameters, which PEFT leaves where they are
        self._base = {name: tensor.clone() for name, tensor in self._live.items()}
        whole = LoraConfig(
            task_type="CAUSAL_LM",
            r=MAX_RANK,
            lora_alpha=6,
            target_modules="all-linear",
            rank_pattern={"q_proj": 3},
        )
        small = LoraConfig(
            task_type="CAUSAL_LM", r=2, lora_alpha=5, target_modules=["q_proj", "v_proj", "o_proj"]
        )
        self._model = get_peft_model(plain, whole, adapter_name="whole").eval()
        self._model.add_adapter("small", small)
        self._model.requires_grad_(False)

    def become(self, base_seed: int, seed: int) -> None:
        """Base weights of one seed, as weights_of has them; an adapter of another."""
        form = FORMS[seed % 3 == 0]
        self._model.set_adapter(form)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, tensor in weights_of(self._base, base_seed).items():
                self._live[name].copy_(tensor)
            for name, parameter in self._model.named_parameters():
                if f".{form}." in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        self._model.requires_grad_(False)  # set_adapter made the active one trainable

    def source(self, name: str, kind: type[AdapterSource] = AdapterSource) -> AdapterSource:
        """What was become last, to be pushed as `name`."""
        return kind(self._model, name)

    def tokens(self) -> list[int]:
        """The first greedy tokens by PEFT's own forward pass."""
        return greedy_tokens(self._model)

    def lies(self) -> Lies:
        """What a slot must hold, with zeros in all that the adapter leaves out."""
        source = self.source("any")
        tensors = dict(source)
        scalings = {layer.module: layer.scaling for layer in source._walk().layers}
        found = {}
        for name, weight in self._live.items():
            if not name.endswith("_proj.weight"):
                continue
            layer = name.removesuffix(".weight")
            a, b = torch.zeros(MAX_RANK, weight.shape[1]), torch.zeros(MAX_RANK, weight.shape[0])
            if layer in scalings:
                rank = len(tensors[f"{layer}.lora_A.weight"])
                a[:rank] = tensors[f"{layer}.lora_A.weight"]
                b[:rank] = tensors[f"{layer}.lora_B.weight"].t()
            found[layer] = checksum(a), checksum(b), round(scalings.get(layer, 0.0), 5)
        return found
