"""SGLang's paths, as slime, miles and AReaL call them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, StreamingResponse

from trainers_adapters.errors import RollsyncError
from trainers_adapters.http_facade.bodies import (
    AbortBody,
    CheckerBody,
    FromDisk,
    FromDistributed,
    GroupName,
    InitGroupBody,
    PauseBody,
    SglangGenerate,
    SglangSampling,
    Tags,
)
from trainers_adapters.http_facade.engine import (
    Engine,
    engine_of,
    memory_tags,
    while_there,
    written,
)
from trainers_adapters.results import Completion
from trainers_adapters.rollout_calls import Request, joined
from weight_updater.requests import InitGroup, Recapture, UpdateReply

router = APIRouter()
OfEngine = Annotated[Engine, Depends(engine_of)]

PAUSE_MODES = {"abort": "abort", "retract": "retract", "in_place": "keep"}
FINISH_TYPES = {"deadline": "abort", "error": "abort"}
"""Finish reasons that these callers have no word for."""


# ---------------------------------------------------------------- generation


@router.post("/generate", response_model=None)
async def generate(body: SglangGenerate, engine: OfEngine, http: HttpRequest) -> Any:
    """One object per completion: a single one for one prompt with n = 1, else a list, prompt by prompt."""
    if body.stream:
        if len(body.prompts) != 1:
            raise RollsyncError("INVALID_ARGUMENT", "INVALID_REQUEST", "a stream is of one prompt")
        return StreamingResponse(_streamed(body, engine), media_type="text/event-stream")
    groups = await while_there(http, engine.generate(_requests(body)))
    asked = zip(body.prompts, groups, strict=True)
    answers = [_answer(completion, body, prompt) for prompt, group in asked for completion in group]
    return answers if body.is_many or len(answers) != 1 else answers[0]


async def _streamed(body: SglangGenerate, engine: Engine) -> AsyncIterator[str]:
    """Server-sent events; each holds all that was sampled so far."""
    parts: dict[int, list[Completion]] = {}
    try:
        async for part in engine.generate_stream(_requests(body)[0]):
            parts.setdefault(part.index, []).append(part)
            answer = _answer(joined(parts[part.index]), body, body.prompts[0]) | {"index": part.index}
            yield f"data: {json.dumps(answer)}\n\n"
    except RollsyncError as error:
        told = {"error": {"type": error.reason or error.code, "message": error.message}}
        yield f"data: {json.dumps(told)}\n\n"
    except ValueError as error:  # a value that no message can hold; nothing was sent
        told = {"error": {"type": "INVALID_REQUEST", "message": str(error)}}
        yield f"data: {json.dumps(told)}\n\n"
    yield "data: [DONE]\n\n"


def _requests(body: SglangGenerate) -> list[Request]:
    prompts = body.prompts
    samplings = _each(body.sampling_params, len(prompts))
    rids = _each(body.rid or "", len(prompts))
    return [
        Request(prompt, _sampling(sampling, body), rid, body.priority, adapter=body.lora_path)
        for prompt, sampling, rid in zip(prompts, samplings, rids, strict=True)
    ]


def _each(value: Any, count: int) -> list[Any]:
    return list(value) if isinstance(value, list) else [value] * count


def _sampling(sampling: SglangSampling, body: SglangGenerate) -> Any:
    wanted = sampling.to_sampling()
    if body.return_logprob and body.top_logprobs_num:
        wanted["top_logprobs"] = body.top_logprobs_num
    if body.return_logprob and body.logprob_start_len >= 0:
        wanted["prompt_logprobs"] = True
    return wanted


def _answer(completion: Completion, body: SglangGenerate, prompt: str | list[int]) -> dict[str, Any]:
    kind = FINISH_TYPES.get(completion.finish_reason, completion.finish_reason)
    finish: dict[str, Any] | None = {"type": kind} if kind else None
    if kind == "length":
        finish = {"type": kind, "length": len(completion.token_ids)}
    elif kind == "abort":
        finish = {"type": kind, "message": completion.error or completion.finish_reason}
    meta: dict[str, Any] = {
        "id": completion.request_id,
        "finish_reason": finish,
        "prompt_tokens": completion.num_prompt_tokens,
        "completion_tokens": len(completion.token_ids),
        "cached_tokens": completion.num_cached_tokens,
        "weight_version": str(completion.weight_version),
        "weight_versions": completion.weight_versions,
    }
    if body.lora_path:
        meta["adapter_versions"] = completion.adapter_versions
    if body.return_logprob:
        meta["output_token_logprobs"] = [
            [written(logprob), token, None]
            for logprob, token in zip(completion.logprobs, completion.token_ids, strict=True)
        ]
        if completion.top_logprobs:
            meta["output_top_logprobs"] = [
                [[written(logprob), token, None] for token, logprob in row] for row in completion.top_logprobs
            ]
        if body.logprob_start_len >= 0:
            rows = _input_logprobs(completion, prompt)
            meta["input_token_logprobs"] = rows[body.logprob_start_len :]
    return {"text": completion.text, "output_ids": completion.token_ids, "meta_info": meta}


def _input_logprobs(completion: Completion, prompt: str | list[int]) -> list[list[Any]]:
    """[logprob, token, None] of each of the prompt's tokens; the first has no logprob, text no tokens."""
    known = [None] * completion.num_prompt_tokens if isinstance(prompt, str) else prompt
    values = [None, *map(written, completion.prompt_logprobs)]
    return [[value, token, None] for value, token in zip(values, known, strict=True)]


