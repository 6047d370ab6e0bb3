"""Buckets that tensors are copied into on their way to engines: shared memory, or memory of a GPU.

A bucket is filled, sealed, read by every engine, and filled again. An engine that took a bucket by the ipc
path keeps it mapped; so close buckets only after all of them have acknowledged its release.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from trainers_adapters.chunk_wire import Chunk
from trainers_adapters.send_tensor import CHUNK_BYTES
from trainers_adapters.sending import byte_view
from weight_updater.checksum import checksums
from weight_updater.requests import CudaIpcRegion, RegionPlacement, ShmSegment, align
from weight_updater.shm import SharedSegment

PROBE_BYTES = 4096
"""Of a GPU's bucket, which an engine compares when it maps it."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Tensor `index` of the manifest lies at `offset` bytes; `view` is it, in the bucket."""

    index: int
    offset: int
    view: torch.Tensor


class Memory(Protocol):
    """What a bucket lies in. data: [size] uint8."""

    data: torch.Tensor

    def region(self) -> ShmSegment | CudaIpcRegion:
        """How an engine finds it."""

    def close(self, *, free: bool) -> None:
        """Let go of it. free: no engine has it mapped; else what cannot be freed under one is left."""


class SharedMemory:
    """A POSIX segment."""

    def __init__(self, size: int) -> None:
        self._segment = SharedSegment.create(size)
        self.data = torch.frombuffer(self._segment.buf, dtype=torch.uint8)

    def region(self) -> ShmSegment:
        return self._segment.descriptor

    def close(self, *, free: bool) -> None:
        self.data = torch.empty(0, dtype=torch.uint8)
        self._segment.close()
        self._segment.unlink()


class GpuMemory:
    """An allocation of a GPU that other processes can map, whatever torch's own allocator does."""

    def __init__(self, size: int, device: torch.device) -> None:
        from weight_updater import device_memory as gpu

        self._buffer = gpu.DeviceBuffer(size, device)
        assert self._buffer.data is not None, "a buffer holds memory until it is closed"
        self.data = self._buffer.data
        index = self.data.get_device()
        allocation = gpu.allocation_of(self.data.data_ptr(), index)
        handle = gpu.handle_of(allocation, index)
        assert handle is not None, "a DeviceBuffer can be shared"
        self._uuid, self._handle = gpu.device_uuid(index), handle
        self._offset = self.data.data_ptr() - allocation.address
        self._allocation_id = secrets.token_hex(16)

    def region(self) -> CudaIpcRegion:
        probe = self.data[:PROBE_BYTES]
        return CudaIpcRegion(
            allocation_id=self._allocation_id,
            device_uuid=self._uuid,
            handle=self._handle,
            offset=self._offset,
            size=self.data.numel(),
            probe_bytes=probe.numel(),
            probe_checksum=checksums([probe])[0],
        )

    def close(self, *, free: bool) -> None:
        self.data = torch.empty(0, dtype=torch.uint8)
        if free:
            self._buffer.close()


class Bucket:
    """Room for tensors of a manifest, each at a multiple of 256 bytes. Filled by one thread, sealed by any.

    Args:
        memory: closed with the bucket.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._end = 0
        self._streams: list[torch.cuda.Stream] = []  # that copies into it are queued on, on a GPU
        self.placed: list[Placed] = []

    @property
    def size(self) -> int:
        return self._memory.data.numel()

    @property
    def on_gpu(self) -> bool:
        return self._memory.data.is_cuda

    def clear(self) -> None:
        """Every engine has read what was in it."""
        self._end, self.placed, self._streams = 0, [], []

    def has_room(self, nbytes: int) -> bool:
        return self._end + nbytes <= self.size

    def put(self, index: int, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        """Copy a tensor in, cast to `dtype` (round to nearest even)."""
        nbytes = tensor.numel() * dtype.itemsize
        view = self._memory.data[self._end : self._end + nbytes].view(dtype).view(tensor.shape)
        view.copy_(tensor.detach())
        if self.on_gpu:
            stream = torch.cuda.current_stream(self._memory.data.device)
            if stream not in self._streams:
                self._streams.append(stream)
        self.placed.append(Placed(index, self._end, view))
        self._end = align(self._end + nbytes)

    def sealed(self) -> list[int]:
        """The checksums of what is in it, in the order in which it came; waits until all of it is written."""
        for stream in self._streams:
            stream.synchronize()
        return checksums([place.view for place in self.placed])

    def region(self) -> ShmSegment | CudaIpcRegion:
        """What to lend, with everything in it written."""
        return self._memory.region()

    def placements(self) -> list[RegionPlacement]:
        return [RegionPlacement(place.index, 0, place.offset) for place in self.placed]

    def chunks(self) -> Iterator[Chunk]:
        """Its tensors' bytes, in pieces that a message can hold."""
        for place in self.placed:
            data = byte_view(place.view)
            for start in range(0, len(data), CHUNK_BYTES):
                yield place.index, start, data[start : start + CHUNK_BYTES]

    def close(self, *, free: bool) -> None:
        """Let go of its memory; free: as Memory.close has it."""
        self.clear()
        self._memory.close(free=free)


def two_buckets(size: int, device: torch.device | None) -> list[Bucket]:
    """Of `size` bytes each, on a GPU or (None) in shared memory.

    Raises:
        UpdateRefused (NO_MEMORY): there is no room for both.
    """
    made: list[Bucket] = []
    try:
        for _ in range(2):
            made.append(Bucket(SharedMemory(size) if device is None else GpuMemory(size, device)))
    except BaseException:
        for bucket in made:
            bucket.close(free=True)
        raise
    return made
