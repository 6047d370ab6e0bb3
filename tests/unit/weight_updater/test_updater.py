"""The life of an update: every state, every end."""

from __future__ import annotations

import dataclasses
import time

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
    make_updater,
    manifest_of,
    push,
    raw,
    send,
    weights,
    whole,
)
from weight_updater.checksum import checksum, fold_by_name
from weight_updater.errors import Reason, UpdateRefused, WeightsTorn
from weight_updater.requests import BeginUpdate, FromTensor, Path, Staging, UpdateState

STAGINGS = [Staging.DEVICE, Staging.HOST, Staging.NONE]


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.fixture
def target() -> TinyTarget:
    return TinyTarget()


@pytest.mark.case("B001")
@pytest.mark.case("B004")
@pytest.mark.parametrize("staging", STAGINGS)
def test_full_update_is_exact_in_place_and_proven(target: TinyTarget, staging: Staging) -> None:
    updater = make_updater(target, device_staging=True)
    addresses, new = target.addresses(), weights(1)
    reply = push(updater, new, staging=staging)
    assert equal(target.values(), new)
    assert target.addresses() == addresses
    assert target.head.data_ptr() == target.slot(HEAD).data_ptr() == target.slot(EMBED).data_ptr()
    assert target.num_finalised == 1
    assert (updater.version, updater.commit_sequence, updater.torn_reason) == (5, 1, "")
    assert reply.state is UpdateState.COMMITTED
    assert (reply.version, reply.previous_version, reply.commit_sequence) == (5, 4, 1)
    assert (reply.path, reply.staging) == (Path.TENSOR, staging)
    assert (reply.num_tensors, reply.num_changed, reply.unmatched) == (6, 6, ())
    assert reply.num_bytes == sum(value.nbytes for value in new.values())
    assert reply.verified
    assert reply.received_checksum == fold_by_name({name: checksum(value) for name, value in new.items()})
    assert reply.live_checksum == fold_by_name(updater.checksums([]))
    assert reply.graphs_reason == "no graphs are captured"
    assert updater.open is None


def test_states_in_order(target: TinyTarget) -> None:
    updater = make_updater(target)
    new = weights(1)
    update_id = begin(updater, new, update_id="u")
    assert update_id == "u"
    assert updater.open is not None
    assert updater.open.state is UpdateState.BEGUN
    chunks = list(whole(new))
    reply = send(updater, update_id, iter(chunks[:2]))
    assert (reply.state, reply.num_tensors) == (UpdateState.RECEIVING, 2)
    with pytest.raises(UpdateRefused, match="4 of 6 tensors have not arrived whole") as caught:
        updater.verify(update_id)
    assert caught.value.reason is Reason.INCOMPLETE
    with pytest.raises(UpdateRefused) as caught:
        updater.commit(update_id)
    assert caught.value.reason is Reason.INCOMPLETE
    with pytest.raises(UpdateRefused) as caught:
        updater.prepared(update_id, 1.0)
    assert caught.value.reason is Reason.WRONG_STATE
    assert send(updater, update_id, iter(chunks[2:])).state is UpdateState.RECEIVED
    assert not updater.verified(update_id)
    updater.verify(update_id)
    assert updater.verified(update_id)
    assert updater.prepared(update_id, 9.0).state is UpdateState.PREPARED
    with pytest.raises(UpdateRefused, match="prepared already"):
        updater.receiver(FromTensor(update_id), iter([]))
    assert updater.commit(update_id).state is UpdateState.COMMITTED
    assert updater.replay(update_id) is not None
    with pytest.raises(UpdateRefused, match="committed already, as version 5"):
        updater.commit(update_id)


@pytest.mark.case("B024")
@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_casts_to_the_slots_dtype(target: TinyTarget, staging: Staging, dtype: torch.dtype) -> None:
    updater = make_updater(target, device_staging=True)
    sent = weights(1, dtype)
    reply = push(updater, sent, staging=staging)
    assert equal(target.values(), {name: value.to(target.slot(name).dtype) for name, value in sent.items()})
    assert reply.received_checksum == fold_by_name({name: checksum(value) for name, value in sent.items()})
    assert reply.live_checksum == fold_by_name(
        {name: checksum(target.slot(name)) for name in target.arena.slot_names}
    )
    assert reply.verified


