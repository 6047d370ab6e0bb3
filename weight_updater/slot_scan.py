"""Checksums of what lies in slots, or would lie there; small slots on a CPU are hashed together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from weight_updater.arena import WeightTarget
from weight_updater.cast import cast_pieces
from weight_updater.checksum import PartialChecksum, checksums


def cast_checksum(source: torch.Tensor, dtype: torch.dtype) -> int:
    """The checksum that the values of `source` ([n], n > 0) have once they are cast to `dtype`."""
    partial = PartialChecksum()
    for start, piece in cast_pieces(source, dtype):
        partial.add(start * piece.element_size(), piece.view(torch.uint8))
    return partial.value(source.numel() * dtype.itemsize)


def slot_checksums(target: WeightTarget, names: Sequence[str]) -> dict[str, int]:
    """Slot -> checksum of what lies in it now, in the order of `names`."""
    if target.device.type != "cpu":
        return dict(zip(names, checksums([target.slot_bytes(name) for name in names]), strict=True))
    arena = target.arena
    rows = np.fromiter(map(arena.row_of.__getitem__, names), dtype=np.int64, count=len(names))
    small = arena.small.are_among(rows)
    values = np.zeros(rows.size, dtype=np.uint64)
    together = rows[small]
    totals, _ = arena.small.scan(
        target.buffer.numpy(), together, arena.offset_of[together], find_nonfinite=False
    )
    values[small] = totals + arena.mixed_lengths[together]
    others = np.flatnonzero(~small).tolist()
    values[others] = checksums([target.slot_bytes(names[at]) for at in others])
    return dict(zip(names, values.tolist(), strict=True))
