"""Where arriving bytes go: into the slots of a staging (or the live) buffer, each byte exactly once.

All four paths end here, whatever the order and size of their pieces. A sink either stores (casts into
the slot's place in `destination`) or, without a destination, borrows: it keeps views of whole tensors
in the trainer's memory and only reads them, until the commit copies from them.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from weight_updater.arena import TORCH_DTYPES, Arena
from weight_updater.arrival import Arrivals, bad_chunk, check_chunk, overlap_text
from weight_updater.cast import as_dtype, cast_into, cast_pieces
from weight_updater.checksum import checksum, finish, has_nonfinite, scan
from weight_updater.errors import Reason, UpdateError, UpdateRefused
from weight_updater.host_scan import MASK, copy_on_host
from weight_updater.look import Look
from weight_updater.plan import Plan, slot_nbytes
from weight_updater.requests import ITEMSIZE
from weight_updater.slot_scan import cast_checksum
from weight_updater.small import Flags, Indexes

if TYPE_CHECKING:
    from weight_updater.device_scan import Found
    from weight_updater.lent_tensors import LentTensors


class Sink:
    """Takes the bytes of one update. `write` may be called by several threads at once.

    Args:
        plan: where each tensor goes.
        arena: layout of `destination`.
        destination: uint8 buffer in the arena's layout; None borrows instead of storing.
        hashing: add up checksums of what arrives (twins of another tensor are always hashed).
        find_nonfinite: look for NaN and infinities in what was written, after any cast.
    """

    def __init__(
        self,
        plan: Plan,
        arena: Arena,
        destination: torch.Tensor | None,
        *,
        hashing: bool,
        find_nonfinite: bool,
    ) -> None:
        self.plan = plan
        self.destination = destination
        self.received_bytes = 0
        self.borrowed: dict[int, torch.Tensor] = {}  # tensor -> its bytes in the trainer's memory
        self.offered: list[LentTensors] = []  # what it borrowed many of them from
        self.extra_bytes = 0
        self._arena = arena
        self.hashes = hashing
        self.finds_nonfinite = find_nonfinite
        self._arrivals = Arrivals(plan.size_of, plan.needed, plan.applied)
        self._totals = np.zeros(len(plan.slots), dtype=np.uint64)  # sums of mixed words
        self._nonfinite = np.zeros(len(plan.slots), dtype=np.bool_)
        self._on_cpu = destination is None or destination.device.type == "cpu"
        # Small whole tensors are scanned together, when somebody asks: one by one they would cost more than
        # their bytes. Of those that came together: (memory, tensors, their places in it).
        self._unscanned: set[int] = set()
        self._unscanned_together: list[tuple[torch.Tensor, Indexes, Indexes]] = []
        self._scanning = threading.Lock()
        self._twin_scratch: dict[int, torch.Tensor] = {}
        self._changed = threading.Condition()
        self._num_writing = 0
        self._ended_by: UpdateError | None = None
        self._looked: Look | None = None

    def write(self, tensor_index: int, byte_offset: int, data: torch.Tensor) -> None:
        """Take bytes [byte_offset, byte_offset + len(data)) of tensor `tensor_index` of the manifest.

        Args:
            byte_offset: a multiple of 8.
            data: [n] uint8, contiguous; the sink is done with it on return unless it borrows.

        Raises:
            UpdateRefused: BAD_CHUNK; or whatever ended the update in the meantime.
        """
        self._begin_write(tensor_index, byte_offset, data)
        total, nonfinite = 0, False
        try:
            if self.plan.slots[tensor_index] is not None:
                store = self._borrow if self.destination is None else self._store
                total, nonfinite = store(tensor_index, byte_offset, data)
        finally:
            with self._changed:
                self._totals[tensor_index] = (int(self._totals[tensor_index]) + total) & MASK
                self._nonfinite[tensor_index] |= nonfinite
                self._num_writing -= 1
                self._changed.notify_all()

    def write_whole(self, indexes: Sequence[int], positions: Sequence[int], data: torch.Tensor) -> None:
        """Take whole tensors of the manifest: `indexes[k]` starts at byte `positions[k]` of `data`.

        The same as a `write` for each, at the cost of their bytes where they are many and small.
        """
        sizes = self.plan.sizes
        tensors, places = np.asarray(indexes, dtype=np.int64), np.asarray(positions, dtype=np.int64)
        small = self._small(tensors) & (data.device.type == "cpu")
        for index, position in zip(tensors[~small].tolist(), places[~small].tolist(), strict=True):
            self.write(index, 0, data[position : position + sizes[index]])
        if small.any():
            self._write_small(tensors[small], places[small], data)

    def write_packed(self, position: int, data: torch.Tensor) -> None:
        """Take bytes [position, position + len(data)) of all tensors packed in the manifest's order, each at
        a multiple of 256 bytes; what lies between tensors is ignored.

        Args:
            position: a multiple of 8.
            data: as for `write`.

        Raises:
            UpdateRefused: BAD_CHUNK; or whatever ended the update in the meantime.
        """
        offsets, sizes = self.plan.packed_offsets, self.plan.sizes
        end = position + data.numel()
        if position % 8 or not 0 <= position <= end <= self.plan.packed_bytes:
            raise UpdateRefused(
                Reason.BAD_CHUNK,
                f"a packed chunk has bytes [{position}, {end}); it must start at a multiple of 8 and lie in "
                f"the {self.plan.packed_bytes} bytes of all tensors",
            )
        whole = range(bisect_left(offsets, position), bisect_left(offsets, end))
        before = whole.start - 1
        if before >= 0 and position < offsets[before] + sizes[before]:
            last = min(end, offsets[before] + sizes[before])
            self.write(before, position - offsets[before], data[: last - position])
        if whole and offsets[whole[-1]] + sizes[whole[-1]] > end:
            cut = whole[-1]
            whole = whole[:-1]
            self.write(cut, 0, data[offsets[cut] - position :])
        self.write_whole(whole, [offsets[index] - position for index in whole], data)

    def claim_whole(self, indexes: Sequence[int]) -> None:
        """Account for whole tensors that somebody else puts into their places; then call `settle_whole`.
        Raises what `write` does; then none is accounted for.
        """
        with self._changed:
            self._claim_whole(indexes)
            self._num_writing += 1

    def settle_whole(self, indexes: Sequence[int], found: Found | None) -> None:
        """The tensors of a `claim_whole` are in place. found: what a scan saw in them, if there was one."""
        with self._changed:
            if found is not None and found.totals.size:
                self._totals[indexes], self._nonfinite[indexes] = found.totals, found.nonfinite
            self._num_writing -= 1
            self._changed.notify_all()

    def is_hashed(self, index: int) -> bool:
        """Whether the checksum of what arrives of a tensor will be asked for."""
        return self.hashes or index in self.plan.twins or index in self.plan.twins.values()

    def flush(self) -> None:
        """Until all that was written lies in its place, and what it came from may change."""

    def catch_up(self) -> None:
        """Do now what was put off when small tensors arrived, so that whoever asks later need not wait."""
        if self._looked is None:
            self._scan_small()

    def trust(self, look: Look) -> None:
        """All tensors were looked at: what was found holds, and nothing is read again as it is written."""
        self._looked = look
        self.hashes = self.finds_nonfinite = False

    def end(self, error: UpdateError) -> None:
        """Let no further byte in: later writes raise `error`. Returns when running writes have finished,
        so that the destination is free; each is one chunk long.
        """
        with self._changed:
            self._ended_by = self._ended_by or error.again()
            self._changed.wait_for(lambda: self._num_writing == 0)

    def num_waiting(self) -> tuple[int, int]:
        """How many tensors that must arrive have not, whole; and how many of those that are written."""
        return self._arrivals.num_waiting()

    def incomplete(self) -> list[tuple[int, int]]:
        """(tensor, bytes that arrived) of every tensor that must arrive and has not, whole."""
        return [
            (index, sum(end - start for start, end in self._arrivals.spans(index)))
            for index in self._arrivals.missing(self.plan.needed)
        ]

    def received_checksum(self, index: int) -> int:
        """The checksum of what arrived of a whole tensor; needs `hashing`, or a twin or its writer."""
        return self.received_checksums([index])[0]

    def received_checksums(self, indexes: Sequence[int]) -> list[int]:
        """`received_checksum` of many tensors."""
        if self._looked is not None:
            return self._looked.received_checksums(indexes)
        self._scan_small()
        at = np.asarray(indexes, dtype=np.int64)
        values: list[int] = (self._totals[at] + self.plan.mixed_lengths[at]).tolist()
        return values

    def nonfinite(self, indexes: Sequence[int]) -> list[int]:
        """Those of `indexes` of which a value was not finite in the slot's dtype."""
        if self._looked is not None:
            return self._looked.nonfinite(indexes)
        self._scan_small()
        return [index for index in indexes if self._nonfinite[index]] if self._nonfinite.any() else []

    def slot_bytes(self, index: int) -> torch.Tensor | None:
        """The stored tensor in its slot's dtype and shape; None for a borrowed one that needs a cast."""
        place = self.plan.slot(index)
        if index in self._twin_scratch:
            return self._twin_scratch[index].view(TORCH_DTYPES[place.dtype]).view(place.shape)
        if self.destination is not None:
            return self._arena.slot_view(self.destination, place.name)
        if self.plan.same_dtype(index) and index in self.borrowed:
            return as_dtype(self.borrowed[index], TORCH_DTYPES[place.dtype]).view(place.shape)
        return None

    def slot_checksum(self, index: int) -> int:
        """The checksum that the slot has once the tensor is in it: after any cast."""
        if (self._looked is not None or self.is_hashed(index)) and self.plan.same_dtype(index):
            return self.received_checksum(index)
        stored = self.slot_bytes(index)
        if stored is not None:
            return checksum(stored)
        place, spec = self.plan.slot(index), self.plan.manifest.tensor(index)
        if not spec.numel:
            return finish(0, 0)
        source = as_dtype(self.borrowed[index], TORCH_DTYPES[spec.dtype])
        return cast_checksum(source, TORCH_DTYPES[place.dtype])

    def slot_checksums(self, indexes: Sequence[int]) -> list[int]:
        """`slot_checksum` of many tensors."""
        if not self.hashes and self._looked is None:
            return [self.slot_checksum(index) for index in indexes]
        casts = self.plan.casts
        if not casts:
            return self.received_checksums(indexes)
        return [
            self.slot_checksum(index) if index in casts else value
            for index, value in zip(indexes, self.received_checksums(indexes), strict=True)
        ]

    def _begin_write(self, index: int, offset: int, data: torch.Tensor) -> None:
        if not 0 <= index < len(self._arrivals):
            raise UpdateRefused(
                Reason.BAD_CHUNK,
                f"a chunk names tensor {index}, the manifest has {len(self._arrivals)} (counted from 0)",
            )
        spec = self.plan.manifest.tensor(index)
        assert data.dtype == torch.uint8, "a sink takes bytes"
        assert data.dim() == 1, "a sink takes bytes in one dimension"
        end = offset + data.numel()
        check_chunk(spec, self.plan.sizes[index], offset, end, whole=self.destination is None)
        with self._changed:
            if self._ended_by is not None:
                raise self._ended_by.again()
            if data.numel() and (taken := self._arrivals.claim(index, offset, end)) is not None:
                raise bad_chunk(spec, offset, end, overlap_text(taken))
            self.received_bytes += data.numel()
            self._num_writing += 1

    def _claim_whole(self, tensors: Indexes | Sequence[int]) -> None:
        """Account for whole tensors, or for none if one may not come; `_changed` is held."""
        if self._ended_by is not None:
            raise self._ended_by.again()
        indexes = np.asarray(tensors, dtype=np.int64)
        taken = self._arrivals.claim_whole(indexes)
        if taken is not None:
            spans = self._arrivals.spans(taken) or [(0, self.plan.sizes[taken])]  # twice in this call
            raise bad_chunk(
                self.plan.manifest.tensor(taken), 0, self.plan.sizes[taken], overlap_text(spans[0])
            )
        self.received_bytes += int(self.plan.size_of[indexes].sum())

    def _store(self, index: int, offset: int, data: torch.Tensor) -> tuple[int, bool]:
        """Write a chunk into its place; returns (sum of its mixed words, a value is not finite)."""
        place, spec = self.plan.slot(index), self.plan.manifest.tensor(index)
        dtype = TORCH_DTYPES[place.dtype]
        if index in self.plan.twins:
            if self.plan.same_dtype(index):
                return scan(data, offset).total, False
            region, start = self._scratch_of_twin(index), 0
        else:
            assert self.destination is not None
            region, start = self.destination, place.offset
        if self.plan.same_dtype(index):
            return self._copy(index, offset, region[start + offset : start + offset + data.numel()], data)
        source_itemsize, itemsize = ITEMSIZE[spec.dtype], dtype.itemsize
        first, count = offset // source_itemsize, data.numel() // source_itemsize
        written = region[start + first * itemsize : start + (first + count) * itemsize]
        cast_into(written.view(dtype), as_dtype(data, TORCH_DTYPES[spec.dtype]))
        total = scan(data, offset).total if self.is_hashed(index) else 0
        return total, self.finds_nonfinite and has_nonfinite(written.view(dtype))

    def _copy(self, index: int, offset: int, into: torch.Tensor, data: torch.Tensor) -> tuple[int, bool]:
        """Copy a chunk into its place, and look at it in the same pass, if anybody is to; as `_store`."""
        dtype, on_cpu = TORCH_DTYPES[self.plan.slot(index).dtype], into.is_cpu and data.is_cpu
        later = data.numel() == self.plan.sizes[index] and self._small(np.array([index])).all()
        if on_cpu and not later and (self.finds_nonfinite or self.is_hashed(index)):
            found = copy_on_host(into.numpy(), data.numpy(), offset // 8, dtype)
            return found.total, self.finds_nonfinite and found.nonfinite
        if on_cpu:  # not by torch, whose threads would wait for each other at every chunk
            into.numpy()[:] = data.numpy()
        else:
            into.copy_(data)
        if not later:
            return self._inspect(index, offset, into, dtype)
        with self._changed:
            self._unscanned.add(index)
        return 0, False

    def _small(self, indexes: Indexes) -> Flags:
        """Which tensors are written as they come, and scanned later together with others."""
        return self.plan.small.are_among(indexes) & self._on_cpu

    def _write_small(self, indexes: Indexes, positions: Indexes, data: torch.Tensor) -> None:
        """Take small whole tensors that lie at `positions` of `data`."""
        with self._changed:
            self._claim_whole(indexes)
            self._num_writing += 1
        memory, places = data, positions
        try:
            if self.destination is None:
                sizes = self.plan.sizes
                for index, position in zip(indexes.tolist(), positions.tolist(), strict=True):
                    self.borrowed[index] = data[position : position + sizes[index]]
            else:
                memory, places = self.destination, self.plan.slot_offset_of[indexes]
                self.plan.small.copy(memory.numpy(), places, data.numpy(), positions, indexes)
        finally:
            with self._changed:
                self._unscanned_together.append((memory, indexes, places))
                self._num_writing -= 1
                self._changed.notify_all()

    def _scan_small(self) -> None:
        """Catch up on small tensors that arrived whole."""
        if not self._unscanned and not self._unscanned_together:
            return
        with self._scanning:  # whoever asks meanwhile waits for the sums
            with self._changed:
                waiting = list(self._unscanned_together)
                alone = list(self._unscanned)
            if alone:
                assert self.destination is not None
                indexes = np.array(alone, dtype=np.int64)
                waiting.append((self.destination, indexes, self.plan.slot_offset_of[indexes]))
            for memory, indexes, places in waiting if self._looks else ():
                found = self.plan.small.scan(
                    memory.numpy(), indexes, places, find_nonfinite=self.finds_nonfinite
                )
                self._totals[indexes], self._nonfinite[indexes] = found
            with self._changed:
                del self._unscanned_together[: len(waiting) - bool(alone)]
                self._unscanned.difference_update(alone)

    @property
    def _looks(self) -> bool:
        """Whether anybody will ask for what a scan finds in any tensor."""
        return self.hashes or self.finds_nonfinite or bool(self.plan.twins)

    def _borrow(self, index: int, offset: int, data: torch.Tensor) -> tuple[int, bool]:
        """Remember a whole tensor of the trainer's and read it once."""
        self.borrowed[index] = data
        place, spec = self.plan.slot(index), self.plan.manifest.tensor(index)
        if self.plan.same_dtype(index):
            return self._inspect(index, offset, data, TORCH_DTYPES[place.dtype])
        nonfinite = self.finds_nonfinite and any(
            has_nonfinite(piece)
            for _, piece in cast_pieces(as_dtype(data, TORCH_DTYPES[spec.dtype]), TORCH_DTYPES[place.dtype])
        )
        return scan(data).total if self.is_hashed(index) else 0, nonfinite

    def _inspect(self, index: int, offset: int, data: torch.Tensor, dtype: torch.dtype) -> tuple[int, bool]:
        if self.is_hashed(index):
            found = scan(data, offset, dtype if self.finds_nonfinite else None)
            return found.total, found.nonfinite
        return 0, self.finds_nonfinite and has_nonfinite(as_dtype(data, dtype))

    def _scratch_of_twin(self, index: int) -> torch.Tensor:
        """Room for a twin that arrives in another dtype than its writer, so that both can be compared."""
        with self._changed:
            if index not in self._twin_scratch:
                nbytes = slot_nbytes(self.plan.slot(index))
                assert self.destination is not None
                self._twin_scratch[index] = self.destination.new_empty(nbytes)
                self.extra_bytes += nbytes
            return self._twin_scratch[index]
