"""Checksums of many small slots at the cost of their bytes: those of equal size are hashed as rows.

A model of experts has tens of thousands of slots; hashing each by itself would cost more than their bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from weight_updater.arena import TORCH_DTYPES, WeightTarget
from weight_updater.cast import cast_pieces
from weight_updater.checksum import (
    BLOCK_BYTES,
    PartialChecksum,
    checksums,
    finish,
    is_small,
    mixed_lengths,
    row_totals,
    rows_nonfinite,
)
from weight_updater.device_scan import Launch, is_fast
from weight_updater.plan import Plan


def scan_rows(
    buffer: torch.Tensor, offsets: Sequence[int], nbytes: int, dtype: torch.dtype | None = None
) -> tuple[list[int], list[bool]]:
    """Scan small tensors of one size that lie in one CPU buffer.

    Args:
        buffer: [n] uint8. offsets: in bytes, of the tensors; fastest where they are neighbours.
        nbytes: of each tensor, as `checksum.is_small` allows.
        dtype: floating dtype of the values for the non-finite test; None leaves it out.

    Returns:
        per tensor the sum of its mixed words, and whether a value is not finite.
    """
    data = buffer.numpy()
    step = max(1, BLOCK_BYTES // nbytes)
    totals: list[int] = []
    nonfinite: list[bool] = []
    for first in range(0, len(offsets), step):
        rows = _rows(data, offsets[first : first + step], nbytes)
        totals += row_totals(rows.view(np.uint64))
        nonfinite += [False] * len(rows) if dtype is None else rows_nonfinite(rows, dtype)
    return totals, nonfinite


def scan_small(
    plan: Plan, buffer: torch.Tensor, indexes: Sequence[int], offsets: Sequence[int], *, find_nonfinite: bool
) -> Iterator[tuple[int, int, bool]]:
    """Scan tensors that are `plan.small`, those of one size and dtype together.

    Args:
        buffer: [n] uint8 on the CPU. offsets: in bytes, of the tensors in it.

    Yields:
        (tensor, the sum of its mixed words, whether a value is not finite; False if nobody looks).
    """
    alike: dict[tuple[int, str], tuple[list[int], list[int]]] = {}
    for index, offset in zip(indexes, offsets, strict=True):
        key = (plan.sizes[index], plan.slot(index).dtype)
        members, starts = alike.setdefault(key, ([], []))
        members.append(index)
        starts.append(offset)
    for (nbytes, name), (members, starts) in alike.items():
        totals, nonfinite = scan_rows(buffer, starts, nbytes, TORCH_DTYPES[name] if find_nonfinite else None)
        yield from zip(members, totals, nonfinite, strict=True)


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
    placements, sizes = target.arena.placements, target.arena.sizes
    values: dict[str, int] = dict.fromkeys(names, 0)
    alike: dict[int, list[str]] = {}
    others = []
    for name in names:
        if target.device.type == "cpu" and is_small(sizes[name]):
            alike.setdefault(sizes[name], []).append(name)
        else:
            others.append(name)
    for nbytes, members in alike.items():
        totals, _ = scan_rows(target.buffer, [placements[name].offset for name in members], nbytes)
        values.update(zip(members, [finish(total, nbytes) for total in totals], strict=True))
    values.update(zip(others, checksums([target.slot_bytes(name) for name in others]), strict=True))
    return values


def _on_device(target: WeightTarget, names: tuple[str, ...]) -> dict[str, int]:
    """`slot_checksums` in one launch, whose table is kept until the slots move."""
    if not names:
        return {}

    def made() -> tuple[Launch, npt.NDArray[np.uint64]]:
        data = [target.slot_bytes(name) for name in names]
        lengths = mixed_lengths([target.arena.sizes[name] for name in names])
        return Launch(target.device, data, [None] * len(data)), lengths

    launch, lengths = target.kept(("checksums", names), made)
    return dict(zip(names, (launch.run().totals + lengths).tolist(), strict=True))


def _rows(data: npt.NDArray[np.uint8], offsets: Sequence[int], nbytes: int) -> npt.NDArray[np.uint8]:
    """Tensors of one size as [tensors, nbytes]: in place if they are neighbours, else copied."""
    start, shape = offsets[0], (len(offsets), nbytes)
    end = start + nbytes * len(offsets)
    if list(offsets) == list(range(start, end, nbytes)):
        return data[start:end].reshape(shape)
    return np.concatenate([data[offset : offset + nbytes] for offset in offsets]).reshape(shape)
