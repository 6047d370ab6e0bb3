"""Path `tensor`: the bytes come in the call, as chunks or in a shared-memory segment on one host."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from weight_updater.cast import bytes_over
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.requests import FromTensor
from weight_updater.shm import SharedSegment
from weight_updater.sink import Sink

Chunks = Iterable[tuple[int | None, int, torch.Tensor]]
"""(tensor of the manifest, byte offset in it, [n] uint8), in any order and of any size. No tensor: the offset
counts in all tensors packed in the manifest's order, each 256-byte aligned, of which a chunk may hold many.
"""


def receive(request: FromTensor, sink: Sink, chunks: Chunks | None) -> None:
    """Write what a client sends into `sink`.

    Args:
        request: names a segment in which the manifest's tensors lie packed, or none.
        chunks: what the client streams, if no segment is named.

    Raises:
        UpdateRefused: MEMORY_UNAVAILABLE, BAD_CHUNK, INVALID_UPDATE.
    """
    if request.segment is not None:
        _read_segment(request, sink)
    elif chunks is not None:
        for index, offset, data in chunks:
            if index is None:
                sink.write_packed(offset, data)
            else:
                sink.write(index, offset, data)
    else:
        raise UpdateRefused(Reason.INVALID_UPDATE, "the tensor path needs a shared-memory segment or chunks")


def _read_segment(request: FromTensor, sink: Sink) -> None:
    assert request.segment is not None
    plan, size = sink.plan, request.segment.size
    end = max(offset + nbytes for offset, nbytes in zip(plan.packed_offsets, plan.sizes, strict=True))
    if size < end:
        raise UpdateRefused(
            Reason.MEMORY_UNAVAILABLE,
            f"shared-memory segment {request.segment.name} has {size} bytes, the manifest's "
            f"{len(plan.sizes)} tensors packed in order, each 256-byte aligned, need {end}",
        )
    with SharedSegment.open(request.segment) as segment:
        data = bytes_over(segment.buf)
        sink.write_whole(plan.needed, [plan.packed_offsets[index] for index in plan.needed], data)
        del data
