"""The ipc path over CUDA regions, with a stand-in for the GPU (fake_gpu.py); on a real one: tests/gpu."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.unit.weight_updater.fake_gpu import FakeGpu, fake_gpu, in_use
from tests.unit.weight_updater.tiny_target import (
    HEAD,
    K,
    TinyTarget,
    begin,
    make_updater,
    raw,
    weights,
)
from weight_updater import device_scan, mappings
from weight_updater.checksum import checksum, fold_by_name
from weight_updater.device_scan import Found
from weight_updater.errors import Reason, UpdateError, UpdateRefused, WeightsTorn
from weight_updater.requests import FromIpc, Path, RegionPlacement, Staging, UpdateReply, UpdateState
from weight_updater.updater import WeightUpdater

STAGINGS = [Staging.DEVICE, Staging.HOST, Staging.NONE]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGpu]:
    with fake_gpu(monkeypatch) as made:
        yield made


def lay_out(gpu: FakeGpu, tensors: Mapping[str, torch.Tensor], handles: list[bytes]) -> FromIpc:
    """Put tensors into allocations in turn, at odd places, and describe them."""
    ends = [16] * len(handles)
    first: list[int] = [16] * len(handles)
    placements = []
    for index, value in enumerate(tensors.values()):
        number = index % len(handles)
        at = ends[number]
        gpu.memory[handles[number]][at : at + value.nbytes] = raw(value)
        placements.append(RegionPlacement(index, number, at - first[number]))
        ends[number] = at + value.nbytes + 2
    regions = tuple(
        gpu.region(
            handle,
            16,
            ends[number] - 16,
            probe_bytes=8,
            probe_checksum=checksum(gpu.memory[handle][16:24]),
        )
        for number, handle in enumerate(handles)
    )
    return FromIpc("", cuda_regions=regions, placements=tuple(placements))


def receive(updater: WeightUpdater, request: FromIpc, update_id: str) -> UpdateReply:
    work = updater.receiver(replace(request, update_id=update_id))
    error: UpdateError | None = None
    try:
        work.run()
    except UpdateError as caught:
        error = caught
    return updater.received(work, error)


def assert_live(target: TinyTarget, new: Mapping[str, torch.Tensor]) -> None:
    assert all(torch.equal(target.slot(n), v.to(target.slot(n).dtype)) for n, v in new.items())


@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize("skip_checksums", [False, True])
def test_tensors_in_two_allocations(
    gpu: FakeGpu, staging: Staging, dtype: torch.dtype | None, skip_checksums: bool
) -> None:
    target = TinyTarget()
    updater = make_updater(target, device_staging=True)
    addresses = target.addresses()
    handles = [gpu.allocate(1, 4096), gpu.allocate(2, 4096)]
    for seed in (1, 2):
        new = weights(seed, dtype)
        request = lay_out(gpu, new, handles)
        update_id = begin(updater, new, path=Path.IPC, staging=staging, skip_checksums=skip_checksums)
        receive(updater, request, update_id)
        assert updater.open is not None
        assert not updater.open.written
        updater.verify(update_id)
        reply = updater.commit(update_id)
        assert_live(target, new)
        assert reply.verified is not skip_checksums
        if not skip_checksums:
            assert reply.received_checksum == fold_by_name(
                {name: checksum(value) for name, value in new.items()}
            )
            assert reply.live_checksum == fold_by_name(updater.checksums([]))
    assert target.addresses() == addresses
    assert gpu.opened == handles, "each allocation is mapped once"
    assert in_use(updater) == {}
    assert updater.release([region.allocation_id for region in request.cuda_regions]) == 2
    assert gpu.closed == handles


def test_launches_for_all_tensors_at_once(gpu: FakeGpu) -> None:
    updater = make_updater(TinyTarget(), device_staging=True)
    handles = [gpu.allocate(1, 4096), gpu.allocate(2, 4096)]
    expected = {
        (Staging.NONE, False, False): ["scan", "copy"],
        (Staging.NONE, False, True): ["copy"],  # what the trainer has hashed is read once
        (Staging.NONE, True, False): ["scan", "copy"],  # for values that are not finite
        (Staging.DEVICE, False, False): ["copy and scan"],
        (Staging.DEVICE, False, True): ["copy and scan"],
    }
    for seed, ((staging, skip, scanned), launches) in enumerate(expected.items(), start=1):
        new = weights(seed)
        request = replace(lay_out(gpu, new, handles), scanned=scanned)
        update_id = begin(updater, new, path=Path.IPC, staging=staging, skip_checksums=skip)
        gpu.launches.clear()
        receive(updater, request, update_id)
        reply = updater.commit(update_id)
        assert gpu.launches == launches
        assert reply.verified is not skip
    update_id = begin(
        updater, new, path=Path.IPC, staging=Staging.NONE, skip_checksums=True, allow_nonfinite=True
    )
    gpu.launches.clear()
    receive(updater, request, update_id)
    updater.commit(update_id)
    assert gpu.launches == ["copy"], "nothing is looked for"


def test_regions_and_placements_are_named_by_digest(gpu: FakeGpu) -> None:
    target = TinyTarget()
    updater = make_updater(target)
    handles = [gpu.allocate(1, 4096)]
    request = lay_out(gpu, weights(1), handles)
    short = FromIpc("", lent=request.digest())
    update_id = begin(updater, weights(1), path=Path.IPC, staging=Staging.NONE)
    with pytest.raises(UpdateRefused, match="send them in full once") as unknown:
        receive(updater, short, update_id)
    assert unknown.value.reason is Reason.MANIFEST_UNKNOWN
    receive(updater, request, update_id)
    updater.commit(update_id)
    for seed in (2, 3):
        new = weights(seed)
        assert lay_out(gpu, new, handles).digest() == request.digest(), "a probe is no part of it"
        update_id = begin(updater, new, path=Path.IPC, staging=Staging.NONE)
        receive(updater, short, update_id)
        updater.commit(update_id)
        assert_live(target, new)
    updater.release([request.cuda_regions[0].allocation_id])
    update_id = begin(updater, new, path=Path.IPC, staging=Staging.NONE)
    with pytest.raises(UpdateRefused) as released:
        receive(updater, short, update_id)
    assert released.value.reason is Reason.MANIFEST_UNKNOWN


@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("scanned", [False, True])
def test_bytes_that_are_not_what_the_manifest_says(gpu: FakeGpu, staging: Staging, scanned: bool) -> None:
    target = TinyTarget()
    updater = make_updater(target, device_staging=True)
    handles = [gpu.allocate(1, 4096)]
    before = target.values()
    new = weights(1)
    request = replace(lay_out(gpu, new, handles), scanned=scanned)
    update_id = begin(updater, new, path=Path.IPC, staging=staging)
    gpu.memory[handles[0]][16 + request.placements[3].offset] ^= 1
    receive(updater, request, update_id)
    if scanned and staging is Staging.NONE:
        with pytest.raises(WeightsTorn, match="wrote there during the call") as torn:
            updater.commit(update_id)
        assert torn.value.reason is Reason.CHECKSUM_MISMATCH
        assert updater.torn_reason
    else:
        with pytest.raises(UpdateRefused, match="arrived with checksum") as refused:
            updater.commit(update_id)
        assert refused.value.reason is Reason.CHECKSUM_MISMATCH
        assert all(torch.equal(target.slot(name), value) for name, value in before.items())


def promised(request: FromIpc, tensors: Mapping[str, torch.Tensor]) -> FromIpc:
    """The request with the checksums of these tensors, which are then the update's."""
    return replace(request, checksums=tuple(checksum(value) for value in tensors.values()))


