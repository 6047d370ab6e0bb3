"""Look: what bytes would bring, found out before the first of them is written to a live slot.

For paths whose bytes can be read twice (files, a shared-memory segment) and that write without staging.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch

from weight_updater.arena import TORCH_DTYPES
from weight_updater.cast import as_dtype, cast_pieces
from weight_updater.checksum import PartialChecksum, has_nonfinite, scan
from weight_updater.plan import Plan
from weight_updater.requests import ITEMSIZE

_MASK = (1 << 64) - 1


class Look:
    """Takes the bytes of whole tensors as a sink does, keeps nothing of them. Safe to use by many threads.

    Args:
        plan: where each tensor would go.
        hashing: add up checksums (twins and their writers are always hashed).
        find_nonfinite: look for NaN and infinities in the slot's dtype.
    """

    def __init__(self, plan: Plan, *, hashing: bool, find_nonfinite: bool) -> None:
        self.plan = plan
        self._tied = {*plan.twins, *plan.twins.values()}
        self._hashing = hashing
        self._find_nonfinite = find_nonfinite
        self._lock = threading.Lock()
        self._arrived = np.zeros(len(plan.slots), dtype=np.int64)
        self._totals = np.zeros(len(plan.slots), dtype=np.uint64)
        self._nonfinite = np.zeros(len(plan.slots), dtype=np.bool_)
        self._cast = {i: PartialChecksum() for i in self._tied if not plan.same_dtype(i)}

    def write(self, tensor_index: int, byte_offset: int, data: torch.Tensor) -> None:
        """Look at bytes [byte_offset, byte_offset + len(data)) of a tensor, each once.

        Args:
            byte_offset: a multiple of 64, so that it is one of 8 after any cast.
            data: [n] uint8 on the CPU, contiguous.
        """
        if self.plan.slots[tensor_index] is None:
            return
        dtype = TORCH_DTYPES[self.plan.slot(tensor_index).dtype]
        wanted = self._find_nonfinite and tensor_index not in self.plan.twins
        total, nonfinite = 0, False
        if self._hashing or tensor_index in self._tied:
            same = self.plan.same_dtype(tensor_index)
            found = scan(data, byte_offset, dtype if wanted and same else None)
            total, nonfinite = found.total, found.nonfinite
        elif wanted and self.plan.same_dtype(tensor_index):
            nonfinite = has_nonfinite(as_dtype(data, dtype))
        if not self.plan.same_dtype(tensor_index):
            nonfinite = self._look_at_cast(tensor_index, byte_offset, data, dtype, wanted)
        with self._lock:
            self._arrived[tensor_index] += data.numel()
            self._totals[tensor_index] = (int(self._totals[tensor_index]) + total) & _MASK
            self._nonfinite[tensor_index] |= nonfinite

    def write_whole(self, indexes: Sequence[int], positions: Sequence[int], data: torch.Tensor) -> None:
        """Look at whole tensors: `indexes[k]` starts at byte `positions[k]` of `data`. As a `write` for each,
        at the cost of their bytes where they are many and small.
        """
        plan = self.plan
        tensors, places = np.asarray(indexes, dtype=np.int64), np.asarray(positions, dtype=np.int64)
        small = plan.small.are_among(tensors)
        for index, position in zip(tensors[~small].tolist(), places[~small].tolist(), strict=True):
            self.write(index, 0, data[position : position + plan.sizes[index]])
        members, starts = tensors[small], places[small]
        totals, nonfinite = plan.small.scan(
            data.numpy(), members, starts, find_nonfinite=self._find_nonfinite
        )
        with self._lock:  # none comes twice in one call, so plain indexing adds
            self._arrived[members] += plan.size_of[members]
            self._totals[members] += totals
            self._nonfinite[members] |= nonfinite

    def incomplete(self) -> list[tuple[int, int]]:
        """(tensor, bytes that were seen) of every tensor that must arrive and was not seen whole."""
        short = self._arrived != self.plan.size_of
        return [(i, int(self._arrived[i])) for i in self.plan.needed if short[i]] if short.any() else []

    def received_checksum(self, index: int) -> int:
        """The checksum of a whole tensor as it would arrive; needs `hashing`, or a twin or its writer."""
        return self.received_checksums([index])[0]

    def received_checksums(self, indexes: Sequence[int]) -> list[int]:
        """`received_checksum` of many tensors."""
        values: list[int] = (self._totals[indexes] + self.plan.mixed_lengths[indexes]).tolist()
        return values

    def slot_checksum(self, index: int) -> int:
        """The checksum of a twin or its writer in the slot's dtype."""
        if self.plan.same_dtype(index):
            return self.received_checksum(index)
        spec = self.plan.manifest.tensor(index)
        return self._cast[index].value(spec.numel * ITEMSIZE[self.plan.slot(index).dtype])

    def nonfinite(self, indexes: Sequence[int]) -> list[int]:
        """Those of `indexes` of which a value would not be finite in the slot's dtype."""
        return [index for index in indexes if self._nonfinite[index]] if self._nonfinite.any() else []

    def _look_at_cast(
        self, index: int, offset: int, data: torch.Tensor, dtype: torch.dtype, wanted: bool
    ) -> bool:
        """Cast a chunk in small pieces; returns whether a value is not finite then (if `wanted`)."""
        if not wanted and index not in self._cast:
            return False
        source = self.plan.manifest.tensor(index).dtype
        first, nonfinite = offset // ITEMSIZE[source], False
        for start, piece in cast_pieces(as_dtype(data, TORCH_DTYPES[source]), dtype):
            nonfinite = nonfinite or (wanted and has_nonfinite(piece))
            if index in self._cast:
                with self._lock:
                    at = (first + start) * dtype.itemsize
                    self._cast[index].add(at, piece.view(torch.uint8))
        return nonfinite
