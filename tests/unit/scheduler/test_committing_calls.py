"""One call that brings what another began: bytes, their checksums and the commit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from rollout_engine import messages
from tests.unit.scheduler.update_loop import Loop
from tests.unit.weight_updater.fake_gpu import FakeGpu, fake_gpu
from tests.unit.weight_updater.test_from_cuda import lay_out
from tests.unit.weight_updater.tiny_target import (
    EMBED,
    HEAD,
    manifest_of,
    weights,
)
from weight_updater.errors import Reason, UpdateError, WeightsTorn
from weight_updater.requests import BeginUpdate, FromIpc, Path, Staging, UpdateReply, UpdateState


class Committing:
    """Updates by lent memory whose checksums come with the one call that receives and commits them."""

    def __init__(self, loop: Loop, gpu: FakeGpu) -> None:
        self._loop = loop
        self._gpu = gpu
        self._handles = [gpu.allocate(1, 4096)]

    def begin(self, name: str, seed: int, staging: Staging = Staging.NONE) -> FromIpc:
        """Open an update; gives what its trainer lends, in full."""
        new = {slot: value for slot, value in weights(seed).items() if slot != HEAD}  # which is tied
        manifest = manifest_of(new)
        begin = BeginUpdate(
            path=Path.IPC,
            update_id=name,
            staging=staging,
            manifest=manifest.with_checksums([None] * len(new)),
        )
        loop, began = self._loop, f"{name} begins"
        loop.start(began, loop.updates.begin(messages.Begin(call_id=1, request=begin)))
        assert not isinstance(loop.turn_until(began), Exception)
        request = lay_out(self._gpu, new, self._handles)
        checksums = tuple(value for value in manifest.checksums if value is not None)
        return replace(request, update_id=name, scanned=True, checksums=checksums)

    def spoil(self, request: FromIpc) -> None:
        self._gpu.memory[self._handles[0]][16 + request.placements[3].offset] ^= 1

    def send(self, name: str, request: FromIpc) -> None:
        command = messages.Update(call_id=2, ipc=request, commit=True)
        self._loop.start(name, self._loop.updates.update(command))


@pytest.fixture
def committing(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> Iterator[Committing]:
    with fake_gpu(monkeypatch) as gpu:
        yield Committing(loop, gpu)
        loop.updater.release(["trainer-1"])


def short(request: FromIpc) -> FromIpc:
    """The same regions and placements, named by digest."""
    return replace(request, lent=request.digest(), cuda_regions=(), placements=())


def test_one_call_brings_checksums_and_commits(loop: Loop, committing: Committing) -> None:
    for seed in (1, 2, 3):
        request = committing.begin(f"u{seed}", seed)
        if seed > 1:
            request = short(request)
        committing.send(f"sent {seed}", request)
        at_once = f"sent {seed}" in loop.answers
        assert at_once is (seed > 1), "what was live is known, the memory mapped: no trip to a worker"
        reply = loop.turn_until(f"sent {seed}")
        assert isinstance(reply, UpdateReply), reply
        assert (reply.state, reply.verified) == (UpdateState.COMMITTED, True)
        assert torch.equal(loop.target.slot(EMBED), weights(seed)[EMBED])
        committing.send(f"again {seed}", request)
        assert loop.answers[f"again {seed}"] == reply
        assert loop.updater.commit_sequence == seed


def test_a_call_that_is_repeated_while_the_first_is_at_work_gets_its_reply(
    loop: Loop, committing: Committing, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = threading.Event(), threading.Event()
    know = loop.updater._live.know

    def slow() -> None:
        reading.set()
        assert go_on.wait(10)
        know()

    monkeypatch.setattr(loop.updater._live, "know", slow)
    request = committing.begin("u", 1)
    committing.send("first", request)
    assert reading.wait(10)
    committing.send("again", request)
    for _ in range(20):
        loop.flows.turn()
    assert not {"first", "again"} & set(loop.answers)
    go_on.set()
    reply = loop.turn_until("first")
    assert isinstance(reply, UpdateReply), reply
    assert loop.turn_until("again") == reply
    assert loop.updater.commit_sequence == 1


def test_what_fails_a_call_that_commits_ends_the_update(loop: Loop, committing: Committing) -> None:
    before = loop.target.values()
    for name, staging in (("staged", Staging.HOST), ("too few", Staging.NONE)):
        request = committing.begin(name, 1, staging)
        if name == "too few":
            request = replace(request, checksums=request.checksums[1:])
        else:
            committing.spoil(request)
        committing.send(f"{name} sent", request)
        error = loop.turn_until(f"{name} sent")
        assert isinstance(error, UpdateError)
        wanted = Reason.INVALID_UPDATE if name == "too few" else Reason.CHECKSUM_MISMATCH
        assert error.reason is wanted
        assert loop.updater.open is None
    assert all(torch.equal(loop.target.slot(name), value) for name, value in before.items())
    request = committing.begin("scanned", 2)
    committing.spoil(request)
    committing.send("torn", request)
    assert isinstance(loop.turn_until("torn"), WeightsTorn)
    assert loop.updater.torn_reason


def test_a_call_at_the_wrong_time_leaves_the_update_to_the_right_one(
    loop: Loop, committing: Committing
) -> None:
    request = committing.begin("u", 1)
    committing.send("unknown", short(request))
    error = loop.turn_until("unknown")
    assert isinstance(error, UpdateError)
    assert error.reason is Reason.MANIFEST_UNKNOWN, "it is sent in full then"
    committing.send("in full", request)
    assert isinstance(loop.turn_until("in full"), UpdateReply)
    request = committing.begin("received", 2, Staging.HOST)
    received = messages.Update(call_id=2, ipc=replace(request, checksums=()))
    loop.start("received", loop.updates.update(received))
    assert isinstance(loop.turn_until("received"), UpdateReply)
    committing.send("late", request)
    late = loop.turn_until("late")
    assert isinstance(late, UpdateError)
    assert late.reason is Reason.WRONG_STATE
    assert loop.updater.open is not None, "the first call's bytes may still be committed"
    committing.send("done", replace(request, checksums=()))
    reply = loop.turn_until("done")
    assert isinstance(reply, UpdateReply)
    assert not reply.verified, "nobody said what they should be"
