"""What a verl rollout configuration means to an engine, and what it cannot honour. No verl is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, cast

from trainers_adapters.frameworks.rollouts import seed_of
from trainers_adapters.rollout_calls import Sampling, sampling_message

NAME = "rollsync"
"""Of the rollout, the checkpoint engine, and the key of `engine_kwargs`."""

CONTROL = {"max_tokens", "max_new_tokens", "logprobs", "prompt_logprobs"}
"""Keys of verl's sampling_params that mean something else to the engine, or are looked at first."""


@dataclass(frozen=True)
class EngineKwargs:
    """`rollout.engine_kwargs.rollsync`.

    addresses: host:port of engines that run already, by replica; empty: each replica starts its own.
    token: of those engines. Engines that are started get one of their own where they need it.
    serve: flags of `rollsync serve` for engines that are started, for example {num_pages: 4096}.
    path: ipc, tensor, or auto (ipc where the engine is on the pushing process's host).
    staging, inflight: as push_weights takes them; staging none is refused.
    timeout_s: seconds that one call of a push may take. request_s: one generation. start_s: the start of an
        engine.
    """

    addresses: tuple[str, ...] = ()
    token: str = field(default="", repr=False)
    serve: Mapping[str, Any] = field(default_factory=dict)
    path: str = "auto"
    staging: str = "auto"
    inflight: str = "wait"
    timeout_s: float = 600.0
    request_s: float = 7200.0
    start_s: float = 300.0

    @classmethod
    def of(cls, config: Any) -> EngineKwargs:
        """From a RolloutConfig.

        Raises:
            ValueError: an unknown key.
        """
        given = dict((config.engine_kwargs or {}).get(NAME) or {})
        known = {one.name for one in fields(cls)}
        if unknown := sorted(given.keys() - known):
            raise ValueError(f"engine_kwargs.{NAME} has {unknown[0]!r}; it knows {', '.join(sorted(known))}")
        if "addresses" in given:
            given["addresses"] = tuple(given["addresses"])
        return cls(**given)


def check_config(config: Any, model_config: Any = None) -> None:
    """Raise ValueError for settings that an engine cannot honour, before anything is started.

    Args:
        config: a RolloutConfig. model_config: a HFModelConfig, where there is one.
    """
    EngineKwargs.of(config)
    wanted = {
        "tensor_model_parallel_size": 1,
        "data_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "expert_parallel_size": 1,
    }
    for name, value in wanted.items():
        if getattr(config, name) not in (None, value):
            raise ValueError(
                f"rollout.{name} is {getattr(config, name)}; a rollsync engine runs on one device: set 1, "
                f"and let verl make more replicas"
            )
    off = {
        "quantization": config.quantization,
        "qat.enable": bool(config.qat) and config.qat.get("enable", False),
        "enable_rollout_routing_replay": config.enable_rollout_routing_replay,
        "mtp.enable_rollout": config.mtp is not None and config.mtp.enable and config.mtp.enable_rollout,
        "disaggregation.enabled": config.disaggregation.enabled,
    }
    for name, is_on in off.items():
        if is_on:
            raise ValueError(f"rollout.{name} is set; a rollsync engine does not have it")
    if config.logprobs_mode not in (None, "processed_logprobs", "raw_logprobs"):
        raise ValueError(
            f"rollout.logprobs_mode is {config.logprobs_mode!r}; processed_logprobs and raw_logprobs exist"
        )
    lora = getattr(model_config, "lora", None) or {}
    rank = max(getattr(model_config, "lora_rank", 0) or 0, lora.get("rank", 0) or 0)
    if rank > 0 and not lora.get("merge", False):
        raise ValueError(
            "the model has LoRA adapters, which verl would send alone; set "
            "actor_rollout_ref.model.lora.merge=True, so that merged weights are pushed"
        )


def max_tokens_of(sampling_params: Mapping[str, Any], prompt_tokens: int, config: Any, context: int) -> int:
    """How many tokens a response may have.

    The request's own limit; without one, what is left of prompt_length + response_length, at most
    response_length. Never more than the context leaves.

    Raises:
        ValueError: the prompt fills the context.
    """
    room = context - prompt_tokens
    if room < 1:
        raise ValueError(f"the prompt has {prompt_tokens} tokens, and the context holds {context}")
    for name in ("max_tokens", "max_new_tokens"):
        if sampling_params.get(name) is not None:
            return max(1, min(int(sampling_params[name]), room))
    left = int(config.prompt_length + config.response_length) - prompt_tokens
    return max(1, min(int(config.response_length), left, room))


def sampling_of(sampling_params: Mapping[str, Any], config: Any, request_id: str) -> Sampling:
    """verl's sampling_params for the engine, without max_tokens.

    Under full_determinism verl's request ids are the same in every run, and each sample has its own; so they
    decide the draws, whichever replica a request goes to.

    Raises:
        ValueError: a parameter that the engine does not know.
    """
    if sampling_params.get("prompt_logprobs") is not None:
        raise ValueError("prompt_logprobs: a rollsync engine cannot be a teacher of verl's distillation")
    sampling: dict[str, Any] = {
        "repetition_penalty": getattr(config, "repetition_penalty", 1.0),
        "ignore_eos": config.ignore_eos,
        "logprobs": "raw" if config.logprobs_mode == "raw_logprobs" else "processed",
    }
    if config.full_determinism:
        sampling["seed"] = seed_of(f"{config.seed}/{request_id}", 0)
    known = Sampling.__annotations__.keys() - {"n", "logprobs", "top_logprobs", "prompt_logprobs"}
    for name, value in sampling_params.items():
        if name in CONTROL or value is None:
            continue
        if name == "n" and value == 1:
            continue
        if name not in known:
            raise ValueError(f"sampling_params has {name!r}, which the engine does not know")
        sampling[name] = max(0, value) if name == "top_k" else value  # -1 means all of them, as 0 does
    checked = cast(Sampling, sampling)
    sampling_message(checked)
    return checked


def serve_flags(config: Any, model_path: str, kwargs: EngineKwargs, *, on_gpu: bool) -> dict[str, Any]:
    """What `rollsync serve` is told: verl's settings, and over them engine_kwargs.rollsync.serve."""
    flags: dict[str, Any] = {"model": model_path, "dtype": config.dtype, "port": 0}
    if config.max_model_len:
        flags["context_length"] = config.max_model_len
    if on_gpu:
        flags["mem_fraction_static"] = config.gpu_memory_utilization
        flags["max_running_requests"] = min(config.max_num_seqs, 4096)
        flags["cuda_graphs"] = not config.enforce_eager
    flags["prefix_cache"] = config.enable_prefix_caching
    flags["chunked_prefill"] = config.enable_chunked_prefill
    return flags | {name.replace("-", "_"): value for name, value in kwargs.serve.items()}


def as_arguments(flags: Mapping[str, Any]) -> list[str]:
    """Flags as a command line."""
    words: list[str] = []
    for name, value in flags.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            for one in value:
                words += [f"--{option}", str(one)]
        else:
            words += [f"--{option}", str(value)]
    return words
