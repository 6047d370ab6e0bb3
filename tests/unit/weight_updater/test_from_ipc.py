"""The ipc path: memory that a trainer lends, and arenas that are adopted."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.unit.weight_updater.tiny_target import (
    EMBED,
    GATE,
    HEAD,
    NORM,
    UP,
    K,
    Q,
    TinyTarget,
    begin,
    lend,
    make_updater,
    num_mappings,
    pack,
    put,
    weights,
)
from weight_updater import by_cores
from weight_updater.checksum import checksum, fold_by_name
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.requests import (
    CudaIpcRegion,
    Path,
    RegionPlacement,
    ShmSegment,
    Staging,
)
from weight_updater.shm import SharedSegment

STAGINGS = [Staging.DEVICE, Staging.HOST, Staging.NONE]


@pytest.fixture
def segment() -> Iterator[SharedSegment]:
    with SharedSegment.create(8192) as made:
        yield made


@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64])
@pytest.mark.parametrize("skip_checksums", [False, True])
@pytest.mark.parametrize("bytes_per_thread", [by_cores.BYTES_PER_THREAD, 100])
def test_packed_region(
    segment: SharedSegment,
    staging: Staging,
    dtype: torch.dtype | None,
    skip_checksums: bool,
    bytes_per_thread: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(by_cores, "BYTES_PER_THREAD", bytes_per_thread)
    target = TinyTarget()
    updater = make_updater(target, device_staging=True)
    addresses = target.addresses()
    for seed in (1, 2):
        new = weights(seed, dtype)
        pack(segment, new)
        update_id = begin(updater, new, path=Path.IPC, staging=staging, skip_checksums=skip_checksums)
        assert updater.open is not None
        assert not updater.open.writes_live
        lend(updater, update_id, segment.descriptor)
        assert not updater.open.written
        updater.verify(update_id)
        reply = updater.commit(update_id)
        assert reply.verified is not skip_checksums
        assert reply.num_changed == 6
        assert all(torch.equal(target.slot(n), v.to(target.slot(n).dtype)) for n, v in new.items())
        if not skip_checksums:
            assert reply.received_checksum == fold_by_name(
                {name: checksum(value) for name, value in new.items()}
            )
            assert reply.live_checksum == fold_by_name(updater.checksums([]))
    assert target.addresses() == addresses
    assert updater.release(["unknown", segment.descriptor.allocation_id]) == 1
    assert num_mappings(segment.descriptor.name) == 1  # the trainer's own


def test_regions_are_mapped_once(segment: SharedSegment) -> None:
    updater = make_updater(TinyTarget())
    for seed in range(5):
        pack(segment, weights(seed))
        update_id = begin(updater, weights(seed), path=Path.IPC, staging=Staging.NONE)
        lend(updater, update_id, segment.descriptor)
        if seed < 4:
            updater.commit(update_id)
    assert num_mappings(segment.descriptor.name) == 2
    with pytest.raises(UpdateRefused, match="is in use") as caught:
        updater.release([segment.descriptor.allocation_id])
    assert caught.value.reason is Reason.WRONG_STATE
    updater.abort(update_id)
    assert updater.release([segment.descriptor.allocation_id]) == 1
    assert updater.release([segment.descriptor.allocation_id]) == 0


def test_an_allocation_id_names_one_allocation(segment: SharedSegment) -> None:
    updater = make_updater(TinyTarget())
    pack(segment, weights(1))
    update_id = begin(updater, weights(1), path=Path.IPC)
    lend(updater, update_id, segment.descriptor)
    updater.commit(update_id)
    with SharedSegment.create(8192) as other:
        mistaken = ShmSegment(other.descriptor.name, 8192, segment.descriptor.allocation_id)
        update_id = begin(updater, weights(1), path=Path.IPC)
        with pytest.raises(UpdateRefused, match="give every allocation an id of its own") as caught:
            lend(updater, update_id, mistaken)
        assert caught.value.reason is Reason.MEMORY_UNAVAILABLE


def test_a_segment_that_shrank_since_it_was_mapped_is_refused_and_not_read(segment: SharedSegment) -> None:
    """The system kills who reads beyond its end: here that would be the engine. (And this test.)"""
    target = TinyTarget()
    updater = make_updater(target)
    kept = SharedSegment.create(16384)
    with kept:
        pack(kept, weights(1))
        update_id = begin(updater, weights(1), path=Path.IPC)
        lend(updater, update_id, kept.descriptor)
        updater.commit(update_id)
        update_id = begin(updater, weights(2), path=Path.IPC)
        os.truncate(f"/dev/shm/{kept.descriptor.name}", 64)
        with pytest.raises(UpdateRefused, match=r"has shrunk from \d+ bytes to 64 since") as caught:
            lend(updater, update_id, kept.descriptor)
        assert caught.value.reason is Reason.MEMORY_UNAVAILABLE
        assert torch.equal(target.slot(EMBED), weights(1)[EMBED])


@pytest.mark.case("B106")
@pytest.mark.parametrize("staging", STAGINGS)
def test_placements_in_two_regions_and_two_calls(segment: SharedSegment, staging: Staging) -> None:
    target = TinyTarget()
    updater = make_updater(target, device_staging=True)
    new = weights(1)
    order = list(new)
    with SharedSegment.create(4096) as second:
        update_id = begin(updater, new, path=Path.IPC, staging=staging)
        put(segment, 8, new[Q])
        put(segment, 80, new[K])  # right behind it, as in the arena
        put(second, 1000, new[EMBED])
        put(second, 12, new[NORM])
        put(second, 2002, new[UP])
        put(second, 3000, new[GATE])
        first = [(Q, 0, 8), (K, 0, 80), (EMBED, 1, 1000), (NORM, 1, 12)]
        places = tuple(RegionPlacement(order.index(name), handle, at) for name, handle, at in first)
        reply = lend(updater, update_id, segment.descriptor, second.descriptor, placements=places)
        assert reply.num_tensors == 4
        places = (RegionPlacement(order.index(UP), 0, 2002), RegionPlacement(order.index(GATE), 0, 3000))
        lend(updater, update_id, second.descriptor, placements=places)
        assert updater.commit(update_id).verified
    assert all(torch.equal(target.slot(name), value) for name, value in new.items())


BAD: dict[str, tuple[dict[str, object], Reason, str]] = {
    "cuda": (
        {"cuda_regions": (CudaIpcRegion("a", "GPU-0", b"", 0, 1),)},
        Reason.MEMORY_UNAVAILABLE,
        "1 regions are CUDA memory, but this engine's weights are not on a CUDA device",
    ),
    "no region": ({}, Reason.INVALID_UPDATE, "0 regions come without placements"),
    "tensor": ({"placements": (RegionPlacement(6, 0, 0),)}, Reason.INVALID_UPDATE, "names tensor 6"),
    "handle": ({"placements": (RegionPlacement(0, 3, 0),)}, Reason.INVALID_UPDATE, "in region 3"),
    "outside": (
        {"placements": (RegionPlacement(0, 0, 8190),)},
        Reason.MEMORY_UNAVAILABLE,
        r"needs bytes \[8190, 8310\) of region 0",
    ),
    "twice": (
        {"placements": (RegionPlacement(0, 0, 0), RegionPlacement(0, 0, 0))},
        Reason.BAD_CHUNK,
        "overlaps",
    ),
}


@pytest.mark.parametrize(("fields", "reason", "match"), BAD.values(), ids=BAD.keys())
def test_requests_that_are_refused(
    segment: SharedSegment, fields: dict[str, object], reason: Reason, match: str
) -> None:
    target = TinyTarget()
    updater = make_updater(target)
    before = target.buffer.clone()
    update_id = begin(updater, weights(1), path=Path.IPC, staging=Staging.NONE)
    regions = [segment.descriptor] if "placements" in fields else []
    with pytest.raises(UpdateRefused, match=match) as caught:
        lend(updater, update_id, *regions, **fields)
    assert caught.value.reason is reason
    assert torch.equal(target.buffer, before)
    assert (updater.open, updater.torn_reason) == (None, "")


@pytest.mark.parametrize("kind", ["checksum", "nonfinite"])
def test_lent_memory_is_checked_before_the_copy(segment: SharedSegment, kind: str) -> None:
    target = TinyTarget()
    updater = make_updater(target)
    before, new = target.buffer.clone(), weights(1, torch.float32)
    if kind == "nonfinite":
        new[K][0, 0] = 3.4e38
    pack(segment, new)
    update_id = begin(updater, new, path=Path.IPC, staging=Staging.NONE)
    if kind == "checksum":
        segment.buf[0] ^= 1
    lend(updater, update_id, segment.descriptor)
    with pytest.raises(UpdateRefused):
        updater.commit(update_id)
    assert torch.equal(target.buffer, before)
    assert updater.torn_reason == ""


def test_twins_in_lent_memory(segment: SharedSegment) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for extra in (0, 1):
            target = TinyTarget()
            updater = make_updater(target)
            new = {**weights(1), HEAD: (weights(1)[EMBED] + extra).to(dtype)}
            pack(segment, new)
            update_id = begin(updater, new, path=Path.IPC, staging=Staging.NONE, checksums_came=False)
            lend(updater, update_id, segment.descriptor)
            if extra:
                with pytest.raises(UpdateRefused, match="are tied"):
                    updater.commit(update_id)
            else:
                updater.commit(update_id)
                assert torch.equal(target.slot(HEAD), new[EMBED])
