"""vLLM's paths, as prime-rl, SkyRL and TRL call them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response

from trainers_adapters.http_facade.bodies import (
    AbortRequests,
    ResetBody,
    VllmCompletion,
    VllmGenerate,
    WeightDir,
)
from trainers_adapters.http_facade.elsewhere import PUSH
from trainers_adapters.http_facade.engine import (
    Engine,
    engine_of,
    memory_tags,
    not_here,
    while_there,
    written,
)
from trainers_adapters.http_facade.sglang import told
from trainers_adapters.results import Completion
from trainers_adapters.rollout_calls import Request

router = APIRouter()
OfEngine = Annotated[Engine, Depends(engine_of)]

SLEEP_TAGS: dict[int, tuple[str, ...]] = {1: ("kv_cache",), 2: ()}
"""By level: what is given back; () is everything, the weights included."""


# ---------------------------------------------------------------- generation


@router.post("/inference/v1/generate")
async def generate(body: VllmGenerate, engine: OfEngine, http: HttpRequest) -> dict[str, Any]:
    sampling = engine.rollout.generate(
        body.token_ids,
        request_id=body.request_id,
        priority=body.priority,
        adapter=await engine.adapter_of(body.model) or "",
        **body.sampling_params.to_sampling(),
    )
    completions = await while_there(http, sampling)
    answer: dict[str, Any] = {
        "request_id": completions[0].request_id,
        "choices": [_choice(completion) for completion in completions],
        "weight_version": str(completions[0].weight_version),
    }
    if body.sampling_params.prompt_logprobs is not None:
        scored = zip(body.token_ids[1:], completions[0].prompt_logprobs, strict=True)
        answer["prompt_logprobs"] = [
            None,
            *({str(token): {"logprob": written(value)}} for token, value in scored),
        ]
    return answer


def _choice(completion: Completion) -> dict[str, Any]:
    return {
        "index": completion.index,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "weight_versions": completion.weight_versions,
        "adapter_versions": completion.adapter_versions,
        "logprobs": {
            "content": [
                _named(token, logprob) | {"top_logprobs": [_named(*one) for one in top]}
                for token, logprob, top in zip(
                    completion.token_ids,
                    completion.logprobs,
                    completion.top_logprobs or [[] for _ in completion.token_ids],
                    strict=True,
                )
            ]
        },
    }


def _named(token: int, logprob: float) -> dict[str, Any]:
    return {"token": f"token_id:{token}", "logprob": written(logprob)}


@router.post("/v1/completions")
async def completions(body: VllmCompletion, engine: OfEngine, http: HttpRequest) -> dict[str, Any]:
    sampling, prompts = body.to_sampling(), body.prompts
    adapter = await engine.adapter_of(body.model)
    requests = [Request(prompt, sampling, adapter=adapter) for prompt in prompts]
    groups = await while_there(http, engine.generate(requests))
    choices: list[dict[str, Any]] = []
    for prompt, group in zip(prompts, groups, strict=True):
        for completion in group:
            choice: dict[str, Any] = {
                "index": len(choices),
                "text": completion.text,
                "finish_reason": completion.finish_reason,
                "weight_versions": completion.weight_versions,
                "logprobs": None,
            }
            if body.logprobs is not None:
                choice["logprobs"] = {
                    "tokens": [f"token_id:{token}" for token in completion.token_ids],
                    "token_logprobs": [written(logprob) for logprob in completion.logprobs],
                }
            if body.return_token_ids:
                choice["token_ids"] = completion.token_ids
                choice["prompt_token_ids"] = prompt if isinstance(prompt, list) else None
            choices.append(choice)
    num_prompt = sum(group[0].num_prompt_tokens for group in groups)
    num_sampled = sum(len(completion.token_ids) for group in groups for completion in group)
    return {
        "id": groups[0][0].request_id,
        "object": "text_completion",
        "model": (await engine.rollout.info()).model_path,
        "choices": choices,
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_sampled,
            "total_tokens": num_prompt + num_sampled,
        },
    }


@router.post("/abort_requests")
async def abort_requests(body: AbortRequests, engine: OfEngine) -> dict[str, Any]:
    """No ids means all."""
    found = await engine.rollout.abort(body.request_ids, all=not body.request_ids)
    return {"aborted": found.aborted, "unknown": found.unknown}


# ---------------------------------------------------------------- state


@router.get("/health")
@router.get("/liveness")
async def health(engine: OfEngine) -> Response:
    """200 while the engine serves or is paused, 503 with the reason else."""
    state = (await engine.rollout.info(timeout_s=10.0)).state
    if state.status in ("serving", "paused"):
        return JSONResponse({"status": state.status})
    return JSONResponse({"status": state.status, "message": state.not_serving_reason}, status_code=503)


@router.get("/v1/models")
async def models(engine: OfEngine) -> dict[str, Any]:
    info = await engine.rollout.info()
    held = [adapter.name for adapter in info.state.adapters]
    names = dict.fromkeys([info.model_path, *engine.model_names, *held])
    return {
        "object": "list",
        "data": [{"id": name, "object": "model", "max_model_len": info.context_length} for name in names],
    }


@router.get("/version")
async def version(engine: OfEngine) -> dict[str, str]:
    return {"version": (await engine.rollout.info()).rollsync_version}


@router.get("/get_world_size")
async def get_world_size() -> dict[str, int]:
    return {"world_size": 1}


@router.get("/weight_info")
async def weight_info(engine: OfEngine) -> dict[str, Any]:
    info = await engine.rollout.info()
    return {
        "weight_version": str(info.weight_version),
        "commit_sequence": info.state.commit_sequence,
        "num_tensors": info.num_weight_tensors,
        "num_bytes": info.weight_bytes,
    }


# ---------------------------------------------------------------- control


@router.post("/pause")
async def pause(
    engine: OfEngine,
    mode: Annotated[Literal["abort", "wait", "keep"], Query()] = "abort",
    clear_cache: Annotated[bool, Query()] = True,
) -> dict[str, Any]:
    """clear_cache changes nothing: cached pages of older weights are never matched."""
    return {"status": "paused", "num_frozen": await engine.rollout.pause(mode)}


@router.post("/resume")
async def resume(engine: OfEngine) -> dict[str, Any]:
    return {"status": "resumed", "weight_version": str(await engine.rollout.resume())}


@router.get("/is_paused")
async def is_paused(engine: OfEngine) -> dict[str, bool]:
    return {"is_paused": bool((await engine.rollout.info()).state.paused_by)}


@router.post("/sleep")
async def sleep(
    engine: OfEngine,
    level: Annotated[int, Query(ge=1, le=2)] = 1,
    tags: Annotated[list[str] | None, Query()] = None,
) -> dict[str, int]:
    """1 keeps the weights, 2 gives them back too; then a full update must commit after /wake_up.

    tags: these alone, whatever the level.
    """
    return {"released_bytes": await engine.rollout.release_memory(memory_tags(tags or SLEEP_TAGS[level]))}


@router.post("/wake_up")
async def wake_up(engine: OfEngine, tags: Annotated[list[str] | None, Query()] = None) -> dict[str, Any]:
    resumed = await engine.rollout.resume_memory(memory_tags(tags))
    return {"resumed_bytes": resumed.resumed_bytes, "needs_update": resumed.needs_update}


@router.get("/is_sleeping")
async def is_sleeping(engine: OfEngine) -> dict[str, bool]:
    return {"is_sleeping": bool((await engine.rollout.info()).state.released_tags)}


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(engine: OfEngine, body: ResetBody | None = None) -> dict[str, int]:
    if body is not None and body.reset_running_requests:
        return {"num_pages": await engine.flush_with_running()}
    return {"num_pages": await engine.rollout.flush_cache()}


# ---------------------------------------------------------------- weights


@router.post("/update_weights")
async def update_weights(body: WeightDir, engine: OfEngine) -> dict[str, Any]:
    if body.weight_dir is None:
        raise not_here("this path takes a weight_dir and no transfer of vLLM's own", PUSH)
    return told(await engine.update_from_disk(body.weight_dir, body.weight_version))
