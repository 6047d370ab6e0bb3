"""Both ends of the distributed path in one process: a trainer's group and an engine's registry."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tests.holdings import children_of, command_of
from weight_updater import from_distributed
from weight_updater.arena import DTYPE_NAMES
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.groups import GroupRegistry, SenderGroup
from weight_updater.meeting import listen
from weight_updater.requests import FromDistributed, InitGroup, Manifest, TensorSpec

LOOPBACK = "127.0.0.1"


class FakeSink:
    """Collects bytes; may do something first."""

    def __init__(self, manifest: Manifest, before: Callable[[], None] = lambda: None) -> None:
        self.manifest = manifest
        self.before = before
        self.tensors = [torch.zeros(tensor.nbytes, dtype=torch.uint8) for tensor in manifest.tensors]
        self.num_bytes = 0

    def write(self, tensor_index: int, byte_offset: int, data: torch.Tensor) -> None:
        self.before()
        self.tensors[tensor_index][byte_offset : byte_offset + data.numel()] = data
        self.num_bytes += data.numel()

    def write_whole(self, indexes, positions, data: torch.Tensor) -> None:
        for index, position in zip(indexes, positions, strict=True):
            self.write(index, 0, data[position : position + self.tensors[index].numel()])

    def write_packed(self, position: int, data: torch.Tensor) -> None:
        end = position + data.numel()
        for index, offset in enumerate(self.manifest.packed_offsets()[0]):
            first, last = max(position, offset), min(end, offset + self.tensors[index].numel())
            if first < last:
                self.write(index, first - offset, data[first - position : last - position])

    def flush(self) -> None:
        """Nothing is put off."""


def manifest_of(tensors: dict[str, torch.Tensor]) -> Manifest:
    return Manifest(tuple(TensorSpec(n, DTYPE_NAMES[t.dtype], tuple(t.shape)) for n, t in tensors.items()))


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Of several dtypes in turn, one strided, one empty, one larger than the buckets of the tests."""
    g = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(5, 3, generator=g),
        "b": torch.randn(40, 50, generator=g).to(torch.bfloat16),
        "empty": torch.empty(0, 7),
        "strided": torch.randn(8, 6, generator=g).t(),
        "c": torch.randn(3, generator=g).to(torch.float16),
        "d": torch.randn(1, generator=g).double(),
        "large": torch.randn(3000, generator=g),
    }


class GroupRegistryScope:
    def __enter__(self) -> GroupRegistry:
        self.registry = GroupRegistry()
        return self.registry

    def __exit__(self, *exc_info: object) -> None:
        self.registry.close()


def free_port(address: str = LOOPBACK) -> int:
    with listen(address, 0) as probe:
        return int(probe.getsockname()[1])


def join(
    registry: GroupRegistry,
    pool: ThreadPoolExecutor,
    *,
    name: str = "g",
    address: str = LOOPBACK,
    timeout_s: float = 20.0,
) -> SenderGroup:
    port = free_port(address)
    joined = pool.submit(registry.init, InitGroup(name, address, port, 1, 2, timeout_s=timeout_s))
    sender = SenderGroup(name, address, port, 2, timeout_s)
    assert joined.result() == "gloo"
    return sender


def send(
    pool: ThreadPoolExecutor, sender: SenderGroup, tensors: dict[str, torch.Tensor], bucket_bytes: int = 0
) -> Future[None]:
    return pool.submit(sender.broadcast, manifest_of(tensors), list(tensors.values()), bucket_bytes)


def receive(
    registry: GroupRegistry, sink: FakeSink, *, name: str = "g", timeout_s: float = 0.0, bucket_bytes: int = 0
) -> None:
    from_distributed.receive(
        FromDistributed("u", name, timeout_s), sink.manifest, sink, registry, bucket_bytes=bucket_bytes
    )


def refused(call: Callable[[], object], *reasons: Reason) -> str:
    with pytest.raises(UpdateRefused) as caught:
        call()
    assert caught.value.reason in reasons, caught.value.message
    return caught.value.message


def assert_arrived(sink: FakeSink, tensors: Iterable[torch.Tensor]) -> None:
    for spec, data, tensor in zip(sink.manifest.tensors, sink.tensors, tensors, strict=True):
        assert data.equal(tensor.contiguous().view(-1).view(torch.uint8)), spec.name


def transfer(
    registry: GroupRegistry, pool: ThreadPoolExecutor, sender: SenderGroup, seed: int, bucket_bytes: int = 0
) -> None:
    sending = send(pool, sender, weights(seed), bucket_bytes)
    sink = FakeSink(manifest_of(weights()))
    receive(registry, sink, bucket_bytes=bucket_bytes)
    sending.result()
    assert_arrived(sink, weights(seed).values())


def group_children() -> list[int]:
    """Those of them that receive for a group."""
    return [child for child in children_of(os.getpid()) if "gloo_child" in command_of(child)]


def mapped_segments() -> list[str]:
    """Shared-memory segments that this process maps; a name that is gone ends with "(deleted)"."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in maps if "/dev/shm/rollsync-" in line]


def resources() -> tuple[int, int, int, int]:
    """Numbers of descriptors, child processes, mapped segments and threads of this process."""
    gc.collect()
    num_files = len(os.listdir("/proc/self/fd"))
    return num_files, len(children_of(os.getpid())), len(mapped_segments()), threading.active_count()


def eventually(is_true: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.05)
    return is_true()
