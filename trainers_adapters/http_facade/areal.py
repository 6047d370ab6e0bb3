"""The paths of AReaL's own vLLM server, as its vLLM backend calls them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from trainers_adapters.http_facade.bodies import ArealWeights
from trainers_adapters.http_facade.engine import Engine, engine_of
from trainers_adapters.http_facade.sglang import told

router = APIRouter()
OfEngine = Annotated[Engine, Depends(engine_of)]


@router.post("/areal_pause_generation")
async def pause_generation(engine: OfEngine) -> dict[str, Any]:
    """What runs ends with what it has; what comes waits."""
    await engine.rollout.pause("abort")
    return {"success": True, "message": "paused, and all requests are aborted"}


@router.post("/areal_continue_generation")
async def continue_generation(engine: OfEngine) -> dict[str, Any]:
    return {"success": True, "message": f"weight version {await engine.rollout.resume()} generates"}


@router.post("/areal_update_weights")
async def update_weights(body: ArealWeights, engine: OfEngine) -> dict[str, Any]:
    return told(await engine.update_from_disk(body.model_path, None, abort_all=True))
