"""verl: its rollouts are sampled by rollsync engines. Needs `pip install rollsync[verl]`.

    python -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=rollsync ...

verl finds this module by itself (entry point `verl.plugins`), in the driver and in every worker. Each replica
starts an engine of its own, or takes one that runs; see docs/verl.md.

Registered are the rollout `rollsync` (ServerAdapter, in the trainer's processes), its replica (one engine and
one server actor) and the checkpoint engine `rollsync`, for trainers on other GPUs than the rollout's.
"""

from __future__ import annotations

import importlib
from typing import Any

from trainers_adapters.frameworks.verl_names import IncompatibleVerl, check_names
from trainers_adapters.frameworks.verl_settings import NAME

__all__ = ["IncompatibleVerl", "register"]

HERE = "trainers_adapters.frameworks"


def register() -> None:
    """Make verl know the rollout, the replica and the checkpoint engine. Harmless twice.

    Raises:
        IncompatibleVerl: the installed verl lacks a name that these are built on.
    """
    check_names()
    base = importlib.import_module("verl.workers.rollout.base")
    replica = importlib.import_module("verl.workers.rollout.replica")
    checkpoints = importlib.import_module("verl.checkpoint_engine.base")
    ours = importlib.import_module(f"{HERE}.verl_parts.checkpoint")
    base._ROLLOUT_REGISTRY[NAME, "async"] = f"{HERE}.verl_parts.rollout.ServerAdapter"
    replica.RolloutReplicaRegistry.register(NAME, _replica)
    checkpoints.CheckpointEngineRegistry.register(NAME)(ours.RollsyncCheckpointEngine)


def _replica() -> Any:
    """The class of a replica, loaded when verl first makes one."""
    return importlib.import_module(f"{HERE}.verl_parts.replica").RollsyncReplica