@router.post("/abort_request")
async def abort_request(body: AbortBody, engine: OfEngine) -> dict[str, Any]:
    rids = [body.rid] if isinstance(body.rid, str) else body.rid
    found = await engine.rollout.abort([rid for rid in rids if rid], all=body.abort_all)
    return {"success": True, "aborted": found.aborted, "unknown": found.unknown}


# ---------------------------------------------------------------- state


@router.get("/health_generate")
async def health_generate(engine: OfEngine) -> JSONResponse:
    """Whether a token can be had."""
    await engine.rollout.generate([0], max_tokens=1, timeout_s=30.0)
    return JSONResponse({"status": "ok"})


@router.get("/get_model_info")
@router.get("/model_info")
async def model_info(engine: OfEngine) -> dict[str, Any]:
    info = await engine.rollout.info()
    return {
        "model_path": info.weights_path or info.model_path,
        "tokenizer_path": info.model_path,
        "is_generation": True,
        "weight_version": str(info.weight_version),
    }


@router.get("/get_server_info")
@router.get("/server_info")
async def server_info(engine: OfEngine) -> dict[str, Any]:
    info = await engine.rollout.info()
    return {
        "model_path": info.model_path,
        "dtype": info.dtype,
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
        "ep_size": 1,
        "disaggregation_mode": "null",
        "context_length": info.context_length,
        "page_size": info.page_size,
        "max_running_requests": info.max_running_requests,
        "attention_backend": info.attention_backend,
        "weight_version": str(info.weight_version),
        "version": info.rollsync_version,
        "instance_id": info.instance_id,
        # What slime and miles compare with their own arguments.
        "nnodes": 1,
        "node_rank": 0,
        "base_gpu_id": 0,
        "gpu_id_step": 1,
        "enable_memory_saver": False,
        **engine.said,
    }


@router.get("/get_weight_version")
@router.get("/weight_version")
async def weight_version(engine: OfEngine) -> dict[str, str]:
    return {"weight_version": str((await engine.rollout.info()).weight_version)}


@router.get("/get_load")
@router.get("/v1/loads")
async def loads(engine: OfEngine, include: str | None = None) -> list[dict[str, int]]:
    """include: of which parts; these are all there are."""
    state = (await engine.rollout.info()).state
    used = state.num_total_pages - state.num_free_pages
    return [
        {
            "dp_rank": 0,
            "num_reqs": state.num_running + state.num_waiting,
            "num_running_reqs": state.num_running,
            "num_waiting_reqs": state.num_waiting,
            "num_used_pages": used,
        }
    ]


# ---------------------------------------------------------------- control


@router.post("/pause_generation")
async def pause_generation(engine: OfEngine, body: PauseBody | None = None) -> dict[str, Any]:
    frozen = await engine.rollout.pause(PAUSE_MODES[(body or PauseBody()).mode])
    return {"success": True, "message": f"paused; {frozen} sequences are frozen"}


@router.post("/continue_generation")
async def continue_generation(engine: OfEngine) -> dict[str, Any]:
    return {"success": True, "weight_version": str(await engine.rollout.resume())}


@router.api_route("/flush_cache", methods=["GET", "POST"])
async def flush_cache(engine: OfEngine) -> dict[str, Any]:
    return {"success": True, "num_pages": await engine.rollout.flush_cache()}


