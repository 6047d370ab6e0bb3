"""Attention backends. One table; the import happens when one is chosen."""

from __future__ import annotations

import importlib
import importlib.util

import torch

from rollout_engine.attention.base import AttentionBackend, AttentionShape
from rollout_engine.errors import ConfigError
from rollout_engine.logs import get_log

log = get_log(__name__)

BACKENDS = {
    "torch": "rollout_engine.attention.torch_sdpa:TorchBackend",
    "flashinfer": "rollout_engine.attention.flashinfer:FlashInferBackend",
}
FLASHINFER_HEAD_DIMS = (64, 128, 256)


def resolve_backend(name: str, shape: AttentionShape) -> str:
    """A key of BACKENDS for `name`, which may be "auto".

    Raises:
        ConfigError: it does not exist, or it was asked for and cannot run this model here.
    """
    if name not in (*BACKENDS, "auto"):
        raise ConfigError(f"attention_backend is {name!r}; there is {', '.join(sorted(BACKENDS))}")
    if name == "torch" or (name == "auto" and shape.device.type != "cuda"):
        return "torch"
    if (obstacle := _flashinfer_obstacle(shape)) is None:
        return "flashinfer"
    if name == "flashinfer":
        raise ConfigError(f"attention_backend is 'flashinfer', but {obstacle}; use 'torch' or 'auto'")
    log.warning("attention_falls_back", backend="torch", decode_graphs=False, because=obstacle)
    return "torch"


def _flashinfer_obstacle(shape: AttentionShape) -> str | None:
    if shape.device.type != "cuda":
        return f"the device is {shape.device}, and FlashInfer needs a GPU"
    if importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer is not installed (pip install 'rollsync[gpu]')"
    if shape.dtype not in (torch.bfloat16, torch.float16):
        return f"FlashInfer computes in bfloat16 or float16, and the model is {shape.dtype}"
    if shape.head_dim not in FLASHINFER_HEAD_DIMS:
        dims = ", ".join(map(str, FLASHINFER_HEAD_DIMS))
        return f"FlashInfer takes heads of {dims}, and the model's are of {shape.head_dim}"
    return None


def make_backend(name: str, shape: AttentionShape) -> AttentionBackend:
    """The backend of a key of BACKENDS; its module is imported now."""
    module, _, attribute = BACKENDS[name].partition(":")
    backend: AttentionBackend = getattr(importlib.import_module(module), attribute)(shape)
    return backend
