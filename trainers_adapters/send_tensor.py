"""The tensor path, sending side: bytes in the call, or in a shared-memory segment named in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from trainers_adapters.clients import WeightsClient
from trainers_adapters.segments import PackedSegment
from trainers_adapters.sending import Outgoing, Sender, byte_view
from trainers_adapters.weights_calls import Chunk
from weight_updater.heap import keep_freed_buffers
from weight_updater.requests import BeginReply, Path, UpdateReply, align

CHUNK_BYTES = 1 << 20
"""Bytes of a chunk: large for what a message costs, small enough for its copies to stay in the cache."""


class TensorStream(Sender):
    """A client stream of chunks: works wherever gRPC does.

    Args:
        chunk_bytes: bytes of a chunk, a multiple of 8; below the engine's max_message_bytes.
    """

    path: ClassVar[Path] = Path.TENSOR

    def __init__(self, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        if chunk_bytes < 8 or chunk_bytes % 8:
            raise ValueError(f"chunk_bytes is {chunk_bytes}; it must be a positive multiple of 8")
        self._chunk_bytes = chunk_bytes
        keep_freed_buffers()

    def send(self, client: WeightsClient, begun: BeginReply, outgoing: Outgoing) -> UpdateReply:
        return client.update_from_tensor(
            begun.update_id, self._chunks(outgoing), timeout_s=outgoing.seconds_left
        )

    def _chunks(self, outgoing: Outgoing) -> Iterator[Chunk]:
        """Large tensors in pieces; small ones together, as many as a chunk holds."""
        offsets, _ = outgoing.manifest.packed_offsets()
        small: list[memoryview] = []
        first = 0  # of the tensors in `small`
        for index, (offset, (_, tensor)) in enumerate(zip(offsets, outgoing.source, strict=True)):
            data = byte_view(tensor)
            large = len(data) > self._chunk_bytes // 2
            if small and (large or offset + len(data) - offsets[first] > self._chunk_bytes):
                yield None, offsets[first], _packed(small)
                small = []
            if large:
                for start in range(0, len(data), self._chunk_bytes):
                    yield index, start, data[start : start + self._chunk_bytes]
            else:
                first = first if small else index
                small.append(data)
        if small:
            yield None, offsets[first], _packed(small)


def _packed(tensors: Sequence[memoryview]) -> bytearray:
    """Tensors as one chunk: each but the first at a multiple of 256 bytes."""
    chunk = bytearray(sum(align(len(data)) for data in tensors[:-1]) + len(tensors[-1]))
    start = 0
    for data in tensors:
        chunk[start : start + len(data)] = data
        start += align(len(data))
    return chunk


class TensorSegment(Sender):
    """Shared memory: for engines on this host. Bytes are copied into the segment once for all engines.

    The segment is kept for later pushes and removed when the `with` block ends.
    """

    path: ClassVar[Path] = Path.TENSOR

    def __init__(self) -> None:
        self._segment = PackedSegment()

    def stage(self, outgoing: Outgoing, clients: Sequence[WeightsClient]) -> dict[str, Any]:
        self._segment.fill(outgoing)
        return {}

    def send(self, client: WeightsClient, begun: BeginReply, outgoing: Outgoing) -> UpdateReply:
        return client.update_from_tensor(
            begun.update_id, segment=self._segment.descriptor, timeout_s=outgoing.seconds_left
        )

    def close(self) -> None:
        self._segment.close()
