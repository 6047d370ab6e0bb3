"""The sink of a device: bytes travel late, in order; slots wait for them; all is hashed when it is there."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch

from tests.unit.weight_updater.tiny_target import (
    EMBED,
    HEAD,
    NORM,
    SHAPES,
    TinyTarget,
    manifest_of,
    pack,
    raw,
    weights,
    whole,
)
from weight_updater import device_sink, from_disk, from_tensor
from weight_updater.checksum import checksum
from weight_updater.device_copies import HostRing
from weight_updater.device_sink import DeviceSink
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.plan import plan_update
from weight_updater.requests import FromDisk, FromTensor
from weight_updater.safetensors_io import save_weights
from weight_updater.shm import SharedSegment
from weight_updater.sink import Sink


class LateCopies:
    """Copies that happen as late as they may: when a mark behind them is waited for."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._queued: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.num_done = 0
        self.most_queued = 0
        self.most_bytes_queued = 0
        self.num_followed = 0

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        with self._lock:
            self._queued.append((destination, source))
            self.most_queued = max(self.most_queued, len(self._queued))
            num_bytes = sum(source.numel() for _, source in self._queued)
            self.most_bytes_queued = max(self.most_bytes_queued, num_bytes)

    def mark(self) -> LateMark:
        with self._lock:
            return LateMark(self, self.num_done + len(self._queued))

    def finish(self) -> None:
        self.mark().wait()

    def follow(self) -> None:
        self.num_followed += 1

    @contextlib.contextmanager
    def current(self):
        with self._lock:  # as on a stream: what runs in the block sees all that was queued before it
            self.finish()
            yield

    def carry_out(self, until: int) -> None:
        with self._lock:
            while self.num_done < until:
                destination, source = self._queued.pop(0)
                destination.copy_(source)
                self.num_done += 1


class LateMark:
    def __init__(self, copies: LateCopies, position: int) -> None:
        self._copies, self._position = copies, position

    def done(self) -> bool:
        return self._copies.num_done >= self._position

    def wait(self) -> None:
        self._copies.carry_out(self._position)


def make_sink(target: TinyTarget, tensors, *, find_nonfinite: bool = True, hashing: bool = True):
    plan = plan_update(target, manifest_of(tensors), partial=False, merged=False)
    destination = target.arena.allocate(torch.device("cpu"))
    return DeviceSink(
        plan,
        target.arena,
        destination,
        hashing=hashing,
        find_nonfinite=find_nonfinite,
        copies=LateCopies(),
    )


def stored(sink: Sink, target: TinyTarget) -> dict[str, torch.Tensor]:
    assert sink.destination is not None
    return {name: target.arena.slot_view(sink.destination, name) for name in SHAPES}


def test_bytes_arrive_with_the_next_flush_and_are_hashed_where_they_lie():
    target, tensors = TinyTarget(), weights(1)
    sink = make_sink(target, tensors)
    for index, offset, data in whole(tensors):
        sink.write(index, offset, data)
    assert sink.copies.num_followed == 1
    assert not stored(sink, target)[EMBED].any()
    sink.flush()
    assert sink.incomplete() == []
    for index, (name, value) in enumerate(tensors.items()):
        assert torch.equal(stored(sink, target)[name], value)
        assert sink.received_checksum(index) == sink.slot_checksum(index) == checksum(value)
        assert not sink.nonfinite([index])


def test_a_wrong_byte_on_the_device_shows_in_the_checksum_of_what_arrived():
    target, tensors = TinyTarget(), weights(1)
    sink = make_sink(target, tensors)
    for index, offset, data in whole(tensors):
        sink.write(index, offset, data)
    sink.flush()
    stored(sink, target)[EMBED].view(torch.uint8)[0, 0] ^= 1
    names = list(tensors)
    wrong = [n for i, n in enumerate(names) if sink.received_checksum(i) != checksum(tensors[n])]
    assert wrong == [EMBED]


