"""verl's settings for an engine; verl itself is not needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trainers_adapters.frameworks.verl_settings import (
    EngineKwargs,
    as_arguments,
    check_config,
    max_tokens_of,
    sampling_of,
    serve_flags,
)


def config(**changes: Any) -> SimpleNamespace:
    """As RolloutConfig has it."""
    return SimpleNamespace(
        **{
            "engine_kwargs": {},
            "tensor_model_parallel_size": 1,
            "data_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
            "expert_parallel_size": 1,
            "quantization": None,
            "qat": {"enable": False, "mode": "w4a16"},
            "enable_rollout_routing_replay": False,
            "mtp": SimpleNamespace(enable=False, enable_rollout=False),
            "disaggregation": SimpleNamespace(enabled=False),
            "logprobs_mode": "processed_logprobs",
            "full_determinism": False,
            "seed": 40,
            "ignore_eos": False,
            "repetition_penalty": 1.0,
            "prompt_length": 100,
            "response_length": 50,
            "dtype": "bfloat16",
            "max_model_len": None,
            "max_num_seqs": 5000,
            "gpu_memory_utilization": 0.5,
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "enable_chunked_prefill": False,
        }
        | changes
    )


def test_sampling_means_the_same_to_the_engine():
    params = {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "repetition_penalty": 1.1, "logprobs": True}
    assert sampling_of(params, config(), "r") == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 0,
        "repetition_penalty": 1.1,
        "ignore_eos": False,
        "logprobs": "processed",
    }
    own = sampling_of({"top_k": 5, "n": 1, "seed": None}, config(ignore_eos=True), "r")
    assert (own["top_k"], own["ignore_eos"], "seed" in own) == (5, True, False)
    assert sampling_of({}, config(logprobs_mode="raw_logprobs"), "r")["logprobs"] == "raw"


def test_under_full_determinism_each_request_draws_by_its_id():
    def seed(request_id: str, **params: int) -> int:
        return sampling_of(params, config(full_determinism=True), request_id)["seed"]

    assert seed("det-1") == seed("det-1")
    assert len({seed(f"det-{number}") for number in range(100)}) == 100
    assert seed("det-1", seed=7) == 7


@pytest.mark.parametrize("params", [{"n": 2}, {"best_of": 3}, {"prompt_logprobs": 1}, {"top_logprobs": 2}])
def test_parameters_that_the_engine_does_not_know_are_named(params):
    with pytest.raises(ValueError, match=next(iter(params))):
        sampling_of(params, config(), "r")


@pytest.mark.parametrize(
    ("params", "prompt_tokens", "context", "expected"),
    [
        ({"max_tokens": 7}, 10, 200, 7),
        ({"max_new_tokens": 9}, 10, 200, 9),
        ({"max_tokens": 300}, 10, 200, 190),
        ({"max_tokens": 0}, 10, 200, 1),
        ({}, 10, 200, 50),
        ({}, 120, 200, 30),
        ({}, 160, 200, 1),
        ({}, 140, 145, 5),
    ],
)
def test_a_response_is_as_long_as_the_request_or_the_lengths_say(params, prompt_tokens, context, expected):
    assert max_tokens_of(params, prompt_tokens, config(), context) == expected


def test_a_prompt_that_fills_the_context_is_refused():
    with pytest.raises(ValueError, match="the prompt has 200 tokens, and the context holds 200"):
        max_tokens_of({}, 200, config(), 200)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tensor_model_parallel_size": 2}, "tensor_model_parallel_size is 2; a rollsync engine runs on one"),
        ({"pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size is 2"),
        ({"qat": {"enable": True}}, "qat.enable is set"),
        ({"quantization": "fp8"}, "rollout.quantization is set"),
        ({"enable_rollout_routing_replay": True}, "enable_rollout_routing_replay is set"),
        ({"mtp": SimpleNamespace(enable=True, enable_rollout=True)}, "mtp.enable_rollout is set"),
        ({"logprobs_mode": "raw_logits"}, "logprobs_mode is 'raw_logits'"),
        ({"engine_kwargs": {"rollsync": {"adresses": []}}}, "has 'adresses'; it knows addresses, inflight"),
    ],
)
def test_settings_that_the_engine_cannot_honour_are_named(changes, said):
    with pytest.raises(ValueError, match=said):
        check_config(config(**changes))


def test_adapters_must_be_merged():
    check_config(config(), SimpleNamespace(lora={"rank": 8, "merge": True}, lora_rank=0))
    check_config(config(), SimpleNamespace(lora={}, lora_rank=0))
    for model in (SimpleNamespace(lora={}, lora_rank=8), SimpleNamespace(lora={"rank": 8}, lora_rank=0)):
        with pytest.raises(ValueError, match=r"model\.lora\.merge=True"):
            check_config(config(), model)


def test_an_engine_is_started_as_verl_says_and_engine_kwargs_say_last():
    own = {"rollsync": {"serve": {"num_pages": 64, "prefix-cache": False, "weights_root": ["/a", "/b"]}}}
    flags = serve_flags(config(), "/model", EngineKwargs.of(config(engine_kwargs=own)), on_gpu=True)
    assert flags == {
        "model": "/model",
        "dtype": "bfloat16",
        "port": 0,
        "mem_fraction_static": 0.5,
        "max_running_requests": 4096,
        "cuda_graphs": False,
        "prefix_cache": False,
        "chunked_prefill": False,
        "num_pages": 64,
        "weights_root": ["/a", "/b"],
    }
    on_cpu = serve_flags(config(max_model_len=300), "/model", EngineKwargs(), on_gpu=False)
    assert on_cpu["context_length"] == 300
    assert "mem_fraction_static" not in on_cpu
    assert as_arguments(
        {"num_pages": 64, "prefix_cache": False, "overlap": True, "weights_root": ["/a", "/b"]}
    ) == [
        *("--num-pages", "64", "--no-prefix-cache", "--overlap"),
        *("--weights-root", "/a", "--weights-root", "/b"),
    ]
