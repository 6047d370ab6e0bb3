"""Read a directory of safetensors into the slots at start."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open

from rollout_engine.errors import EngineError, Reason
from weight_updater.arena import WeightTarget


@torch.no_grad()
def load_weights(target: WeightTarget, directory: Path) -> None:
    """Write every tensor of `directory` to its slot. Raises EngineError(MODEL_INVALID)."""
    missing = set(target.arena.slot_names)
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                if target.is_buffer(name):
                    continue
                if name not in target.arena.placements:
                    raise EngineError(Reason.MODEL_INVALID, f"{path} has {name}, which the model lacks")
                target.slot(name).copy_(file.get_tensor(name))
                missing.discard(target.arena.canonical(name))
    if missing:
        raise EngineError(
            Reason.MODEL_INVALID, f"{directory} lacks {len(missing)} tensors, first {min(missing)}"
        )
