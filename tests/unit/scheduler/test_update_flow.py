"""Updates in one call, on a loop turned by hand: one trip to a worker, and no commit beside it."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from rollout_engine import messages
from tests.unit.scheduler.update_loop import Loop
from tests.unit.weight_updater.fake_gpu import fake_gpu
from tests.unit.weight_updater.test_from_cuda import lay_out
from tests.unit.weight_updater.tiny_target import (
    EMBED,
    HEAD,
    manifest_of,
    num_mappings,
    pack,
    weights,
)
from weight_updater.errors import Reason, UpdateError
from weight_updater.requests import BeginUpdate, FromIpc, FromTensor, Path, Staging, UpdateReply, UpdateState
from weight_updater.sink import Sink


def test_an_update_in_one_call_needs_one_trip_to_a_worker(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    trips: list[object] = []
    submit = loop.flows._pool.submit

    def count(function: Any) -> Any:
        trips.append(function)
        return submit(function)

    monkeypatch.setattr(loop.flows._pool, "submit", count)
    for seed, num_trips in ((1, 2), (2, 2)):  # the manifest is resolved beside the loop, too
        trips.clear()
        loop.update(f"u{seed}", seed)
        reply = loop.turn_until(f"u{seed}")
        assert isinstance(reply, UpdateReply)
        assert (reply.state, reply.verified) == (UpdateState.COMMITTED, True)
        assert torch.equal(loop.target.slot(EMBED), weights(seed)[EMBED])
        assert len(trips) == num_trips


def test_what_the_worker_finds_wrong_refuses_the_update(loop: Loop) -> None:
    before = loop.target.values()
    loop.update("wrong", 1, spoil=True)
    error = loop.turn_until("wrong")
    assert isinstance(error, UpdateError)
    assert error.reason is Reason.CHECKSUM_MISMATCH
    assert loop.updater.open is None
    assert all(torch.equal(loop.target.slot(name), value) for name, value in before.items())
    loop.update("right", 2)
    assert isinstance(loop.turn_until("right"), UpdateReply)


def test_no_commit_comes_while_a_worker_still_verifies_an_update_that_was_aborted(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the live slots: what it finds there would be taken for the checksums of what came after."""
    verifying, go_on = threading.Event(), threading.Event()
    know = loop.updater._live.know

    def slow() -> None:
        verifying.set()
        assert go_on.wait(10)
        know()

    monkeypatch.setattr(loop.updater._live, "know", slow)
    loop.update("first", 1)
    deadline = time.monotonic() + 10
    while not verifying.is_set():
        assert time.monotonic() < deadline
        loop.flows.turn()
    loop.start("abort", loop.updates.abort(messages.AbortUpdate(call_id=2, update_id="first")))
    monkeypatch.setattr(loop.updater._live, "know", know)
    loop.update("second", 2)
    for _ in range(50):
        loop.flows.turn()
        time.sleep(0.002)
    assert "second" not in loop.answers
    assert loop.updater.commit_sequence == 0
    go_on.set()
    reply = loop.turn_until("second")
    assert isinstance(reply, UpdateReply)
    assert isinstance(loop.turn_until("first"), UpdateError)
    assert loop.turn_until("abort") == {"found": True, "torn": False}
    live = {name: manifest_of(weights(2)).tensors[at].checksum for at, name in enumerate(weights(2))}
    assert loop.updater.checksums([]) == live == loop.updater._live.known


@pytest.mark.parametrize("staging", [Staging.HOST, Staging.NONE])
@pytest.mark.parametrize("path", [Path.TENSOR, Path.IPC])
def test_the_memory_of_an_update_that_was_aborted_under_its_worker_is_given_back_at_once(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, path: Path, staging: Staging
) -> None:
    """A segment may be as large as the model, and nobody calls the collector of cycles when all is quiet."""
    reading, go_on = threading.Event(), threading.Event()
    write = Sink.write_whole

    def wait(*arguments: Any) -> None:
        reading.set()
        assert go_on.wait(10)
        write(*arguments)

    monkeypatch.setattr(Sink, "write_whole", wait)
    tensors, named = weights(1), loop.segment.descriptor
    pack(loop.segment, tensors)
    begin = BeginUpdate(path=path, update_id="u", manifest=manifest_of(tensors), staging=staging)
    way: dict[str, Any] = {"tensor": FromTensor("u", named)}
    if path is Path.IPC:
        way = {"ipc": FromIpc("u", (named,))}
    gc.collect()
    gc.disable()
    try:
        loop.start("begun", loop.updates.begin(messages.Begin(call_id=1, request=begin)))
        loop.turn_until("begun")
        loop.start("sent", loop.updates.update(messages.Update(call_id=2, **way)))
        deadline = time.monotonic() + 10
        while not reading.is_set():
            assert time.monotonic() < deadline
            loop.flows.turn()
        assert loop.updater.abort("u")[0]
        go_on.set()
        error = loop.turn_until("sent")
        assert isinstance(error, UpdateError)
        assert error.reason is Reason.UNKNOWN_UPDATE
        del error
        loop.answers.clear()
        loop.updater.release([named.allocation_id])
        deadline = time.monotonic() + 10
        while num_mappings(named.name) > 1:  # ours; the worker lets go a moment after it has answered
            assert time.monotonic() < deadline, "nothing but the collector would give it back"
    finally:
        gc.enable()


def test_memory_that_was_lent_before_needs_no_worker_if_it_is_not_looked_at_or_nothing_runs(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    unseen = {"skip_checksums": True, "allow_nonfinite": True}
    with fake_gpu(monkeypatch) as gpu:
        handles = [gpu.allocate(1, 4096)]

        def push(name: str, seed: int, *, lent: bool, scanned: bool = False, **asked: Any) -> bool:
            """Whether the loop answers at once; what was pushed is live afterwards."""
            new = {slot: value for slot, value in weights(seed).items() if slot != HEAD}  # which is tied
            request = lay_out(gpu, new, handles)
            manifest = manifest_of(new)
            named: dict[str, Any] = {"manifest": manifest}
            if lent:
                request = FromIpc("", lent=request.digest())
                named = {"manifest_digest": manifest.digest(), "checksums": tuple(manifest.checksums)}
            begin = BeginUpdate(path=Path.IPC, update_id=name, staging=Staging.NONE, **named, **asked)
            ipc = replace(request, scanned=scanned)
            loop.start(name, loop.updates.update(messages.Update(call_id=1, ipc=ipc, begin=begin)))
            at_once = name in loop.answers
            reply = loop.turn_until(name)
            assert isinstance(reply, UpdateReply), reply
            assert reply.state is UpdateState.COMMITTED
            assert all(torch.equal(loop.target.slot(slot), value) for slot, value in new.items())
            return at_once

        assert not push("mapped", 1, lent=False, **unseen)
        assert not push("arranged", 2, lent=True)
        assert push("again", 3, lent=True, **unseen)
        assert push("looked at", 4, lent=True, skip_checksums=True)
        loop.sequences.is_idle = False
        assert not push("looked at beside sequences", 7, lent=True, skip_checksums=True)
        assert push("not looked at beside sequences", 8, lent=True, **unseen)
        assert not push("what was live is not known", 5, lent=True, scanned=True)
        assert push("promised", 6, lent=True, scanned=True)
        loop.updater.release(["trainer-1"])
