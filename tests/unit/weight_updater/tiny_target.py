"""A model of six tensors, made by hand: two fused storages, a tied head, bfloat16 and float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from weight_updater.arena import DTYPE_NAMES, Arena, SlotSpec, StorageSpec, WeightTarget
from weight_updater.checksum import checksum
from weight_updater.errors import UpdateRefused
from weight_updater.graphs import GraphHooks
from weight_updater.requests import (
    BeginUpdate,
    FromIpc,
    FromTensor,
    Manifest,
    Path,
    ShmSegment,
    TensorSpec,
    UpdateReply,
)
from weight_updater.shm import SharedSegment
from weight_updater.updater import WeightUpdater

CPU = torch.device("cpu")
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Q = "model.layers.0.self_attn.q_proj.weight"
K = "model.layers.0.self_attn.k_proj.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"
UP = "model.layers.0.mlp.up_proj.weight"
NORM = "model.norm.weight"
INV_FREQ = "model.rotary_emb.inv_freq"

SHAPES = {EMBED: (10, 6), Q: (6, 6), K: (2, 6), GATE: (5, 6), UP: (5, 6), NORM: (7,)}


class TinyTarget(WeightTarget):
    """The target, with a parameter for each storage, a tied head, and a count of finalisations."""

    def __init__(self, finalise: Callable[[], None] = lambda: None, device: torch.device = CPU) -> None:
        bf16 = torch.bfloat16
        storages = [
            StorageSpec("embed", bf16, (10, 6), (SlotSpec(EMBED, (10, 6)),)),
            StorageSpec("qk", bf16, (8, 6), (SlotSpec(Q, (6, 6)), SlotSpec(K, (2, 6)))),
            StorageSpec("gate_up", bf16, (10, 6), (SlotSpec(GATE, (5, 6)), SlotSpec(UP, (5, 6)))),
            StorageSpec("norm", torch.float32, (7,), (SlotSpec(NORM, (7,)),)),
        ]
        self.parameters = {
            storage.key: torch.nn.Parameter(torch.empty(storage.shape, dtype=storage.dtype, device=device))
            for storage in storages
        }
        self.head = self.parameters["embed"]  # tied: the same Parameter
        self.num_finalised = 0
        arena = Arena(storages, {HEAD: EMBED})
        super().__init__(arena, self.parameters, device, lambda name: name.endswith("inv_freq"), self.count)
        self._finalise_extra = finalise
        for name, value in weights(0).items():
            self.slot(name).copy_(value)

    def count(self) -> None:
        self.num_finalised += 1
        self._finalise_extra()

    def values(self) -> dict[str, torch.Tensor]:
        """A copy of all slots."""
        return {name: self.slot(name).clone() for name in SHAPES}


def weights(seed: int, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Name -> value in the slot's dtype (or `dtype`), different for each seed."""
    generator = torch.Generator().manual_seed(seed)
    own = {name: torch.float32 if name == NORM else torch.bfloat16 for name in SHAPES}
    return {
        name: torch.randn(shape, generator=generator).to(own[name] if dtype is None else dtype)
        for name, shape in SHAPES.items()
    }


def manifest_of(tensors: Mapping[str, torch.Tensor], *, checksums: bool = True) -> Manifest:
    return Manifest(
        tuple(
            TensorSpec(
                name, DTYPE_NAMES[value.dtype], tuple(value.shape), checksum(value) if checksums else None
            )
            for name, value in tensors.items()
        )
    )


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Logical row-major bytes."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def whole(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Each tensor in one chunk."""
    for index, value in enumerate(tensors.values()):
        yield index, 0, raw(value)


def make_updater(
    target: WeightTarget, *, device_staging: bool = False, graphs: GraphHooks | None = None, version: int = 4
) -> WeightUpdater:
    return WeightUpdater(
        target,
        lease_s=60.0,
        roots=[],
        device_staging=device_staging,
        initial_version=version,
        graphs=graphs,
    )


def begin(updater: WeightUpdater, tensors: Mapping[str, torch.Tensor], **fields: object) -> str:
    """Begin a tensor update with checksums; returns its id."""
    checksums = bool(fields.pop("checksums_came", True))
    request = BeginUpdate(
        **{"path": Path.TENSOR, "manifest": manifest_of(tensors, checksums=checksums), **fields}  # type: ignore[arg-type]
    )
    return updater.begin(request, updater.resolve(request), paused=False).update_id


def send(
    updater: WeightUpdater, update_id: str, chunks: Iterator[tuple[int, int, torch.Tensor]]
) -> UpdateReply:
    """Receive chunks the way the engine does."""
    receive = updater.receiver(FromTensor(update_id), chunks)
    error: Exception | None = None
    try:
        receive.run()
    except Exception as caught:  # noqa: BLE001  the worker's boundary
        error = caught
    return updater.received(receive, error)


def push(updater: WeightUpdater, tensors: Mapping[str, torch.Tensor], **fields: object) -> UpdateReply:
    """Begin, send whole tensors, verify and commit."""
    update_id = begin(updater, tensors, **fields)
    send(updater, update_id, whole(tensors))
    try:
        updater.verify(update_id)
    except Exception as error:
        updater.refuse(update_id, error)  # type: ignore[arg-type]
        raise
    return updater.commit(update_id)


def num_mappings(name: str) -> int:
    """How often this process has mapped the segment `name`."""
    with open("/proc/self/maps") as maps:
        return sum(name in line for line in maps)


def put(segment: SharedSegment, offset: int, value: torch.Tensor) -> None:
    """Write a tensor's bytes into a segment."""
    segment.buf[offset : offset + value.nbytes] = raw(value).numpy().tobytes()


def pack(segment: SharedSegment, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors in order, each at a multiple of 256 bytes."""
    for offset, value in zip(manifest_of(tensors).packed_offsets()[0], tensors.values(), strict=True):
        put(segment, offset, value)


def lend(updater: WeightUpdater, update_id: str, *regions: ShmSegment, **fields: object) -> UpdateReply:
    """Receive from lent memory the way the engine does."""
    receive = updater.receiver(FromIpc(update_id, regions, **fields))  # type: ignore[arg-type]
    try:
        receive.run()
    except UpdateRefused as error:
        return updater.received(receive, error)
    return updater.received(receive, None)
