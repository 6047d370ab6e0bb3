"""Weights that are there before the engine is: a trainer's arena, adopted at start."""

from __future__ import annotations

import torch

from weight_updater.arena import Arena
from weight_updater.descriptor import read_descriptor
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.mappings import Mappings


class PreloadedWeights:
    """A trainer's arena, mapped as its descriptor says.

    Args:
        path: of the descriptor.
        device: of the engine.

    Attributes:
        mappings: of trainers' memory, with the arena in it; for the WeightUpdater to go on with.
        mapping: of the arena.

    Raises:
        UpdateRefused: FILE_NOT_FOUND, PATH_FORBIDDEN, FILE_CORRUPT, MEMORY_UNAVAILABLE, PEER_LOST.
    """

    def __init__(self, path: str, device: torch.device) -> None:
        self._path = path
        described = read_descriptor(path)
        self._layout_digest = described.layout_digest
        self.mappings = Mappings(device)
        self.mapping = self.mappings.open(described.region)
        self.mappings.pinned.add(self.mapping.allocation_id)
        if self.mapping.data.device != device:
            raise UpdateRefused(
                Reason.MEMORY_UNAVAILABLE,
                f"the arena of {path} lies on {self.mapping.data.device}, this engine runs on {device}; "
                f"serve with --device to match",
            )
        if not self.mapping.owner_alive():
            raise UpdateRefused(
                Reason.PEER_LOST, f"the trainer that wrote {path} is gone; let it write the file anew"
            )

    @property
    def nbytes(self) -> int:
        """Bytes that the trainer holds for the arena."""
        return self.mapping.data.numel()

    def home(self, arena: Arena) -> torch.Tensor:
        """The buffer for the live weights: [arena.nbytes] uint8.

        Raises:
            UpdateRefused (MANIFEST_MISMATCH): it has another layout than the model's.
        """
        digest = arena.layout.digest()
        if digest != self._layout_digest or self.nbytes < arena.nbytes:
            raise UpdateRefused(
                Reason.MANIFEST_MISMATCH,
                f"the arena of {self._path} has {self.nbytes} bytes in layout {self._layout_digest}, the "
                f"model's layout is {digest} with {arena.nbytes} bytes; make it with the layout of the same "
                f"model directory and dtype",
            )
        return self.mapping.data[: arena.nbytes]
