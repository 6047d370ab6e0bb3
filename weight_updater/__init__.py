"""How bytes reach a live model: four ways in, one life of an update, three ends (refused, committed, torn).

The names below are what trainers' adapters and engines may use. They load on first use, so that a
process which only describes updates (`requests`, `errors`, `shm`) never loads torch. The checksum of one
tensor is `weight_updater.checksum.checksum`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weight_updater.arena import TORCH_DTYPES, Arena, SlotSpec, StorageSpec, WeightTarget
    from weight_updater.checksum import PartialChecksum, fold, has_nonfinite
    from weight_updater.errors import Reason, UpdateError, UpdateRefused, WeightsTorn
    from weight_updater.graphs import GraphHooks
    from weight_updater.names import clean_name
    from weight_updater.requests import (
        BeginReply,
        BeginUpdate,
        CudaIpcRegion,
        FromDisk,
        FromDistributed,
        FromIpc,
        FromTensor,
        Inflight,
        InitGroup,
        Layout,
        Manifest,
        Path,
        Placement,
        Recapture,
        RegionPlacement,
        ShmSegment,
        StageSeconds,
        Staging,
        TensorSpec,
        UpdateReply,
        UpdateState,
    )
    from weight_updater.shm import SharedSegment
    from weight_updater.updater import WeightUpdater

_HOMES = {
    "arena": ("TORCH_DTYPES", "Arena", "SlotSpec", "StorageSpec", "WeightTarget"),
    "checksum": ("PartialChecksum", "fold", "has_nonfinite"),
    "errors": ("Reason", "UpdateError", "UpdateRefused", "WeightsTorn"),
    "graphs": ("GraphHooks",),
    "names": ("clean_name",),
    "requests": (
        "BeginReply",
        "BeginUpdate",
        "CudaIpcRegion",
        "FromDisk",
        "FromDistributed",
        "FromIpc",
        "FromTensor",
        "Inflight",
        "InitGroup",
        "Layout",
        "Manifest",
        "Path",
        "Placement",
        "Recapture",
        "RegionPlacement",
        "ShmSegment",
        "StageSeconds",
        "Staging",
        "TensorSpec",
        "UpdateReply",
        "UpdateState",
    ),
    "shm": ("SharedSegment",),
    "updater": ("WeightUpdater",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "TORCH_DTYPES",
    "Arena",
    "BeginReply",
    "BeginUpdate",
    "CudaIpcRegion",
    "FromDisk",
    "FromDistributed",
    "FromIpc",
    "FromTensor",
    "GraphHooks",
    "Inflight",
    "InitGroup",
    "Layout",
    "Manifest",
    "PartialChecksum",
    "Path",
    "Placement",
    "Reason",
    "Recapture",
    "RegionPlacement",
    "SharedSegment",
    "ShmSegment",
    "SlotSpec",
    "StageSeconds",
    "Staging",
    "StorageSpec",
    "TensorSpec",
    "UpdateError",
    "UpdateRefused",
    "UpdateReply",
    "UpdateState",
    "WeightTarget",
    "WeightUpdater",
    "WeightsTorn",
    "clean_name",
    "fold",
    "has_nonfinite",
]


def __getattr__(name: str) -> object:
    """Load a public name from its home (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"weight_updater has no {name!r}")
    value: object = getattr(importlib.import_module(f"weight_updater.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
