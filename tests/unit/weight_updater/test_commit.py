"""The moment of the write: exchanges, rollbacks, and faults at every step of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.unit.weight_updater.tiny_target import (
    EMBED,
    HEAD,
    NORM,
    UP,
    K,
    TinyTarget,
    begin,
    make_updater,
    push,
    raw,
    send,
    weights,
    whole,
)
from weight_updater import staging as staging_module
from weight_updater.errors import Reason, UpdateRefused, WeightsTorn
from weight_updater.requests import Recapture, Staging, UpdateState
from weight_updater.staging import Exchange
from weight_updater.updater import WeightUpdater

STAGINGS = [Staging.DEVICE, Staging.HOST]


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("staging", STAGINGS)
def test_rollback_brings_the_previous_version_back(staging: Staging) -> None:
    target = TinyTarget()
    updater = make_updater(target, device_staging=True)
    addresses = target.addresses()
    push(updater, weights(1))
    kept = push(updater, weights(2), staging=staging, keep_previous=True)
    assert equal(target.values(), weights(2))
    assert (kept.version, kept.previous_version, kept.commit_sequence) == (6, 5, 2)
    reply = updater.rollback()
    assert equal(target.values(), weights(1))
    assert (reply.state, reply.version, reply.previous_version) == (UpdateState.ROLLED_BACK, 5, 6)
    assert (updater.version, updater.commit_sequence) == (5, 3)
    assert (reply.update_id, reply.num_tensors, reply.num_changed) == (kept.update_id, 6, 6)
    assert reply.live_checksum != kept.live_checksum
    assert target.addresses() == addresses
    assert target.head.data_ptr() == target.slot(HEAD).data_ptr()
    with pytest.raises(UpdateRefused) as caught:
        updater.rollback()
    assert caught.value.reason is Reason.NO_PREVIOUS
    with pytest.raises(UpdateRefused, match="version 6 is not larger than 6"):
        begin(updater, weights(3), version=6)
    assert push(updater, weights(3)).version == 7
    assert updater.checksums([])[K] != 0


def test_rollback_of_a_partial_update() -> None:
    target = TinyTarget()
    updater = make_updater(target)
    push(updater, weights(1))
    part = {name: weights(2)[name] for name in (K, NORM)}
    push(updater, part, partial=True, keep_previous=True)
    assert equal(target.values(), {**weights(1), **part})
    updater.rollback()
    assert equal(target.values(), weights(1))


def test_rollback_without_checksums() -> None:
    target = TinyTarget()
    updater = make_updater(target)
    push(updater, weights(1), skip_checksums=True)
    push(updater, weights(2), skip_checksums=True, keep_previous=True)
    assert updater.rollback().live_checksum == 0
    assert equal(target.values(), weights(1))


def test_a_newer_update_ends_the_way_back() -> None:
    target = TinyTarget()
    updater = make_updater(target, device_staging=True)
    push(updater, weights(1), keep_previous=True)
    update_id = begin(updater, weights(2))
    with pytest.raises(UpdateRefused, match=rf"update {update_id} \(.*is open"):
        updater.rollback()
    updater.abort(update_id)  # nothing arrived, the staging buffer is as it was
    updater.rollback()
    assert equal(target.values(), weights(0))
    push(updater, weights(3), keep_previous=True)
    update_id = begin(updater, weights(4))
    send(updater, update_id, iter([(0, 0, raw(weights(4)[EMBED]))]))
    updater.abort(update_id)
    with pytest.raises(UpdateRefused) as caught:
        updater.rollback()
    assert caught.value.reason is Reason.NO_PREVIOUS
    push(updater, weights(5), keep_previous=True)
    push(updater, weights(6), staging=Staging.HOST)  # elsewhere, but what is kept is not the previous now
    with pytest.raises(UpdateRefused):
        updater.rollback()


class FailingCopies:
    """Copies until the `fail_at`-th call, which copies half and raises; later calls work."""

    def __init__(self, fail_at: int) -> None:
        self.fail_at = fail_at
        self.num_calls = 0

    def __call__(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self.num_calls += 1
        if self.num_calls == self.fail_at:
            half = destination.numel() // 2
            destination[:half].copy_(source[:half])
            raise RuntimeError("the device fell over")
        destination.copy_(source)


def received(target: TinyTarget, **fields: object) -> tuple[WeightUpdater, str]:
    updater = make_updater(target)
    update_id = begin(updater, weights(1), **fields)
    send(updater, update_id, whole(weights(1)))
    updater.verify(update_id)
    return updater, update_id


def test_a_fault_in_the_copy_tears(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TinyTarget()
    updater, update_id = received(target)
    monkeypatch.setattr(staging_module, "copy_bytes", FailingCopies(1))
    with pytest.raises(
        WeightsTorn, match=r"the device fell over .RuntimeError.; send a full update"
    ) as caught:
        updater.commit(update_id)
    assert caught.value.reason is Reason.WRITE_FAILED
    assert "fell over" in updater.torn_reason
    assert updater.version == 4
    assert push(updater, weights(2)).version == 5
    assert updater.torn_reason == ""
    assert equal(target.values(), weights(2))


@pytest.mark.parametrize("piece_bytes", [64, 1 << 20])
def test_a_fault_anywhere_in_an_exchange_is_undone(monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    monkeypatch.setattr(staging_module, "SCRATCH_BYTES", piece_bytes)
    num_copies = FailingCopies(0)
    monkeypatch.setattr(staging_module, "copy_bytes", num_copies)
    target = TinyTarget()
    updater, update_id = received(target, keep_previous=True)
    updater.commit(update_id)
    assert num_copies.num_calls in (3, 3 * -(-target.arena.nbytes // 64))
    for fail_at in range(1, num_copies.num_calls + 1):
        target = TinyTarget()
        updater, update_id = received(target, keep_previous=True)
        monkeypatch.setattr(staging_module, "copy_bytes", FailingCopies(fail_at))
        with pytest.raises(UpdateRefused, match="it was undone, the old weights are live") as caught:
            updater.commit(update_id)
        assert caught.value.reason is Reason.WRITE_FAILED
        assert equal(target.values(), weights(0))
        assert (updater.version, updater.torn_reason) == (4, "")
        assert push(updater, weights(2)).num_changed == 6


def test_exchange_undo_restores_both_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    for fail_at in range(1, 13):
        a, b = torch.arange(64, dtype=torch.uint8), torch.arange(64, 128, dtype=torch.uint8)
        exchange = Exchange(a, b, [(0, 32), (40, 20)], torch.empty(16, dtype=torch.uint8))
        monkeypatch.setattr(staging_module, "copy_bytes", FailingCopies(fail_at))
        with pytest.raises(RuntimeError):
            exchange.run()
        assert exchange.undo()
        assert torch.equal(a, torch.arange(64, dtype=torch.uint8))
        assert torch.equal(b, torch.arange(64, 128, dtype=torch.uint8))


def fail_once() -> Callable[[], None]:
    calls = []

    def finalise() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("no room for the rotary table")

    return finalise


def test_a_fault_in_finalise_tears_or_is_undone() -> None:
    target = TinyTarget(fail_once())
    updater = make_updater(target)
    with pytest.raises(WeightsTorn, match="no room for the rotary table"):
        push(updater, weights(1))
    assert updater.torn_reason
    target = TinyTarget(fail_once())
    updater = make_updater(target)
    with pytest.raises(UpdateRefused, match=r"no room for the rotary table.*undone"):
        push(updater, weights(1), keep_previous=True)
    assert target.num_finalised == 2
    assert equal(target.values(), weights(0))
    assert updater.torn_reason == ""


def test_finalise_that_fails_again_after_the_undo_tears() -> None:
    def always() -> None:
        raise ValueError("broken for good")

    updater = make_updater(TinyTarget(always))
    with pytest.raises(WeightsTorn, match="broken for good"):
        push(updater, weights(1), keep_previous=True)
    assert "broken for good" in updater.torn_reason


def test_live_bytes_that_differ_from_staged_ones_tear() -> None:
    target = TinyTarget()
    target._finalise_extra = lambda: target.slot(UP)[0].zero_()
    updater = make_updater(target)
    with pytest.raises(WeightsTorn, match=f"{UP} holds bytes with checksum") as caught:
        push(updater, weights(1))
    assert caught.value.reason is Reason.CHECKSUM_MISMATCH
    assert updater.version == 4


def test_a_fault_in_rollback_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TinyTarget()
    updater = make_updater(target)
    push(updater, weights(1), keep_previous=True)
    monkeypatch.setattr(staging_module, "copy_bytes", FailingCopies(2))
    with pytest.raises(UpdateRefused, match="undone"):
        updater.rollback()
    assert equal(target.values(), weights(1))
    assert (updater.version, updater.commit_sequence) == (5, 1)
    updater.rollback()
    assert equal(target.values(), weights(0))


class FakeGraphs:
    """Graphs over the target's addresses, as they were when captured."""

    def __init__(self, target: TinyTarget) -> None:
        self.target = target
        self.captured = target.addresses()
        self.num_recaptures = 0
        self.fail = False

    def num_captured(self) -> int:
        return 3

    def moved(self) -> list[str]:
        now = self.target.addresses()
        return [key for key, address in self.captured.items() if now[key] != address]

    def check_recapture(self) -> None:
        if self.fail:
            raise UpdateRefused(Reason.NO_MEMORY, "no room to capture 3 graphs")

    def recapture(self) -> int:
        self.captured = self.target.addresses()
        self.num_recaptures += 1
        return 3

    def capture_owed(self) -> int:
        return 0


