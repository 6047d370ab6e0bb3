"""From a model's modules to an arena of slots: which Hugging Face name is written where."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rollout_engine.models.config import ModelConfig
from rollout_engine.models.layers import FusedLinear, RMSNorm
from rollout_engine.models.registry import MODELS, model_class
from weight_updater.arena import Arena, SlotSpec, StorageSpec, WeightTarget
from weight_updater.requests import Layout

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def is_buffer(name: str) -> bool:
    """True for names that old checkpoints and trainers send, but that the engine computes itself."""
    return name.split(".")[-2:] == ["rotary_emb", "inv_freq"]


def model_layout(directory: str | Path, dtype: str = "auto") -> Layout:
    """Where every tensor of a model lies in an engine's arena; from the directory's config.json alone.

    Raises:
        ConfigError, EngineError(MODEL_INVALID): no model that can be served.
    """
    config = ModelConfig.from_directory(Path(directory), known=tuple(MODELS), dtype=dtype)
    with torch.device("meta"):
        model: Any = model_class(config.architecture)(config)
    return _arena(model, config).layout


def _arena(model: nn.Module, config: ModelConfig) -> Arena:
    storages = _as_transformers_orders([storage for _, _, storage in _storages(model, config.dtype)])
    return Arena(storages, {HEAD: EMBEDDING} if config.tie else {})


def build_model(
    config: ModelConfig, device: torch.device, home: Callable[[Arena], torch.Tensor] | None = None
) -> tuple[Any, WeightTarget]:
    """The model of `config` with its weights in one arena on `device`, and its slots.

    Call it outside inference mode: parameters born inside could never be updated outside.

    Args:
        home: gives the memory that holds the weights already; None allocates it, zeroed.
    """
    assert not torch.is_inference_mode_enabled(), "a model built in inference mode cannot be updated"
    with torch.device("meta"):
        model: Any = model_class(config.architecture)(config)
    arena = _arena(model, config)
    parameters, places = _give_homes(model, config.dtype, device)
    buffer = None if home is None else home(arena)

    def rebound() -> list[str]:
        return [f"{path}.{leaf}" for path, module, leaf, own in places if getattr(module, leaf) is not own]

    target = WeightTarget(arena, parameters, device, is_buffer, model.finalise, buffer, rebound)
    target.finalise()
    return model, target


def _storages(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[nn.Module, str, StorageSpec]]:
    """(owner, attribute, storage) of every parameter once, in the order of the model."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        for leaf, param in module.named_parameters(recurse=False):
            if id(param) in seen:
                continue
            seen.add(id(param))
            key, shape = f"{path}.{leaf}", tuple(param.shape)
            slots: tuple[SlotSpec, ...] = (SlotSpec(key, shape),)
            if isinstance(module, FusedLinear):
                parent = path.rpartition(".")[0]
                slots = tuple(
                    SlotSpec(f"{parent}.{part}.{leaf}", (rows, *shape[1:])) for part, rows in module.parts
                )
            yield module, leaf, StorageSpec(key, dtype, shape, slots)


def _as_transformers_orders(storages: Sequence[StorageSpec]) -> list[StorageSpec]:
    """A layer's norms last, as its module in transformers has them.

    Trainers send in that order, so a bucket of theirs lies in the arena as it comes, and needs no copy.
    """

    def layer(storage: StorageSpec) -> str:
        head, found, rest = storage.key.partition(".layers.")
        return f"{head}{found}{rest.partition('.')[0]}" if found else storage.key

    ordered: list[StorageSpec] = []
    for _, members in groupby(storages, layer):
        ordered += sorted(members, key=lambda storage: storage.key.endswith("layernorm.weight"))
    return ordered


Place = tuple[str, nn.Module, str, nn.Parameter]
"""(path, module, attribute, parameter): where a model has which parameter; a tied one has several."""


def _give_homes(
    model: nn.Module, dtype: torch.dtype, device: torch.device
) -> tuple[dict[str, nn.Parameter], list[Place]]:
    """Replace meta parameters and buffers by ones on `device`: storage key -> parameter, and every place.

    The parameters are empty: an arena binds them. (A meta parameter cannot be rebound to real memory.)
    Ties are kept: one parameter object stays one.
    """
    homes: dict[int, nn.Parameter] = {}
    parameters: dict[str, nn.Parameter] = {}
    places: list[Place] = []
    for path, module in model.named_modules():
        for leaf, param in list(module.named_parameters(recurse=False)):
            if id(param) not in homes:
                home = nn.Parameter(torch.empty(0, dtype=dtype, device=device), requires_grad=False)
                homes[id(param)] = home
                parameters[f"{path}.{leaf}"] = home
            setattr(module, leaf, homes[id(param)])
            places.append((path, module, leaf, homes[id(param)]))
        for leaf, buffer in list(module.named_buffers(recurse=False)):
            empty = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
            module.register_buffer(leaf, empty, persistent=False)
    return parameters, places


@torch.no_grad()
def fill_random(model: nn.Module, target: WeightTarget, seed: int) -> None:
    """Draw every weight from normal(0, 0.02) of `seed`; norms are 1, biases 0."""
    generator = torch.Generator(device=target.device).manual_seed(seed)
    for module, leaf, storage in _storages(model, torch.float32):
        for slot in storage.slots:
            if isinstance(module, RMSNorm):
                target.slot(slot.name).fill_(1.0)
            elif leaf == "bias":
                target.slot(slot.name).zero_()
            else:
                target.slot(slot.name).normal_(0.0, 0.02, generator=generator)
    target.finalise()
