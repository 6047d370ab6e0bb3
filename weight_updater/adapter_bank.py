"""AdapterBank: the memory that adapters live in, and how a manifest fits into it.

Everything is allocated once, for as many adapters of the largest rank as the engine was started for, so no
address ever changes: graphs that were captured over it stay right, and pushes leave no growth.

R = largest rank, r = a module's own rank; what lies beyond it in a slot is zero and adds nothing
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weight_updater.arena import Arena, SlotSpec, StorageSpec, aligned_zeros
from weight_updater.checksum import checksums as checksums_of
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.names import clean_name
from weight_updater.plan import NAMES_SHOWN, Plan, check_manifest
from weight_updater.requests import AdapterModule, AdapterSpec, Manifest, TensorSpec, align

SIDES = ("lora_A", "lora_B")
MAX_NAME = 200
MAX_SCALING = torch.finfo(torch.float32).max
"""Scalings are kept in float32; a larger one would fail no sooner than at the commit."""


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """One linear layer of the model, and the stacked matrices of all adapters of it. Slots: see adapters.py.

    name: of the layer in the base model. a: [slots, R, in]. b: [slots, R, out], B transposed.
    scaling: [slots], on the device; scales: the same on the host.
    """

    name: str
    a: torch.Tensor
    b: torch.Tensor
    scaling: torch.Tensor
    scales: list[float]


@dataclass(frozen=True, slots=True)
class Fitted:
    """An adapter's manifest, matched against the bank. arena: of A and B as they arrive."""

    arena: Arena
    plan: Plan
    modules: dict[str, AdapterModule]

    @property
    def rank(self) -> int:
        """The largest of its modules."""
        return max(module.rank for module in self.modules.values())


class AdapterBank:
    """Called by the engine's loop; `fit` by any thread.

    Args:
        parts: of one dtype and device, each with max_adapters + 2 slots.

    Attributes:
        staging: uint8, where an adapter's bytes wait; as large as the largest adapter.
        nbytes: of everything, staging included.
    """

    def __init__(self, parts: Sequence[AdapterPart], max_adapters: int, max_rank: int) -> None:
        self.parts = {part.name: part for part in parts}
        self.max_adapters, self.max_rank = max_adapters, max_rank
        self.dtype, self.device = parts[0].a.dtype, parts[0].a.device
        largest = sum(align(part.a[0].nbytes) + align(part.b[0].nbytes) for part in parts)
        self.staging = aligned_zeros(largest, self.device)
        held = sum(part.a.nbytes + part.b.nbytes + part.scaling.nbytes for part in parts)
        self.nbytes = held + self.staging.numel()

    def fit(self, manifest: Manifest, spec: AdapterSpec) -> Fitted:
        """Match an adapter's manifest against the layers of the model.

        Raises:
            UpdateRefused: INVALID_UPDATE, or MANIFEST_MISMATCH naming the first offender and both sides.
        """
        check_manifest(manifest)
        names = [canonical(name) for name in manifest.columns.names]
        self._check_names(manifest, names)
        found = {name: spec for name, spec in zip(names, manifest.tensors, strict=True) if name is not None}
        modules = {name.rpartition(".lora_")[0]: None for name in found}
        fitted = {module: self._module(module, found, spec) for module in modules}
        if strange := [module.name for module in spec.modules if module.name not in fitted]:
            raise UpdateRefused(
                Reason.INVALID_UPDATE,
                f"adapter {spec.name} says rank and scaling of {strange[0]}, of which the manifest brings "
                f"nothing",
            )
        storages = [
            StorageSpec(name, self.dtype, tensor.shape, (SlotSpec(name, tensor.shape),))
            for name, tensor in found.items()
        ]
        arena = Arena(storages)
        slots = [arena.placements[name] for name in found]
        plan = Plan(manifest, slots, {}, (), ((0, arena.nbytes),), full=True)
        return Fitted(arena, plan, fitted)

    def _check_names(self, manifest: Manifest, names: list[str | None]) -> None:
        """Refuse what is no A or B of a layer that the bank has room for, and what comes twice."""
        given = manifest.columns.names
        if strange := [name for name, known in zip(given, names, strict=True) if known is None]:
            raise UpdateRefused(
                Reason.MANIFEST_MISMATCH,
                f"{len(strange)} tensors are neither lora_A nor lora_B of a linear layer: {_some(strange)}; "
                f"such an adapter cannot be held beside the base weights, push it merged",
            )
        first: dict[str, str] = {}
        for name, known in zip(given, names, strict=True):
            assert known is not None
            if known in first:
                raise UpdateRefused(
                    Reason.MANIFEST_MISMATCH,
                    f"the manifest names {known} twice: as {first[known]!r} and as {name!r}",
                )
            first[known] = name
        unknown = [name for known, name in first.items() if known.rpartition(".lora_")[0] not in self.parts]
        if unknown:
            raise UpdateRefused(
                Reason.MANIFEST_MISMATCH,
                f"{len(unknown)} of {len(given)} tensors belong to layers that can have no adapter here: "
                f"{_some(unknown)}; those that can are {_some(list(self.parts))}",
            )

    def _module(self, name: str, found: dict[str, TensorSpec], spec: AdapterSpec) -> AdapterModule:
        """Rank and scaling of one module, with both of its matrices checked against them."""
        special = {module.name: module for module in spec.modules}.get(name)
        module = special or AdapterModule(name, spec.rank, spec.scaling)
        pair = [found.get(f"{name}.{side}.weight") for side in SIDES]
        for side, tensor, other in zip(SIDES, pair, reversed(pair), strict=True):
            if tensor is None:
                assert other is not None
                raise UpdateRefused(
                    Reason.MANIFEST_MISMATCH, f"the manifest brings {other.name} but no {side} of {name}"
                )
        a, b = pair
        assert a is not None
        assert b is not None
        if module.rank > self.max_rank:
            raise UpdateRefused(
                Reason.MANIFEST_MISMATCH,
                f"adapter {spec.name} has rank {module.rank} in {name}, this engine holds ranks up to "
                f"{self.max_rank}; start it with --max-adapter-rank {module.rank}",
            )
        part = self.parts[name]
        wanted = ((module.rank, part.a.shape[2]), (part.b.shape[2], module.rank))
        for tensor, shape in zip((a, b), wanted, strict=True):
            if tensor.shape != shape:
                raise UpdateRefused(
                    Reason.MANIFEST_MISMATCH,
                    f"{tensor.name} has shape {list(tensor.shape)}, with rank {module.rank} it must have "
                    f"{list(shape)}",
                )
        return module

    def staged(self, fitted: Fitted) -> torch.Tensor:
        """The bytes that an adapter's own arena takes of the staging memory."""
        return self.staging[: fitted.arena.nbytes]

    @torch.no_grad()
    def install(self, slot: int, fitted: Fitted) -> None:
        """Write what was staged into a slot, all of it: layers that the adapter leaves out become zero."""
        staged = self.staged(fitted)
        for name, part in self.parts.items():
            module = fitted.modules.get(name)
            rank = module.rank if module else 0
            scaling = module.scaling if module else 0.0
            for matrix in (part.a, part.b):
                matrix[slot, rank:].zero_()
            part.scaling[slot] = scaling
            part.scales[slot] = scaling
            if module is not None:
                a, b = (fitted.arena.slot_view(staged, f"{name}.{side}.weight") for side in SIDES)
                part.a[slot, :rank].copy_(a)
                part.b[slot, :rank].copy_(b.t())

    def checksums(self, slot: int, fitted: Fitted) -> dict[str, int]:
        """Name -> checksum of A and B as they lie in a slot, read there."""
        tensors: dict[str, torch.Tensor] = {}
        for name, module in fitted.modules.items():
            part = self.parts[name]
            tensors[f"{name}.lora_A.weight"] = part.a[slot, : module.rank]
            tensors[f"{name}.lora_B.weight"] = part.b[slot, : module.rank].t()
        values = checksums_of([tensor.contiguous() for tensor in tensors.values()])
        return dict(zip(tensors, values, strict=True))


