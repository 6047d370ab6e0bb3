"""The trainer's side: clients of a running engine, and the calls that push weights to it.

Names are loaded when they are first used, so importing the clients loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "RolloutClient": "clients",
    "WeightsClient": "clients",
    "AsyncRolloutClient": "aio",
    "AsyncWeightsClient": "aio",
    "RollsyncError": "errors",
    "Tls": "connection",
    "Completion": "results",
    "Request": "rollout_calls",
    "ModuleSource": "sources",
    "PeftSource": "peft_source",
    "AdapterSource": "adapter_source",
    "ShardedSource": "sharding.source",
    "RankFailed": "sharding.ranks",
    "push_sharded": "sharding.push",
    "ShardedPush": "sharding.push",
    "source_of": "sources",
    "push_weights": "push",
    "PushReport": "push",
    "PushError": "errors",
    "DiskDirectory": "send_disk",
    "TensorStream": "send_tensor",
    "TensorSegment": "send_tensor",
    "IpcArena": "send_ipc",
    "BroadcastGroup": "send_distributed",
    "AdoptedArena": "adopt",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
