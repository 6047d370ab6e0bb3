"""Tensors that lie in this process's memory, as one packed stream: no line of Python for each, step by step.

A trainer's parameters mostly stay where they are, so views of their bytes are made once; what a push does is
a few native calls over the list of them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from weight_updater.arena import TORCH_DTYPES
from weight_updater.checksum import BLOCK_BYTES, checksums, mixed_lengths, row_totals
from weight_updater.manifest import ALIGNMENT, Columns, Manifest
from weight_updater.small import Bytes, SmallTensors, Words


class PackedBytes:
    """The row-major bytes of a manifest's tensors, as if packed in order, each at a multiple of 256 bytes.

    Args:
        columns: names, dtypes and shapes.
        arrays: the bytes of each tensor, [n], where they lie; the memory is the caller's to keep.
    """

    def __init__(self, columns: Columns, arrays: Sequence[Bytes]) -> None:
        self.columns = columns
        self.arrays = arrays
        self._offsets, self._size = columns.packed
        self._small = SmallTensors(columns.sizes, [torch.uint8] * len(arrays))
        self._mixed_lengths = mixed_lengths(columns.sizes)
        # Tensors and what aligns the next one, in turn; from `_first[k]` on they are tensor k and behind.
        zeros = np.zeros(ALIGNMENT, dtype=np.uint8)
        self._parts: list[Bytes] = []
        self._first: list[int] = []
        for array in arrays:
            self._first.append(len(self._parts))
            self._parts.append(array)
            if array.size % ALIGNMENT:
                self._parts.append(zeros[: -array.size % ALIGNMENT])

    def read_into(self, into: Bytes, position: int = 0) -> None:
        """Fill `into` with the stream's bytes from `position` on; it lies within the stream."""
        end = position + into.size
        if not into.size:
            return
        assert 0 <= position < end <= self._size, "the stream has no such bytes"
        tensor = bisect_right(self._offsets, position) - 1
        behind = bisect_left(self._offsets, end)
        parts = self._parts[self._first[tensor] : self._first[behind] if behind < len(self._first) else None]
        skip = position - self._offsets[tensor]
        while skip >= parts[0].size:
            skip -= parts.pop(0).size
        parts[0] = parts[0][skip:]
        surplus = (self._offsets[behind] if behind < len(self._offsets) else self._size) - end
        while surplus >= parts[-1].size:
            surplus -= parts.pop().size
        parts[-1] = parts[-1][: parts[-1].size - surplus]
        np.concatenate(parts, out=into)

    def checksums(self) -> list[int]:
        """Of every tensor; see checksum.py."""
        totals = np.zeros(len(self.arrays), dtype=np.uint64)
        everything = np.arange(len(self.arrays))
        small = self._small.are_among(everything)
        for nbytes, _, at in self._small.groups(everything[small]):
            where, step = everything[small][at], max(1, BLOCK_BYTES // nbytes)
            for first in range(0, where.size, step):
                part = where[first : first + step]
                totals[part] = self._row_totals(part.tolist(), nbytes)
        values: list[int] = (totals + self._mixed_lengths).tolist()
        others = everything[~small].tolist()
        large = checksums([torch.from_numpy(self.arrays[index]) for index in others])
        for index, value in zip(others, large, strict=True):
            values[index] = value
        return values

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors over the same memory."""
        columns = self.columns
        for name, dtype, shape, array in zip(
            columns.names, columns.dtypes, columns.shapes, self.arrays, strict=True
        ):
            flat = torch.from_numpy(array) if array.size else torch.empty(0, dtype=torch.uint8)
            yield name, flat.view(TORCH_DTYPES[dtype]).view(shape)

    def manifest(self, *, checksums: bool) -> Manifest:
        """What these bytes are."""
        return Manifest.of(self.columns, self.checksums() if checksums else ())

    def _row_totals(self, indexes: list[int], nbytes: int) -> Words:
        """The sums of mixed words of small tensors of `nbytes` each."""
        block = np.concatenate([self.arrays[index] for index in indexes])  # aligned, and stays in the cache
        return row_totals(block.view(np.uint64).reshape(len(indexes), nbytes // 8))


def together(arrays: Iterable[Bytes], most_bytes: int) -> Iterator[memoryview]:
    """The bytes of all arrays in order: smaller ones together in pieces of about `most_bytes`, larger ones
    from where they lie.
    """
    batch: list[Bytes] = []
    size = 0
    for array in arrays:
        if batch and size + array.size > most_bytes:
            yield np.concatenate(batch).data
            batch, size = [], 0
        if array.size > most_bytes:
            yield array.data
        else:
            batch.append(array)
            size += array.size
    if batch:
        yield np.concatenate(batch).data
