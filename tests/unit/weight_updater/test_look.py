"""What can be read twice is looked at before a live slot is written: bad bytes refuse, and tear nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path as FilePath

import pytest
import torch

from tests.unit.weight_updater.tiny_target import (
    EMBED,
    HEAD,
    NORM,
    TinyTarget,
    make_updater,
    manifest_of,
    pack,
    raw,
    weights,
    whole,
)
from weight_updater.errors import Reason, UpdateError, UpdateRefused, WeightsTorn
from weight_updater.look import Look
from weight_updater.plan import plan_update
from weight_updater.receive import Receive
from weight_updater.requests import BeginUpdate, FromDisk, FromTensor, Path, Staging
from weight_updater.safetensors_io import save_weights
from weight_updater.shm import SharedSegment
from weight_updater.sink import Sink
from weight_updater.updater import WeightUpdater

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def updater(tmp_path: FilePath) -> Iterator[WeightUpdater]:
    made = WeightUpdater(
        TinyTarget(), lease_s=60.0, roots=[str(tmp_path)], device_staging=False, initial_version=4
    )
    yield made
    made.close()


def with_bad_value(value: float) -> Callable[[Tensors], Tensors]:
    def change(new: Tensors) -> Tensors:
        new[NORM][3] = value
        return new

    return change


def conflict(new: Tensors) -> Tensors:
    return {**new, HEAD: new[EMBED] + 1}


def conflict_in_another_dtype(new: Tensors) -> Tensors:
    return {**new, HEAD: new[EMBED].double() + 1}


def equal_in_another_dtype(new: Tensors) -> Tensors:
    return {**new, HEAD: new[EMBED].double()}


CASES = [
    (with_bad_value(float("nan")), Reason.NONFINITE),
    (with_bad_value(float("inf")), Reason.NONFINITE),
    (conflict, Reason.MANIFEST_MISMATCH),
    (conflict_in_another_dtype, Reason.MANIFEST_MISMATCH),
]


def receive(
    updater: WeightUpdater, kind: str, new: Tensors, tmp_path: FilePath, **fields: object
) -> tuple[Receive, list[SharedSegment]]:
    """An update without staging that has begun, and what would bring its bytes."""
    manifest = manifest_of(new, checksums=bool(fields.pop("checksums_came", False)))
    request = BeginUpdate(**{"path": Path.TENSOR, "manifest": manifest, "staging": Staging.NONE, **fields})  # type: ignore[arg-type]
    if kind == "disk":
        directory = str(tmp_path / "new")
        save_weights(directory, list(new.items()), checksums=False)
        request = dataclasses.replace(request, path=Path.DISK, directory=directory)
    reply = updater.begin(request, updater.resolve(request), paused=False)
    if kind == "disk":
        return updater.receiver(FromDisk(reply.update_id, directory)), []
    segment = SharedSegment.create(manifest.packed_offsets()[1])
    pack(segment, new)
    return updater.receiver(FromTensor(reply.update_id, segment.descriptor)), [segment]


def run(updater: WeightUpdater, made: Receive) -> UpdateError:
    """The error that ends an update as its bytes arrive."""
    with pytest.raises(UpdateError) as caught:
        made.run()
    with pytest.raises(UpdateError) as ended:
        updater.received(made, caught.value)
    return ended.value


@pytest.mark.parametrize("dtype", [None, torch.float64])
@pytest.mark.parametrize("kind", ["disk", "segment"])
@pytest.mark.parametrize(("change", "reason"), CASES)
def test_bad_bytes_refuse_before_the_first_write(
    updater: WeightUpdater,
    kind: str,
    dtype: torch.dtype | None,
    change: Callable[[Tensors], Tensors],
    reason: Reason,
    tmp_path: FilePath,
) -> None:
    target = updater._target
    assert isinstance(target, TinyTarget)
    old = target.values()
    made, segments = receive(updater, kind, change(weights(1, dtype)), tmp_path)
    assert made.writes_live
    ended = run(updater, made)
    assert isinstance(ended, UpdateRefused)
    assert ended.reason is reason
    assert all(torch.equal(target.slot(name), value) for name, value in old.items())
    assert (updater.version, updater.torn_reason) == (4, "")
    for segment in segments:
        segment.__exit__(None, None, None)


def test_a_changed_segment_refuses_before_the_first_write(updater: WeightUpdater, tmp_path: FilePath) -> None:
    made, [segment] = receive(updater, "segment", weights(1), tmp_path, checksums_came=True)
    segment.buf[5] ^= 1
    with segment:
        ended = run(updater, made)
    assert isinstance(ended, UpdateRefused)
    assert (ended.reason, updater.torn_reason) == (Reason.CHECKSUM_MISMATCH, "")


@pytest.mark.parametrize("skip_checksums", [False, True])
@pytest.mark.parametrize("kind", ["disk", "segment"])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_good_bytes_are_written_and_told_as_without_a_look(
    updater: WeightUpdater, kind: str, dtype: torch.dtype | None, skip_checksums: bool, tmp_path: FilePath
) -> None:
    target = updater._target
    new = equal_in_another_dtype(weights(1, dtype))
    made, segments = receive(updater, kind, new, tmp_path, skip_checksums=skip_checksums)
    made.look()
    assert torch.equal(target.slot(NORM), weights(0)[NORM]), "a look writes nothing"
    made.run()
    updater.received(made, None)
    updater.verify(made.update.update_id)
    reply = updater.commit(made.update.update_id)
    assert all(torch.equal(target.slot(n), v.to(target.slot(n).dtype)) for n, v in new.items())
    assert (reply.version, reply.num_changed) == (5, 6)
    assert (reply.received_checksum == 0) == skip_checksums
    for segment in segments:
        segment.__exit__(None, None, None)


def test_what_changes_after_the_look_shows_at_the_commit(updater: WeightUpdater, tmp_path: FilePath) -> None:
    made, [segment] = receive(updater, "segment", weights(1), tmp_path)
    made.look()
    segment.buf[5] ^= 1
    with segment:
        made.run()
    updater.received(made, None)
    with pytest.raises(WeightsTorn) as torn:
        updater.commit(made.update.update_id)
    assert torn.value.reason is Reason.CHECKSUM_MISMATCH


@pytest.mark.parametrize("skip_checksums", [False, True])
def test_files_that_are_written_anew_after_the_look_refuse_before_the_first_write(
    updater: WeightUpdater, skip_checksums: bool, tmp_path: FilePath
) -> None:
    """A look comes before sequences in flight have ended, so it may be minutes old; a trainer saves again."""
    target = updater._target
    assert isinstance(target, TinyTarget)
    old = target.values()
    made, _ = receive(updater, "disk", weights(1), tmp_path, skip_checksums=skip_checksums)
    made.look()
    save_weights(
        str(tmp_path / "new"), list(with_bad_value(float("nan"))(weights(2)).items()), checksums=False
    )
    ended = run(updater, made)
    assert isinstance(ended, UpdateRefused)
    assert (ended.reason, updater.torn_reason) == (Reason.FILE_CORRUPT, "")
    assert all(torch.equal(target.slot(name), value) for name, value in old.items())


def test_a_stream_cannot_be_looked_at() -> None:
    updater = make_updater(TinyTarget())
    new = with_bad_value(float("nan"))(weights(1))
    request = BeginUpdate(path=Path.TENSOR, manifest=manifest_of(new), staging=Staging.NONE)
    reply = updater.begin(request, updater.resolve(request), paused=False)
    made = updater.receiver(FromTensor(reply.update_id), whole(new))
    made.look()
    made.run()
    updater.received(made, None)
    with pytest.raises(WeightsTorn) as torn:
        updater.commit(reply.update_id)
    assert torn.value.reason is Reason.NONFINITE


@pytest.mark.parametrize("kind", ["disk", "segment"])
def test_an_engine_on_a_gpu_does_not_look(updater: WeightUpdater, kind: str, tmp_path: FilePath) -> None:
    made, segments = receive(updater, kind, weights(1), tmp_path)
    receivers = updater._receivers
    assert receivers.look(made.update, made.request) is not None
    updater._target.device = torch.device("cuda")
    assert receivers.look(made.update, made.request) is None
    for segment in segments:
        segment.__exit__(None, None, None)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64, torch.float16])
def test_a_look_finds_what_a_sink_finds_in_any_pieces(dtype: torch.dtype | None) -> None:
    target, new = TinyTarget(), equal_in_another_dtype(weights(3, dtype))
    new[NORM][2] = float("inf")
    plan = plan_update(target, manifest_of(new), partial=False, merged=False)
    look = Look(plan, hashing=True, find_nonfinite=True)
    sink = Sink(plan, target.arena, torch.zeros_like(target.buffer), hashing=True, find_nonfinite=True)
    first = next(i for i, value in enumerate(new.values()) if value.nbytes > 64)
    for index, value in enumerate(new.values()):
        sink.write(index, 0, raw(value))
        if index != first:
            look.write(index, 0, raw(value))
    value = list(new.values())[first]
    look.write(first, 64, raw(value)[64:])
    assert look.incomplete() == [(first, value.nbytes - 64)]
    look.write(first, 0, raw(value)[:64])
    assert look.incomplete() == []
    for index in plan.needed:
        assert look.received_checksum(index) == sink.received_checksum(index)
        if index in plan.applied:
            assert look.nonfinite([index]) == sink.nonfinite([index])
    for index in (*plan.twins, *plan.twins.values()):
        assert look.slot_checksum(index) == sink.slot_checksum(index)


@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize("hashing", [True, False])
def test_a_look_at_tensors_that_come_together_finds_the_same(
    dtype: torch.dtype | None, hashing: bool
) -> None:
    target, new = TinyTarget(), equal_in_another_dtype(weights(4, dtype))
    new[NORM][2] = float("inf")
    plan = plan_update(target, manifest_of(new), partial=False, merged=False)
    one_by_one, together = (Look(plan, hashing=hashing, find_nonfinite=True) for _ in range(2))
    for index, value in enumerate(new.values()):
        one_by_one.write(index, 0, raw(value))
    packed = torch.zeros(plan.packed_bytes, dtype=torch.uint8)
    for offset, value in zip(plan.packed_offsets, new.values(), strict=True):
        packed[offset : offset + value.nbytes] = raw(value)
    together.write_whole(plan.needed, [plan.packed_offsets[index] for index in plan.needed], packed)
    assert together.incomplete() == []
    assert together.nonfinite(plan.applied) == one_by_one.nonfinite(plan.applied) != []
    if hashing:
        assert together.received_checksums(plan.needed) == one_by_one.received_checksums(plan.needed)
    for index in (*plan.twins, *plan.twins.values()):
        assert together.slot_checksum(index) == one_by_one.slot_checksum(index)
