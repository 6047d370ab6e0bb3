"""From files, segments and streams into a model on a GPU: bit for bit, whatever the staging, and beside
whatever else the GPU does.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path as FilePath

import pytest
import torch

from tests.unit.weight_updater.tiny_target import (
    EMBED,
    HEAD,
    SHAPES,
    TinyTarget,
    make_updater,
    manifest_of,
    num_mappings,
    pack,
    raw,
    weights,
    whole,
)
from weight_updater import pinned
from weight_updater.arena import Arena, SlotSpec, StorageSpec, WeightTarget
from weight_updater.checksum import checksum
from weight_updater.device_copies import ring_to
from weight_updater.errors import Reason, UpdateError, UpdateRefused
from weight_updater.from_disk import load_directory
from weight_updater.requests import (
    BeginUpdate,
    FromDisk,
    FromTensor,
    Path,
    Staging,
    UpdateReply,
)
from weight_updater.safetensors_io import INDEX, SINGLE, save_weights
from weight_updater.shm import SharedSegment
from weight_updater.updater import WeightUpdater

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda:0")
PATHS = ["single file", "shards", "segment", "stream"]
STAGINGS = [Staging.DEVICE, Staging.HOST, Staging.NONE]

Tensors = dict[str, torch.Tensor]
Send = Callable[[Tensors, Staging], UpdateReply]


@contextmanager
def sender(path: str, updater: WeightUpdater, folder: FilePath, *, flip: bool = False) -> Iterator[Send]:
    """A function that pushes tensors by `path`; with `flip`, a bit of the first one changes on the way."""
    segments: list[SharedSegment] = []

    def send(tensors: Tensors, staging: Staging) -> UpdateReply:
        first = next(iter(tensors))
        if path in ("single file", "shards"):
            for name in os.listdir(folder):
                os.unlink(folder / name)
            most = 200 if path == "shards" else 1 << 30
            save_weights(str(folder), tensors.items(), max_shard_bytes=most)
            if flip:
                flip_stored_bit(folder, first)
            begin = BeginUpdate(Path.DISK, directory=str(folder), staging=staging)
            return run(updater, begin, lambda update_id: (FromDisk(update_id, str(folder)), None))
        begin = BeginUpdate(Path.TENSOR, manifest=manifest_of(tensors), staging=staging)
        if flip:
            tensors = {name: value.clone() for name, value in tensors.items()}
            raw(tensors[first])[1] ^= 1
        if path == "stream":
            return run(updater, begin, lambda update_id: (FromTensor(update_id), whole(tensors)))
        segments.append(SharedSegment.create(manifest_of(tensors).packed_offsets()[1]))
        pack(segments[-1], tensors)
        descriptor = segments[-1].descriptor
        return run(updater, begin, lambda update_id: (FromTensor(update_id, descriptor), None))

    try:
        yield send
    finally:
        for segment in segments:
            segment.close()
            segment.unlink()


def flip_stored_bit(folder: FilePath, name: str) -> None:
    """Change a bit of a tensor in its file."""
    file = folder / SINGLE
    if (folder / INDEX).exists():
        file = folder / json.loads((folder / INDEX).read_text())["weight_map"][name]
    with open(file, "r+b") as stored:
        header_bytes = int.from_bytes(stored.read(8), "little")
        offsets = json.loads(stored.read(header_bytes))[name]["data_offsets"]
        stored.seek(8 + header_bytes + offsets[0])
        byte = stored.read(1)[0]
        stored.seek(-1, os.SEEK_CUR)
        stored.write(bytes([byte ^ 1]))


def run(updater: WeightUpdater, begin: BeginUpdate, request) -> UpdateReply:
    """The life of an update, the way the engine leads it."""
    update_id = updater.begin(begin, updater.resolve(begin), paused=False).update_id
    receive = updater.receiver(*request(update_id))
    error: Exception | None = None
    try:
        receive.run()
    except UpdateError as caught:
        error = caught
    updater.received(receive, error)
    try:
        updater.verify(update_id)
    except UpdateError as caught:
        updater.refuse(update_id, caught)
        raise
    return updater.commit(update_id)


def live(target: TinyTarget) -> Tensors:
    return {name: value.cpu() for name, value in target.values().items()}


def same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@contextmanager
def updater_of(target: WeightTarget, folder: FilePath) -> Iterator[WeightUpdater]:
    made = WeightUpdater(target, lease_s=60.0, roots=[str(folder)], device_staging=True, initial_version=4)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("path", PATHS)
def test_the_same_bytes_are_live_and_proven(path, staging, tmp_path):
    target = TinyTarget(device=DEVICE)
    with updater_of(target, tmp_path) as updater, sender(path, updater, tmp_path) as send:
        for version, seed in enumerate((1, 2), start=5):
            new = weights(seed)
            reply = send(new, staging)
            assert (reply.version, reply.staging, reply.verified) == (version, staging, True)
            assert same(live(target), new)
            assert updater.checksums([]) == {name: checksum(value) for name, value in new.items()}
        assert reply.num_bytes == sum(value.nbytes for value in new.values())


@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_are_cast_to_the_slots_dtype(path, staging, dtype, tmp_path):
    target = TinyTarget(device=DEVICE)
    with updater_of(target, tmp_path) as updater, sender(path, updater, tmp_path) as send:
        new = weights(3, dtype)
        send(new, staging)
        own = {name: value.dtype for name, value in target.values().items()}
        assert same(live(target), {name: new[name].to(own[name]) for name in SHAPES})
        assert updater.checksums([]) == {name: checksum(value) for name, value in live(target).items()}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("staging", [Staging.DEVICE, Staging.HOST])
def test_a_flipped_bit_is_refused_and_the_old_weights_stay(path, staging, tmp_path):
    target = TinyTarget(device=DEVICE)
    before = live(target)
    with (
        updater_of(target, tmp_path) as updater,
        sender(path, updater, tmp_path, flip=True) as send,
        pytest.raises(UpdateRefused) as refused,
    ):
        send(weights(4), staging)
    assert refused.value.reason is Reason.CHECKSUM_MISMATCH
    assert EMBED in refused.value.message
    assert same(live(target), before)
    assert not updater.torn_reason


@pytest.mark.parametrize("path", PATHS)
def test_a_flipped_bit_in_live_slots_tears(path, tmp_path):
    target = TinyTarget(device=DEVICE)
    with updater_of(target, tmp_path) as updater:
        with sender(path, updater, tmp_path, flip=True) as send, pytest.raises(UpdateError):
            send(weights(5), Staging.NONE)
        assert updater.torn_reason
        with sender(path, updater, tmp_path) as send:
            send(weights(6), Staging.NONE)
        assert not updater.torn_reason
        assert same(live(target), weights(6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tied_names_are_compared_on_the_device(dtype, tmp_path):
    target = TinyTarget(device=DEVICE)
    new = weights(7)
    new[HEAD] = new[EMBED].to(dtype)
    with updater_of(target, tmp_path) as updater, sender("stream", updater, tmp_path) as send:
        send(new, Staging.DEVICE)
        assert same(live(target), {name: new[name] for name in SHAPES})
        new[HEAD] = (new[EMBED] + 1).to(dtype)
        with pytest.raises(UpdateRefused) as refused:
            send(new, Staging.DEVICE)
        assert refused.value.reason is Reason.MANIFEST_MISMATCH


@pytest.mark.parametrize("path", PATHS)
def test_nonfinite_values_are_found_on_the_device(path, tmp_path):
    target = TinyTarget(device=DEVICE)
    new = weights(8)
    new[EMBED][2, 3] = float("nan")
    with updater_of(target, tmp_path) as updater, sender(path, updater, tmp_path) as send:
        with pytest.raises(UpdateRefused) as refused:
            send(new, Staging.DEVICE)
        assert (refused.value.reason, EMBED in refused.value.message) == (Reason.NONFINITE, True)


LARGE = {"a": (4096, 8192), "b": (4095, 8193), "c": (5, 7), "d": (3, 4096, 4096)}


def large_target() -> WeightTarget:
    """230 MB in four tensors: many slots of the ring, odd sizes, and small neighbours."""
    storages = [
        StorageSpec(name, torch.bfloat16, shape, (SlotSpec(name, shape),)) for name, shape in LARGE.items()
    ]
    parameters = {
        name: torch.nn.Parameter(torch.empty(0, dtype=torch.bfloat16, device=DEVICE)) for name in LARGE
    }
    return WeightTarget(Arena(storages), parameters, DEVICE)


@pytest.mark.parametrize("path", ["single file", "segment"])
@pytest.mark.parametrize("staging", STAGINGS)
def test_tensors_of_many_slots(path, staging, tmp_path):
    target = large_target()
    generator = torch.Generator().manual_seed(9)
    new = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in LARGE.items()}
    with updater_of(target, tmp_path) as updater, sender(path, updater, tmp_path) as send:
        send(new, staging)
        for name, value in new.items():
            assert torch.equal(target.slot(name).cpu(), value)
        if path == "single file":
            target.buffer.zero_()
            load_directory(target, str(tmp_path))
            for name, value in new.items():
                assert torch.equal(target.slot(name).cpu(), value)


def test_bytes_arrive_while_the_device_is_busy_with_something_else(tmp_path):
    target = TinyTarget(device=DEVICE)
    save_weights(str(tmp_path), weights(10).items())
    with updater_of(target, tmp_path) as updater:
        for warm in (True, False):  # the first allocates the ring
            begin = BeginUpdate(Path.DISK, directory=str(tmp_path), staging=Staging.DEVICE)
            update_id = updater.begin(begin, updater.resolve(begin), paused=False).update_id
            torch.cuda.synchronize(DEVICE)
            forward = torch.cuda.Stream(DEVICE)
            with torch.cuda.stream(forward):
                torch.cuda._sleep(1_000 if warm else 3_000_000_000)
                done = torch.cuda.Event()
                done.record()
            receive = updater.receiver(FromDisk(update_id, str(tmp_path)))
            receive.run()
            assert warm or not done.query()
            updater.received(receive, None)
            updater.verify(update_id)
            updater.commit(update_id)
    assert same(live(target), weights(10))


def test_page_locked_memory_is_taken_once(tmp_path):
    target = TinyTarget(device=DEVICE)
    save_weights(str(tmp_path), weights(11).items())
    load_directory(target, str(tmp_path))
    ring = ring_to(target.buffer.device)
    with updater_of(target, tmp_path) as updater, sender("single file", updater, tmp_path) as send:
        send(weights(12), Staging.DEVICE)
        send(weights(13), Staging.HOST)
        staged = updater.buffers.get(Staging.HOST)
        send(weights(14), Staging.HOST)
        assert updater.buffers.get(Staging.HOST) is staged
    assert staged.is_pinned()
    assert staged.data_ptr() % 256 == 0
    assert ring_to(target.buffer.device) is ring


def test_a_segment_is_registered_once_and_until_it_is_released_or_removed(monkeypatch):
    registered: list[bool] = []

    def register(data, device):
        registered.append(pinned_register(data, device))
        return registered[-1]

    pinned_register = pinned.register
    monkeypatch.setattr(pinned, "register", register)
    target, updater = TinyTarget(device=DEVICE), None
    updater = make_updater(target, device_staging=True)
    new = weights(15)

    def send(segment: SharedSegment) -> None:
        pack(segment, new)
        begin = BeginUpdate(Path.TENSOR, manifest=manifest_of(new), staging=Staging.DEVICE)
        run(updater, begin, lambda update_id: (FromTensor(update_id, segment.descriptor), None))

    def wait_for_mappings(segment: SharedSegment, number: int) -> None:
        deadline = time.monotonic() + 5
        while num_mappings(segment.descriptor.name) != number and time.monotonic() < deadline:
            time.sleep(0.01)
        assert num_mappings(segment.descriptor.name) == number

    with SharedSegment.create(manifest_of(new).packed_offsets()[1]) as segment:
        for _ in range(3):
            send(segment)
            assert num_mappings(segment.descriptor.name) == 2  # the creator's own, and the updater's
        assert registered == [True]
        (held,) = updater._receivers._segments._held.values()
        assert held.data.is_pinned()
        del held
        assert updater.release([segment.descriptor.allocation_id, "unknown"]) == 1
        wait_for_mappings(segment, 1)
        send(segment)
        assert registered == [True, True]
        segment.unlink()
        updater.tick(time.monotonic())
        wait_for_mappings(segment, 1)
    updater.close()
    assert same(live(target), new)
