"""What five trainers send to an engine over HTTP, field by field, and what they read from the answers.

From the sources of slime, miles, AReaL, SkyRL and prime-rl (with verifiers and renderers, which send for it)
of August 2026. docs/http.md has the same calls for people, and a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Read = Callable[[Any], object]

PROMPT = [5, 6, 7, 8, 9]
SPECIAL_IDS = {0, 1, 2, 3}
"""Of the tests' tokenizer: they have no text."""
SERVED, ELSEWHERE = "yes", "other way"
"""`here` of the table in docs/http.md."""


@dataclass(frozen=True)
class TrainerCall:
    """One call. body: None makes it a GET. read: raises if the answer lacks what the trainer reads of it.

    DIRECTORY and ADAPTER in a body stand for directories of weights and of an adapter below the root.
    """

    trainer: str
    call: str
    body: Any = None
    here: str = SERVED
    read: Read = lambda answer: None

    @property
    def path(self) -> str:
        return self.call.split(" ")[1]


DIRECTORY, ADAPTER, VERSION = "<directory>", "<adapter>", "<version>"


def reads_sglang_tokens(answer: Any) -> None:
    """Ids and log-probabilities, the text that is rewarded, why it ended, which weights."""
    meta = answer["meta_info"]
    rows = meta["output_token_logprobs"]
    assert [row[1] for row in rows] == answer["output_ids"]
    assert all(row[0] <= 0 for row in rows)
    assert answer["text"] or set(answer["output_ids"]) <= SPECIAL_IDS
    assert meta["finish_reason"]["type"] in ("stop", "length", "abort")
    assert meta["weight_version"].isdecimal()
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(PROMPT), len(rows))
    assert meta["cached_tokens"] >= 0


def reads_sglang_scores(answer: Any) -> None:
    rows = answer["meta_info"]["input_token_logprobs"]
    assert [row[1] for row in rows] == PROMPT
    assert rows[0][0] is None
    assert all(row[0] < 0 for row in rows[1:])


def reads_sglang_score_tail(answers: Any) -> None:
    """Of two prompts, from the token before the last two on."""
    for answer in answers:
        rows = answer["meta_info"]["input_token_logprobs"]
        assert [row[1] for row in rows[-2:]] == PROMPT[-2:]
        assert all(row[0] is not None for row in rows[-2:])


def reads_vllm_tokens(answer: Any) -> None:
    choice = answer["choices"][0]
    content = choice["logprobs"]["content"]
    assert [one["token"] for one in content] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert all(one["logprob"] <= 0 for one in content)
    assert choice["finish_reason"] in ("stop", "length")
    assert answer["request_id"]


def reads_vllm_top(answer: Any) -> None:
    reads_vllm_tokens(answer)
    assert all(one["top_logprobs"] for one in answer["choices"][0]["logprobs"]["content"])


def reads_vllm_scores(answer: Any) -> None:
    first, *others = answer["prompt_logprobs"]
    assert first is None
    assert [list(one) for one in others] == [[str(token)] for token in PROMPT[1:]]
    assert all(value["logprob"] < 0 for one in others for value in one.values())


def reads_vllm_completion(answer: Any) -> None:
    choice = answer["choices"][0]
    ids = [int(token.split(":")[1]) for token in choice["logprobs"]["tokens"]]
    assert len(ids) == len(choice["logprobs"]["token_logprobs"]) == 6
    assert choice["finish_reason"] == "length"


def reads_success(answer: Any) -> None:
    assert answer["success"]


def reads_no_requests(answer: Any) -> None:
    assert [load["num_reqs"] for load in answer] == [0]


def reads_topology(answer: Any) -> None:
    assert (answer["tp_size"], answer["pp_size"], answer["ep_size"]) == (1, 1, 1)
    assert answer["disaggregation_mode"] not in ("prefill", "decode")
    assert answer["enable_memory_saver"] is False
    assert (answer["nnodes"], answer["node_rank"], answer["gpu_id_step"]) == (1, 0, 1)


def reads_ranks(answer: Any) -> None:
    (rank,) = answer["ranks"]
    assert {role["rank"] for role in rank["parallelism_info"]} == {0}
    assert all(int(value, 16) >= 0 for value in rank["checksums"].values())


