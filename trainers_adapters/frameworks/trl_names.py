"""The names of TRL that attach relies on although TRL does not promise them; looked at before anything runs.

attach puts an object of ours where TRL keeps its vLLM backend. What TRL calls on it, and what it reads around
it, are private names: if one is missing or called otherwise, samples could be of stale weights without a
sign. So every one is checked here, and a missing one is an error that names it and the versions.
"""

from __future__ import annotations

import importlib
import inspect
from importlib.metadata import version as installed_version
from typing import Any

KNOWN_GOOD = "trl>=1.16,<1.17"

ATTRIBUTES = (
    "accelerator",
    "args",
    "eos_token_ids",
    "max_completion_length",
    "min_p",
    "model",
    "processing_class",
    "repetition_penalty",
    "state",
    "temperature",
    "top_k",
    "top_p",
    "use_vllm",
    "vllm_mode",
    "_metrics",
)
"""Of the trainer object: what is read, or set so that TRL takes its path of an outside backend."""

TURN_NAMES = (
    "use_vllm",
    "state",
    "global_step",
    "_last_loaded_step",
    "vllm_generation",
    "sync_weights",
    "generate",
)
"""What `_generate_single_turn` reads and calls: when weights are synced, and how tokens are asked for."""

TURN_KEYWORDS = ("prompts", "images", "num_generations", "profiler")
"""How it calls the backend's generate."""

REWARD_PARAMETERS = ["self", "inputs", "prompts", "completions", "completion_ids_list"]
"""Of `_calculate_rewards`, which is given each sample's weight_version."""


class IncompatibleTrl(RuntimeError):
    """The installed TRL lacks a private name that attach needs."""


def stock_class(trainer: Any) -> type:
    """GRPOTrainer or RLOOTrainer, whichever the trainer is.

    Raises:
        TypeError: it is neither.
    """
    trl = importlib.import_module("trl")
    for name in ("GRPOTrainer", "RLOOTrainer"):
        if isinstance(trainer, getattr(trl, name)):
            return getattr(trl, name)  # type: ignore[no-any-return]
    raise TypeError(
        f"attach takes a trl GRPOTrainer or RLOOTrainer, not {type(trainer).__module__}."
        f"{type(trainer).__name__}; AsyncGRPOTrainer takes a rollout_worker and a weight_transfer"
    )


def check_names(trainer: Any) -> None:
    """Raise IncompatibleTrl if this TRL is not what attach was written for."""
    stock = stock_class(trainer)
    missing = [f"{stock.__name__}.{name}" for name in ATTRIBUTES if not hasattr(trainer, name)]
    if stock.__name__ == "GRPOTrainer":
        extra = ("rollout_func", "vllm_importance_sampling_correction")
        missing += [f"GRPOTrainer.{name}" for name in extra if not hasattr(trainer, name)]
    missing += _in_turn(stock) + _in_rewards(stock)
    if missing:
        raise IncompatibleTrl(
            f"trl {installed_version('trl')} lacks {', '.join(missing)}, which rollsync "
            f"{installed_version('rollsync')} attaches to; install {KNOWN_GOOD}"
            + " or, for GRPO, use make_rollout_func, which needs no private name"
            * (stock.__name__[0] == "G")
        )


def _in_turn(stock: type) -> list[str]:
    name = f"{stock.__name__}._generate_single_turn"
    turn = inspect.unwrap(getattr(stock, "_generate_single_turn", None) or _absent)
    if turn is _absent:
        return [name]
    code = turn.__code__
    missing = [f"{name}: {used}" for used in TURN_NAMES if used not in code.co_names]
    if TURN_KEYWORDS not in code.co_consts:
        missing.append(f"{name}: vllm_generation.generate({', '.join(f'{word}=' for word in TURN_KEYWORDS)})")
    return missing


def _in_rewards(stock: type) -> list[str]:
    rewards = inspect.unwrap(getattr(stock, "_calculate_rewards", None) or _absent)
    if rewards is not _absent and list(inspect.signature(rewards).parameters) == REWARD_PARAMETERS:
        return []
    return [f"{stock.__name__}._calculate_rewards({', '.join(REWARD_PARAMETERS)})"]


def _absent() -> None:
    """Stands for a method that is not there."""
