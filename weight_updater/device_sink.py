"""The sink of an engine on a GPU: bytes travel asynchronously and are hashed on the device, all at once.

`write` queues a copy and returns. A device hashes and tests all tensors of a model in a few milliseconds,
in one pass when the update is verified; so the CPU never reads the bytes, however they came.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch

from weight_updater.arena import TORCH_DTYPES, Arena
from weight_updater.buckets import Piece
from weight_updater.cast import as_dtype, cast_into
from weight_updater.checksum import finish, scan
from weight_updater.device_copies import Copies, copies_to
from weight_updater.device_scan import is_fast, scan_many
from weight_updater.errors import UpdateError
from weight_updater.host_scan import Scan
from weight_updater.plan import Plan, slot_nbytes
from weight_updater.requests import Placement
from weight_updater.sink import Sink

CAST_BYTES = 32 << 20
"""Bytes that arrive in another dtype than the slot's are cast on the device in pieces of this size."""


class DeviceSink(Sink):
    """A sink whose destination is device memory. `write` may be called by several threads at once.

    Data may lie in host memory or on the device. It must stay as it is until a mark of `copies` that was
    made after `write` has been waited for.

    Args:
        copies: order the copies; their order starts behind what the calling thread has queued.
    """

    def __init__(
        self,
        plan: Plan,
        arena: Arena,
        destination: torch.Tensor,
        *,
        hashing: bool,
        find_nonfinite: bool,
        copies: Copies,
    ) -> None:
        super().__init__(plan, arena, destination, hashing=hashing, find_nonfinite=find_nonfinite)
        self.copies = copies
        self._slot_totals: dict[int, int] = {}  # tensors that were cast -> sum of the slot's mixed words
        self._cast_scratch = destination.new_empty(0)
        casts = sorted(plan.casts)
        if casts:
            # Allocated here, on the loop, not while bytes arrive.
            largest = max(plan.manifest.tensors[index].nbytes for index in casts)
            self._cast_scratch = destination.new_empty(min(CAST_BYTES, -(-largest // 8) * 8))
            self.extra_bytes += self._cast_scratch.numel()
            for index in casts:
                if index in plan.twins:
                    self._scratch_of_twin(index)
        self._stops: list[Callable[[], None]] = []
        self._slot_starts: list[int] = []  # in order; made when somebody asks for `in_place`
        self._slot_ends: list[int] = []
        copies.follow()

    def write_whole(self, indexes: Sequence[int], positions: Sequence[int], data: torch.Tensor) -> None:
        """Take whole tensors of the manifest: `indexes[k]` starts at byte `positions[k]` of `data`.

        Tensors that lie in the arena as they lie in `data` are one copy, padding between them included.
        """
        run: list[Piece] = []
        shift: int | None = None
        for index, position in zip(indexes, positions, strict=True):
            piece = Piece(index, 0, self.plan.sizes[index], position)
            own = self._shift(piece)
            if run and (own is None or own != shift or position < run[-1].position):
                self._write_run(run, data)
                run = []
            run.append(piece)
            shift = own
        self._write_run(run, data)

    def _write_run(self, run: Sequence[Piece], data: torch.Tensor) -> None:
        """Write tensors that lie in `data` and in the arena alike, if there is more than one."""
        if len(run) > 1:
            first, last = run[0].position, run[-1].position + run[-1].size
            straight = self.in_place([p._replace(position=p.position - first) for p in run], last - first)
            if straight is not None:
                self.claim(run)
                try:
                    self.copies.copy(straight, data[first:last])
                finally:
                    self.landed(run)
                return
        for piece in run:
            self.write(piece.tensor, 0, data[piece.position : piece.position + piece.size])

    def flush(self) -> None:
        """Until everything that was written lies in its place."""
        self.copies.finish()

    def end(self, error: UpdateError) -> None:
        with self._changed:
            self._ended_by = self._ended_by or error.again()
            stops = list(self._stops)
        for stop in stops:
            stop()
        super().end(error)
        self.copies.finish()

    @contextmanager
    def stoppable(self, stop: Callable[[], None]) -> Iterator[None]:
        """While the block runs, `end` calls `stop`, which must soon end whatever writes to `in_place`."""
        with self._changed:
            if self._ended_by is not None:
                raise self._ended_by.again()
            self._stops.append(stop)
        try:
            yield
        finally:
            with self._changed:
                self._stops.remove(stop)

    def in_place(self, pieces: Sequence[Piece], size: int) -> torch.Tensor | None:
        """Where a bucket of `size` bytes may be received straight into, padding included ([size] uint8).

        None if its pieces do not lie in the arena as they do in the bucket, or with other slots between.
        """
        assert self.destination is not None
        starts = {self._shift(piece) for piece in pieces}
        (start,) = starts if len(starts) == 1 else (None,)
        if start is None:
            return None
        if not 0 <= start <= start + size <= self.destination.numel():
            return None
        if self._num_slots_in(start, start + size) != len(pieces):
            return None  # padding of the bucket would overwrite a slot
        return self.destination[start : start + size]

    def claim(self, pieces: Sequence[Piece]) -> None:
        """Bytes of these pieces are about to come to where `in_place` said; call `landed` when they have, or
        never will.

        Raises:
            UpdateRefused: BAD_CHUNK; or whatever ended the update in the meantime. Then nothing is claimed.
        """
        assert self.destination is not None
        for number, piece in enumerate(pieces):
            try:
                self._begin_write(piece.tensor, piece.start, self.destination[: piece.size])
            except UpdateError:
                self._finish_writes(number)
                raise

    def landed(self, pieces: Sequence[Piece]) -> None:
        """What was claimed is there, or nothing writes to it any more."""
        with self._changed:
            self._unscanned.update(piece.tensor for piece in pieces if self._is_looked_at(piece.tensor))
        self._finish_writes(len(pieces))

    def _is_looked_at(self, index: int) -> bool:
        """Whether anybody will ask for what a scan of the tensor finds."""
        return self.finds_nonfinite or self.is_hashed(index)

    def _shift(self, piece: Piece) -> int | None:
        """Where byte 0 of a bucket with `piece` comes to in the arena; None: no place takes it as it is."""
        place = self.plan.slots[piece.tensor]
        if place is None or not piece.size or piece.tensor in self.plan.twins:
            return None
        return place.offset + piece.start - piece.position if self.plan.same_dtype(piece.tensor) else None

    def _finish_writes(self, number: int) -> None:
        with self._changed:
            self._num_writing -= number
            self._changed.notify_all()

    def _num_slots_in(self, start: int, end: int) -> int:
        """How many slots have bytes in [start, end) of the arena."""
        if not self._slot_starts:
            places = [self._arena.placements[name] for name in self._arena.slot_names]
            spans = sorted((p.offset, p.offset + slot_nbytes(p)) for p in places if slot_nbytes(p))
            self._slot_starts = [first for first, _ in spans]
            self._slot_ends = [last for _, last in spans]
        return bisect_left(self._slot_starts, end) - bisect_right(self._slot_ends, start)

    def slot_checksum(self, index: int) -> int:
        self._scan_small()
        if index in self._slot_totals:
            return finish(self._slot_totals[index], slot_nbytes(self.plan.slot(index)))
        with self.copies.current():
            return super().slot_checksum(index)

    def _store(self, index: int, offset: int, data: torch.Tensor) -> tuple[int, bool]:
        """Queue a chunk's way into its place; returns (sum of its mixed words if hashed here, False)."""
        if not data.numel():
            return 0, False
        place, same_dtype = self.plan.slot(index), self.plan.same_dtype(index)
        is_twin = index in self.plan.twins
        total = 0
        if self.is_hashed(index) and (is_twin or not same_dtype):
            # These bytes will lie nowhere as they came.
            with self.copies.current():
                total = scan(data, offset).total
        if is_twin and same_dtype:
            return total, False
        assert self.destination is not None
        region, start = (self._scratch_of_twin(index), 0) if is_twin else (self.destination, place.offset)
        if same_dtype:
            self.copies.copy(region[start + offset : start + offset + data.numel()], data)
        else:
            self._cast(index, offset, data, region[start : start + slot_nbytes(place)])
        if not is_twin and self._is_looked_at(index):
            with self._changed:
                self._unscanned.add(index)
        return total, False

    def _cast(self, index: int, offset: int, data: torch.Tensor, slot: torch.Tensor) -> None:
        """Queue a cast of `data`, bytes from `offset` on of the tensor, into `slot` ([n] uint8)."""
        source_dtype = TORCH_DTYPES[self.plan.manifest.tensors[index].dtype]
        values = slot.view(TORCH_DTYPES[self.plan.slot(index).dtype])
        step = self._cast_scratch.numel()
        for start in range(0, data.numel(), step):
            piece = data[start : start + step]
            first, count = (offset + start) // source_dtype.itemsize, piece.numel() // source_dtype.itemsize
            scratch = self._cast_scratch[: piece.numel()]
            with self._changed:  # the scratch is used in the order of the copies, by one thread at a time
                self.copies.copy(scratch, piece)
                with self.copies.current():
                    cast_into(values[first : first + count], as_dtype(scratch, source_dtype))

    def _scan_small(self) -> None:
        """Scan every stored tensor that is whole and was not scanned yet, in one go on the device."""
        with self._scanning:  # whoever asks meanwhile waits for what is found
            with self._changed:
                whole = {
                    index
                    for index in self._unscanned
                    if self._arrivals[index].spans == [(0, self.plan.sizes[index])]
                }
                self._unscanned -= whole
            if whole:
                self._scan_whole(whole)

    def _scan_whole(self, indexes: Collection[int]) -> None:
        assert self.destination is not None
        by_offset = {self.plan.slot(index).offset: index for index in indexes}
        places = [self.plan.slot(by_offset[offset]) for offset in sorted(by_offset)]
        with self.copies.current():
            found = scan_places(self.destination, places, find_nonfinite=self.finds_nonfinite)
        for place, result in found:
            index = by_offset[place.offset]
            self._nonfinite[index] = result.nonfinite
            if self.plan.same_dtype(index):
                self._totals[index] = result.total
            else:
                self._slot_totals[index] = result.total


def scan_places(
    buffer: torch.Tensor, places: Sequence[Placement], *, find_nonfinite: bool
) -> list[tuple[Placement, Scan]]:
    """Scan slots of a device buffer in the arena's layout, behind what the current stream holds."""
    data = [buffer[place.offset : place.offset + slot_nbytes(place)] for place in places]
    dtypes = [TORCH_DTYPES[place.dtype] if find_nonfinite else None for place in places]
    if is_fast(buffer.device):
        found = scan_many(data, buffer.device, dtypes)
    else:
        found = [scan(part, 0, dtype) for part, dtype in zip(data, dtypes, strict=True)]
    return list(zip(places, found, strict=True))


def make_sink(
    plan: Plan, arena: Arena, destination: torch.Tensor | None, *, hashing: bool, find_nonfinite: bool
) -> Sink:
    """The sink for where `destination` lies; see Sink for the arguments."""
    if destination is None or destination.device.type != "cuda":
        return Sink(plan, arena, destination, hashing=hashing, find_nonfinite=find_nonfinite)
    return DeviceSink(
        plan,
        arena,
        destination,
        hashing=hashing,
        find_nonfinite=find_nonfinite,
        copies=copies_to(destination.device),
    )
