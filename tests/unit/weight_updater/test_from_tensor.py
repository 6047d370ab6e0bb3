"""The tensor path: chunks, or a shared-memory segment."""

from __future__ import annotations

import pytest
import torch

from tests.unit.weight_updater.tiny_target import (
    NORM,
    Q,
    TinyTarget,
    begin,
    make_updater,
    manifest_of,
    num_mappings,
    pack,
    raw,
    send,
    weights,
)
from weight_updater import by_cores
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.requests import FromDisk, FromTensor, ShmSegment, Staging
from weight_updater.shm import SharedSegment
from weight_updater.updater import WeightUpdater


def receive(updater: WeightUpdater, update_id: str, segment: ShmSegment) -> None:
    received = updater.receiver(FromTensor(update_id, segment))
    try:
        received.run()
    except UpdateRefused as error:
        updater.received(received, error)
    else:
        updater.received(received, None)


@pytest.mark.parametrize("bytes_per_thread", [by_cores.BYTES_PER_THREAD, 100])
@pytest.mark.parametrize("staging", [Staging.HOST, Staging.NONE])
def test_segment(staging: Staging, bytes_per_thread: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_cores, "BYTES_PER_THREAD", bytes_per_thread)
    target = TinyTarget()
    updater = make_updater(target)
    new = weights(1, torch.float32)
    size = manifest_of(new).packed_offsets()[1]
    with SharedSegment.create(size) as segment:
        pack(segment, new)
        update_id = begin(updater, new, staging=staging)
        receive(updater, update_id, segment.descriptor)
        assert num_mappings(segment.descriptor.name) == 1  # ours; the updater's is gone
    updater.verify(update_id)
    assert updater.commit(update_id).verified
    assert all(torch.equal(target.slot(name), v.to(target.slot(name).dtype)) for name, v in new.items())


def test_the_last_tensors_padding_may_be_missing() -> None:
    target = TinyTarget()
    updater = make_updater(target)
    new = weights(1)
    offsets, _ = manifest_of(new).packed_offsets()
    with SharedSegment.create(offsets[-1] + new[NORM].nbytes) as segment:
        pack(segment, new)
        update_id = begin(updater, new)
        receive(updater, update_id, segment.descriptor)
        assert updater.commit(update_id).version == 5


def test_a_small_or_absent_segment_refuses() -> None:
    target = TinyTarget()
    updater = make_updater(target)
    before = target.buffer.clone()
    with SharedSegment.create(1024) as segment:
        update_id = begin(updater, weights(1))
        with pytest.raises(UpdateRefused, match=r"has 1024 bytes, the manifest's 6 .* need") as caught:
            receive(updater, update_id, segment.descriptor)
        assert caught.value.reason is Reason.MEMORY_UNAVAILABLE
        gone = segment.descriptor
    update_id = begin(updater, weights(1))
    with pytest.raises(UpdateRefused) as caught:
        receive(updater, update_id, ShmSegment(gone.name, 1 << 20, gone.allocation_id))
    assert caught.value.reason is Reason.MEMORY_UNAVAILABLE
    assert torch.equal(target.buffer, before)
    assert updater.open is None


def test_a_repeated_call_is_answered_without_reading_again() -> None:
    updater = make_updater(TinyTarget())
    new = weights(1)
    with SharedSegment.create(4096) as segment:
        pack(segment, new)
        update_id = begin(updater, new)
        request = FromTensor(update_id, segment.descriptor)
        first = updater.receiver(request)
        first.run()
        reply = updater.received(first, None)
        again = updater.receiver(request)
        again.run()
        assert updater.received(again, None).received_checksum == reply.received_checksum
        assert updater.commit(update_id).version == 5


def test_a_stream_of_packed_and_single_chunks() -> None:
    target = TinyTarget()
    updater = make_updater(target)
    new = weights(1)
    offsets, size = manifest_of(new).packed_offsets()
    data = torch.zeros(size, dtype=torch.uint8)
    for offset, value in zip(offsets, new.values(), strict=True):
        data[offset : offset + value.nbytes] = raw(value)
    update_id = begin(updater, new)
    chunks = [(None, offsets[2], data[offsets[2] :]), (1, 0, raw(new[Q])), (None, 0, data[: offsets[1]])]
    send(updater, update_id, iter(chunks))
    updater.verify(update_id)
    assert updater.commit(update_id).verified
    assert all(torch.equal(target.slot(name), value) for name, value in new.items())


def test_neither_segment_nor_chunks_is_refused() -> None:
    updater = make_updater(TinyTarget())
    update_id = begin(updater, weights(1))
    receiver = updater.receiver(FromTensor(update_id))
    with pytest.raises(UpdateRefused, match="needs a shared-memory segment or chunks"):
        receiver.run()


def test_another_path_than_begun_is_refused() -> None:
    updater = make_updater(TinyTarget())
    update_id = begin(updater, weights(1))
    with pytest.raises(UpdateRefused, match="began with path tensor, not disk"):
        updater.receiver(FromDisk(update_id, "/tmp"))
    assert updater.open is not None


def test_a_stream_that_breaks_refuses() -> None:
    def chunks():  # type: ignore[no-untyped-def]
        yield 0, 0, torch.zeros(8, dtype=torch.uint8)
        raise UpdateRefused(Reason.PEER_LOST, "the client went away")

    updater = make_updater(TinyTarget())
    update_id = begin(updater, weights(1))
    with pytest.raises(UpdateRefused, match="the client went away"):
        send(updater, update_id, chunks())
    assert updater.open is None
    assert updater.torn_reason == ""
