"""What a TRL trainer's settings mean to an engine: prompts, sampling, weights; and what it cannot honour."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from trainers_adapters.errors import RollsyncError
from trainers_adapters.results import EngineInfo
from trainers_adapters.rollout_calls import Sampling, sampling_message
from trainers_adapters.sharding.source import ShardedSource
from trainers_adapters.sources import Source, source_of

OURS = {"n", "logprobs", "top_logprobs", "prompt_logprobs"}
"""Sampling options that generation_kwargs may not set."""


class Weights:
    """The trainer's weights as they are when it is called; LoRA adapters are merged on the way out.

    Where the trainer shards them (FSDP, ZeRO-3), every rank has to call, and to take part in the push.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._sharded: tuple[Any, ShardedSource] | None = None  # the module and its source

    def __call__(self) -> Source | ShardedSource:
        trainer = self._trainer
        if not _shards(trainer.accelerator.state):
            return source_of(trainer.accelerator.unwrap_model(trainer.model))
        module = trainer.model_wrapped
        if self._sharded is None or self._sharded[0] is not module:
            self._sharded = module, ShardedSource(module)
        return self._sharded[1]


def _shards(state: Any) -> bool:
    """Whether accelerate's state says that no rank has all parameters."""
    zero_3 = state.deepspeed_plugin is not None and state.deepspeed_plugin.zero_stage == 3
    return zero_3 or getattr(state, "fsdp_plugin", None) is not None


def prompt_token_ids(tokenizer: Any, prompts: list[Any], **template: Any) -> list[list[int]]:
    """Token ids of texts, or of message lists by the tokenizer's chat template, as TRL itself makes them.

    Args:
        template: what apply_chat_template is given besides.
    """
    if isinstance(prompts[0], str):
        return [list(ids) for ids in tokenizer(text=prompts)["input_ids"]]
    for prompt in prompts:
        for message in prompt:
            content = message["content"]
            if isinstance(content, list) and any(part.get("type") != "text" for part in content):
                raise ValueError("a prompt holds parts that are no text; a rollsync engine samples from text")
    encoded = tokenizer.apply_chat_template(
        conversation=prompts, add_generation_prompt=True, tokenize=True, return_dict=True, **template
    )
    return [list(ids) for ids in encoded["input_ids"]]


def sampling_of(trainer: Any) -> Sampling:
    """The trainer's sampling settings for the engine; n and, unless it is set, seed are left out.

    Every EOS id of the trainer ends a completion, and no other id does, so that TRL and the engine agree
    on which completions were cut off.

    Raises:
        ValueError: generation_kwargs that the engine does not know.
    """
    sampling: dict[str, Any] = {
        "max_tokens": trainer.max_completion_length,
        "temperature": trainer.temperature,
        "top_p": trainer.top_p,
        "top_k": trainer.top_k,
        "min_p": trainer.min_p or 0.0,
        "repetition_penalty": trainer.repetition_penalty,
        "logprobs": "processed",
        "ignore_eos": True,
        "stop_token_ids": list(trainer.eos_token_ids),
    }
    extra: Mapping[str, Any] = trainer.args.generation_kwargs or {}
    allowed = Sampling.__annotations__.keys() - OURS
    for name, value in extra.items():
        if name not in allowed:
            raise ValueError(
                f"generation_kwargs has {name!r}, which the engine does not know; it knows "
                f"{', '.join(sorted(allowed))}"
            )
        if name == "stop_token_ids":
            sampling[name] = [*sampling[name], *value]
        elif name == "ignore_eos":
            sampling["stop_token_ids"] = [] if value else sampling["stop_token_ids"]
        else:
            sampling[name] = value
    checked = cast(Sampling, sampling)
    sampling_message(checked)
    return checked


def check_trainer(trainer: Any, timeout_s: float) -> None:
    """Raise ValueError for settings that an engine cannot honour, before anything is trained."""
    sampling_of(trainer)
    args = trainer.args
    if getattr(args, "vllm_structured_outputs_regex", None) is not None:
        raise ValueError("vllm_structured_outputs_regex is set; the engine samples without a grammar")
    if trainer.accelerator.num_processes > 1 and timeout_s >= args.ddp_timeout:
        raise ValueError(
            f"timeout_s is {timeout_s:g}, but ranks wait for each other only {args.ddp_timeout} s "
            f"(ddp_timeout); lower the one or raise the other"
        )
    if trainer.accelerator.num_processes > 1 and getattr(trainer, "tools", None):
        raise ValueError(
            "with tools, ranks make turns of their own, but rank 0 samples for all; use one process"
        )
    correction = getattr(trainer, "vllm_importance_sampling_correction", False)
    mode = getattr(trainer, "vllm_importance_sampling_mode", "")
    if getattr(trainer, "loss_type", "") == "vespo" and correction and not mode.startswith("token_"):
        raise ValueError(
            f"the vespo loss corrects token by token; vllm_importance_sampling_mode is {mode!r}, set "
            f"token_truncate or token_mask"
        )


def check_engine(info: EngineInfo, trainer: Any) -> None:
    """Raise RollsyncError if the engine cannot hold this trainer's model or ends its completions."""
    config = trainer.model.config.get_text_config()
    if info.vocab_size != config.vocab_size:
        raise RollsyncError(
            "FAILED_PRECONDITION",
            "OTHER_MODEL",
            f"the engine serves {info.architecture} with {info.vocab_size} tokens from {info.model_path}, "
            f"the trainer's {type(trainer.model).__name__} has {config.vocab_size}; serve the same model",
        )
    if info.context_length <= trainer.max_completion_length:
        raise RollsyncError(
            "FAILED_PRECONDITION",
            "CONTEXT_TOO_SHORT",
            f"max_completion_length is {trainer.max_completion_length}, but the engine's context holds "
            f"{info.context_length} tokens, prompt included",
        )
