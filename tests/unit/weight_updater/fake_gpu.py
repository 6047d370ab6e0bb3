"""Stands in for a GPU where there is none: handles map CPU buffers, kernels are loops over CPU tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import pytest
import torch

from weight_updater import from_ipc, lent_tensors, staging
from weight_updater.checksum import Scan, scan
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.requests import CudaIpcRegion
from weight_updater.updater import WeightUpdater

UUID = "GPU-0"


class FakeGpu:
    """Memory by handle.

    Attributes:
        opened, closed: handles, in order. launches: what kernels were asked for, in order.
    """

    def __init__(self) -> None:
        self.memory: dict[bytes, torch.Tensor] = {}
        self.opened: list[bytes] = []
        self.closed: list[bytes] = []
        self.launches: list[str] = []

    def allocate(self, number: int, nbytes: int) -> bytes:
        """An allocation of the trainer's; returns its handle."""
        handle = number.to_bytes(64, "little")
        self.memory[handle] = torch.zeros(nbytes, dtype=torch.uint8)
        return handle

    def region(self, handle: bytes, offset: int, size: int, **fields: object) -> CudaIpcRegion:
        identity = int.from_bytes(handle, "little")
        return CudaIpcRegion(f"trainer-{identity}", UUID, handle, offset, size, **fields)  # type: ignore[arg-type]

    def scan_many(
        self,
        data: Sequence[torch.Tensor],
        device: torch.device,
        dtypes: Sequence[torch.dtype | None],
        offsets: Sequence[int] | None = None,
    ) -> list[Scan]:
        if data:
            self.launches.append("scan")
        return [scan(part, 0, dtype) for part, dtype in zip(data, dtypes, strict=True)]

    def copy_many(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        device: torch.device,
        dtypes: Sequence[torch.dtype | None] | None = None,
    ) -> list[Scan]:
        if pairs:
            self.launches.append("copy" if dtypes is None else "copy and scan")
        for destination, source in pairs:
            destination.copy_(source)
        if dtypes is None:
            return []
        return [scan(source, 0, dtype) for (_, source), dtype in zip(pairs, dtypes, strict=True)]


class _Mapped:
    def __init__(self, gpu: FakeGpu, handle: bytes) -> None:
        if handle not in gpu.memory:
            raise UpdateRefused(Reason.MEMORY_UNAVAILABLE, "a CUDA IPC handle cannot be opened")
        self._gpu, self._handle = gpu, handle
        gpu.opened.append(handle)

    def check_holds(self, end: int) -> None:
        nbytes = self._gpu.memory[self._handle].numel()
        if end > nbytes:
            raise UpdateRefused(
                Reason.MEMORY_UNAVAILABLE, f"a region ends at byte {end} of an allocation of {nbytes} bytes"
            )

    def region(self, offset: int, size: int) -> torch.Tensor:
        return self._gpu.memory[self._handle][offset : offset + size]

    def close(self) -> None:
        self._gpu.closed.append(self._handle)


@contextlib.contextmanager
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    """Replace what touches a GPU on the ipc path."""
    gpu = FakeGpu()
    monkeypatch.setattr(from_ipc, "MappedAllocation", lambda handle, uuid, device: _Mapped(gpu, handle))
    monkeypatch.setattr(from_ipc.Mappings, "on_gpu", property(lambda self: True))
    for module in (lent_tensors, staging):
        monkeypatch.setattr(module, "is_fast", lambda device: True)
        monkeypatch.setattr(module, "copy_many", gpu.copy_many)
    monkeypatch.setattr(lent_tensors, "scan_many", gpu.scan_many)
    yield gpu


def in_use(updater: WeightUpdater) -> dict[str, int]:
    """Allocations that a receiver reads now."""
    return dict(updater._receivers.mappings._in_use)