@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("scanned", [False, True])
def test_checksums_that_come_with_the_bytes(gpu: FakeGpu, staging: Staging, scanned: bool) -> None:
    """They are as good as the manifest's: compared, and (scanned) relied on by the copy alone."""
    target = TinyTarget()
    updater = make_updater(target, device_staging=True)
    handles = [gpu.allocate(1, 4096)]
    for seed, wrong in ((1, False), (2, False), (3, True)):
        new = weights(seed)
        request = promised(replace(lay_out(gpu, new, handles), scanned=scanned), new)
        fields = {"path": Path.IPC, "staging": staging, "checksums_came": False}
        update_id = begin(updater, new, **fields)
        gpu.launches.clear()
        if wrong:
            gpu.memory[handles[0]][16 + request.placements[3].offset] ^= 1
            break
        receive(updater, request, update_id)
        reply = updater.commit(update_id)
        assert_live(target, new)
        assert reply.verified
        if staging is Staging.NONE:
            assert gpu.launches == (["copy"] if scanned else ["scan", "copy"])
    receive(updater, request, update_id)
    ended = WeightsTorn if scanned and staging is Staging.NONE else UpdateRefused
    with pytest.raises(ended) as caught:
        updater.commit(update_id)
    assert caught.value.reason is Reason.CHECKSUM_MISMATCH
    assert bool(updater.torn_reason) is (ended is WeightsTorn)