@pytest.mark.parametrize("staging", STAGINGS)
def test_equal_weights_give_equal_numbers_in_any_order(target: TinyTarget, staging: Staging) -> None:
    updater = make_updater(target, device_staging=True)
    sent = weights(1)
    orders = [sent, dict(reversed(sent.items())), dict(sorted(sent.items()))]
    tied = {HEAD: sent[EMBED], **sent}
    alone = {HEAD: sent[EMBED], **{name: value for name, value in sent.items() if name != EMBED}}
    replies = [push(updater, order, staging=staging) for order in (*orders, tied, alone)]
    assert [list(order) for order in orders] == [list(sent), list(sent)[::-1], sorted(sent)]
    assert {reply.received_checksum for reply in replies} == {replies[0].live_checksum}
    assert {reply.live_checksum for reply in replies} == {fold_by_name(updater.checksums([]))}
    assert push(updater, weights(2), staging=staging).received_checksum != replies[0].received_checksum


@pytest.mark.case("B016")
def test_num_changed_counts_values_not_messages(target: TinyTarget) -> None:
    updater = make_updater(target)
    assert push(updater, weights(0)).num_changed == 0
    assert push(updater, {**weights(0), NORM: weights(1)[NORM]}).num_changed == 1
    again = {**weights(0), NORM: weights(1)[NORM]}
    assert push(updater, again, skip_checksums=True).num_changed == 0
    reply = push(updater, {**again, Q: weights(1)[Q]}, skip_checksums=True)
    assert (reply.num_changed, reply.verified, reply.received_checksum) == (1, False, 0)
    assert push(updater, {**again, Q: weights(1)[Q]}).num_changed == 0


@pytest.mark.parametrize("staging", STAGINGS)
def test_partial_update_leaves_the_rest_alone(target: TinyTarget, staging: Staging) -> None:
    updater = make_updater(target, device_staging=True)
    push(updater, weights(1), staging=staging)
    push(updater, weights(2))
    part = {name: weights(3)[name] for name in (K, NORM)}
    reply = push(updater, part, staging=staging, partial=True)
    assert equal(target.values(), {**weights(2), **part})
    assert (reply.num_tensors, reply.num_changed) == (2, 2)
    assert reply.live_checksum == fold_by_name(updater.checksums([]))


def test_verified_only_with_checksums(target: TinyTarget) -> None:
    updater = make_updater(target)
    reply = push(updater, weights(1), checksums_came=False)
    assert not reply.verified
    assert "no checksum" in reply.warnings[0]
    assert reply.received_checksum == fold_by_name(
        {name: checksum(value) for name, value in weights(1).items()}
    )


def test_versions_only_grow(target: TinyTarget) -> None:
    updater = make_updater(target)
    for stale in (1, 4):
        with pytest.raises(UpdateRefused, match=f"version {stale} is not larger than 4") as caught:
            begin(updater, weights(1), version=stale)
        assert caught.value.reason is Reason.STALE_VERSION
    assert push(updater, weights(1), version=9).version == 9
    assert push(updater, weights(2)).version == 10


@pytest.mark.case("B065")
def test_one_update_at_a_time_and_idempotent_begin(target: TinyTarget) -> None:
    updater = make_updater(target)
    request = BeginUpdate(Path.TENSOR, update_id="first", manifest=manifest_of(weights(1)))
    reply = updater.begin(request, updater.resolve(request), paused=False)
    assert updater.begin(request, updater.resolve(request), paused=False) == reply
    for other in (
        dataclasses.replace(request, update_id="second"),
        dataclasses.replace(request, version=77),
    ):
        with pytest.raises(UpdateRefused, match=r"update first .tensor, begun, version 5. is open") as caught:
            updater.begin(other, updater.resolve(other), paused=False)
        assert caught.value.reason is Reason.UPDATE_IN_PROGRESS
    assert updater.abort("second") == (False, False)
    assert updater.abort("first") == (True, False)
    with pytest.raises(UpdateRefused, match="update first was aborted") as caught:
        updater.verified("first")
    assert caught.value.reason is Reason.UNKNOWN_UPDATE
    assert updater.begin(request, updater.resolve(request), paused=False).update_id == "first"


