"""Attention backends. One table; the import happens when one is chosen."""

from __future__ import annotations

import importlib

import torch

from rollout_engine.attention.base import AttentionBackend
from rollout_engine.errors import ConfigError

BACKENDS = {"torch": "rollout_engine.attention.torch_sdpa:TorchBackend"}
AUTO = {"cpu": ("torch",), "cuda": ("flashinfer", "torch")}
"""Device type -> what "auto" takes, in this order, of what is in BACKENDS."""


def make_backend(name: str, device: torch.device) -> AttentionBackend:
    """The backend called `name`. Raises ConfigError listing what exists."""
    if name == "auto":
        name = next(backend for backend in AUTO[device.type] if backend in BACKENDS)
    if name not in BACKENDS:
        raise ConfigError(f"attention_backend is {name!r}; there is {', '.join(sorted(BACKENDS))}")
    module, _, attribute = BACKENDS[name].partition(":")
    backend: AttentionBackend = getattr(importlib.import_module(module), attribute)()
    return backend
