"""Adoption of CUDA memory, with a stand-in for the GPU (fake_gpu.py); on a real one: tests/gpu."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.weight_updater.fake_gpu import FakeGpu, fake_gpu
from tests.unit.weight_updater.test_adopt import Trainer
from tests.unit.weight_updater.test_from_cuda import assert_live, receive
from tests.unit.weight_updater.tiny_target import TinyTarget, begin, make_updater, manifest_of, raw, weights
from weight_updater.checksum import checksum
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.from_ipc import _check_home
from weight_updater.requests import CudaIpcRegion, FromIpc, Path, Staging


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    with fake_gpu(monkeypatch) as made:
        yield made


def test_an_arena_is_adopted_where_it_lies(gpu: FakeGpu) -> None:
    target = TinyTarget()
    updater = make_updater(target)
    handle = gpu.allocate(1, target.arena.nbytes)
    memory = gpu.memory[handle]
    trainer = Trainer(1)  # holds the owner's lock
    try:
        region = gpu.region(handle, 0, target.arena.nbytes)
        update_id = begin(updater, weights(1), path=Path.IPC, adopt=True)
        with pytest.raises(UpdateRefused, match="owner's lock"):
            receive(updater, FromIpc("", cuda_regions=(region,)), update_id)
        updater.release([region.allocation_id])
        request = FromIpc("", cuda_regions=(replace(region, owner=trainer.descriptor),))
        for seed in (2, 3):
            update_id = begin(updater, weights(seed), path=Path.IPC, adopt=True)
            for name, value in weights(seed).items():
                target.arena.slot_view(memory, name).copy_(value)
            gpu.launches.clear()
            receive(updater, request, update_id)
            reply = updater.commit(update_id)
            assert (reply.extra_bytes, reply.num_changed, reply.verified) == (0, 6, True)
            assert target.buffer.data_ptr() == memory.data_ptr()
            assert gpu.launches == ["scan"], "read once, copied never"
            assert_live(target, weights(seed))
        with pytest.raises(UpdateRefused, match="adopted arena"):
            updater.release([region.allocation_id])
        trainer.die()
        updater.tick(time.monotonic() + 1)
        assert "is gone" in updater.torn_reason
    finally:
        trainer.close()


def tensors_over(address: int) -> list[torch.Tensor]:
    """Those in storage that begins there."""
    gc.collect()
    alive = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.numel()]
    return [one for one in alive if one.untyped_storage().data_ptr() == address]


def test_memory_that_was_left_for_an_adopted_arena_is_kept_by_nothing(gpu: FakeGpu) -> None:
    """Copies from a trainer's memory were worked out once, into the memory that was live then."""
    target = TinyTarget()
    updater = make_updater(target)
    packed = gpu.allocate(1, manifest_of(weights(1)).packed_offsets()[1])
    update_id = begin(updater, weights(1), path=Path.IPC, staging=Staging.NONE)
    for offset, value in zip(manifest_of(weights(1)).packed_offsets()[0], weights(1).values(), strict=True):
        gpu.memory[packed][offset : offset + value.nbytes] = raw(value)
    receive(updater, FromIpc("", cuda_regions=(gpu.region(packed, 0, len(gpu.memory[packed])),)), update_id)
    updater.commit(update_id)
    left = target.buffer.untyped_storage().data_ptr()
    assert tensors_over(left)
    handle = gpu.allocate(2, target.arena.nbytes)
    for name, value in weights(2).items():
        target.arena.slot_view(gpu.memory[handle], name).copy_(value)
    trainer = Trainer(1)
    try:
        region = gpu.region(handle, 0, target.arena.nbytes, owner=trainer.descriptor)
        update_id = begin(updater, weights(2), path=Path.IPC, adopt=True)
        receive(updater, FromIpc("", cuda_regions=(region,)), update_id)
        updater.commit(update_id)
        assert_live(target, weights(2))
        assert not tensors_over(left)
    finally:
        trainer.close()


def test_what_was_lent_packed_is_adopted_in_the_arenas_layout(gpu: FakeGpu) -> None:
    """The same region, first copied from and then adopted: its tensors lie elsewhere in it."""
    target = TinyTarget()
    updater = make_updater(target)
    offsets, packed_bytes = manifest_of(weights(1)).packed_offsets()
    assert packed_bytes != target.arena.nbytes, "the layouts differ"
    handle = gpu.allocate(1, max(packed_bytes, target.arena.nbytes))
    memory = gpu.memory[handle]
    trainer = Trainer(1)  # holds the owner's lock
    try:
        region = gpu.region(handle, 0, memory.numel(), owner=trainer.descriptor)
        request = FromIpc("", cuda_regions=(region,))
        for offset, value in zip(offsets, weights(1).values(), strict=True):
            memory[offset : offset + value.nbytes] = raw(value)
        update_id = begin(updater, weights(1), path=Path.IPC, staging=Staging.NONE)
        receive(updater, request, update_id)
        updater.commit(update_id)
        assert_live(target, weights(1))
        for seed in (2, 3):
            update_id = begin(updater, weights(seed), path=Path.IPC, adopt=True)
            for name, value in weights(seed).items():
                target.arena.slot_view(memory, name).copy_(value)
            receive(updater, request, update_id)
            updater.commit(update_id)
            assert_live(target, weights(seed))
            assert updater.checksums([]) == {name: checksum(value) for name, value in weights(seed).items()}
    finally:
        trainer.close()


def test_a_segment_in_host_memory_is_not_adopted_by_an_engine_on_a_gpu(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = TinyTarget()
    updater = make_updater(target)
    before, address = target.values(), target.buffer.data_ptr()
    trainer = Trainer(target.arena.nbytes)
    try:
        trainer.train(target, weights(2))
        update_id = begin(updater, weights(2), path=Path.IPC, adopt=True)
        monkeypatch.setattr(updater._receivers.mappings, "device", torch.device("cuda", 0))
        with pytest.raises(UpdateRefused, match=r"lies on cpu, this engine runs on cuda:0; make it on") as no:
            receive(updater, FromIpc("", regions=(trainer.descriptor,)), update_id)
        assert no.value.reason == Reason.MEMORY_UNAVAILABLE
        assert updater.open is None
        assert updater.torn_reason == ""
        assert target.buffer.data_ptr() == address
        assert all(torch.equal(target.slot(name), value) for name, value in before.items())
        assert updater.release([trainer.descriptor.allocation_id]) == 1, "nothing holds it"
    finally:
        trainer.close()


@pytest.mark.parametrize(
    ("where", "own", "refused"),
    [
        ("cuda:0", "cuda:0", False),
        ("cuda:1", "cuda:1", False),
        ("cuda:1", "cuda", False),  # whichever is current
        ("cuda:1", "cuda:0", True),
        ("cuda:0", "cpu", True),
        ("cpu", "cpu", False),
    ],
)
def test_an_arena_is_adopted_on_the_engines_own_device_alone(where: str, own: str, refused: bool) -> None:
    data = SimpleNamespace(device=torch.device(where))
    known: Any = SimpleNamespace(
        device=torch.device(own),
        open=lambda region: SimpleNamespace(data=data),
        using=lambda _: nullcontext(),
    )
    region = CudaIpcRegion("trainer-1", "GPU-1", b"h" * 64, 0, 16)
    with pytest.raises(UpdateRefused, match=f"lies on {where}") if refused else nullcontext():
        _check_home(region, known)