def test_checksums_that_may_not_come(gpu: FakeGpu) -> None:
    target = TinyTarget()
    updater = make_updater(target)
    new = weights(1)
    request = promised(lay_out(gpu, new, [gpu.allocate(1, 4096)]), new)

    def refused(sent: FromIpc, reason: Reason, match: str, **fields: object) -> str:
        update_id = updater.open.update_id if updater.open else begin(updater, new, path=Path.IPC, **fields)
        with pytest.raises(UpdateRefused, match=match) as caught:
            updater.receiver(replace(sent, update_id=update_id))
        assert caught.value.reason is reason
        assert updater.open is not None, "it may be called again"
        assert updater.open.state is UpdateState.BEGUN
        return update_id

    updater.abort(refused(request, Reason.WRONG_STATE, "has checksums already"))
    updater.abort(refused(request, Reason.WRONG_STATE, "skip_checksums", skip_checksums=True))
    unhashed = {"checksums_came": False, "staging": Staging.NONE}
    too_few = replace(request, checksums=request.checksums[1:])
    refused(too_few, Reason.INVALID_UPDATE, "5 checksums came for the 6 tensors", **unhashed)
    too_large = replace(request, checksums=(1 << 64, *request.checksums[1:]))
    refused(too_large, Reason.INVALID_UPDATE, "not a 64-bit number")
    unknown = replace(request, lent="0" * 32, cuda_regions=(), placements=())
    update_id = refused(unknown, Reason.MANIFEST_UNKNOWN, "send them in full once")
    receive(updater, request, update_id)
    again = updater.receiver(replace(request, update_id=update_id))
    assert not again.counted, "a repeated call is none that brings checksums twice"
    assert updater.commit(update_id).verified
    assert_live(target, new)
    update_id = begin(updater, new, path=Path.IPC, **unhashed)
    receive(updater, replace(request, checksums=()), update_id)
    with pytest.raises(UpdateRefused, match="has begun to receive") as late:
        updater.receiver(replace(request, update_id=update_id))
    assert late.value.reason is Reason.WRONG_STATE


def test_checksums_of_tied_names_that_differ(gpu: FakeGpu) -> None:
    updater = make_updater(TinyTarget())
    new = weights(1)
    tied = new | {HEAD: new["model.embed_tokens.weight"] + 1}
    request = promised(lay_out(gpu, tied, [gpu.allocate(1, 8192)]), tied)
    update_id = begin(updater, tied, path=Path.IPC, staging=Staging.NONE, checksums_came=False)
    with pytest.raises(UpdateRefused, match="tied in this model") as refused:
        updater.receiver(replace(request, update_id=update_id))
    assert refused.value.reason is Reason.MANIFEST_MISMATCH


def test_values_that_are_not_finite_are_refused(gpu: FakeGpu) -> None:
    updater = make_updater(TinyTarget())
    new = weights(1)
    new[K][1, 2] = float("inf")
    request = lay_out(gpu, new, [gpu.allocate(1, 4096)])
    update_id = begin(updater, new, path=Path.IPC, staging=Staging.NONE)
    receive(updater, request, update_id)
    with pytest.raises(UpdateRefused, match=K) as refused:
        updater.commit(update_id)
    assert refused.value.reason is Reason.NONFINITE


@pytest.mark.parametrize("scanned", [False, True])
def test_tied_names(gpu: FakeGpu, scanned: bool) -> None:
    target = TinyTarget()
    updater = make_updater(target)
    handles = [gpu.allocate(1, 8192)]
    new = weights(1)
    tied = new | {HEAD: new["model.embed_tokens.weight"].clone()}
    update_id = begin(updater, tied, path=Path.IPC, staging=Staging.NONE)
    receive(updater, replace(lay_out(gpu, tied, handles), scanned=scanned), update_id)
    updater.commit(update_id)
    assert_live(target, new)


