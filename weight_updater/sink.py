"""Where arriving bytes go: into the slots of a staging (or the live) buffer, each byte exactly once.

All four paths end here, whatever the order and size of their pieces. A sink either stores (casts into
the slot's place in `destination`) or, without a destination, borrows: it keeps views of whole tensors
in the trainer's memory and only reads them, until the commit copies from them.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Sequence

import torch

from weight_updater.arena import TORCH_DTYPES, Arena
from weight_updater.arrival import Arrival, bad_chunk, overlap_text
from weight_updater.cast import as_dtype, cast_into, cast_pieces
from weight_updater.checksum import PartialChecksum, checksum, finish, has_nonfinite, scan
from weight_updater.errors import Reason, UpdateError, UpdateRefused
from weight_updater.plan import Plan
from weight_updater.requests import ITEMSIZE, TensorSpec
from weight_updater.slot_scan import scan_rows

_MASK = (1 << 64) - 1


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
        self.extra_bytes = 0
        self._arena = arena
        self._hashing = hashing
        self._find_nonfinite = find_nonfinite
        self._arrivals = [Arrival() for _ in plan.slots]
        on_cpu = destination is None or destination.device.type == "cpu"
        self._small = plan.small if on_cpu else [False] * len(plan.small)
        # Small whole tensors are scanned together, when somebody asks: one by one they would cost more than
        # their bytes. Of those that are borrowed: (trainer's memory, tensors, their places in it).
        self._unscanned: set[int] = set()
        self._unscanned_borrowed: list[tuple[torch.Tensor, list[int], list[int]]] = []
        self._scanning = threading.Lock()
        self._twin_scratch: dict[int, torch.Tensor] = {}
        self._changed = threading.Condition()
        self._num_writing = 0
        self._ended_by: UpdateError | None = None

    def write(self, tensor_index: int, byte_offset: int, data: torch.Tensor) -> None:
        """Take bytes [byte_offset, byte_offset + len(data)) of tensor `tensor_index` of the manifest.

        Args:
            byte_offset: a multiple of 8.
            data: [n] uint8, contiguous; the sink is done with it on return unless it borrows.

        Raises:
            UpdateRefused: BAD_CHUNK; or whatever ended the update in the meantime.
        """
        arrival = self._begin_write(tensor_index, byte_offset, data)
        total, nonfinite = 0, False
        try:
            if self.plan.slots[tensor_index] is not None:
                store = self._borrow if self.destination is None else self._store
                total, nonfinite = store(tensor_index, byte_offset, data)
        finally:
            with self._changed:
                arrival.total = (arrival.total + total) & _MASK
                arrival.nonfinite = arrival.nonfinite or nonfinite
                self._num_writing -= 1
                self._changed.notify_all()

    def write_whole(self, indexes: Sequence[int], positions: Sequence[int], data: torch.Tensor) -> None:
        """Take whole tensors of the manifest: `indexes[k]` starts at byte `positions[k]` of `data`.

        The same as a `write` for each, at the cost of their bytes where they are many and small.
        """
        sizes = self.plan.sizes
        small: list[int] = []
        places: list[int] = []
        for index, position in zip(indexes, positions, strict=True):
            if self._small[index]:
                small.append(index)
                places.append(position)
            else:
                self.write(index, 0, data[position : position + sizes[index]])
        if small:
            self._write_small(small, places, data)

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

    def catch_up(self) -> None:
        """Do now what was put off when small tensors arrived, so that whoever asks later need not wait."""
        self._scan_small()

    def end(self, error: UpdateError) -> None:
        """Let no further byte in: later writes raise `error`. Returns when running writes have finished,
        so that the destination is free; each is one chunk long.
        """
        with self._changed:
            self._ended_by = self._ended_by or error
            self._changed.wait_for(lambda: self._num_writing == 0)

    def incomplete(self) -> list[tuple[int, int]]:
        """(tensor, bytes that arrived) of every tensor that must arrive and has not, whole."""
        found = []
        for index in self.plan.needed:
            nbytes, spans = self.plan.sizes[index], self._arrivals[index].spans
            if spans != [(0, nbytes)] and nbytes:
                found.append((index, sum(end - start for start, end in spans)))
        return found

    def received_checksum(self, index: int) -> int:
        """The checksum of what arrived of a whole tensor; needs `hashing`, or a twin or its writer."""
        self._scan_small()
        return finish(self._arrivals[index].total, self.plan.sizes[index])

    def received_checksums(self, indexes: Sequence[int]) -> list[int]:
        """`received_checksum` of many tensors."""
        self._scan_small()
        arrivals, sizes = self._arrivals, self.plan.sizes
        return [finish(arrivals[index].total, sizes[index]) for index in indexes]

    def is_nonfinite(self, index: int) -> bool:
        """Whether a value of the tensor was not finite in the slot's dtype."""
        return bool(self.nonfinite([index]))

    def nonfinite(self, indexes: Sequence[int]) -> list[int]:
        """Those of `indexes` of which a value was not finite in the slot's dtype."""
        self._scan_small()
        return [index for index in indexes if self._arrivals[index].nonfinite]

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
        if self._is_hashed(index) and self.plan.same_dtype(index):
            return self.received_checksum(index)
        stored = self.slot_bytes(index)
        if stored is not None:
            return checksum(stored)
        place, spec = self.plan.slot(index), self.plan.manifest.tensors[index]
        if not spec.numel:
            return finish(0, 0)
        partial = PartialChecksum()
        source = as_dtype(self.borrowed[index], TORCH_DTYPES[spec.dtype])
        for start, piece in cast_pieces(source, TORCH_DTYPES[place.dtype]):
            partial.add(start * piece.element_size(), piece.view(torch.uint8))
        return partial.value(spec.numel * ITEMSIZE[place.dtype])

    def slot_checksums(self, indexes: Sequence[int]) -> list[int]:
        """`slot_checksum` of many tensors."""
        if not self._hashing:
            return [self.slot_checksum(index) for index in indexes]
        casts = self.plan.casts
        return [
            self.slot_checksum(index) if index in casts else value
            for index, value in zip(indexes, self.received_checksums(indexes), strict=True)
        ]

    def _begin_write(self, index: int, offset: int, data: torch.Tensor) -> Arrival:
        if not 0 <= index < len(self._arrivals):
            raise UpdateRefused(
                Reason.BAD_CHUNK,
                f"a chunk names tensor {index}, the manifest has {len(self._arrivals)} (counted from 0)",
            )
        spec = self.plan.manifest.tensors[index]
        assert data.dtype == torch.uint8, "a sink takes bytes"
        assert data.dim() == 1, "a sink takes bytes in one dimension"
        end = offset + data.numel()
        self._check_chunk(spec, self.plan.sizes[index], offset, end)
        arrival = self._arrivals[index]
        with self._changed:
            if self._ended_by is not None:
                raise self._ended_by
            overlap = arrival.claim(offset, end) if data.numel() else None
            if overlap is not None:
                raise bad_chunk(spec, offset, end, overlap_text(overlap))
            self.received_bytes += data.numel()
            self._num_writing += 1
        return arrival

    def _check_chunk(self, spec: TensorSpec, nbytes: int, offset: int, end: int) -> None:
        if offset < 0 or end > nbytes:
            raise bad_chunk(spec, offset, end, f"lies outside of the tensor's {nbytes} bytes")
        if offset % 8 or (end % 8 and end != nbytes):
            text = "is misaligned; chunks start and end at multiples of 8, but for a tensor's end"
            raise bad_chunk(spec, offset, end, text)
        if self.destination is None and end - offset != nbytes:
            raise bad_chunk(spec, offset, end, "is a part; this path brings whole tensors")

    def _is_hashed(self, index: int) -> bool:
        return self._hashing or index in self.plan.twins or index in self.plan.twins.values()

    def _store(self, index: int, offset: int, data: torch.Tensor) -> tuple[int, bool]:
        """Write a chunk into its place; returns (sum of its mixed words, a value is not finite)."""
        place, spec = self.plan.slot(index), self.plan.manifest.tensors[index]
        dtype = TORCH_DTYPES[place.dtype]
        if index in self.plan.twins:
            if self.plan.same_dtype(index):
                return scan(data, offset).total, False
            region, start = self._scratch_of_twin(index), 0
        else:
            assert self.destination is not None
            region, start = self.destination, place.offset
        source_itemsize, itemsize = ITEMSIZE[spec.dtype], dtype.itemsize
        if self.plan.same_dtype(index):
            written = region[start + offset : start + offset + data.numel()]
            if written.device.type == data.device.type == "cpu":
                # By this thread alone: torch's would wait for each other at every chunk on a busy machine.
                written.numpy()[:] = data.numpy()
            else:
                written.copy_(data)
            if self._small[index] and data.numel() == self.plan.sizes[index]:
                with self._changed:
                    self._unscanned.add(index)
                return 0, False
            return self._inspect(index, offset, written, dtype)
        first, count = offset // source_itemsize, data.numel() // source_itemsize
        written = region[start + first * itemsize : start + (first + count) * itemsize]
        cast_into(written.view(dtype), as_dtype(data, TORCH_DTYPES[spec.dtype]))
        total = scan(data, offset).total if self._is_hashed(index) else 0
        return total, self._find_nonfinite and has_nonfinite(written.view(dtype))

    def _write_small(self, indexes: list[int], positions: list[int], data: torch.Tensor) -> None:
        """Take small whole tensors that lie at `positions` of `data`, all of which `self._small` allows."""
        sizes, slots, arrivals = self.plan.sizes, self.plan.slots, self._arrivals
        with self._changed:
            if self._ended_by is not None:
                raise self._ended_by
            for claimed, index in enumerate(indexes):
                if arrivals[index].spans:
                    refused = bad_chunk(
                        self.plan.manifest.tensors[index],
                        0,
                        sizes[index],
                        overlap_text(arrivals[index].spans[0]),
                    )
                    for other in indexes[:claimed]:
                        arrivals[other].spans.clear()
                    raise refused
                arrivals[index].spans.append((0, sizes[index]))
            self.received_bytes += sum([sizes[index] for index in indexes])
            self._num_writing += 1
        try:
            if self.destination is None:
                for index, position in zip(indexes, positions, strict=True):
                    self.borrowed[index] = data[position : position + sizes[index]]
            else:
                source, stored = data.numpy(), self.destination.numpy()
                for index, position in zip(indexes, positions, strict=True):
                    start, nbytes = slots[index].offset, sizes[index]  # type: ignore[union-attr]
                    stored[start : start + nbytes] = source[position : position + nbytes]
        finally:
            with self._changed:
                if self.destination is None:
                    self._unscanned_borrowed.append((data, indexes, positions))
                else:
                    self._unscanned.update(indexes)
                self._num_writing -= 1
                self._changed.notify_all()

    def _scan_small(self) -> None:
        """Catch up on small tensors that arrived whole."""
        if not self._unscanned and not self._unscanned_borrowed:
            return
        with self._scanning:  # whoever asks meanwhile waits for the sums
            with self._changed:
                stored, borrowed = list(self._unscanned), list(self._unscanned_borrowed)
            if stored:
                assert self.destination is not None
                places = sorted((self.plan.slot(index).offset, index) for index in stored)
                self._scan_in(self.destination, [i for _, i in places], [offset for offset, _ in places])
            for data, indexes, positions in borrowed:
                self._scan_in(data, indexes, positions)
            with self._changed:
                self._unscanned.difference_update(stored)
                del self._unscanned_borrowed[: len(borrowed)]

    def _scan_in(self, buffer: torch.Tensor, indexes: list[int], offsets: list[int]) -> None:
        """Scan small tensors that lie at `offsets` of `buffer`, those of one size and dtype together."""
        alike: dict[tuple[int, str], tuple[list[int], list[int]]] = {}
        for index, offset in zip(indexes, offsets, strict=True):
            key = (self.plan.sizes[index], self.plan.slot(index).dtype)
            members, starts = alike.setdefault(key, ([], []))
            members.append(index)
            starts.append(offset)
        for (nbytes, name), (members, starts) in alike.items():
            dtype = TORCH_DTYPES[name] if self._find_nonfinite else None
            totals, nonfinite = scan_rows(buffer, starts, nbytes, dtype)
            for index, total, bad in zip(members, totals, nonfinite, strict=True):
                arrival = self._arrivals[index]
                arrival.total, arrival.nonfinite = total, bad

    def _borrow(self, index: int, offset: int, data: torch.Tensor) -> tuple[int, bool]:
        """Remember a whole tensor of the trainer's and read it once."""
        self.borrowed[index] = data
        place, spec = self.plan.slot(index), self.plan.manifest.tensors[index]
        if self.plan.same_dtype(index):
            return self._inspect(index, offset, data, TORCH_DTYPES[place.dtype])
        nonfinite = self._find_nonfinite and any(
            has_nonfinite(piece)
            for _, piece in cast_pieces(as_dtype(data, TORCH_DTYPES[spec.dtype]), TORCH_DTYPES[place.dtype])
        )
        return scan(data).total if self._is_hashed(index) else 0, nonfinite

    def _inspect(self, index: int, offset: int, data: torch.Tensor, dtype: torch.dtype) -> tuple[int, bool]:
        if self._is_hashed(index):
            found = scan(data, offset, dtype if self._find_nonfinite else None)
            return found.total, found.nonfinite
        return 0, self._find_nonfinite and has_nonfinite(as_dtype(data, dtype))

    def _scratch_of_twin(self, index: int) -> torch.Tensor:
        """Room for a twin that arrives in another dtype than its writer, so that both can be compared."""
        with self._changed:
            if index not in self._twin_scratch:
                place = self.plan.slot(index)
                nbytes = math.prod(place.shape) * ITEMSIZE[place.dtype]
                assert self.destination is not None
                self._twin_scratch[index] = self.destination.new_empty(nbytes)
                self.extra_bytes += nbytes
            return self._twin_scratch[index]
