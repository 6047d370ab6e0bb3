"""NCCL groups without NCCL: what surrounds the collectives, over a stand-in that moves bytes in threads."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.unit.weight_updater.nccl_wire import CPU, LOOPBACK, Wire, World, free_port
from tests.unit.weight_updater.test_device_sink import LateCopies
from tests.unit.weight_updater.tiny_target import (
    EMBED,
    NORM,
    SHAPES,
    TinyTarget,
    manifest_of,
    weights,
)
from weight_updater import from_distributed
from weight_updater.buckets import plan_buckets
from weight_updater.device_sink import DeviceSink
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.groups import GroupRegistry, SenderGroup
from weight_updater.meeting import HeaderRefused, listen
from weight_updater.nccl import NcclGroup
from weight_updater.nccl_receiver import NcclReceiver
from weight_updater.plan import plan_update
from weight_updater.requests import FromDistributed, InitGroup, Manifest, TensorSpec
from weight_updater.sink import Sink


def sink_for(target: TinyTarget, manifest: Manifest) -> DeviceSink:
    plan = plan_update(target, manifest, partial=False, merged=False)
    return DeviceSink(
        plan,
        target.arena,
        target.arena.allocate(CPU),
        hashing=True,
        find_nonfinite=True,
        copies=LateCopies(),
    )


def receive(world: World, sink: Sink, bucket_bytes: int, timeout_s: float = 0.0) -> None:
    from_distributed.receive(
        FromDistributed("u", "g", timeout_s),
        sink.plan.manifest,
        sink,
        world.registry,
        bucket_bytes=bucket_bytes,
        needed=sink.plan.needed,
    )


def assert_stored(sink: Sink, target: TinyTarget, new: dict[str, torch.Tensor]) -> None:
    assert sink.destination is not None
    assert sink.incomplete() == []
    for index, (name, value) in enumerate(new.items()):
        stored = target.arena.slot_view(sink.destination, name)
        assert torch.equal(stored, value.to(stored.dtype)), name
        assert not sink.nonfinite([index])
        if value.dtype == stored.dtype:
            assert sink.received_checksum(index) == sink.slot_checksum(index)


@pytest.mark.parametrize("bucket_bytes", [256, 512, 1 << 20])
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_updates_arrive_in_any_bucket_size(world, monkeypatch, bucket_bytes, dtype):
    target = TinyTarget()
    with world.join(monkeypatch) as sender:
        for seed in (1, 2, 3):
            new = weights(seed, dtype)
            manifest = manifest_of(new)
            sink = sink_for(target, manifest)
            sending = world.pool.submit(sender.broadcast, manifest, list(new.values()), bucket_bytes)
            receive(world, sink, bucket_bytes)
            sending.result()
            assert_stored(sink, target, new)


def test_a_sink_in_host_memory_is_fed_through_two_buffers(world, monkeypatch):
    target, new = TinyTarget(), weights(4)
    manifest = manifest_of(new)
    plan = plan_update(target, manifest, partial=False, merged=False)
    sink = Sink(plan, target.arena, target.arena.allocate(CPU), hashing=True, find_nonfinite=True)
    with world.join(monkeypatch) as sender:
        sending = world.pool.submit(sender.broadcast, manifest, list(new.values()), 256)
        receive(world, sink, 256)
        sending.result()
    assert_stored(sink, target, new)


@pytest.mark.case("B025")
@pytest.mark.case("B093")
def test_a_disagreement_is_refused_on_both_sides_before_any_collective_and_harms_nothing(world, monkeypatch):
    target, new = TinyTarget(), weights(5)
    manifest = manifest_of(new)
    with world.join(monkeypatch) as sender:
        sending = world.pool.submit(sender.broadcast, manifest, list(new.values()), 512)
        with pytest.raises(HeaderRefused, match="bucket_bytes"):
            receive(world, sink_for(target, manifest), 256)
        with pytest.raises(UpdateRefused) as refused:
            sending.result()
        assert refused.value.reason is Reason.MANIFEST_MISMATCH
        assert world.wire.sent == []
        sink = sink_for(target, manifest)
        sending = world.pool.submit(sender.broadcast, manifest, list(new.values()), 256)
        receive(world, sink, 256)
        sending.result()
        assert_stored(sink, target, new)
        assert world.wire.num_aborts == 0


@pytest.mark.case("B085")
def test_a_broadcast_that_never_ends_is_aborted_at_its_deadline_and_the_name_is_free(world, monkeypatch):
    world.timeout_s = 1.0
    target, new = TinyTarget(), weights(6)
    manifest = manifest_of(new)
    sender = world.join(monkeypatch)
    world.wire.stuck_from = 2
    sending = world.pool.submit(sender.broadcast, manifest, list(new.values()), 256)
    started = time.monotonic()
    with pytest.raises(UpdateRefused) as refused:
        receive(world, sink_for(target, manifest), 256)
    assert refused.value.reason in (Reason.TIMEOUT, Reason.PEER_LOST)
    assert 0.5 < time.monotonic() - started < 20.0
    with pytest.raises(UpdateRefused):
        sending.result()
    assert world.wire.num_aborts == 2  # both ends
    assert world.registry.names == []
    sender.close()
    world.wire = Wire()
    world.timeout_s = 10.0
    with world.join(monkeypatch) as sender:
        sink = sink_for(target, manifest)
        sending = world.pool.submit(sender.broadcast, manifest, list(new.values()), 256)
        receive(world, sink, 256)
        sending.result()
        assert_stored(sink, target, new)


def test_a_sender_that_never_sends_ends_the_receiver_at_its_deadline(world, monkeypatch):
    target, manifest = TinyTarget(), manifest_of(weights(7))
    with world.join(monkeypatch):
        with pytest.raises(UpdateRefused) as refused:
            receive(world, sink_for(target, manifest), 256, timeout_s=0.5)
        assert refused.value.reason is Reason.TIMEOUT
        assert "agreeing" in refused.value.message


@pytest.mark.parametrize("speaks_first", ["who ends it", "who receives"])
def test_an_update_that_ends_aborts_what_writes_to_its_destination(world, monkeypatch, speaks_first):
    here, tell = threading.current_thread(), NcclGroup.tell_failure

    def tell_failure(group: NcclGroup, text: str) -> None:
        if speaks_first == "who receives" and threading.current_thread() is here:
            time.sleep(0.5)
        tell(group, text)

    monkeypatch.setattr(NcclGroup, "tell_failure", tell_failure)
    target, new = TinyTarget(), weights(8)
    manifest = manifest_of(new)
    sink = sink_for(target, manifest)
    with world.join(monkeypatch) as sender:
        world.wire.stuck_from = 0
        sending = world.pool.submit(sender.broadcast, manifest, list(new.values()), 256)
        receiving = world.pool.submit(receive, world, sink, 256)
        while sink.received_bytes == 0:
            time.sleep(0.01)
        started = time.monotonic()
        sink.end(UpdateRefused(Reason.TIMEOUT, "aborted by the trainer"))
        assert time.monotonic() - started < 8.0
        with pytest.raises(UpdateRefused):
            receiving.result()
        with pytest.raises(UpdateRefused, match="the update ended"):
            sending.result()


def test_the_first_word_of_why_a_group_ended_is_the_one_that_all_hear(world, monkeypatch):
    with world.join(monkeypatch) as sender:
        (receiver,) = (group for group, _ in world.registry._groups.values())
        receiver.kill()
        sender._group.tell_failure("too late")
        with pytest.raises(UpdateRefused, match=r"rank 0 .* failed: rank 1: the group was destroyed"):
            sender.broadcast(manifest_of(weights(1)), list(weights(1).values()), 256)


def test_closing_the_sender_ends_both_sides(world, monkeypatch):
    target, new = TinyTarget(), weights(9)
    manifest = manifest_of(new)
    sender = world.join(monkeypatch)
    world.wire.stuck_from = 1
    sending = world.pool.submit(sender.broadcast, manifest, list(new.values()), 256)
    sink = sink_for(target, manifest)
    receiving = world.pool.submit(receive, world, sink, 256)
    while sink.received_bytes == 0:
        time.sleep(0.01)
    sender.close()
    for side in (sending, receiving):
        with pytest.raises(UpdateRefused) as refused:
            side.result()
        assert refused.value.reason is Reason.PEER_LOST
    assert world.registry.names == []


def test_a_source_that_is_not_its_manifest_tells_the_receiver(world, monkeypatch):
    target, new = TinyTarget(), weights(10)
    manifest = manifest_of(new)
    with world.join(monkeypatch) as sender:
        sending = world.pool.submit(sender.broadcast, manifest, list(new.values())[:-1], 256)
        with pytest.raises(UpdateRefused, match=f"{NORM} is missing"):
            receive(world, sink_for(target, manifest), 256)
        with pytest.raises(UpdateRefused, match=f"{NORM} is missing"):
            sending.result()


def test_backends_that_differ_are_refused_at_the_rendezvous(world):
    port = free_port()
    request = InitGroup("g", LOOPBACK, port, 1, 2, "nccl", 5.0)
    joined = world.pool.submit(world.registry.init, request)
    with pytest.raises(UpdateRefused) as ours, SenderGroup("g", LOOPBACK, port, 2, 5.0):
        pass
    with pytest.raises(UpdateRefused) as theirs:
        joined.result()
    # Whoever sees it first says so; the other may only see that the first one is gone.
    assert any("backend is" in error.value.message for error in (ours, theirs))


def test_an_engine_on_a_cpu_has_no_nccl():
    registry = GroupRegistry()
    with pytest.raises(UpdateRefused, match="this engine has gloo"):
        registry.init(InitGroup("g", LOOPBACK, 1, 1, 2, "nccl", 5.0))
    with pytest.raises(UpdateRefused, match="nccl where there is a GPU"):
        SenderGroup("g", LOOPBACK, 0, 2, 5.0, backend="nccl")


def in_place(names: list[str], bucket_bytes: int, dtype: torch.dtype | None = None) -> list[bool]:
    """Which buckets of these tensors, in this order, may be received straight into the arena."""
    target = TinyTarget()
    new = {name: weights(1, dtype)[name] for name in names}
    plan = plan_update(target, manifest_of(new), partial=True, merged=False)
    sink = DeviceSink(
        plan,
        target.arena,
        target.arena.allocate(CPU),
        hashing=True,
        find_nonfinite=True,
        copies=LateCopies(),
    )
    buckets = plan_buckets(plan.manifest, bucket_bytes)
    found = []
    for bucket in range(len(buckets)):
        pieces, size = buckets.pieces(bucket), buckets.size(bucket)
        straight = sink.in_place(pieces, size)
        found.append(straight is not None)
        if straight is not None:
            assert sink.destination is not None
            straight.fill_(7)
            expected = {buckets.manifest.tensors[piece.tensor].name for piece in pieces}
            slots = {name: target.arena.slot_view(sink.destination, name) for name in SHAPES}
            touched = {name for name, slot in slots.items() if bool((slot.view(torch.uint8) == 7).any())}
            assert touched == expected
            straight.zero_()
    return found


def test_a_bucket_is_received_straight_where_no_other_slot_is_touched():
    q, k, gate, up = list(SHAPES)[1:5]
    # Storages start at multiples of 256, as tensors do in a bucket; k follows q after 72 bytes, though.
    assert in_place([EMBED], 256) == [True]
    assert in_place([q], 256) == [False]  # its padding would overwrite k
    assert in_place([k], 256) == [False]  # it would have to start before its storage
    assert in_place([gate], 256) == [False]
    assert in_place([NORM], 256) == [True]
    assert in_place([EMBED, NORM], 1024) == [False]
    assert in_place([NORM, EMBED], 1024) == [False]
    assert in_place([EMBED], 256, torch.float32) == [False]
    assert in_place([up], 256) == [False]


def test_large_tensors_that_follow_each_other_as_in_the_arena_are_one_bucket():
    from weight_updater.arena import Arena, SlotSpec, StorageSpec, WeightTarget

    slots = (SlotSpec("q", (4, 64)), SlotSpec("k", (2, 64)), SlotSpec("v", (2, 64)))
    storages = [
        StorageSpec("qkv", torch.float32, (8, 64), slots),
        StorageSpec("o", torch.float32, (4, 64), (SlotSpec("o", (4, 64)),)),
        StorageSpec("n", torch.float32, (3,), (SlotSpec("n", (3,)),)),
    ]
    parameters = {s.key: torch.nn.Parameter(torch.empty(s.shape)) for s in storages}
    target = WeightTarget(Arena(storages), parameters, CPU)

    def straight(names: list[str], bucket_bytes: int) -> list[bool]:
        shapes = {s.name: s.shape for storage in storages for s in storage.slots}
        manifest = Manifest(tuple(TensorSpec(name, "float32", shapes[name]) for name in names))
        plan = plan_update(target, manifest, partial=True, merged=False)
        sink = DeviceSink(
            plan, target.arena, target.buffer, hashing=False, find_nonfinite=False, copies=LateCopies()
        )
        buckets = plan_buckets(manifest, bucket_bytes)
        return [sink.in_place(buckets.pieces(b), buckets.size(b)) is not None for b in range(len(buckets))]

    assert straight(["q", "k", "v", "o", "n"], 1 << 20) == [True]
    assert straight(["q", "k", "v", "o", "n"], 512) == [True] * 7
    assert straight(["q", "v", "k", "o", "n"], 1 << 20) == [False]
    assert straight(["k", "v", "o"], 1 << 20) == [True]
    assert straight(["q", "v"], 1024) == [True, True]
    assert straight(["q", "v"], 1 << 20) == [False]


def test_a_rendezvous_that_hangs_in_the_library_ends_at_its_timeout():
    release = threading.Event()
    port = free_port()

    def hang(store: Any, member: Any, device: torch.device) -> Any:
        release.wait(20)
        raise RuntimeError("too late")

    receiver = NcclReceiver(InitGroup("g", LOOPBACK, port, 1, 2, "nccl", 1.0), CPU, build=hang)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(receiver.join)
        with pytest.raises(UpdateRefused) as refused:
            make_rank_0(port, hang)
        assert refused.value.reason is Reason.TIMEOUT
        with pytest.raises(UpdateRefused):
            joining.result()
    release.set()


def make_rank_0(port: int, build: Callable[..., Any]) -> NcclGroup:
    from weight_updater.meeting import Member

    listener: socket.socket = listen(LOOPBACK, port)
    return NcclGroup(Member("g", LOOPBACK, port, 0, 2, 1.0, "nccl"), CPU, listener, build=build)


def test_memory_for_buckets_that_fit_nowhere_is_told(world, monkeypatch):
    target, new = TinyTarget(), weights(6)
    manifest = manifest_of(new)
    with world.join(monkeypatch) as sender:
        for bucket_bytes in (256, 512):
            sink = sink_for(target, manifest)
            sending = world.pool.submit(sender.broadcast, manifest, list(new.values()), bucket_bytes)
            receive(world, sink, bucket_bytes)
            sending.result()
            assert sink.extra_bytes == 2 * bucket_bytes
            assert_stored(sink, target, new)
        alike = {NORM: new[NORM]}
        plan = plan_update(target, manifest_of(alike), partial=True, merged=False)
        sink = DeviceSink(
            plan, target.arena, target.buffer, hashing=True, find_nonfinite=True, copies=LateCopies()
        )
        sending = world.pool.submit(sender.broadcast, plan.manifest, list(alike.values()), 256)
        receive(world, sink, 256)
        sending.result()
        assert sink.extra_bytes == 0, "it came to where it belongs"


def test_without_memory_for_buckets_nothing_is_broadcast(world, monkeypatch):
    target, new = TinyTarget(), weights(6)
    manifest, taken = manifest_of(new), torch.empty

    def empty(*size: Any, **options: Any) -> torch.Tensor:
        if size == (2 * 512,):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return taken(*size, **options)

    monkeypatch.setattr(torch, "empty", empty)
    with world.join(monkeypatch) as sender:
        sending = world.pool.submit(sender.broadcast, manifest, list(new.values()), 512)
        with pytest.raises(UpdateRefused, match=r"two buffers of 512 bytes.* smaller bucket_bytes") as no:
            receive(world, sink_for(target, manifest), 512)
        with pytest.raises(UpdateRefused, match="two buffers of 512 bytes"):
            sending.result(timeout=10)
    assert no.value.reason is Reason.NO_MEMORY
    assert world.wire.sent == []
