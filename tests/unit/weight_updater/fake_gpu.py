"""Stands in for a GPU where there is none: handles map CPU buffers, kernels are loops over CPU memory."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from weight_updater import device_scan, lent_tensors, mappings, moves
from weight_updater.checksum import scan as read
from weight_updater.device_scan import Found
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

    def run(self, table: FakeTable, device: torch.device, *, copy: bool, scan: bool) -> Found:
        """What the kernel does with a table."""
        self.launches.append(" and ".join(["copy"] * copy + ["scan"] * scan))
        found = [
            read(bytes_at(source, nbytes), 8 * word, dtype) for source, _, nbytes, dtype, word in table.key
        ]
        for source, destination, nbytes, _, _ in table.key if copy else ():
            ctypes.memmove(destination, source, nbytes)
        totals = np.array([one.total for one in found if scan], dtype=np.uint64)
        return Found(totals, np.array([one.nonfinite for one in found if scan], dtype=np.bool_))


class FakeTable:
    """What a launch would tell the kernel: per range (source, destination, bytes, dtype, first word)."""

    def __init__(self, key: tuple[Any, ...], device: torch.device) -> None:
        self.key = key


def bytes_at(address: int, nbytes: int) -> torch.Tensor:
    """[nbytes] uint8 over memory of this process."""
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8) if nbytes else torch.empty(0, dtype=torch.uint8)


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
    monkeypatch.setattr(mappings, "MappedAllocation", lambda handle, uuid, device: _Mapped(gpu, handle))
    monkeypatch.setattr(mappings.Mappings, "on_gpu", property(lambda self: True))
    fake_kernels(monkeypatch, gpu, lent_tensors, moves)
    yield gpu


def fake_kernels(monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu, *modules: ModuleType) -> None:
    """Let `modules` find kernels for any device, which `gpu` runs."""
    for module in modules:
        monkeypatch.setattr(module, "is_fast", lambda device: True)
    monkeypatch.setattr(device_scan, "_Table", FakeTable)
    monkeypatch.setattr(device_scan, "_queue", gpu.run)
    monkeypatch.setattr(device_scan, "_read", lambda found, *, scan: found)


def in_use(updater: WeightUpdater) -> dict[str, int]:
    """Allocations that a receiver reads now."""
    return dict(updater._receivers.mappings._in_use)
