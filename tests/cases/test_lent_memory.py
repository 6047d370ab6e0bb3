"""Memory that a trainer lends or reuses: when it is its own again, and what is left of it."""

from __future__ import annotations

import gc
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.cases.common import Tensors, assert_serves, live, trained
from tests.desk import num_threads
from tests.unit.adapters.fake_engine import FakeEngine, serving
from tests.unit.weight_updater.fake_gpu import FakeGpu, fake_gpu
from tests.unit.weight_updater.test_from_cuda import lay_out, receive
from tests.unit.weight_updater.tiny_target import (
    TinyTarget,
    begin,
    make_updater,
    num_mappings,
)
from tests.unit.weight_updater.tiny_target import (
    weights as tiny_weights,
)
from tests.ways import Ways, fill, manifest_of
from trainers_adapters import IpcArena, ModuleSource, TensorSegment, push_weights
from trainers_adapters.clients import WeightsClient
from weight_updater import device_memory
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.requests import BeginUpdate, FromIpc, FromTensor, ShmSegment, Staging
from weight_updater.requests import Path as Way
from weight_updater.shm import SharedSegment


@pytest.fixture
def segment(weights):
    with SharedSegment.create(manifest_of(weights).packed_offsets()[1]) as made:
        yield made


def offers(segment: SharedSegment, tensors: Tensors) -> dict[str, tuple[BeginUpdate, object]]:
    manifest = manifest_of(tensors)
    return {
        "segment": (
            BeginUpdate(Way.TENSOR, manifest=manifest),
            lambda uid: FromTensor(uid, segment.descriptor),
        ),
        "ipc": (BeginUpdate(Way.IPC, manifest=manifest), lambda uid: FromIpc(uid, (segment.descriptor,))),
    }


@pytest.mark.case("B100")
@pytest.mark.parametrize("staging", [Staging.DEVICE, Staging.HOST])
@pytest.mark.parametrize("way", ["segment", "ipc"])
def test_a_buffer_that_is_used_again_after_the_reply_changes_nothing(
    way, staging, segment, engine, tied_dir, weights
):
    """The reply means: copied. So what the sender writes next is not in what is committed later."""
    for _ in range(3):
        new = trained(weights)
        fill(segment, new)
        request, call = offers(segment, new)[way]
        begun = engine.begin(replace(request, staging=staging))
        engine.update(call(begun.update_id))
        fill(segment, trained(weights))  # at once, with the next step's values
        engine.commit(begun.update_id)
        assert_serves(engine, tied_dir, new)
        segment.buf[:] = bytes(len(segment.buf))
        assert_serves(engine, tied_dir, new)


@pytest.mark.case("B100")
@pytest.mark.parametrize("way", ["segment", "ipc"])
def test_without_staging_it_is_the_senders_again_after_the_commit(way, segment, engine, tied_dir, weights):
    new = trained(weights)
    fill(segment, new)
    request, call = offers(segment, new)[way]
    begun = engine.begin(replace(request, staging=Staging.NONE))
    engine.update(call(begun.update_id))
    engine.commit(begun.update_id)
    fill(segment, trained(weights))
    assert_serves(engine, tied_dir, new)


@pytest.mark.case("B100")
def test_bytes_that_change_while_they_are_lent_are_refused(segment, engine, weights):
    """Lent without staging and overwritten before the commit: the checksums tell."""
    before, new = live(engine), trained(weights)
    fill(segment, new)
    request, call = offers(segment, new)["ipc"]
    begun = engine.begin(replace(request, staging=Staging.HOST))
    fill(segment, trained(weights))
    engine.update(call(begun.update_id))
    with pytest.raises(UpdateRefused) as refused:
        engine.commit(begun.update_id)
    assert refused.value.reason is Reason.CHECKSUM_MISMATCH
    assert live(engine) == before


class Slow(FakeEngine):
    """Reads what is lent half a second late."""

    def _read_segment(self, segment) -> None:
        time.sleep(0.5)
        super()._read_segment(segment)


@pytest.mark.case("B100")
@pytest.mark.parametrize("make", [TensorSegment, IpcArena])
def test_a_push_is_over_when_the_slowest_engine_has_copied(make):
    module = torch.nn.Linear(5, 3)
    engines = [FakeEngine(), Slow()]
    with (
        serving(engines[0]) as a,
        serving(engines[1]) as b,
        WeightsClient(a) as first,
        WeightsClient(b) as second,
        make() as sender,
    ):
        for step in range(2):
            with torch.no_grad():
                module.weight.fill_(step)
            expected = module.weight.detach().numpy().tobytes()
            push_weights(ModuleSource(module), [first, second], via=sender)
            with torch.no_grad():
                module.weight.fill_(-1)
            assert [engine.weights["weight"] for engine in engines] == [expected] * 2


def resources() -> tuple[int, int, int]:
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("/dev/shm/rollsync-")
    return len(os.listdir("/proc/self/fd")), num_threads(), maps


