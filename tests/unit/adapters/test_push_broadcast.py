"""Broadcasts to one engine alone: one call, beside which the broadcast runs, and what becomes of those that
fail. The group is a stand-in; with a real one: tests/wire/test_contract.py, on GPUs: tests/gpu.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import grpc
import pytest
import torch
from torch import nn

from tests.unit.adapters.fake_engine import FakeEngine, serving
from tests.unit.adapters.interrupts import Interrupted, interrupted, interrupts
from trainers_adapters import push_one, send_distributed
from trainers_adapters.clients import WeightsClient
from trainers_adapters.errors import PushError
from trainers_adapters.push import push_weights
from trainers_adapters.send_distributed import BroadcastGroup
from trainers_adapters.sources import ModuleSource
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.packing import PackedBytes
from weight_updater.requests import Manifest

REFUSED = (grpc.StatusCode.FAILED_PRECONDITION, "STALE_VERSION", "9 is live")
INIT, UPDATE, DESTROY = (
    "InitWeightsUpdateGroup 1/2",
    "UpdateWeightsFromDistributed",
    "DestroyWeightsUpdateGroup",
)
ENOUGH_S = 20.0


class Group:
    """SenderGroup's face. A broadcast waits until the engine receives, and ends with what `fails` holds."""

    made: list[Group]
    fails: BaseException | None

    def __init__(self, *args: object, backend: str, device: torch.device | None) -> None:
        assert (backend, device) == ("gloo", None)
        self.receiving, self.closed, self.ended = threading.Event(), threading.Event(), threading.Event()
        self.sent: list[list[str]] = []  # names
        self.buckets: list[int] = []
        Group.made.append(self)

    def broadcast(self, manifest: Manifest, packed: PackedBytes, bucket_bytes: int) -> None:
        self.buckets.append(bucket_bytes)
        self.ended.clear()
        try:
            deadline = time.monotonic() + ENOUGH_S
            while not self.receiving.wait(0.01):
                assert time.monotonic() < deadline, "nobody received, and nobody ended the broadcast"
                if self.closed.is_set():
                    raise UpdateRefused(Reason.PEER_LOST, "the sender closed the group")
            self.receiving.clear()
            if Group.fails is not None:
                raise Group.fails
            assert packed.columns.names == manifest.columns.names
            self.sent.append([spec.name for spec in manifest.tensors])
        finally:
            self.ended.set()

    def receive(self) -> bool:
        """ENGINE. Whether a broadcast came whole."""
        num_sent = len(self.sent)
        self.receiving.set()
        assert self.ended.wait(ENOUGH_S)
        return len(self.sent) > num_sent

    def close(self) -> None:
        self.closed.set()


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_distributed, "SenderGroup", Group)
    monkeypatch.setattr(Group, "made", [], raising=False)
    monkeypatch.setattr(Group, "fails", None, raising=False)


@pytest.fixture
def engine() -> FakeEngine:
    made = FakeEngine()
    made.received = lambda: Group.made[-1].receive()
    return made


@pytest.fixture
def client(engine: FakeEngine) -> Iterator[WeightsClient]:
    with serving(engine) as address, WeightsClient(address) as made:
        yield made


@pytest.fixture
def group(client: WeightsClient) -> Iterator[BroadcastGroup]:
    before = threading.active_count()
    with BroadcastGroup(bucket_bytes=1 << 20) as made:
        yield made
    assert all(one.closed.is_set() for one in Group.made)
    assert not [one for one in threading.enumerate() if one.name.startswith("broadcast")]
    assert threading.active_count() <= before + 8  # the fake engine's own


@pytest.fixture
def source() -> ModuleSource:
    return ModuleSource(nn.Linear(3, 2))


