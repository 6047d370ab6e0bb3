"""LoRA adapters by directory, as AReaL, SkyRL and prime-rl load them; requests choose one by its name."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from trainers_adapters.http_facade.bodies import AdapterName, LoadAdapter
from trainers_adapters.http_facade.engine import Engine, engine_of

router = APIRouter()
OfEngine = Annotated[Engine, Depends(engine_of)]


@router.post("/load_lora_adapter")
@router.post("/v1/load_lora_adapter")
@router.post("/skyrl/v1/load_lora_adapter")
async def load(body: LoadAdapter, engine: OfEngine) -> dict[str, Any]:
    """Also in place of one of that name: what runs through it finishes first."""
    reply = await engine.load_adapter(body.lora_name, body.lora_path)
    return {
        "success": True,
        "status": "ok",
        "message": f"adapter {reply.adapter} is live as version {reply.adapter_version}",
        "lora_name": reply.adapter,
        "adapter_version": reply.adapter_version,
    }


@router.post("/unload_lora_adapter")
@router.post("/v1/unload_lora_adapter")
async def unload(body: AdapterName, engine: OfEngine) -> dict[str, Any]:
    removed = await engine.weights.remove_adapter(body.lora_name)
    return {"success": True, "status": "ok", "adapter_version": removed.version}
