"""The names of verl that the adapter is built on, looked at before anything runs.

verl finds a rollout through a private dictionary and calls it by name, in other processes. A name that moved
would show as a hang, or as samples of stale weights; so each is checked here, and what is missing is an error
that names it and the versions.
"""

from __future__ import annotations

import importlib
import inspect
from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from typing import Any

KNOWN_GOOD = "verl==0.9.1"

SIGNATURES: dict[str, tuple[str, ...]] = {
    "verl.workers.rollout.base.get_rollout_class": ("rollout_name", "mode"),
    "verl.workers.rollout.base.BaseRollout.__init__": ("self", "config", "model_config", "device_mesh"),
    "verl.workers.rollout.base.BaseRollout.resume": ("self", "tags"),
    "verl.workers.rollout.base.BaseRollout.update_weights": ("self", "weights", "wire_format"),
    "verl.workers.rollout.base.BaseRollout.release": ("self",),
    "verl.workers.rollout.utils.ensure_async_iterator": ("iterable",),
    "verl.workers.rollout.replica.RolloutReplicaRegistry.register": ("name", "loader"),
    "verl.workers.rollout.replica.RolloutReplica.__init__": (
        "self",
        "replica_rank",
        "config",
        "model_config",
        "gpus_per_node",
        "is_reward_model",
        "is_teacher_model",
        "name_suffix",
    ),
    "verl.workers.rollout.replica.RolloutReplica.launch_servers": ("self",),
    "verl.workers.rollout.replica.RolloutReplica.abort_all_requests": ("self", "reject_request"),
    "verl.checkpoint_engine.base.CheckpointEngineRegistry.register": ("backend",),
    "verl.checkpoint_engine.base.CheckpointEngine.prepare": ("self",),
    "verl.checkpoint_engine.base.CheckpointEngine.build_topology": (
        "actor_wg_world_size",
        "rollout_world_size",
        "metadata",
    ),
    "verl.checkpoint_engine.base.CheckpointEngine.send_weights": ("self", "weights", "global_steps"),
    "verl.checkpoint_engine.base.CheckpointEngine.receive_weights": ("self", "global_steps"),
    "verl.checkpoint_engine.base.CheckpointEngineWorker.update_weights": ("self", "global_steps"),
}
"""Dotted names, and the parameters that each must have, in this order; more may follow."""

FIELDS: dict[str, tuple[str, ...]] = {
    "verl.workers.rollout.replica.TokenOutput": (
        "token_ids",
        "log_probs",
        "stop_reason",
        "num_preempted",
        "extra_fields",
    ),
    "verl.workers.config.RolloutConfig": (
        "checkpoint_engine",
        "data_parallel_size",
        "disaggregation",
        "dtype",
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "enable_rollout_routing_replay",
        "enforce_eager",
        "engine_kwargs",
        "expert_parallel_size",
        "free_cache_engine",
        "full_determinism",
        "gpu_memory_utilization",
        "ignore_eos",
        "logprobs_mode",
        "max_model_len",
        "max_num_seqs",
        "mtp",
        "pipeline_model_parallel_size",
        "prompt_length",
        "qat",
        "quantization",
        "response_length",
        "seed",
        "tensor_model_parallel_size",
    ),
}
"""Classes, and the fields that are read or filled."""

REGISTRY = "verl.workers.rollout.base._ROLLOUT_REGISTRY"
"""A dictionary from (name, mode) to a dotted class name."""

CALLED: dict[str, tuple[str, ...]] = {
    "verl.workers.rollout.llm_server.LLMServerClient.generate": (
        "generate",
        "request_id",
        "prompt_ids",
        "sampling_params",
        "image_data",
        "video_data",
    ),
    "verl.checkpoint_engine.base.CheckpointEngineWorker.update_weights": ("wire_format", "global_steps"),
}
"""Functions of verl, and what each must say in its code: names, or keywords that it calls us with."""


class IncompatibleVerl(RuntimeError):
    """The installed verl lacks a name that the adapter needs."""


@cache
def check_names() -> None:
    """Raise IncompatibleVerl if this verl is not what the adapter was written for."""
    missing = [what for name, wanted in SIGNATURES.items() if (what := _signature(name, wanted))]
    for name, wanted in FIELDS.items():
        found = _fields(_find(name))
        missing += [f"{name}.{one}" for one in wanted if one not in found]
    for name, wanted in CALLED.items():
        said = _words(_find(name))
        missing += [f"{name}: {one}" for one in wanted if one not in said]
    if not isinstance(_find(REGISTRY), dict):
        missing.append(REGISTRY)
    if missing:
        raise IncompatibleVerl(
            f"verl {_installed('verl')} lacks {', '.join(missing)}, which rollsync {_installed('rollsync')} "
            f"is built on; install {KNOWN_GOOD}"
        )


def _find(dotted: str) -> Any:
    """The object of that name, or None. verl may be half imported, so its modules are looked up by name."""
    parts = dotted.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError as error:
            if error.name is None or not dotted.startswith(error.name):
                raise
            continue
        for part in parts[length:]:
            found = getattr(found, part, None)
        return found
    return None


def _signature(name: str, wanted: tuple[str, ...]) -> str:
    """What is wrong with a function's parameters; "" if nothing is."""
    function = _find(name)
    found = tuple(inspect.signature(function).parameters) if callable(function) else ()
    return "" if found[: len(wanted)] == wanted else f"{name}({', '.join(wanted)})"


def _fields(kind: Any) -> set[str]:
    return set(getattr(kind, "model_fields", {})) | set(getattr(kind, "__dataclass_fields__", {}))


def _words(function: Any) -> set[str]:
    """Names and string constants of a function's code, and of what is nested in it."""
    code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
    words: set[str] = set()
    waiting = [code] if code is not None else []
    while waiting:
        one = waiting.pop()
        words.update(one.co_names)
        for constant in one.co_consts:
            if isinstance(constant, str):
                words.add(constant)
            elif isinstance(constant, tuple):
                words.update(word for word in constant if isinstance(word, str))
            elif inspect.iscode(constant):
                waiting.append(constant)
    return words


def _installed(package: str) -> str:
    try:
        return installed_version(package)
    except PackageNotFoundError:
        return "(not installed)"