SLIME_SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "max_new_tokens": 6,
    "stop": None,
    "stop_token_ids": None,
    "skip_special_tokens": False,
    "no_stop_trim": True,
    "spaces_between_special_tokens": False,
}
AREAL_SAMPLING = {
    "top_p": 1.0,
    "top_k": 100_000_000,
    "max_new_tokens": 6,
    "temperature": 1.0,
    "stop_token_ids": [2],
    "ignore_eos": False,
    "skip_special_tokens": True,
    "frequency_penalty": 0.0,
}
SKYRL_SAMPLING = {
    "min_tokens": 1,
    "skip_special_tokens": True,
    "include_stop_str_in_output": True,
    "max_tokens": 6,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "logprobs": 1,
    "stop": None,
    "repetition_penalty": 1.0,
    "seed": None,
}
SCORE = {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False}
GROUP = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
NAMED = {"names": ["a"], "dtypes": ["bfloat16"], "shapes": [[2]], "group_name": "g"}

SLIME = (
    TrainerCall("slime", "GET /health_generate"),
    TrainerCall("slime", "GET /server_info", read=reads_topology),
    TrainerCall(
        "slime",
        "POST /generate",
        {"sampling_params": SLIME_SAMPLING, "return_logprob": True, "input_ids": PROMPT},
        read=reads_sglang_tokens,
    ),
    TrainerCall(
        "slime",
        "POST /generate (score)",
        {"input_ids": PROMPT, "sampling_params": SCORE, "return_logprob": True, "logprob_start_len": 0},
        read=reads_sglang_scores,
    ),
    TrainerCall("slime", "POST /abort_request", {"abort_all": True}),
    TrainerCall("slime", "GET /v1/loads?include=core", read=reads_no_requests),
    TrainerCall("slime", "POST /release_memory_occupation", {}),
    TrainerCall("slime", "POST /resume_memory_occupation", {"tags": ["weights"]}),
    TrainerCall("slime", "POST /pause_generation", {}),
    TrainerCall("slime", "GET /flush_cache"),
    TrainerCall(
        "slime", "POST /update_weights_from_disk", {"model_path": DIRECTORY, "weight_version": VERSION}
    ),
    TrainerCall("slime", "GET /get_weight_version", read=lambda answer: int(answer["weight_version"])),
    TrainerCall("slime", "POST /continue_generation", {}),
    TrainerCall("slime", "POST /resume_memory_occupation (cache)", {"tags": ["kv_cache", "cuda_graph"]}),
    TrainerCall("slime", "POST /weights_checker", {"action": "snapshot"}, read=reads_success),
    TrainerCall("slime", "POST /pull_weights", {"target_version": 1}, ELSEWHERE),
    TrainerCall("slime", "POST /update_weights_from_tensor", {"serialized_named_tensors": ["x"]}, ELSEWHERE),
    TrainerCall("slime", "POST /post_process_weights", {"post_process_quantization": True}, ELSEWHERE),
    TrainerCall("slime", "POST /start_profile", {"output_dir": None}, ELSEWHERE),
)
MILES = (
    TrainerCall("miles", "GET /model_info", read=lambda answer: int(answer["weight_version"])),
    TrainerCall("miles", "GET /get_server_info", read=reads_topology),
    TrainerCall(
        "miles",
        "POST /generate",
        {
            "input_ids": PROMPT,
            "sampling_params": SLIME_SAMPLING,
            "return_logprob": True,
            "return_routed_experts": False,
            "return_indexer_topk": False,
        },
        read=reads_sglang_tokens,
    ),
    TrainerCall(
        "miles",
        "POST /generate (scores)",
        {
            "input_ids": [PROMPT, PROMPT],
            "sampling_params": SLIME_SAMPLING | SCORE,
            "return_logprob": True,
            "logprob_start_len": len(PROMPT) - 3,
        },
        read=reads_sglang_score_tail,
    ),
    TrainerCall("miles", "POST /flush_cache", {}),
    TrainerCall("miles", "POST /pause_generation", {"mode": "retract"}),
    TrainerCall(
        "miles", "POST /update_weights_from_disk", {"model_path": DIRECTORY, "weight_version": VERSION}
    ),
    TrainerCall("miles", "POST /continue_generation", {}),
    TrainerCall(
        "miles",
        "POST /weights_checker",
        {"action": "checksum", "allow_quant_error": False, "selector": "all"},
        read=reads_ranks,
    ),
    TrainerCall("miles", "POST /begin_weight_update", {"selector": "all"}, ELSEWHERE),
    TrainerCall("miles", "POST /end_weight_update", {}, ELSEWHERE),
    TrainerCall("miles", "POST /pull_weights", {"target_version": 1}, ELSEWHERE),
    TrainerCall("miles", "POST /update_weights_from_tensor", {"serialized_named_tensors": ["x"]}, ELSEWHERE),
    TrainerCall("miles", "POST /update_weight_version", {"new_version": "2"}, ELSEWHERE),
    TrainerCall("miles", "POST /load_lora_adapter_from_tensors", {"serialized_tensors": "x"}, ELSEWHERE),
    TrainerCall("miles", "POST /load_lora_adapter_from_distributed", {"lora_name": "a"}, ELSEWHERE),
    TrainerCall("miles", "GET /parallelism_config?rank=0", None, ELSEWHERE),
)
AREAL = (
    TrainerCall("AReaL", "GET /health"),
    TrainerCall(
        "AReaL",
        "POST /generate",
        {
            "input_ids": PROMPT,
            "image_data": [],
            "sampling_params": AREAL_SAMPLING,
            "return_logprob": True,
            "stream": False,
        },
        read=reads_sglang_tokens,
    ),
    TrainerCall(
        "AReaL", "POST /load_lora_adapter", {"lora_name": "lora-v1", "lora_path": ADAPTER}, read=reads_success
    ),
    TrainerCall(
        "AReaL",
        "POST /generate (adapter)",
        {
            "input_ids": PROMPT,
            "image_data": [],
            "sampling_params": AREAL_SAMPLING,
            "return_logprob": True,
            "stream": False,
            "lora_path": "lora-v1",
        },
        read=reads_sglang_tokens,
    ),
    TrainerCall("AReaL", "POST /release_memory_occupation", {}),
    TrainerCall("AReaL", "POST /resume_memory_occupation", {"tags": ["weights", "kv_cache"]}),
    TrainerCall("AReaL", "POST /pause_generation", {}),
    TrainerCall(
        "AReaL", "POST /update_weights_from_disk", {"model_path": DIRECTORY, "abort_all_requests": True}
    ),
    TrainerCall("AReaL", "POST /continue_generation", {}),
    TrainerCall(
        "AReaL",
        "POST /v1/completions",
        {
            "top_p": 1.0,
            "top_k": 100_000_000,
            "max_tokens": 6,
            "temperature": 1.0,
            "stop_token_ids": [],
            "ignore_eos": True,
            "skip_special_tokens": True,
            "return_tokens_as_token_ids": True,
            "logprobs": 0,
            "use_beam_search": False,
            "stream": False,
            "prompt": PROMPT,
        },
        read=reads_vllm_completion,
    ),
    TrainerCall("AReaL", "POST /areal_pause_generation", {}, read=reads_success),
    TrainerCall("AReaL", "POST /areal_update_weights", {"model_path": DIRECTORY}, read=reads_success),
    TrainerCall("AReaL", "POST /areal_continue_generation", {}, read=reads_success),
    TrainerCall("AReaL", "POST /sleep", {}),
    TrainerCall("AReaL", "POST /wake_up?tags=weights&tags=kv_cache", {}),
    TrainerCall("AReaL", "POST /areal_init_weights_update_group", GROUP, ELSEWHERE),
    TrainerCall("AReaL", "POST /areal_set_update_weight_meta", NAMED, ELSEWHERE),
    TrainerCall("AReaL", "POST /areal_update_weights_xccl", {}, ELSEWHERE),
)
SKYRL = (
    TrainerCall("SkyRL", "GET /health"),
    TrainerCall("SkyRL", "GET /get_world_size", read=lambda answer: answer["world_size"] + 0),
    TrainerCall(
        "SkyRL",
        "POST /inference/v1/generate",
        {"sampling_params": SKYRL_SAMPLING, "model": "policy", "token_ids": PROMPT},
        read=reads_vllm_top,
    ),
    TrainerCall(
        "SkyRL",
        "POST /inference/v1/generate (scores)",
        {
            "sampling_params": {
                "n": 2,
                "logprobs": 0,
                "output_kind": 2,
                "prompt_logprobs": 0,
                "max_tokens": 4,
            },
            "model": "policy",
            "token_ids": PROMPT,
        },
        read=reads_vllm_scores,
    ),
    TrainerCall("SkyRL", "POST /pause?mode=keep&clear_cache=false", {}),
    TrainerCall("SkyRL", "POST /reset_prefix_cache", {"reset_running_requests": True}),
    TrainerCall("SkyRL", "POST /resume", {}),
    TrainerCall("SkyRL", "POST /sleep?level=1&tags=kv_cache", {}),
    TrainerCall("SkyRL", "POST /wake_up?tags=kv_cache", {}),
    TrainerCall("SkyRL", "POST /init_weight_transfer_engine", {"init_info": {}}, ELSEWHERE),
    TrainerCall("SkyRL", "POST /update_weights", {"update_info": {"names": ["a"]}}, ELSEWHERE),
    TrainerCall("SkyRL", "POST /collective_rpc", {"method": "skyrl_start_weight_update"}, ELSEWHERE),
    TrainerCall("SkyRL", "POST /fetch_weights", {"target_version": 1}, ELSEWHERE),
    TrainerCall("SkyRL", "POST /skyrl/v1/generate", {"token_ids": PROMPT}, ELSEWHERE),
    TrainerCall("SkyRL", "POST /skyrl/v1/load_lora_adapter", {"lora_name": "lora", "lora_path": ADAPTER}),
    TrainerCall(
        "SkyRL",
        "POST /inference/v1/generate (adapter)",
        {"sampling_params": SKYRL_SAMPLING, "model": "lora", "token_ids": PROMPT},
        read=reads_vllm_top,
    ),
    TrainerCall("SkyRL", "POST /v1/unload_lora_adapter", {"lora_name": "lora"}),
    TrainerCall("SkyRL", "POST /v1/chat/completions", {"messages": []}, ELSEWHERE),
)
PRIME_RL = (
    TrainerCall("prime-rl", "GET /health"),
    TrainerCall(
        "prime-rl",
        "GET /v1/models",
        read=lambda answer: next(one["max_model_len"] for one in answer["data"] if one["id"] == "policy"),
    ),
    TrainerCall(
        "prime-rl",
        "POST /inference/v1/generate",
        {
            "model": "policy",
            "token_ids": PROMPT,
            "sampling_params": {
                "temperature": 1.0,
                "max_tokens": 6,
                "stop_token_ids": [2],
                "logprobs": 1,
                "skip_special_tokens": False,
                "routed_experts_prompt_start": 4,
            },
            "cache_salt": "3",
        },
        read=reads_vllm_tokens,
    ),
    TrainerCall(
        "prime-rl",
        "POST /inference/v1/generate (score)",
        {
            "model": "policy",
            "token_ids": PROMPT,
            "sampling_params": {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1},
        },
        read=reads_vllm_scores,
    ),
    TrainerCall("prime-rl", "POST /pause?mode=keep&clear_cache=false", {}),
    TrainerCall("prime-rl", "POST /update_weights", {"weight_dir": DIRECTORY}),
    TrainerCall("prime-rl", "POST /resume", {}),
    TrainerCall("prime-rl", "GET /liveness"),
    TrainerCall("prime-rl", "POST /init_broadcaster", {"host": "h", "port": 1}, ELSEWHERE),
    TrainerCall("prime-rl", "POST /load_lora_adapter", {"lora_name": "r1", "lora_path": ADAPTER}),
    TrainerCall("prime-rl", "POST /load_lora_adapter (again)", {"lora_name": "r1", "lora_path": ADAPTER}),
    TrainerCall("prime-rl", "POST /v1/unload_lora_adapter", {"lora_name": "r1"}),
)

BY_TRAINER = {calls[0].trainer: calls for calls in (SLIME, MILES, AREAL, SKYRL, PRIME_RL)}