@pytest.mark.case("B066")
@pytest.mark.case("B068")
@pytest.mark.parametrize("staging", [Staging.DEVICE, Staging.HOST])
def test_failed_chunk_refuses_a_staged_update(target: TinyTarget, staging: Staging) -> None:
    updater = make_updater(target, device_staging=True)
    before = target.values()
    new = weights(1)
    update_id = begin(updater, new, staging=staging)
    send(updater, update_id, iter([(0, 0, raw(new[EMBED]))]))
    with pytest.raises(UpdateRefused, match="overlaps") as caught:
        send(updater, update_id, iter([(0, 0, raw(new[EMBED]))]))
    assert caught.value.reason is Reason.BAD_CHUNK
    with pytest.raises(UpdateRefused):
        updater.commit(update_id)
    assert (updater.version, updater.torn_reason, updater.open) == (4, "", None)
    assert equal(target.values(), before)
    assert push(updater, new, staging=staging).version == 5


def test_failed_chunk_tears_an_unstaged_update_until_a_full_one(target: TinyTarget) -> None:
    updater = make_updater(target)
    new = weights(1)
    update_id = begin(updater, new, staging=Staging.NONE)
    receive = updater.receiver(FromTensor(update_id), iter([(0, 0, raw(new[EMBED])), (99, 0, raw(new[Q]))]))
    assert receive.writes_live
    with pytest.raises(UpdateRefused) as fault:
        receive.run()
    with pytest.raises(WeightsTorn, match="names tensor 99"):
        updater.received(receive, fault.value)
    assert "names tensor 99" in updater.torn_reason
    assert updater.version == 4
    with pytest.raises(UpdateRefused, match="only a full update") as caught:
        begin(updater, {Q: new[Q]}, partial=True)
    assert caught.value.reason is Reason.WRONG_STATE
    with pytest.raises(UpdateRefused, match="torn"):
        updater.rollback()
    assert push(updater, new).version == 5
    assert updater.torn_reason == ""
    assert equal(target.values(), new)


@pytest.mark.parametrize(("staging", "torn"), [(Staging.HOST, False), (Staging.NONE, True)])
def test_checksum_mismatch(target: TinyTarget, staging: Staging, torn: bool) -> None:
    updater = make_updater(target)
    new = weights(1)
    update_id = begin(updater, new, staging=staging)
    flipped = raw(new[K]).clone()
    flipped[3] ^= 1
    chunks = [(i, o, flipped if i == 2 else d) for i, o, d in whole(new)]
    send(updater, update_id, iter(chunks))
    with pytest.raises(UpdateRefused, match=f"{K} arrived with checksum") as caught:
        updater.verify(update_id)
    assert caught.value.reason is Reason.CHECKSUM_MISMATCH
    updater.refuse(update_id, caught.value)
    assert bool(updater.torn_reason) is torn
    assert updater.version == 4


@pytest.mark.case("B142")
@pytest.mark.case("B024")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3.4e38])
def test_nonfinite_after_the_cast(target: TinyTarget, bad: float) -> None:
    updater = make_updater(target)
    before, sent = target.values(), weights(1, torch.float32)
    sent[UP][2, 3] = bad
    with pytest.raises(UpdateRefused, match=f"{UP} has NaN or infinite values in bfloat16") as caught:
        push(updater, sent)
    assert caught.value.reason is Reason.NONFINITE
    assert equal(target.values(), before)
    assert push(updater, sent, allow_nonfinite=True).version == 5
    assert not torch.isfinite(target.slot(UP)).all()


def test_lease_runs_out_only_while_nothing_runs(target: TinyTarget) -> None:
    updater = make_updater(target)
    new = weights(1)
    update_id = begin(updater, new, lease_s=5.0)
    now = time.monotonic()
    updater.tick(now + 4.0)
    assert updater.renew(update_id, 20.0) == 20.0
    updater.tick(now + 19.0)
    receive = updater.receiver(FromTensor(update_id), whole(new))
    updater.tick(now + 1000.0)
    receive.run()
    updater.received(receive, None)
    updater.tick(time.monotonic() + 4.0)
    assert updater.open is not None
    updater.tick(time.monotonic() + 6.0)
    assert updater.open is None
    assert updater.torn_reason == ""
    with pytest.raises(UpdateRefused, match=r"lease of update .* ran out: no call came for 5 s"):
        updater.renew(update_id, 0.0)


