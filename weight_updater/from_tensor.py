"""Path `tensor`: the bytes come in the call, as chunks or in a shared-memory segment on one host."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from weight_updater.cast import bytes_over
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.look import Look
from weight_updater.plan import Plan
from weight_updater.requests import FromTensor, ShmSegment
from weight_updater.shm import SharedSegment
from weight_updater.sink import Sink

Chunks = Iterable[tuple[int, int, torch.Tensor]]
"""(tensor of the manifest, byte offset in it, [n] uint8), in any order and of any size."""


def receive(request: FromTensor, sink: Sink, chunks: Chunks | None) -> None:
    """Write what a client sends into `sink`.

    Args:
        request: names a segment in which the manifest's tensors lie packed, or none.
        chunks: what the client streams, if no segment is named.

    Raises:
        UpdateRefused: MEMORY_UNAVAILABLE, BAD_CHUNK, INVALID_UPDATE.
    """
    if request.segment is not None:
        read_segment(request.segment, sink.plan, sink)
    elif chunks is not None:
        for index, offset, data in chunks:
            sink.write(index, offset, data)
    else:
        raise UpdateRefused(Reason.INVALID_UPDATE, "the tensor path needs a shared-memory segment or chunks")


def read_segment(named: ShmSegment, plan: Plan, sink: Sink | Look) -> None:
    """Write the tensors that lie packed in a segment into `sink`, each whole.

    Raises:
        UpdateRefused (MEMORY_UNAVAILABLE): it cannot be mapped, or is too small.
    """
    tensors = plan.manifest.tensors
    offsets, _ = plan.manifest.packed_offsets()
    size = named.size
    end = max(offset + tensor.nbytes for offset, tensor in zip(offsets, tensors, strict=True))
    if size < end:
        raise UpdateRefused(
            Reason.MEMORY_UNAVAILABLE,
            f"shared-memory segment {named.name} has {size} bytes, the manifest's {len(tensors)} "
            f"tensors packed in order, each 256-byte aligned, need {end}",
        )
    with SharedSegment.open(named) as segment:
        data = bytes_over(segment.buf)
        for index in plan.needed:
            sink.write(index, 0, data[offsets[index] : offsets[index] + tensors[index].nbytes])
        del data
