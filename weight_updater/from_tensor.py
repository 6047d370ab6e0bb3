"""Path `tensor`: the bytes come in the call, as chunks or in a shared-memory segment on one host."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch

from weight_updater.cast import bytes_over
from weight_updater.device_copies import Mark
from weight_updater.device_sink import DeviceSink
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.pinned import PinnedSegments
from weight_updater.requests import FromTensor, ShmSegment
from weight_updater.shm import SharedSegment
from weight_updater.sink import Sink

COPY_BYTES = 128 << 20
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
        _check_size(request.segment, sink)
        if segments is not None:
            with segments.use(request.segment) as data:
                _read_segment(data, sink)
        else:
            with SharedSegment.open(request.segment) as segment:
                _read_segment(bytes_over(segment.buf), sink)
    elif chunks is not None:
        for index, offset, data in chunks:
            if index is None:
                sink.write_packed(offset, data)
            else:
                sink.write(index, offset, data)
            sink.flush()  # the bytes are the client's again when the next ones are asked for
    else:
        raise UpdateRefused(Reason.INVALID_UPDATE, "the tensor path needs a shared-memory segment or chunks")


def _check_size(segment: ShmSegment, sink: Sink) -> None:
    plan = sink.plan
    end = max(offset + nbytes for offset, nbytes in zip(plan.packed_offsets, plan.sizes, strict=True))
    if segment.size < end:
        raise UpdateRefused(
            Reason.MEMORY_UNAVAILABLE,
            f"shared-memory segment {segment.name} has {segment.size} bytes, the manifest's "
            f"{len(plan.sizes)} tensors packed in order, each 256-byte aligned, need {end}",
        )


def _read_segment(data: torch.Tensor, sink: Sink) -> None:
    """Write the needed tensors of a segment; none of its bytes is on its way any more on return."""
    plan = sink.plan
    if not isinstance(sink, DeviceSink):
        sink.write_whole(plan.needed, [plan.packed_offsets[index] for index in plan.needed], data)
        return
    queued: deque[Mark] = deque()
    num_bytes = 0
    try:
        for index in plan.needed:
            nbytes, first = plan.sizes[index], plan.packed_offsets[index]
            for start in range(0, nbytes, COPY_BYTES):
                size = min(COPY_BYTES, nbytes - start)
                sink.write(index, start, data[first + start : first + start + size])
                num_bytes += size
                if num_bytes >= COPY_BYTES:
                    # A short queue keeps the link busy, and an update that is aborted ends soon.
                    queued.append(sink.copies.mark())
                    num_bytes = 0
                    if len(queued) > MAX_QUEUED:
                        queued.popleft().wait()
    finally:
        sink.flush()
