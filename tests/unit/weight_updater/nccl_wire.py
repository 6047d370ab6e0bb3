"""A stand-in for NCCL that moves bytes between threads, and one sender and one engine over it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.unit.weight_updater.test_device_sink import LateCopies
from weight_updater.groups import GroupRegistry, SenderGroup
from weight_updater.meeting import listen
from weight_updater.nccl import NcclGroup
from weight_updater.nccl_receiver import NcclReceiver
from weight_updater.requests import InitGroup

CPU = torch.device("cpu")
LOOPBACK = "127.0.0.1"


class Wire:
    """Broadcasts between threads: the bytes come when both ends have asked, and never before."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.sent: list[torch.Tensor] = []
        self.stuck_from = 1 << 30  # broadcasts from this one on never end
        self.num_aborts = 0


class WireGroup:
    """What stands in for ProcessGroupNCCL at one rank."""

    def __init__(self, wire: Wire, rank: int) -> None:
        self._wire, self._rank = wire, rank
        self._num_started = 0
        self.aborted = False

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> WireWork:
        assert options.rootRank == 0
        (data,) = tensors
        with self._wire.changed:
            number = self._num_started
            self._num_started += 1
            if self._rank == 0:
                self._wire.sent.append(data.clone())
        return WireWork(self._wire, self, number, data)

    def abort(self) -> None:
        with self._wire.changed:
            self.aborted = True
            self._wire.num_aborts += 1


class WireWork:
    def __init__(self, wire: Wire, group: WireGroup, number: int, data: torch.Tensor) -> None:
        self._wire, self._group, self._number, self._data = wire, group, number, data

    def is_completed(self) -> bool:
        with self._wire.changed:
            if self._group.aborted:
                return True
            if self._number >= min(len(self._wire.sent), self._wire.stuck_from):
                return False
            assert self._wire.sent[self._number].numel() == self._data.numel()
            self._data.copy_(self._wire.sent[self._number])
            return True

    def wait(self) -> None:
        if self._group.aborted:
            raise RuntimeError("NCCL communicator was aborted")


class World:
    """One sender and one engine over a wire."""

    def __init__(self, timeout_s: float = 10.0) -> None:
        self.wire = Wire()
        self.timeout_s = timeout_s
        self.pool = ThreadPoolExecutor(4)
        self.registry = NcclRegistry(self.build)
        self.receivers: list[NcclReceiver] = []

    def build(self, store: Any, member: Any, device: torch.device) -> WireGroup:
        return WireGroup(self.wire, member.rank)

    def join(self, monkeypatch: pytest.MonkeyPatch, name: str = "g") -> SenderGroup:
        monkeypatch.setattr(
            "weight_updater.groups._join",
            lambda member, device, listener: NcclGroup(member, CPU, listener, build=self.build),
        )
        port = free_port()
        request = InitGroup(name, LOOPBACK, port, 1, 2, "nccl", self.timeout_s)
        joined = self.pool.submit(self.registry.init, request)
        sender = SenderGroup(name, LOOPBACK, port, 2, self.timeout_s, backend="nccl")
        assert joined.result() == "nccl"
        return sender


class NcclRegistry(GroupRegistry):
    """An engine's registry as on a GPU, over a wire."""

    def __init__(self, build: Callable[..., WireGroup]) -> None:
        copies = LateCopies()
        super().__init__(
            CPU,
            lambda request, device: NcclReceiver(request, device, build=build, copies=lambda device: copies),
        )

    @property
    def backends(self) -> tuple[str, ...]:
        return ("nccl", "gloo")


def free_port() -> int:
    with listen(LOOPBACK, 0) as probe:
        return int(probe.getsockname()[1])