def canonical(name: str) -> str | None:
    """The name of A or B as PEFT saves it, without the wrappers around the base model; None for others.

    base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight
    -> model.layers.0.mlp.up_proj.lora_A.weight
    """
    path = clean_name(name).split(".")
    side = next((at for at, segment in enumerate(path) if segment in SIDES), None)
    if side is None or not side or path[-1] != "weight" or len(path) - side not in (2, 3):
        return None
    return ".".join([*path[: side + 1], "weight"])


def check_spec(spec: AdapterSpec) -> None:
    """Refuse what can be right for no adapter.

    Raises:
        UpdateRefused (INVALID_UPDATE): no proper name, a rank below 1, or a scaling that is not finite.
    """
    if not 0 < len(spec.name) <= MAX_NAME or not spec.name.isprintable():
        raise UpdateRefused(
            Reason.INVALID_UPDATE,
            f"an adapter is called {spec.name[:MAX_NAME]!r}; requests choose it by its name, of 1 to "
            f"{MAX_NAME} printable characters",
        )
    modules = (AdapterModule("its modules", spec.rank, spec.scaling), *spec.modules)
    for module in modules:
        if module.rank < 1:
            raise UpdateRefused(
                Reason.INVALID_UPDATE,
                f"adapter {spec.name} has rank {module.rank} in {module.name}; it must be at least 1",
            )
        if not abs(module.scaling) <= MAX_SCALING:
            raise UpdateRefused(
                Reason.INVALID_UPDATE,
                f"adapter {spec.name} has scaling {module.scaling} in {module.name}; it must be finite in "
                f"float32",
            )


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:NAMES_SHOWN])
    return shown if len(names) <= NAMES_SHOWN else f"{shown} and {len(names) - NAMES_SHOWN} more"
