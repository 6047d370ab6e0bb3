"""What a TRL trainer's settings become, with a hand-written trainer; TRL itself is in tests/trl."""

from __future__ import annotations

from types import SimpleNamespace as Object
from typing import Any

import pytest
import torch

from trainers_adapters import ModuleSource, RollsyncError, ShardedSource
from trainers_adapters.frameworks.trl_settings import (
    Weights,
    check_engine,
    check_trainer,
    prompt_token_ids,
    sampling_of,
)


def make_trainer(**changes: Any) -> Any:
    args = {"generation_kwargs": None, "ddp_timeout": 1800} | changes.pop("args", {})
    state = Object(fsdp_plugin=None, deepspeed_plugin=None)
    return Object(
        **{
            "max_completion_length": 16,
            "temperature": 0.9,
            "top_p": 0.95,
            "top_k": 0,
            "min_p": None,
            "repetition_penalty": 1.0,
            "eos_token_ids": [2, 7],
            "args": Object(**args),
            "accelerator": Object(state=state, num_processes=1),
            **changes,
        }
    )


def test_sampling_is_the_trainers_and_its_eos_alone_ends_a_completion():
    assert sampling_of(make_trainer()) == {
        "max_tokens": 16,
        "temperature": 0.9,
        "top_p": 0.95,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": "processed",
        "ignore_eos": True,
        "stop_token_ids": [2, 7],
    }


def test_generation_kwargs_come_over_the_settings():
    kwargs = {"temperature": 0.5, "stop_token_ids": [9], "seed": 4, "presence_penalty": 0.1}
    sampling = sampling_of(make_trainer(args={"generation_kwargs": kwargs}))
    assert {name: sampling[name] for name in kwargs} == {**kwargs, "stop_token_ids": [2, 7, 9]}
    endless = {"ignore_eos": True, "stop_token_ids": [9]}
    assert sampling_of(make_trainer(args={"generation_kwargs": endless}))["stop_token_ids"] == [9]


@pytest.mark.parametrize("name", ["max_new_tokens", "n", "logprobs"])
def test_generation_kwargs_that_cannot_be_honoured_are_named(name):
    trainer = make_trainer(args={"generation_kwargs": {name: 1}})
    with pytest.raises(ValueError, match=f"generation_kwargs has '{name}', which the engine does not know"):
        check_trainer(trainer, 600.0)


def refused(match: str, timeout_s: float = 600.0, **changes: Any) -> None:
    with pytest.raises(ValueError, match=match):
        check_trainer(make_trainer(**changes), timeout_s)


def test_settings_that_an_engine_cannot_honour_are_refused():
    refused("vllm_structured_outputs_regex is set", args={"vllm_structured_outputs_regex": "a+"})
    ranks = Object(state=make_trainer().accelerator.state, num_processes=2)
    refused(r"timeout_s is 1800, but ranks wait .* only 1800 s", 1800.0, accelerator=ranks)
    check_trainer(make_trainer(accelerator=ranks), 600.0)
    refused("with tools, ranks make turns of their own", accelerator=ranks, tools=[print])
    check_trainer(make_trainer(tools=[print]), 600.0)
    vespo = {"loss_type": "vespo", "vllm_importance_sampling_correction": True}
    refused("vespo loss corrects token by token", vllm_importance_sampling_mode="sequence_mask", **vespo)
    check_trainer(make_trainer(vllm_importance_sampling_mode="token_mask", **vespo), 600.0)


@pytest.mark.parametrize(
    ("fsdp", "stage", "kind"),
    [
        (None, None, ModuleSource),
        (None, 2, ModuleSource),
        ("plugin", None, ShardedSource),
        (None, 3, ShardedSource),
    ],
)
def test_weights_come_from_shards_where_no_rank_has_them_whole(fsdp, stage, kind):
    deepspeed = None if stage is None else Object(zero_stage=stage)
    state = Object(fsdp_plugin=fsdp, deepspeed_plugin=deepspeed)
    model, wrapped = torch.nn.Linear(2, 3), torch.nn.Linear(4, 5)
    accelerator = Object(state=state, unwrap_model=lambda module: module, num_processes=1)
    trainer = make_trainer(accelerator=accelerator, model=model, model_wrapped=wrapped)
    check_trainer(trainer, 600.0)
    weights = Weights(trainer)
    source = weights()
    assert type(source) is kind
    shapes = [spec.shape for spec in source.manifest(checksums=False).tensors]
    assert shapes == ([(5, 4), (5,)] if kind is ShardedSource else [(3, 2), (3,)])
    assert (weights() is source) == (kind is ShardedSource)  # its ranks have met


def engine_refused(match: str, vocab_size: int, context_length: int) -> None:
    config = Object(get_text_config=lambda: Object(vocab_size=100))
    trainer = make_trainer(model=Object(config=config))
    info = Object(
        vocab_size=vocab_size, context_length=context_length, architecture="Llama", model_path="/models/x"
    )
    with pytest.raises(RollsyncError, match=match):
        check_engine(info, trainer)  # type: ignore[arg-type]


def test_an_engine_of_another_model_is_refused():
    engine_refused(r"OTHER_MODEL: the engine serves Llama with 99 tokens from /models/x", 99, 512)
    engine_refused(r"CONTEXT_TOO_SHORT: max_completion_length is 16, .* holds 16 tokens", 100, 16)


class Tokenizer:
    """Each character is a token; a chat is its contents after a 0, and the template's extras."""

    def __call__(self, text: list[str]) -> dict[str, Any]:
        return {"input_ids": [[ord(character) for character in one] for one in text]}

    def apply_chat_template(self, conversation: Any, **given: Any) -> dict[str, Any]:
        assert (given["add_generation_prompt"], given["tokenize"], given["return_dict"]) == (True, True, True)
        texts = ["".join(message["content"] for message in chat) for chat in conversation]
        return {"input_ids": [[0, *map(ord, text), *given.get("extra", ())] for text in texts]}


def test_prompts_are_texts_or_chats_but_no_images():
    assert prompt_token_ids(Tokenizer(), ["ab", "c"]) == [[97, 98], [99]]
    chat = [{"role": "user", "content": "ab"}]
    assert prompt_token_ids(Tokenizer(), [chat], extra=(5,)) == [[0, 97, 98, 5]]
    with pytest.raises(ValueError, match="holds parts that are no text"):
        prompt_token_ids(Tokenizer(), [[{"role": "user", "content": [{"type": "image", "image": 1}]}]])
