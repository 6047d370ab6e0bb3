"""Path `tensor`: the bytes come in the call, as chunks or in a shared-memory segment on one host."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import torch

from weight_updater.by_cores import write_by_cores
from weight_updater.cast import bytes_over
from weight_updater.device_copies import Mark
from weight_updater.device_sink import DeviceSink
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.look import Look
from weight_updater.pinned import PinnedSegments
from weight_updater.plan import Plan
from weight_updater.requests import FromTensor, ShmSegment
from weight_updater.shm import SharedSegment
from weight_updater.sink import Sink

COPY_BYTES = 32 << 20
"""Bytes of one copy from a segment to a device."""

MAX_QUEUED = 3
"""Copies from a segment that are queued behind the one that runs."""

Chunks = Iterable[tuple[int | None, int, torch.Tensor]]
"""(tensor of the manifest, byte offset in it, [n] uint8), in any order and of any size. No tensor: the offset
counts in all tensors packed in the manifest's order, each 256-byte aligned, of which a chunk may hold many.
"""


def receive(
    request: FromTensor, sink: Sink, chunks: Chunks | None, segments: PinnedSegments | None = None
) -> None:
    """Write what a client sends into `sink`.

    Args:
        request: names a segment in which the manifest's tensors lie packed, or none.
        chunks: what the client streams, if no segment is named.
        segments: keeps segments that a device reads; None maps the segment for this call only.

    Raises:
        UpdateRefused: MEMORY_UNAVAILABLE, BAD_CHUNK, INVALID_UPDATE.
    """
    if request.segment is not None:
        read_segment(request.segment, sink.plan, sink, segments)
    elif chunks is not None:
        for index, offset, data in chunks:
            if index is None:
                sink.write_packed(offset, data)
            else:
                sink.write(index, offset, data)
            sink.flush()  # the bytes are the client's again when the next ones are asked for
    else:
        raise UpdateRefused(Reason.INVALID_UPDATE, "the tensor path needs a shared-memory segment or chunks")


def read_segment(
    named: ShmSegment, plan: Plan, sink: Sink | Look, segments: PinnedSegments | None = None
) -> None:
    """Write the needed tensors, which lie packed in a segment, into `sink`, each whole.

    Args:
        segments: as for `receive`.

    Raises:
        UpdateRefused (MEMORY_UNAVAILABLE): it cannot be mapped, or is too small.
    """
    _check_size(named, plan)
    if segments is not None:
        with segments.use(named) as data:
            _read_bytes(data, plan, sink)
    else:
        with SharedSegment.open(named) as segment:
            _read_bytes(bytes_over(segment.buf), plan, sink)


def _check_size(segment: ShmSegment, plan: Plan) -> None:
    if segment.size < plan.packed_end:
        raise UpdateRefused(
            Reason.MEMORY_UNAVAILABLE,
            f"shared-memory segment {segment.name} has {segment.size} bytes, the manifest's "
            f"{len(plan.sizes)} tensors packed in order, each 256-byte aligned, need {plan.packed_end}",
        )


def _read_bytes(data: torch.Tensor, plan: Plan, sink: Sink | Look) -> None:
    """Write the needed tensors of a segment; none of its bytes is on its way any more on return."""
    if not isinstance(sink, DeviceSink):
        write_by_cores(sink, plan.needed, [plan.packed_offsets[index] for index in plan.needed], data)
        return
    queued: deque[Mark] = deque()
    try:
        for indexes in _batches(plan.needed, plan.sizes):
            first = plan.packed_offsets[indexes[0]]
            if len(indexes) > 1:
                end = plan.packed_offsets[indexes[-1]] + plan.sizes[indexes[-1]]
                positions = [plan.packed_offsets[index] - first for index in indexes]
                sink.write_whole(indexes, positions, data[first:end])
            else:
                _write_large(sink, indexes[0], data[first : first + plan.sizes[indexes[0]]], queued)
            _queue_mark(sink, queued)
    finally:
        sink.flush()


def _batches(indexes: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    """Cut into runs of tensors of together about COPY_BYTES, or single larger ones."""
    batch: list[int] = []
    num_bytes = 0
    for index in indexes:
        if batch and num_bytes + sizes[index] > COPY_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(index)
        num_bytes += sizes[index]
    if batch:
        yield batch


def _write_large(sink: DeviceSink, index: int, data: torch.Tensor, queued: deque[Mark]) -> None:
    for start in range(0, data.numel(), COPY_BYTES):
        if start:
            _queue_mark(sink, queued)
        sink.write(index, start, data[start : start + COPY_BYTES])


def _queue_mark(sink: DeviceSink, queued: deque[Mark]) -> None:
    """Keep the queue of copies short: the link stays busy, and an update that is aborted ends soon."""
    queued.append(sink.copies.mark())
    if len(queued) > MAX_QUEUED:
        queued.popleft().wait()
