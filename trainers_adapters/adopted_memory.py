"""The memory of an adopted arena, which an engine lives on, and a lock that tells of its owner's death."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch

from weight_updater.requests import CudaIpcRegion, ShmSegment
from weight_updater.shm import SharedSegment

PROBE_BYTES = 4096


class AdoptedMemory(Protocol):
    """data: [nbytes] uint8. allocation_id: new for every allocation."""

    data: torch.Tensor

    @property
    def allocation_id(self) -> str: ...

    def region(self) -> ShmSegment | CudaIpcRegion:
        """What engines are told once; waits until what was written so far is there."""
        ...

    def settle(self) -> None:
        """Wait until what was written so far is there."""
        ...

    def close(self, *, free: bool) -> None:
        """Let go of it. free: no engine has it mapped; else what cannot be freed under one is left."""
        ...


def allocate(nbytes: int, device: torch.device) -> AdoptedMemory:
    """Zeroed memory on `device` (the CPU or a GPU) that an engine of this host can adopt.

    Raises:
        UpdateRefused (NO_MEMORY): there is not enough.
    """
    return _OnGpu(nbytes, device) if device.type == "cuda" else _OnHost(nbytes)


class _OnHost:
    """A POSIX segment; its creator holds the owner's lock on it."""

    def __init__(self, nbytes: int) -> None:
        self._segment = SharedSegment.create(nbytes, owner_lock=True)
        self.data = torch.frombuffer(self._segment.buf, dtype=torch.uint8)

    @property
    def allocation_id(self) -> str:
        return self._segment.descriptor.allocation_id

    def region(self) -> ShmSegment:
        return self._segment.descriptor

    def settle(self) -> None:
        pass  # the CPU writes while it is called

    def close(self, *, free: bool) -> None:
        self.data = torch.empty(0, dtype=torch.uint8)
        self._segment.close()
        self._segment.unlink()


class _OnGpu:
    """CUDA memory, and a small POSIX segment whose owner's lock says that the trainer lives."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        from weight_updater.device_memory import DeviceBuffer, allocation_of, device_uuid, handle_of

        self._owner = SharedSegment.create(1, owner_lock=True)
        self._buffer = DeviceBuffer(nbytes, device)
        index, data = self._buffer.index, self._buffer.data
        assert data is not None, "a new buffer is open"
        self.data = data
        allocation = allocation_of(self._buffer.address, index)
        handle = handle_of(allocation, index)
        assert handle is not None, "memory from cudaMalloc can be shared"
        self._region = CudaIpcRegion(
            allocation_id=self._owner.descriptor.allocation_id,
            device_uuid=device_uuid(index),
            handle=handle,
            offset=self._buffer.address - allocation.address,
            size=nbytes,
            probe_bytes=min(PROBE_BYTES, nbytes),
            owner=self._owner.descriptor,
        )

    @property
    def allocation_id(self) -> str:
        return self._region.allocation_id

    def region(self) -> CudaIpcRegion:
        from weight_updater.checksum import checksum

        self.settle()
        return replace(self._region, probe_checksum=checksum(self.data[: self._region.probe_bytes]))

    def settle(self) -> None:
        torch.cuda.current_stream(self.data.device).synchronize()

    def close(self, *, free: bool) -> None:
        self.data = torch.empty(0, dtype=torch.uint8)
        self._owner.close()
        self._owner.unlink()
        if free:  # freeing what an engine has mapped is undefined; then it stays as long as this process
            self._buffer.close()