def test_chunks_in_any_order_add_up():
    target, tensors = TinyTarget(), weights(2)
    sink = make_sink(target, tensors)
    chunks = [
        (index, start, data[start : start + 16])
        for index, _, data in whole(tensors)
        for start in range(0, data.numel(), 16)
    ]
    for chunk in reversed(chunks):
        sink.write(*chunk)
    sink.flush()
    assert [sink.received_checksum(i) for i in range(len(tensors))] == [checksum(v) for v in tensors.values()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_a_cast_gives_what_the_sink_of_a_cpu_gives(dtype, monkeypatch):
    monkeypatch.setattr("weight_updater.device_sink.CAST_BYTES", 64)  # several pieces for each chunk
    target = TinyTarget()
    tensors = weights(3, dtype)
    sink = make_sink(target, tensors)
    plan = sink.plan
    other = target.arena.allocate(torch.device("cpu"))
    oracle = Sink(plan, target.arena, other, hashing=True, find_nonfinite=True)
    for index, _, data in whole(tensors):
        for start in range(0, data.numel(), 80):
            sink.write(index, start, data[start : start + 80])
            oracle.write(index, start, data[start : start + 80])
    sink.flush()
    for index, name in enumerate(tensors):
        assert torch.equal(stored(sink, target)[name], target.arena.slot_view(other, name))
        assert sink.received_checksum(index) == oracle.received_checksum(index)
        assert sink.slot_checksum(index) == oracle.slot_checksum(index)


def test_values_that_become_infinite_in_the_slots_dtype_are_found():
    target = TinyTarget()
    tensors = weights(4, torch.float64)
    tensors[EMBED][3, 2] = 1e300
    sink = make_sink(target, tensors)
    for index, offset, data in whole(tensors):
        sink.write(index, offset, data)
    sink.flush()
    assert sink.nonfinite(range(len(tensors))) == [list(tensors).index(EMBED)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_tied_name_is_compared_and_not_written(dtype):
    target = TinyTarget()
    tensors = weights(5)
    tensors[HEAD] = tensors[EMBED].to(dtype)
    sink = make_sink(target, tensors)
    for index, offset, data in whole(tensors):
        sink.write(index, offset, data)
    sink.flush()
    names = list(tensors)
    twin, writer = names.index(HEAD), names.index(EMBED)
    assert sink.slot_checksum(twin) == sink.slot_checksum(writer) == checksum(tensors[EMBED])


def test_an_ended_update_takes_nothing_more_and_its_copies_have_ended():
    target, tensors = TinyTarget(), weights(6)
    sink = make_sink(target, tensors)
    sink.write(0, 0, raw(tensors[EMBED]))
    sink.end(UpdateRefused(Reason.TIMEOUT, "late"))
    assert torch.equal(stored(sink, target)[EMBED], tensors[EMBED])
    with pytest.raises(UpdateRefused, match="late"):
        sink.write(1, 0, raw(list(tensors.values())[1]))


def test_a_slot_is_given_again_only_after_its_bytes_have_left_it():
    copies = LateCopies()
    arrived = torch.zeros(5, 8, dtype=torch.uint8)

    def read(passage):
        for turn in range(5):
            slot = passage.take()
            slot.view[:] = bytes([turn + 1] * 8)
            passage.fill(slot, turn)
        passage.end()

    with HostRing(torch.zeros(16, dtype=torch.uint8), 8).passage(copies) as passage:
        with ThreadPoolExecutor(1) as pool:
            reader = pool.submit(read, passage)
            while passage._filled.qsize() < 2:  # or the first could have left before the second comes
                time.sleep(0.001)
            for data, turn in passage.arrivals(1):
                copies.copy(arrived[turn], data)
            reader.result()
        copies.finish()
    assert arrived[:, 0].tolist() == [1, 2, 3, 4, 5]
    assert copies.most_queued == 2


def test_a_copier_that_stops_leaves_no_reader_waiting_for_a_slot():
    ring = HostRing(torch.zeros(16, dtype=torch.uint8), 8)
    with ring.passage(LateCopies()) as passage, ThreadPoolExecutor(3) as pool:
        assert passage.take()
        assert passage.take()
        readers = [pool.submit(passage.take) for _ in range(3)]
        passage.stop()
        assert [reader.result(timeout=10) for reader in readers] == [None] * 3


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_a_checkpoint_passes_through_a_few_slots(tmp_path, num_threads, dtype):
    target, tensors = TinyTarget(), weights(7, dtype)
    save_weights(str(tmp_path), tensors.items(), max_shard_bytes=200)
    manifest = from_disk.read_manifest(str(tmp_path))
    sink = make_sink(target, {spec.name: tensors[spec.name] for spec in manifest.tensors})
    ring = HostRing(torch.zeros(4 * 32, dtype=torch.uint8), 32)  # smaller than a tensor, larger than a row
    from_disk.receive(FromDisk("u", str(tmp_path)), manifest, sink, num_threads=num_threads, ring=ring)
    for index, spec in enumerate(manifest.tensors):
        value = tensors[spec.name].to(torch.float32 if spec.name == NORM else torch.bfloat16)
        assert torch.equal(stored(sink, target)[spec.name], value)
        assert sink.received_checksum(index) == checksum(tensors[spec.name]) == spec.checksum


def test_a_sink_that_refuses_stops_all_threads_and_leaves_the_ring_free(tmp_path):
    target, tensors = TinyTarget(), weights(8)
    save_weights(str(tmp_path), tensors.items())
    manifest = from_disk.read_manifest(str(tmp_path))
    ring = HostRing(torch.zeros(4 * 32, dtype=torch.uint8), 32)
    sink = make_sink(target, {spec.name: tensors[spec.name] for spec in manifest.tensors})
    sink.end(UpdateRefused(Reason.TIMEOUT, "it ended"))
    with pytest.raises(UpdateRefused, match="it ended"):
        from_disk.receive(FromDisk("u", str(tmp_path)), manifest, sink, num_threads=2, ring=ring)
    sink = make_sink(target, {spec.name: tensors[spec.name] for spec in manifest.tensors})
    from_disk.receive(FromDisk("u", str(tmp_path)), manifest, sink, num_threads=2, ring=ring)
    assert sink.incomplete() == []


def test_a_segment_is_copied_in_bounded_pieces(monkeypatch):
    monkeypatch.setattr("weight_updater.from_tensor.COPY_BYTES", 24)
    target, tensors = TinyTarget(), weights(9)
    sink = make_sink(target, tensors)
    with SharedSegment.create(manifest_of(tensors).packed_offsets()[1]) as segment:
        pack(segment, tensors)
        from_tensor.receive(FromTensor("u", segment.descriptor), sink, None)
    assert sink.copies.most_bytes_queued <= (from_tensor.MAX_QUEUED + 2) * 2 * 24
    for name, value in tensors.items():
        assert torch.equal(stored(sink, target)[name], value)


def test_tensors_that_lie_alike_on_both_sides_are_one_copy_and_others_are_not():
    target, tensors = TinyTarget(), weights(12)
    q, k, gate, up = list(SHAPES)[1:5]
    for names, num_copies in ([q, k], 1), ([k, q], 2), ([gate, up], 1), ([q, gate], 2), ([EMBED, q, k], 2):
        new = {name: tensors[name] for name in names}
        plan = plan_update(target, manifest_of(new), partial=True, merged=False)
        destination = target.arena.allocate(torch.device("cpu"))
        sink = DeviceSink(
            plan, target.arena, destination, hashing=True, find_nonfinite=True, copies=LateCopies()
        )
        data = torch.cat([raw(value) for value in new.values()])
        positions = [sum(value.nbytes for value in list(new.values())[:i]) for i in range(len(new))]
        sink.write_whole(range(len(new)), positions, data)
        assert sink.copies.most_queued == num_copies
        sink.flush()
        for index, (name, value) in enumerate(new.items()):
            assert torch.equal(stored(sink, target)[name], value)
            assert sink.received_checksum(index) == checksum(value)
        for name in SHAPES.keys() - new.keys():
            assert not stored(sink, target)[name].any()
        with pytest.raises(UpdateRefused, match="overlaps"):
            sink.write_whole(range(len(new)), positions, data)


def test_a_streams_chunk_has_left_its_memory_when_the_next_is_asked_for():
    target, tensors = TinyTarget(), weights(10)
    sink = make_sink(target, tensors)

    def chunks():
        memory = torch.zeros(256, dtype=torch.uint8)
        for index, offset, data in whole(tensors):
            memory[: data.numel()].copy_(data)
            yield index, offset, memory[: data.numel()]
            memory.zero_()

    from_tensor.receive(FromTensor("u"), sink, chunks())
    for name, value in tensors.items():
        assert torch.equal(stored(sink, target)[name], value)


@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize("nbytes", [8, 104, 512, 1 << 20])
def test_a_stream_of_packed_chunks(nbytes, dtype):
    """Chunks end anywhere: in a tensor, between two, behind several."""
    target, tensors = TinyTarget(), weights(11, dtype)
    tensors[HEAD] = tensors[EMBED].clone()  # tied: compared, not written
    sink = make_sink(target, tensors)
    offsets, size = manifest_of(tensors).packed_offsets()
    packed = torch.full((size,), 255, dtype=torch.uint8)
    for offset, value in zip(offsets, tensors.values(), strict=True):
        packed[offset : offset + value.nbytes] = raw(value)

    def chunks():
        memory = torch.zeros(nbytes, dtype=torch.uint8)
        for start in reversed(range(0, size, nbytes)):
            chunk = memory[: min(nbytes, size - start)]
            chunk.copy_(packed[start : start + nbytes])
            yield None, start, chunk
            memory.zero_()

    from_tensor.receive(FromTensor("u"), sink, chunks())
    assert sink.incomplete() == []
    assert sink.received_checksums(sink.plan.needed) == [checksum(value) for value in tensors.values()]
    for name, value in stored(sink, target).items():
        assert torch.equal(value, tensors[name].to(value.dtype))


def test_who_asks_while_another_thread_scans_waits_for_what_it_finds(monkeypatch):
    target, tensors = TinyTarget(), weights(12)
    sink = make_sink(target, tensors)
    for index, offset, data in whole(tensors):
        sink.write(index, offset, data)
    sink.flush()
    scanning, go_on = threading.Event(), threading.Event()
    original = device_sink.scan_places

    def slow(*arguments, **options):
        scanning.set()
        assert go_on.wait(10)
        return original(*arguments, **options)

    monkeypatch.setattr(device_sink, "scan_places", slow)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(sink.received_checksums, sink.plan.needed)
        assert scanning.wait(10)
        second = pool.submit(sink.received_checksums, sink.plan.needed)
        done, _ = wait([second], timeout=0.1)
        assert not done
        go_on.set()
        assert first.result() == second.result() == [checksum(value) for value in tensors.values()]