@pytest.mark.case("B097")
@pytest.mark.parametrize("way", ["segment", "ipc"])
@pytest.mark.parametrize("kept", [True, False])
def test_fifty_updates_leave_the_senders_memory_alone(kept, way, engine, weights):
    """One allocation that is kept, or a new one each time that is released: both ends are back at start."""
    new = trained(weights)
    size = manifest_of(new).packed_offsets()[1]
    before = None
    segment = SharedSegment.create(size)
    names = {segment.descriptor.name}
    fill(segment, new)
    for step in range(50):
        if not kept and step:
            segment = SharedSegment.create(size)
            names.add(segment.descriptor.name)
            fill(segment, new)
        request, call = offers(segment, new)[way]
        engine.update(call(""), request)
        if not kept:
            engine.updater.release([segment.descriptor.allocation_id])
            segment.close()
            segment.unlink()
            engine.updater.tick(time.monotonic() + 2)
        if step == 2:
            before = resources()
    assert all(now <= then for now, then in zip(resources(), before, strict=True))
    assert names & {*os.listdir("/dev/shm")} == (names if kept else set())
    if kept:
        engine.updater.release([segment.descriptor.allocation_id])
        assert num_mappings(segment.descriptor.name) == 1, "the sender's own"
        segment.close()
        segment.unlink()


@pytest.mark.case("B107")
@pytest.mark.parametrize("way", ["segment", "ipc"])
def test_memory_that_cannot_be_shared_says_so_and_another_path_is_taken(
    way, engine, ways: Ways, tied_dir, weights, monkeypatch
):
    """As in another container: the name is not there, or the memory behind it is another."""
    before, new = live(engine), trained(weights)
    size = manifest_of(new).packed_offsets()[1]
    with (
        SharedSegment.create(64) as small,
        SharedSegment.create(size) as other,
        SharedSegment.create(size + 4096) as larger,
    ):
        fill(other, new)
        fill(larger, new)
        wrong = {
            "gone": ShmSegment("rollsync-" + "0" * 32, size, "a"),
            "small": ShmSegment(small.descriptor.name, size, "b"),
            "larger": ShmSegment(larger.descriptor.name, size, "d"),
            "short": small.descriptor,
            "a path": ShmSegment("../../etc/hostname", size, "c"),
            "another user's": other.descriptor,
        }
        for what, descriptor in wrong.items():
            if what == "another user's":
                monkeypatch.setattr("weight_updater.shm.os.geteuid", lambda: os.getuid() + 1)
            manifest = manifest_of(new)
            if way == "ipc":
                begin_, request = BeginUpdate(Way.IPC, manifest=manifest), FromIpc("", (descriptor,))
            else:
                begin_, request = BeginUpdate(Way.TENSOR, manifest=manifest), FromTensor("", descriptor)
            with pytest.raises(UpdateRefused) as refused:
                engine.update(request, begin_)
            assert refused.value.reason is Reason.MEMORY_UNAVAILABLE, what
        monkeypatch.undo()
        engine.updater.release(["b", small.descriptor.allocation_id])
    assert live(engine) == before
    ways.push("stream", new)
    assert_serves(engine, tied_dir, new)


@pytest.fixture
def gpu(monkeypatch):
    with fake_gpu(monkeypatch) as made:
        yield made


@pytest.mark.case("B108")
@pytest.mark.parametrize("seen", ["zeros", "one bit", "another allocation"])
@pytest.mark.parametrize("staging", [Staging.DEVICE, Staging.HOST, Staging.NONE])
def test_memory_that_arrives_as_something_else_is_noticed_at_the_probe(staging, seen, gpu: FakeGpu):
    """Before it is used for anything, and it is unmapped again; the next try maps it anew."""
    target = TinyTarget()
    updater = make_updater(target, device_staging=True)
    before = target.buffer.clone()
    handle = gpu.allocate(1, 4096)
    request = lay_out(gpu, tiny_weights(1), [handle])
    good = gpu.memory[handle].clone()
    if seen == "zeros":
        gpu.memory[handle].zero_()
    elif seen == "one bit":
        gpu.memory[handle][17] ^= 0x80
    else:
        gpu.memory[handle].copy_(torch.arange(4096, dtype=torch.int64).to(torch.uint8))
    update_id = begin(updater, tiny_weights(1), path=Way.IPC, staging=staging)
    with pytest.raises(UpdateRefused, match="in the trainer") as refused:
        receive(updater, request, update_id)
    assert refused.value.reason is Reason.MEMORY_UNAVAILABLE
    assert (gpu.opened, gpu.closed) == ([handle], [handle])
    assert torch.equal(target.buffer, before)
    gpu.memory[handle].copy_(good)
    update_id = begin(updater, tiny_weights(1), path=Way.IPC, staging=staging)
    receive(updater, request, update_id)
    assert updater.commit(update_id).verified


@pytest.mark.case("B103")
@pytest.mark.parametrize("order", [("GPU-a", "GPU-b"), ("GPU-b", "GPU-a"), ("GPU-b",)])
def test_a_gpu_is_found_by_its_uuid_whatever_its_number(order, monkeypatch):
    monkeypatch.setattr(device_memory, "device_uuid", lambda index: order[index])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(order))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, index: True)
    own = torch.device("cuda", 0)
    assert device_memory.device_of("GPU-b", own) == order.index("GPU-b")
    assert device_memory.device_of("b", own) == order.index("GPU-b"), "with and without the prefix"
    with pytest.raises(UpdateRefused) as refused:
        device_memory.device_of("GPU-z", own)
    assert refused.value.reason is Reason.MEMORY_UNAVAILABLE
    assert "lies on GPU-z" in refused.value.message
    assert f"it sees {', '.join(order)}" in refused.value.message
