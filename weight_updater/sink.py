"""Where arriving bytes go: into the slots of a staging (or the live) buffer, each byte exactly once.

All four paths end here, whatever the order and size of their pieces. A sink either stores (casts into
the slot's place in `destination`) or, without a destination, borrows: it keeps views of whole tensors
in the trainer's memory and only reads them, until the commit copies from them.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left

import torch

from weight_updater.arena import TORCH_DTYPES, Arena
from weight_updater.cast import as_dtype, cast_into, cast_pieces
from weight_updater.checksum import PartialChecksum, checksum, finish, has_nonfinite, scan
from weight_updater.errors import Reason, UpdateError, UpdateRefused
from weight_updater.look import Look
from weight_updater.plan import Plan
from weight_updater.requests import ITEMSIZE, TensorSpec
from weight_updater.slot_scan import is_small, scan_slots

_MASK = (1 << 64) - 1


class Arrival:
    """What has come of one tensor. spans: sorted, disjoint, merged [start, end) in bytes."""

    __slots__ = ("nonfinite", "spans", "total")

    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []
        self.total = 0  # sum of the chunks' mixed words
        self.nonfinite = False

    def claim(self, start: int, end: int) -> tuple[int, int] | None:
        """Add [start, end); returns the span that it overlaps, if any, and then adds nothing."""
        at = bisect_left(self.spans, (start, start))
        for span in self.spans[max(0, at - 1) : at + 1]:
            if start < span[1] and span[0] < end:
                return span
        if at < len(self.spans) and self.spans[at][0] == end:
            end = self.spans.pop(at)[1]
        if at and self.spans[at - 1][1] == start:
            at -= 1
            start = self.spans.pop(at)[0]
        self.spans.insert(at, (start, end))
        return None


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
        self._unscanned: set[int] = set()  # small whole tensors, scanned together when somebody asks
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

    def trust(self, look: Look) -> None:
        """All tensors were looked at: what was found holds, and nothing is read again as it is written."""
        self._looked = look
        self._hashing = self._find_nonfinite = False

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
            nbytes, spans = self.plan.manifest.tensors[index].nbytes, self._arrivals[index].spans
            if spans != [(0, nbytes)] and nbytes:
                found.append((index, sum(end - start for start, end in spans)))
        return found

    def received_checksum(self, index: int) -> int:
        """The checksum of what arrived of a whole tensor; needs `hashing`, or a twin or its writer."""
        if self._looked is not None:
            return self._looked.received_checksum(index)
        self._scan_small()
        return finish(self._arrivals[index].total, self.plan.manifest.tensors[index].nbytes)

    def is_nonfinite(self, index: int) -> bool:
        """Whether a value of the tensor was not finite in the slot's dtype."""
        if self._looked is not None:
            return self._looked.is_nonfinite(index)
        self._scan_small()
        return self._arrivals[index].nonfinite

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
        if (self._looked is not None or self._is_hashed(index)) and self.plan.same_dtype(index):
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
        self._check_chunk(spec, offset, end)
        arrival = self._arrivals[index]
        with self._changed:
            if self._ended_by is not None:
                raise self._ended_by
            overlap = arrival.claim(offset, end) if data.numel() else None
            if overlap is not None:
                raise bad_chunk(
                    spec, offset, end, f"overlaps [{overlap[0]}, {overlap[1]}), which arrived already"
                )
            self.received_bytes += data.numel()
            self._num_writing += 1
        return arrival

    def _check_chunk(self, spec: TensorSpec, offset: int, end: int) -> None:
        nbytes = spec.nbytes
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
            written.copy_(data)
            if data.numel() == spec.nbytes and is_small(place) and written.device.type == "cpu":
                self._unscanned.add(index)
                return 0, False
            return self._inspect(index, offset, written, dtype)
        first, count = offset // source_itemsize, data.numel() // source_itemsize
        written = region[start + first * itemsize : start + (first + count) * itemsize]
        cast_into(written.view(dtype), as_dtype(data, TORCH_DTYPES[spec.dtype]))
        total = scan(data, offset).total if self._is_hashed(index) else 0
        return total, self._find_nonfinite and has_nonfinite(written.view(dtype))

    def _scan_small(self) -> None:
        """Catch up on small tensors that arrived whole: one by one they would cost more than their bytes."""
        if not self._unscanned:
            return
        with self._changed:
            indexes, self._unscanned = self._unscanned, set()
        assert self.destination is not None
        by_offset = {self.plan.slot(index).offset: index for index in indexes}
        places = [self.plan.slot(by_offset[offset]) for offset in sorted(by_offset)]
        for place, found in scan_slots(self.destination, places, find_nonfinite=self._find_nonfinite):
            arrival = self._arrivals[by_offset[place.offset]]
            arrival.total, arrival.nonfinite = found.total, found.nonfinite

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


def bad_chunk(spec: TensorSpec, offset: int, end: int, what: str) -> UpdateRefused:
    """The refusal of bytes [offset, end) of a tensor."""
    return UpdateRefused(Reason.BAD_CHUNK, f"a chunk of {spec.name} with bytes [{offset}, {end}) {what}")