def test_lease_of_an_unstaged_update_tears(target: TinyTarget) -> None:
    updater = make_updater(target)
    update_id = begin(updater, weights(1), staging=Staging.NONE)
    send(updater, update_id, iter([(0, 0, raw(weights(1)[EMBED]))]))
    updater.tick(time.monotonic() + 61.0)
    assert "lease" in updater.torn_reason


def test_prepared_deadline_becomes_the_lease(target: TinyTarget) -> None:
    updater = make_updater(target)
    update_id = begin(updater, weights(1))
    send(updater, update_id, whole(weights(1)))
    updater.verify(update_id)
    updater.prepared(update_id, 300.0)
    updater.tick(time.monotonic() + 299.0)
    assert updater.open is not None
    updater.tick(time.monotonic() + 301.0)
    assert updater.open is None


def test_abort_turns_late_writers_away(target: TinyTarget) -> None:
    updater = make_updater(target)
    new = weights(1)
    update_id = begin(updater, new)
    receive = updater.receiver(FromTensor(update_id), whole(new))
    assert updater.abort(update_id) == (True, False)
    with pytest.raises(UpdateRefused, match="was aborted") as fault:
        receive.run()
    with pytest.raises(UpdateRefused, match="was aborted"):
        updater.received(receive, fault.value)
    assert push(updater, new).version == 5


def test_manifest_by_digest_with_new_checksums(target: TinyTarget) -> None:
    updater = make_updater(target)
    push(updater, weights(1))
    new = weights(2)
    manifest = manifest_of(new)
    sums = tuple(tensor.checksum or 0 for tensor in manifest.tensors)
    request = BeginUpdate(Path.TENSOR, manifest_digest=manifest.digest(), checksums=sums)
    assert updater.resolve(request) == manifest
    short = dataclasses.replace(request, checksums=sums[:2])
    with pytest.raises(UpdateRefused, match="2 checksums came for a manifest of 6"):
        updater.resolve(short)
    unknown = dataclasses.replace(request, manifest_digest="00")
    with pytest.raises(UpdateRefused) as caught:
        updater.resolve(unknown)
    assert caught.value.reason is Reason.MANIFEST_UNKNOWN
    reply = updater.begin(request, updater.resolve(request), paused=False)
    assert reply.manifest_digest == manifest.digest()
    send(updater, reply.update_id, whole(new))
    assert updater.commit(reply.update_id).verified
    assert equal(target.values(), new)


@pytest.mark.case("B111")
def test_discard_needs_a_full_update(target: TinyTarget) -> None:
    updater = make_updater(target)
    push(updater, weights(1), keep_previous=True)
    update_id = begin(updater, weights(2))
    updater.discard()
    assert updater.torn_reason == "weights were released"
    with pytest.raises(UpdateRefused, match="memory was released"):
        updater.verified(update_id)
    target.buffer.zero_()
    with pytest.raises(UpdateRefused):
        updater.rollback()
    assert push(updater, weights(2)).num_changed == 6
    assert updater.torn_reason == ""


def test_checksums_tell_what_lies_there_now(target: TinyTarget) -> None:
    updater = make_updater(target)
    push(updater, weights(1))
    assert list(updater.checksums([])) == target.arena.slot_names
    assert updater.checksums([HEAD, NORM]) == {
        HEAD: checksum(weights(1)[EMBED]),
        NORM: checksum(weights(1)[NORM]),
    }
    target.slot(GATE)[0, 0] += 1
    assert updater.checksums([GATE])[GATE] != checksum(weights(1)[GATE])
    with pytest.raises(UpdateRefused, match="no tensor 'nope'"):
        updater.checksums(["nope"])


def test_nothing_grows_over_many_updates(target: TinyTarget) -> None:
    updater = make_updater(target)
    for seed in range(100):
        push(updater, weights(seed % 3), update_id=f"u{seed}")
    assert updater.version == 104
    assert updater.replay("u99") is not None
    assert updater.replay("u0") is None
