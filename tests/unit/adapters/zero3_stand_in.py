"""A stand-in for what the adapters use of deepspeed: parameters of ZeRO-3, and the context that gathers them.

It behaves as deepspeed's own does: a sharded parameter is empty outside of the context, every rank has a
piece of it in `ds_tensor` (padded to equal sizes), entering is a collective, and leaving frees what was
gathered.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import distributed as dist
from torch import nn


def install() -> None:
    """Make `from deepspeed import zero` find the stand-in in this process."""
    module: Any = ModuleType("deepspeed")
    module.__spec__ = ModuleSpec("deepspeed", None)  # other libraries look for one
    module.zero = ModuleType("deepspeed.zero")
    module.zero.GatheredParameters = GatheredParameters
    sys.modules["deepspeed"], sys.modules["deepspeed.zero"] = module, module.zero


def shard(net: nn.Module) -> nn.Module:
    """Partition every parameter in place, as zero.Init and the engine do."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for index, parameter in enumerate(net.parameters()):
        flat = parameter.detach().flatten()
        each = -(-flat.numel() // size)
        padded = torch.zeros(each * size, dtype=flat.dtype)
        padded[: flat.numel()] = flat
        parameter.ds_id = index  # type: ignore[attr-defined]
        parameter.ds_shape = parameter.shape  # type: ignore[attr-defined]
        parameter.ds_numel = flat.numel()  # type: ignore[attr-defined]
        parameter.ds_tensor = padded[rank * each : (rank + 1) * each].clone()  # type: ignore[attr-defined]
        parameter.data = torch.empty(0, dtype=flat.dtype)
    return net


@contextmanager
def GatheredParameters(params: Iterable, modifier_rank: int | None = None) -> Iterator[None]:
    assert modifier_rank is None, "a push only reads"
    params = list(params)
    for p in params:
        pieces = torch.empty(p.ds_tensor.numel() * dist.get_world_size(), dtype=p.ds_tensor.dtype)
        dist.all_gather_into_tensor(pieces, p.ds_tensor)
        p.data = pieces[: p.ds_numel].view(p.ds_shape)
    try:
        yield
    finally:
        for p in params:
            p.data.fill_(torch.nan)  # whoever kept it has nothing
            p.data = torch.empty(0, dtype=p.dtype)