class LostGraphs(FakeGraphs):
    """A recapture that fails `num_faults` times; then none is captured until what is owed is."""

    def __init__(self, target: TinyTarget, num_faults: int) -> None:
        super().__init__(target)
        self._num_faults = num_faults
        self.is_owed = False

    def num_captured(self) -> int:
        return 0 if self.is_owed else 3

    def moved(self) -> list[str]:
        return [] if self.is_owed else super().moved()

    def recapture(self) -> int:
        self.is_owed = True
        if self._num_faults:
            self._num_faults -= 1
            raise torch.OutOfMemoryError("no memory for graphs")
        self.is_owed = False
        return super().recapture()

    def capture_owed(self) -> int:
        return self.recapture() if self.is_owed else 0


def test_graphs_are_kept_unless_asked_otherwise() -> None:
    target = TinyTarget()
    graphs = FakeGraphs(target)
    updater = make_updater(target, graphs=graphs)
    reply = push(updater, weights(1))
    assert (reply.graphs_kept, reply.graphs_recaptured) == (3, 0)
    assert reply.graphs_reason == "no captured address moved"
    reply = push(updater, weights(2), recapture=Recapture.NEVER)
    assert reply.graphs_kept == 3
    reply = push(updater, weights(3), recapture=Recapture.ALWAYS)
    assert (reply.graphs_kept, reply.graphs_recaptured, reply.graphs_reason) == (0, 3, "recapture=always")
    assert graphs.num_recaptures == 1


