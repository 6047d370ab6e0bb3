"""Updates in one call, on a loop turned by hand: one trip to a worker, and no commit beside it."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from rollout_engine import messages
from rollout_engine.flows import FlowRunner
from rollout_engine.gate import Gate
from rollout_engine.update_flow import UpdateFlow
from rollout_engine.update_records import UpdateRecords
from tests.unit.weight_updater.fake_gpu import FakeGpu, fake_gpu
from tests.unit.weight_updater.test_from_cuda import lay_out
from tests.unit.weight_updater.tiny_target import (
    EMBED,
    HEAD,
    TinyTarget,
    make_updater,
    manifest_of,
    num_mappings,
    pack,
    weights,
)
from weight_updater.errors import Reason, UpdateError, WeightsTorn
from weight_updater.requests import BeginUpdate, FromIpc, FromTensor, Path, Staging, UpdateReply, UpdateState
from weight_updater.shm import SharedSegment
from weight_updater.sink import Sink


class NoSequences:
    """A scheduler and the uploads of an engine that generates nothing."""

    def __init__(self) -> None:
        self.started: list[Any] = []
        self.live: list[Any] = []
        self.is_idle = True

    def started_with(self, adapter: str) -> list[Any]:
        return self.started

    def on_commit(self, commit_sequence: int) -> None:
        pass

    def is_open(self, call_id: int) -> bool:
        return False

    def drop(self, call_id: int) -> None:
        pass

    def interrupt(self, call_id: int) -> None:
        pass


class Loop:
    """The engine's loop, as far as updates go."""

    def __init__(self) -> None:
        self.target = TinyTarget()
        self.updater = make_updater(self.target)
        self.sequences: Any = NoSequences()
        self.updates = UpdateFlow(
            self.updater,
            self.sequences,
            Gate(),
            self.sequences,
            finish=lambda *_: None,
            end_too_old=lambda version: None,
            copy_bytes_per_second=1e9,
            records=UpdateRecords(self.updater),
        )
        self.flows = FlowRunner(wake=lambda: None)
        self.answers: dict[str, UpdateReply | Exception] = {}
        self.segment = SharedSegment.create(manifest_of(weights(1)).packed_offsets()[1])

    def start(self, name: str, flow: Any) -> None:
        def done(result: Any, error: Exception | None) -> None:
            self.answers[name] = result if error is None else error

        self.flows.start(flow, done)

    def update(self, name: str, seed: int, *, spoil: bool = False) -> None:
        """Start an update in one call."""
        tensors = weights(seed)
        manifest = manifest_of(tensors)
        if spoil:
            tensors[EMBED][0, 0] += 1
        pack(self.segment, tensors)
        begin = BeginUpdate(path=Path.TENSOR, update_id=name, manifest=manifest, staging=Staging.HOST)
        tensor = FromTensor("", self.segment.descriptor)
        command = messages.Update(call_id=1, tensor=tensor, begin=begin)
        self.start(name, self.updates.update(command))

    def turn_until(self, name: str) -> UpdateReply | Exception:
        deadline = time.monotonic() + 10
        while name not in self.answers:
            assert time.monotonic() < deadline, f"{name} is not answered"
            self.flows.turn()
            time.sleep(0.001)
        return self.answers[name]


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.flows.close()
    made.updater.close()
    made.segment.close()
    made.segment.unlink()


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
