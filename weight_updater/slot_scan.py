"""Checksums of what lies in slots, or would lie there; small slots on a CPU are hashed together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from weight_updater.arena import WeightTarget
from weight_updater.cast import cast_pieces
from weight_updater.checksum import PartialChecksum, checksums
from weight_updater.device_scan import Launch, is_fast


def cast_checksum(source: torch.Tensor, dtype: torch.dtype) -> int:
    """The checksum that the values of `source` ([n], n > 0) have once they are cast to `dtype`."""
    partial = PartialChecksum()
    for start, piece in cast_pieces(source, dtype):
        partial.add(start * piece.element_size(), piece.view(torch.uint8))
    return partial.value(source.numel() * dtype.itemsize)


def slot_checksums(target: WeightTarget, names: Sequence[str]) -> dict[str, int]:
    """Slot -> checksum of what lies in it now, in the order of `names`."""
    if is_fast(target.device):
        return _on_device(target, tuple(names))
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


def start_checksums(target: WeightTarget, names: Sequence[str]) -> Callable[[], dict[str, int]]:
    """`slot_checksums` by a GPU behind what the caller's current stream holds; what is returned waits for
    it. Elsewhere nothing is read before somebody asks.
    """
    if not names or not is_fast(target.device):
        return lambda: slot_checksums(target, names)
    return _start_on_device(target, tuple(names))


def _on_device(target: WeightTarget, names: tuple[str, ...]) -> dict[str, int]:
    return _start_on_device(target, names)() if names else {}


def _start_on_device(target: WeightTarget, names: tuple[str, ...]) -> Callable[[], dict[str, int]]:
    """One launch for all slots, whose table is kept until they move."""

    def made() -> tuple[Launch, npt.NDArray[np.uint64]]:
        data = [target.slot_bytes(name) for name in names]
        rows = [target.arena.row_of[name] for name in names]
        return Launch(target.device, data, [None] * len(data)), target.arena.mixed_lengths[rows]

    launch, lengths = target.kept(("checksums", names), made)
    started = launch.start()
    return lambda: dict(zip(names, (started.result().totals + lengths).tolist(), strict=True))