def test_graphs_that_a_recapture_lost_are_captured_at_the_next_commit() -> None:
    """Whatever became of that update: the engine would run uncaptured for good, and nobody would know."""
    target = TinyTarget()
    graphs = LostGraphs(target, num_faults=2)
    updater = make_updater(target, graphs=graphs)
    with pytest.raises(WeightsTorn, match="no memory for graphs"):
        push(updater, weights(1), recapture=Recapture.ALWAYS)
    reply = push(updater, weights(2))
    assert (reply.graphs_kept, reply.graphs_recaptured) == (0, 0)
    assert reply.graphs_reason == (
        "graphs were lost before, and are not captured now either: no memory for graphs"
    )
    assert equal(target.values(), weights(2)), "which is no fault of the weights"
    assert updater.torn_reason == ""
    assert push(updater, weights(3), recapture=Recapture.NEVER).graphs_reason == "no graphs are captured"
    reply = push(updater, weights(4))
    assert (reply.graphs_recaptured, reply.graphs_reason) == (3, "they had been lost or put off")
    assert reply.seconds.recapture > 0
    assert push(updater, weights(5)).graphs_kept == 3


def test_graphs_that_a_recapture_lost_are_captured_once_its_update_is_undone() -> None:
    target = TinyTarget()
    graphs = LostGraphs(target, num_faults=1)
    updater = make_updater(target, device_staging=True, graphs=graphs)
    with pytest.raises(UpdateRefused, match="it was undone, the old weights are live"):
        push(updater, weights(1), recapture=Recapture.ALWAYS, keep_previous=True)
    assert equal(target.values(), weights(0))
    assert graphs.num_captured() == 3
    assert push(updater, weights(2)).graphs_kept == 3


def test_extra_memory_is_what_was_not_reserved_at_start() -> None:
    target = TinyTarget()
    updater = make_updater(target, device_staging=True)
    nbytes = target.arena.nbytes
    assert push(updater, weights(1)).extra_bytes == 0
    assert push(updater, weights(2), staging=Staging.NONE).extra_bytes == 0
    assert push(updater, weights(3), staging=Staging.HOST).extra_bytes == nbytes
    assert push(updater, weights(4), keep_previous=True).extra_bytes == nbytes  # the scratch is bounded by it
    head = {HEAD: weights(5)[EMBED].float()}
    assert push(updater, {**weights(5), **head}).extra_bytes == 120