def test_a_push_takes_one_call_beside_which_all_of_it_is_broadcast(engine, client, group, source):
    for step in (1, 2):
        report = push_weights(source, client, via=group)
        assert report.version == engine.version == step
        assert engine.begun[-1].path == 2
        assert engine.begun[-1].bucket_bytes == 1 << 20
    assert engine.events == [INIT, UPDATE, UPDATE]
    (made,) = Group.made
    assert made.buckets == [1 << 20, 1 << 20]
    assert made.sent == [["weight", "bias"]] * 2
    assert [begin.WhichOneof("source_manifest") for begin in engine.begun] == ["manifest", "manifest_digest"]


def test_an_engine_that_was_started_anew_is_told_in_full_beside_the_same_broadcast(
    engine, client, group, source
):
    push_weights(source, client, via=group)
    engine.manifests.clear()
    assert push_weights(source, client, via=group).version == 2
    assert engine.events == [INIT, UPDATE, UPDATE, UPDATE]
    assert len(Group.made[0].sent) == len(Group.made[0].buckets) == 2


def test_a_call_whose_answer_was_lost_is_repeated_and_nothing_is_broadcast_again(
    engine, client, group, source
):
    engine.loses_reply = True
    assert push_weights(source, client, 3, via=group).version == 3
    assert engine.events == [INIT, UPDATE, UPDATE]
    assert (engine.sequence, len(Group.made[0].buckets)) == (1, 1)


def test_an_engine_that_does_not_answer_leaves_no_broadcast_behind(
    engine, client, group, source, monkeypatch
):
    monkeypatch.setattr(push_one, "COMMIT_RETRY_S", 0.1)
    engine.refuse[UPDATE] = (grpc.StatusCode.UNAVAILABLE, "", "connection refused")
    with pytest.raises(PushError, match="live on 0 of 1 engines, but not surely"):
        push_weights(source, client, via=group)
    assert Group.made[0].closed.is_set()
    assert Group.made[0].ended.is_set()
    engine.refuse.clear()
    assert push_weights(source, client, via=group).version == 1
    assert len(Group.made) == 2


def test_what_the_engine_refuses_ends_the_broadcast_and_the_next_push_makes_a_group(
    engine, client, group, source
):
    engine.refuse[UPDATE] = REFUSED
    with pytest.raises(
        PushError, match=r"UpdateWeightsFromDistributed on .*9 is live.*nothing was"
    ) as refused:
        push_weights(source, client, via=group)
    assert (refused.value.reason, engine.version, engine.open) == ("STALE_VERSION", 0, None)
    assert Group.made[0].ended.is_set(), "from here on nothing reads the source"
    assert DESTROY in engine.events
    engine.refuse.clear()
    assert push_weights(source, client, via=group).version == 1
    assert len(Group.made) == 2


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        (ValueError("the source yields w where v was due"), ValueError, "w where v was due"),
        (UpdateRefused(Reason.MANIFEST_MISMATCH, "3 bytes"), PushError, "on the trainer: 3 bytes"),
        (UpdateRefused(Reason.PEER_LOST, "rank 1 is gone"), PushError, "rank 0 gave up"),
    ],
)
def test_what_fails_first_is_what_is_raised(fault, kind, says, engine, client, group, source, monkeypatch):
    """An engine that waited for a broadcast which failed says no more than that."""
    monkeypatch.setattr(Group, "fails", fault)
    with pytest.raises(kind, match=says):
        push_weights(source, client, via=group)
    assert (engine.version, engine.open) == (0, None)
    monkeypatch.setattr(Group, "fails", None)
    assert push_weights(source, client, via=group).version == 1


def test_an_interrupt_leaves_nothing_open_and_nothing_running(engine, client, group, source):
    engine.slow.add(UPDATE)
    with interrupts() as interrupt, pytest.raises(Interrupted):
        interrupted(
            lambda: push_weights(source, client, via=group), interrupt, lambda: UPDATE in engine.events
        )
    assert Group.made[0].ended.is_set()
    assert engine.events[:2] == [INIT, UPDATE]
    assert set(engine.events[2:]) == {DESTROY, "AbortUpdate"}
