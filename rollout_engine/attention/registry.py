"""Attention backends. One table; the import happens when one is chosen."""

from __future__ import annotations

import importlib

import torch

from rollout_engine.attention.base import AttentionBackend
from rollout_engine.errors import ConfigError

BACKENDS = {"torch": "rollout_engine.attention.torch_sdpa:TorchBackend"}
AUTO = {"cpu": ("torch",), "cuda": ("flashinfer", "torch")}
"""Device type -> what "auto" takes, in this order, of what is in BACKENDS."""


def resolve_backend(name: str, device: torch.device) -> str:
    """A key of BACKENDS for `name`, which may be "auto". Raises ConfigError listing what exists."""
    if name == "auto":
        return next(backend for backend in AUTO[device.type] if backend in BACKENDS)
    if name not in BACKENDS:
        raise ConfigError(f"attention_backend is {name!r}; there is {', '.join(sorted(BACKENDS))}")
    return name


def make_backend(name: str) -> AttentionBackend:
    """The backend of a key of BACKENDS; its module is imported now."""
    module, _, attribute = BACKENDS[name].partition(":")
    backend: AttentionBackend = getattr(importlib.import_module(module), attribute)()
    return backend
