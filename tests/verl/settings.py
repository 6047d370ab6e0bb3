"""verl's configuration for a CPU: what the tests set over verl's own defaults."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

ON_CPU = (
    "trainer.device=cpu",
    "actor_rollout_ref.model.use_remove_padding=False",
    "+actor_rollout_ref.model.override_config.attn_implementation=eager",
    "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    "actor_rollout_ref.actor.use_torch_compile=False",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=fp32",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype=fp32",
    "actor_rollout_ref.rollout.dtype=float32",
    "+actor_rollout_ref.rollout.engine_kwargs.rollsync.serve.num_pages=256",
    "+actor_rollout_ref.rollout.engine_kwargs.rollsync.serve.num_threads=1",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "data.dataloader_num_workers=0",
    "reward.num_workers=1",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
)
"""float32 everywhere, so that log-probabilities can be compared; nothing that needs a GPU; few processes."""

ROLLOUT = (
    "actor_rollout_ref.rollout.name=rollsync",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.prompt_length=160",
    "actor_rollout_ref.rollout.response_length=32",
    "actor_rollout_ref.rollout.nnodes=1",
)


def compose(model: Path, *more: str, base: Sequence[str] = ON_CPU + ROLLOUT) -> Any:
    """verl's whole configuration, as its trainer reads it."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return hydra_compose("ppo_trainer", overrides=[*base, f"actor_rollout_ref.model.path={model}", *more])