@router.post("/release_memory_occupation")
async def release_memory_occupation(engine: OfEngine, body: Tags | None = None) -> dict[str, Any]:
    released = await engine.rollout.release_memory(memory_tags((body or Tags()).tags))
    return {"success": True, "released_bytes": released}


@router.post("/resume_memory_occupation")
async def resume_memory_occupation(engine: OfEngine, body: Tags | None = None) -> dict[str, Any]:
    resumed = await engine.rollout.resume_memory(memory_tags((body or Tags()).tags))
    return {"success": True, "resumed_bytes": resumed.resumed_bytes, "needs_update": resumed.needs_update}


# ---------------------------------------------------------------- weights


@router.post("/update_weights_from_disk")
async def update_weights_from_disk(body: FromDisk, engine: OfEngine) -> dict[str, Any]:
    reply = await engine.update_from_disk(
        body.model_path,
        body.weight_version,
        abort_all=body.abort_all_requests,
        recapture=Recapture.ALWAYS if body.recapture_cuda_graph else Recapture.AUTO,
    )
    return told(reply)


@router.post("/update_weights_from_distributed")
async def update_weights_from_distributed(body: FromDistributed, engine: OfEngine) -> dict[str, Any]:
    if not len(body.names) == len(body.dtypes) == len(body.shapes):
        counts = f"{len(body.names)} names, {len(body.dtypes)} dtypes and {len(body.shapes)} shapes"
        raise RollsyncError("INVALID_ARGUMENT", "INVALID_REQUEST", f"{counts}; give one of each per tensor")
    reply = await engine.update_from_distributed(
        list(zip(body.names, body.dtypes, body.shapes, strict=True)),
        body.group_name,
        body.weight_version,
        abort_all=body.abort_all_requests,
        bucket_bytes=body.bucket_bytes,
    )
    return told(reply)


@router.post("/init_weights_update_group")
async def init_weights_update_group(body: InitGroupBody, engine: OfEngine) -> dict[str, Any]:
    request = InitGroup(
        group_name=body.group_name,
        master_address=body.master_address,
        master_port=body.master_port,
        rank=body.rank_offset,
        world_size=body.world_size,
        backend=body.backend,
    )
    return {"success": True, "message": f"joined by {await engine.weights.init_group(request)}"}


@router.post("/destroy_weights_update_group")
async def destroy_weights_update_group(engine: OfEngine, body: GroupName | None = None) -> dict[str, Any]:
    found = await engine.weights.destroy_group((body or GroupName()).group_name)
    return {"success": found, "message": "left" if found else "no group of that name is known"}


@router.post("/weights_checker", response_model=None)
async def weights_checker(body: CheckerBody, engine: OfEngine) -> Any:
    """checksum; snapshot, and compare with it."""
    if body.action == "checksum":
        found = await engine.weights.checksums()
        by_name = {name: f"{value:016x}" for name, value in found.by_name.items()}
        ranks = [{"checksums": by_name, "parallelism_info": [{"rank": 0, "size": 1}]}]
        return {
            "success": True,
            "checksum": f"{found.folded:016x}",
            "checksums": by_name,
            "ranks": ranks,
        }
    if body.action == "snapshot":
        engine.snapshot = (await engine.weights.checksums()).by_name
        return {"success": True, "message": f"{len(engine.snapshot)} checksums are kept"}
    if body.action == "compare":
        if not engine.snapshot:
            raise RollsyncError(
                "FAILED_PRECONDITION", "NO_SNAPSHOT", "no snapshot is kept; send action=snapshot first"
            )
        skipped = set(body.skip_tensor_list or ())
        differing = [name for name in await engine.compare_with_snapshot() if name not in skipped]
        if not differing:
            return {"success": True, "message": "all weights are those of the snapshot"}
        message = f"{len(differing)} weights differ from the snapshot (first: {differing[0]})"
        return JSONResponse({"success": False, "message": message, "differing": differing}, status_code=400)
    raise RollsyncError(
        "INVALID_ARGUMENT",
        "INVALID_REQUEST",
        f"action is {body.action!r}; it must be checksum, snapshot or compare (weights are never overwritten "
        f"to test with)",
    )


def told(reply: UpdateReply) -> dict[str, Any]:
    """What an update came to."""
    return {
        "success": True,
        "message": f"{reply.num_tensors} tensors are live as version {reply.version}",
        "weight_version": str(reply.version),
        "num_paused_requests": reply.num_kept,
        "num_aborted_requests": reply.num_aborted,
        "verified": reply.verified,
        "pause_seconds": reply.seconds.pause,
    }