@pytest.mark.case("B107")
@pytest.mark.case("B108")
def test_a_probe_that_differs_is_refused_and_unmapped(gpu: FakeGpu) -> None:
    updater = make_updater(TinyTarget())
    handle = gpu.allocate(1, 4096)
    request = lay_out(gpu, weights(1), [handle])
    gpu.memory[handle][16] ^= 1
    update_id = begin(updater, weights(1), path=Path.IPC)
    with pytest.raises(UpdateRefused, match="in the trainer") as refused:
        receive(updater, request, update_id)
    assert refused.value.reason is Reason.MEMORY_UNAVAILABLE
    assert (gpu.opened, gpu.closed) == ([handle], [handle])


@pytest.mark.case("B102")
@pytest.mark.parametrize("says_release", [True, False])
def test_hundreds_of_handles_in_turn_do_not_pile_up(
    gpu: FakeGpu, says_release: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every push lends another allocation; the trainer lets go of the one before, or says nothing."""
    monkeypatch.setattr(mappings, "MAX_MAPPINGS", 8)
    target = TinyTarget()
    updater = make_updater(target)
    most_mapped = 0
    for number in range(1, 301):
        new = weights(number)
        request = lay_out(gpu, new, [gpu.allocate(number, 2048)])
        update_id = begin(updater, new, path=Path.IPC, staging=Staging.NONE)
        receive(updater, request, update_id)
        updater.commit(update_id)
        assert_live(target, new)
        most_mapped = max(most_mapped, len(gpu.opened) - len(gpu.closed))
        if says_release:
            assert updater.release([request.cuda_regions[0].allocation_id]) == 1
    assert len(gpu.opened) == len(set(gpu.opened)) == 300
    assert gpu.closed == gpu.opened[: len(gpu.closed)], "oldest first, each once"
    assert most_mapped == (1 if says_release else 9)


def test_regions_that_cannot_be_right(gpu: FakeGpu) -> None:
    updater = make_updater(TinyTarget())
    handle = gpu.allocate(1, 2048)
    good = lay_out(gpu, weights(1), [handle])
    region = good.cuda_regions[0]
    wrong = {
        "a region ends at byte": replace(region, size=4096, probe_checksum=None),
        "without an allocation id": replace(region, allocation_id=""),
        "cannot be opened": replace(region, handle=bytes(64), allocation_id="x"),
    }
    for match, bad in wrong.items():
        update_id = begin(updater, weights(1), path=Path.IPC, staging=Staging.NONE)
        with pytest.raises(UpdateRefused, match=match):
            receive(updater, replace(good, cuda_regions=(bad,)), update_id)
    update_id = begin(updater, weights(1), path=Path.IPC, staging=Staging.NONE)
    receive(updater, good, update_id)
    updater.commit(update_id)
    other = replace(region, handle=gpu.allocate(2, 2048))
    update_id = begin(updater, weights(1), path=Path.IPC, staging=Staging.NONE)
    with pytest.raises(UpdateRefused, match="give every allocation an id of its own"):
        receive(updater, replace(good, cuda_regions=(other,)), update_id)


def test_memory_that_a_receiver_reads_is_not_unmapped(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    updater = make_updater(TinyTarget())
    handle = gpu.allocate(1, 4096)
    request = lay_out(gpu, weights(1), [handle])
    identity = request.cuda_regions[0].allocation_id
    refused: list[UpdateRefused] = []

    def abort_and_release(*arguments: Any, **options: Any) -> Found:
        updater.abort(update_id)
        with pytest.raises(UpdateRefused) as caught:
            updater.release([identity])
        refused.append(caught.value)
        return gpu.run(*arguments, **options)

    update_id = begin(updater, weights(1), path=Path.IPC, staging=Staging.NONE)
    monkeypatch.setattr(device_scan, "_queue", abort_and_release)
    monkeypatch.setattr("weight_updater.sink.Sink.end", lambda self, error: None)  # it would wait for us
    with pytest.raises(UpdateRefused, match="aborted"):
        receive(updater, request, update_id)
    assert [error.reason for error in refused] == [Reason.WRONG_STATE]
    assert updater.release([identity]) == 1
