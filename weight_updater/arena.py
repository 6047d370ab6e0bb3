"""One flat allocation for all weights of a model, and the slots that updates write to.

A storage is one tensor of the model (often fused: q, k and v in one matrix). A slot is the part of a
storage that one Hugging Face name is written to: consecutive rows, so always one contiguous byte range.
Storages start at multiples of 256 bytes; slots fill their storage in order, without gaps. A staging
buffer has the same layout, so a commit is one flat copy.

    arena   |<-- storage qkv (256-aligned) -->|pad|<-- storage o_proj -->|pad| ...
    slots   | q_proj | k_proj | v_proj |          | o_proj |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from weight_updater import virtual_memory
from weight_updater.checksum import mixed_lengths
from weight_updater.huge_pages import prefer_huge_pages
from weight_updater.requests import Layout, Placement, align
from weight_updater.small import SmallTensors

TORCH_DTYPES: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}

MAX_KEPT = 4
"""Things that a target keeps for its slots where they lie."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SlotSpec:
    """A Hugging Face name and the shape of its tensor."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StorageSpec:
    """One tensor of the model and the slots that fill it in order.

    key: the parameter's own name in the model. rows of `slots` add up to `shape[0]`.
    """

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    slots: tuple[SlotSpec, ...]


class Arena:
    """Offsets of storages and slots; makes views into any buffer of `nbytes` bytes.

    Args:
        storages: in the order of the arena.
        aliases: slot name -> the slot whose storage it shares (a tied head).

    Attributes:
        placements, sizes: of every slot, aliases last; sizes in bytes.
        slot_names: names that hold bytes of their own (no aliases), in the arena's order.
        names_in_order: the same, sorted.
        row_of: name -> its row in `offset_of` (bytes), `mixed_lengths` (what makes a checksum out of a total)
            and `small`.
    """

    def __init__(self, storages: Sequence[StorageSpec], aliases: Mapping[str, str] | None = None) -> None:
        self.storages = {storage.key: storage for storage in storages}
        self.aliases = dict(aliases or {})
        self._storage_offset: dict[str, int] = {}
        self.placements: dict[str, Placement] = {}
        self.sizes: dict[str, int] = {}  # slot name -> bytes
        end = 0
        for storage in storages:
            self._storage_offset[storage.key] = end
            end = align(self._place_slots(storage, end))
        self.nbytes = end
        self.slot_names = list(self.placements)
        for name, target in self.aliases.items():
            place = self.placements[target]
            self.placements[name] = Placement(name, place.dtype, place.shape, place.offset, alias_of=target)
            self.sizes[name] = self.sizes[target]
        self.names_in_order = sorted(self.slot_names)
        self.row_of = {name: row for row, name in enumerate(self.placements)}
        places = self.placements.values()
        sizes = list(self.sizes.values())
        self.small = SmallTensors(sizes, [TORCH_DTYPES[place.dtype] for place in places])
        self.mixed_lengths = mixed_lengths(sizes)
        self.offset_of = np.array([place.offset for place in places], dtype=np.int64)

    def _place_slots(self, storage: StorageSpec, offset: int) -> int:
        itemsize = storage.dtype.itemsize
        for slot in storage.slots:
            assert slot.name not in self.placements, f"two slots are named {slot.name}"
            self.placements[slot.name] = Placement(slot.name, DTYPE_NAMES[storage.dtype], slot.shape, offset)
            self.sizes[slot.name] = math.prod(slot.shape) * itemsize
            offset += self.sizes[slot.name]
        expected = self._storage_offset[storage.key] + math.prod(storage.shape) * itemsize
        assert offset == expected, f"the slots of {storage.key} do not fill it"
        return offset

    @property
    def layout(self) -> Layout:
        return Layout(tuple(self.placements.values()), self.nbytes)

    def canonical(self, name: str) -> str:
        """The slot that holds `name`'s bytes: itself, or the target of an alias."""
        return self.aliases.get(name, name)

    def allocate(self, device: torch.device) -> torch.Tensor:
        """A zeroed uint8 buffer of `nbytes` bytes for this layout, 256-byte aligned.

        On a GPU its memory can be released and resumed (virtual_memory.py).
        """
        if device.type == "cuda":
            return virtual_memory.allocate(self.nbytes, device)
        return aligned_zeros(self.nbytes, device)

    def slot_view(self, buffer: torch.Tensor, name: str) -> torch.Tensor:
        """The slot `name` in `buffer`, in its dtype and shape; borrows `buffer`'s memory."""
        place = self.placements[name]
        return self._view(buffer, place.offset, TORCH_DTYPES[place.dtype], place.shape)

    def storage_view(self, buffer: torch.Tensor, key: str) -> torch.Tensor:
        """The storage `key` in `buffer`; borrows `buffer`'s memory."""
        storage = self.storages[key]
        return self._view(buffer, self._storage_offset[key], storage.dtype, storage.shape)

    @staticmethod
    def _view(buffer: torch.Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        return buffer[offset : offset + nbytes].view(dtype).view(shape)


def aligned_zeros(nbytes: int, device: torch.device) -> torch.Tensor:
    """A zeroed uint8 tensor of `nbytes` bytes whose address is a multiple of 256.

    CPU allocators align to 64 bytes only, so a little more is taken and the start is shifted.
    """
    slack = 0 if device.type == "cuda" else 256
    raw = torch.empty(nbytes + slack, dtype=torch.uint8, device=device)
    if device.type == "cpu":
        prefer_huge_pages(raw)
    start = -raw.data_ptr() % 256
    return raw[start : start + nbytes].zero_()


class WeightTarget:
    """The live weights of one model: its arena, its parameters, and what is derived from them.

    Args:
        arena: the layout.
        parameters: storage key -> the model's Parameter; rebound, in place, to views of the live buffer.
        device: where the live buffer is allocated.
        is_buffer: tells names that senders may bring but that are no weights (`rotary_emb.inv_freq`);
            they are skipped, since the engine computes them itself.
        finalise: recomputes derived state in place after a write; called at every commit.
        buffer: memory in the arena's layout that holds the weights already; None allocates it.
        rebound: names of the model's parameters that are no longer the ones of `parameters`.
    """

    def __init__(
        self,
        arena: Arena,
        parameters: Mapping[str, torch.nn.Parameter],
        device: torch.device,
        is_buffer: Callable[[str], bool] = lambda name: False,
        finalise: Callable[[], None] = lambda: None,
        buffer: torch.Tensor | None = None,
        rebound: Callable[[], list[str]] = list,
    ) -> None:
        assert parameters.keys() == arena.storages.keys(), "each storage needs its parameter"
        self.arena = arena
        self.device = device
        self.is_buffer = is_buffer
        self.finalise = finalise
        self._rebound = rebound
        self._parameters = dict(parameters)
        self.buffer = arena.allocate(device) if buffer is None else buffer
        self.bind(self.buffer)

    def bind(self, buffer: torch.Tensor) -> None:
        """Point every parameter at its place in `buffer` (adopt). Parameter objects stay the same,
        so ties hold; addresses change, so captured graphs do not.
        """
        for key, parameter in self._parameters.items():
            parameter.data = self.arena.storage_view(buffer, key)
        self._homes = [(key, p, p.data_ptr()) for key, p in self._parameters.items() if p.numel()]
        self.buffer = buffer
        self._bytes: dict[str, torch.Tensor] = {}
        self._kept: dict[object, Any] = {}

    def kept(self, key: object, make: Callable[[], T]) -> T:
        """What `make` gives, which depends on `key` and on where the slots lie; made once until `bind`."""
        if (known := self._kept.get(key)) is not None:
            value: T = known
            return value
        if len(self._kept) >= MAX_KEPT:
            self._kept = {}
        self._kept[key] = value = make()
        return value

    def slot(self, name: str) -> torch.Tensor:
        """The live tensor of slot `name`, in the slot's dtype and shape."""
        return self.arena.slot_view(self.buffer, name)

    def slot_bytes(self, name: str) -> torch.Tensor:
        """The bytes of slot `name`, [n] uint8, live. The same view until `bind`: making one for each of
        hundreds of slots would take longer than a GPU takes to read them all.
        """
        if name not in self._bytes:
            start = self.arena.placements[name].offset
            self._bytes[name] = self.buffer[start : start + self.arena.sizes[name]]
        return self._bytes[name]

    def strays(self) -> list[str]:
        """Names of the model's parameters that do not lie where updates write: somebody gave the module
        another Parameter, which unties a head, or the Parameter other memory. Empty while all is well.
        """
        moved = [key for key, parameter, home in self._homes if parameter.data_ptr() != home]
        return [*self._rebound(), *moved]

    def addresses(self) -> dict[str, int]:
        """Storage key -> address, for comparing before and after."""
        return {key: parameter.data_ptr() for key, parameter in self._parameters.items()}
