"""The life of an update over a real process: repeats, leases, ends in every state, sleep."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.engines import RunningEngine, serve
from tests.tiny import make_tiny
from tests.wire.trainer import (
    PATHS,
    PROMPT,
    SEEDS,
    InFlight,
    Named,
    assert_serves,
    begin,
    beside,
    chunks_of,
    push,
    train,
    until,
    until_closed,
)
from trainers_adapters import (
    ModuleSource,
    PushError,
    RollsyncError,
)
from trainers_adapters.sending import Outgoing, Sender
from weight_updater.requests import BeginUpdate, Inflight, Staging, UpdateReply
from weight_updater.requests import Path as Way


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "llama", "llama", tied=True)


@pytest.fixture(scope="module")
def engine(model_dir, work_dir) -> Iterator[RunningEngine]:
    with serve(model_dir, "--weights-root", str(work_dir), "--num-pages", "256", forked=True) as running:
        yield running


def send(engine: RunningEngine, update_id: str, source) -> UpdateReply:
    return engine.weights.update_from_tensor(update_id, chunks_of(source))


def reason_of(call: Callable, *args, **kwargs) -> str:
    with pytest.raises(RollsyncError) as refused:
        call(*args, **kwargs)
    return refused.value.reason


# ---------------------------------------------------------------- repeats


@pytest.mark.case("B124")
def test_every_call_of_an_update_may_be_repeated(engine, model):
    source = ModuleSource(model)
    before = engine.rollout.info()
    request = BeginUpdate(path=Way.TENSOR, update_id=f"repeated-{next(SEEDS)}", manifest=source.manifest())
    begun = engine.weights.begin(request)
    assert engine.weights.begin(request) == begun
    first = send(engine, begun.update_id, source)
    again = send(engine, begun.update_id, source)
    assert (again.state, again.num_bytes) == (first.state, first.num_bytes) == ("received", begun.total_bytes)
    vote = engine.weights.prepare(begun.update_id)
    assert engine.weights.prepare(begun.update_id).state == vote.state == "prepared"
    done = engine.weights.commit(begun.update_id)
    assert engine.weights.commit(begun.update_id) == done
    assert send(engine, begun.update_id, source) == done, "a late repeat of an earlier call as well"
    after = engine.rollout.info()
    assert after.weight_version == done.version == before.weight_version + 1
    assert after.state.commit_sequence == before.state.commit_sequence + 1
    assert_serves(engine, model, done.version)


def one_call(path: str, engine: RunningEngine, sender: Sender, update: BeginUpdate, outgoing: Outgoing):
    """The one-call form of a path: begin, receive and commit together."""
    weights = engine.weights
    if path == "disk":
        return weights.update_from_disk(update, update.directory)
    if path == "tensor":
        return weights.update_from_tensor(update, chunks_of(outgoing.source))
    if path == "segment":
        return weights.update_from_tensor(update, segment=sender._segment.descriptor)
    if path == "ipc":
        return weights.update_from_ipc(update, [sender.descriptor])
    call = beside(weights.update_from_distributed, update, sender._name)
    sender._group.broadcast(
        outgoing.manifest, (t for _, t in outgoing.source), update.bucket_bytes or 64 << 20
    )
    return call.result(30)


@pytest.mark.case("B124")
@pytest.mark.parametrize("path", PATHS)
def test_one_call_does_it_all_once(path, engine, senders, model):
    source, sender = ModuleSource(model), senders[path]
    version = engine.rollout.info().weight_version
    outgoing = Outgoing(source, source.manifest(), time.monotonic() + 60)
    fields = {"manifest": outgoing.manifest} | sender.stage(outgoing, [engine.weights])
    update = BeginUpdate(path=sender.path, update_id=f"one-call-{path}", **fields)
    done = one_call(path, engine, sender, update, outgoing)
    assert (done.state, done.version, done.verified) == ("committed", version + 1, True)
    assert_serves(engine, model, version + 1)
    if path == "distributed":  # nobody broadcasts a second time: the reply is the one of the first
        assert engine.weights.update_from_distributed(update, sender._name) == done
    else:
        assert one_call(path, engine, sender, update, outgoing) == done
    assert engine.rollout.info().weight_version == version + 1


@pytest.mark.case("B124")
def test_a_commit_that_is_repeated_while_the_first_waits_gets_its_reply(engine, model):
    source = ModuleSource(model)
    stream = InFlight(engine)
    begun = begin(engine, source, inflight=Inflight.WAIT)
    send(engine, begun.update_id, source)
    commits = [beside(engine.weights.commit, begun.update_id) for _ in range(3)]
    first, *others = [commit.result(20) for commit in commits]
    assert others == [first, first]
    assert first.version == begun.next_version
    assert stream.end().labels == [begun.version] * stream.num_tokens


def test_a_manifest_is_known_by_its_digest(engine, model):
    source = ModuleSource(model)
    manifest = source.manifest()
    push(source, engine)
    train(model, next(SEEDS))
    checksums = tuple(spec.checksum for spec in source.manifest().tensors)
    short = BeginUpdate(path=Way.TENSOR, manifest_digest=manifest.digest(), checksums=checksums)
    begun = engine.weights.begin(short)
    assert begun.manifest_digest == manifest.digest()
    send(engine, begun.update_id, source)
    assert_serves(engine, model, engine.weights.commit(begun.update_id).version)
    unknown = BeginUpdate(path=Way.TENSOR, manifest_digest="0" * 32)
    assert reason_of(engine.weights.begin, unknown) == "MANIFEST_UNKNOWN"
    odd = BeginUpdate(path=Way.TENSOR, manifest_digest=manifest.digest(), checksums=checksums[1:])
    assert reason_of(engine.weights.begin, odd) == "INVALID_UPDATE"
    stale = BeginUpdate(path=Way.TENSOR, manifest_digest=manifest.digest(), checksums=checksums[::-1])
    begun = engine.weights.begin(stale)
    send(engine, begun.update_id, source)
    assert reason_of(engine.weights.commit, begun.update_id) == "CHECKSUM_MISMATCH"


# ---------------------------------------------------------------- leases and votes


@pytest.mark.case("B066")
def test_a_prepared_update_ends_at_the_coordinators_deadline(engine, model):
    source, before = ModuleSource(model), engine.weights.checksums()
    begun = begin(engine, source)
    send(engine, begun.update_id, source)
    assert engine.weights.prepare(begun.update_id, deadline_s=60).state == "prepared"
    assert engine.rollout.info().state.open_update_state == "prepared"
    assert reason_of(send, engine, begun.update_id, source) == "WRONG_STATE"
    assert engine.weights.abort(begun.update_id) is True
    begun = begin(engine, source)
    send(engine, begun.update_id, source)
    assert engine.weights.prepare(begun.update_id, deadline_s=0.5).state == "prepared"
    until_closed(engine)
    assert reason_of(engine.weights.commit, begun.update_id) == "UNKNOWN_UPDATE"
    assert engine.weights.checksums() == before
    assert push(source, engine).version == begun.next_version


def test_a_vote_needs_every_byte_and_the_sender_may_go_on(engine, model):
    source = ModuleSource(model)
    chunks = list(chunks_of(source))
    begun = begin(engine, source)
    engine.weights.update_from_tensor(begun.update_id, chunks[:-1])
    assert reason_of(engine.weights.prepare, begun.update_id) == "INCOMPLETE"
    assert reason_of(engine.weights.commit, begun.update_id) == "INCOMPLETE"
    engine.weights.update_from_tensor(begun.update_id, chunks[-1:])
    engine.weights.prepare(begun.update_id, deadline_s=20)
    assert_serves(engine, model, engine.weights.commit(begun.update_id).version)


@pytest.mark.case("B066")
def test_a_lease_that_is_renewed_lives_on_and_then_ends(engine, model):
    source = ModuleSource(model)
    update_id = renewed(engine, source, 2.0) or renewed(engine, source, 15.0)
    assert engine.weights.renew(update_id, lease_s=0.2) == 0.2
    until_closed(engine)
    assert reason_of(engine.weights.renew, update_id) == "UNKNOWN_UPDATE"


def renewed(engine: RunningEngine, source, lease_s: float) -> str:
    """An update that has lived for longer than its lease; "" if this process stood still for a whole one."""
    started = asked = time.monotonic()
    begun = begin(engine, source, lease_s=lease_s)
    assert begun.lease_s == lease_s
    while time.monotonic() - started < 1.2 * lease_s:
        time.sleep(lease_s / 5)
        before, asked = asked, time.monotonic()
        try:
            assert engine.weights.renew(begun.update_id) == lease_s
        except RollsyncError:
            assert time.monotonic() - before > lease_s, "the lease ended before its time"
            return ""
    assert engine.weights.renew(begun.update_id, lease_s=60.0) == 60.0
    return begun.update_id


# ---------------------------------------------------------------- abort in every state


def slow(source, gate: threading.Event) -> Iterator[tuple[int, int, memoryview]]:
    """Two chunks, and the rest when the gate opens."""
    for number, chunk in enumerate(chunks_of(source)):
        if number == 2:
            assert gate.wait(30)
        yield chunk


@pytest.mark.case("B065")
@pytest.mark.parametrize("staging", [Staging.HOST, Staging.NONE])
@pytest.mark.parametrize("state", ["begun", "receiving", "received", "prepared"])
def test_abort_ends_an_update_in_any_state(state, staging, engine, model):
    source, before = ModuleSource(model), engine.weights.checksums()
    begun = begin(engine, source, staging=staging)
    gate = threading.Event()
    call = None
    if state == "receiving":
        call = beside(engine.weights.update_from_tensor, begun.update_id, slow(source, gate))
        until(lambda: engine.rollout.info().state.open_update_received_bytes > 0, "bytes arrive")
    elif state != "begun":
        send(engine, begun.update_id, source)
    if state == "prepared":
        engine.weights.prepare(begun.update_id)
    assert engine.weights.abort(begun.update_id) is True
    if call is not None:
        gate.set()
        assert reason_of(call.result, 20) in ("UNKNOWN_UPDATE", "PEER_LOST")
    assert engine.weights.abort(begun.update_id) is False
    assert reason_of(engine.weights.commit, begun.update_id) == "UNKNOWN_UPDATE"
    if staging is Staging.NONE and state != "begun":
        assert reason_of(engine.greedy, PROMPT) == "NOT_SERVING"
    else:
        assert engine.weights.checksums() == before
        assert engine.greedy(PROMPT, ignore_eos=True).weight_versions == [before.weight_version] * 8
    assert_serves(engine, model, push(source, engine).version)


@pytest.mark.case("B065")
@pytest.mark.parametrize("staging", [Staging.HOST, Staging.NONE])
def test_abort_ends_an_update_that_waits_for_sequences(staging, engine, model):
    """Nothing has been written yet, with staging none either; and the wait is over at once."""
    source, before = ModuleSource(model), engine.weights.checksums()
    stream = InFlight(engine)
    begun = begin(engine, source, staging=staging, inflight=Inflight.WAIT)
    if staging is Staging.HOST:
        send(engine, begun.update_id, source)
        waiting = beside(engine.weights.commit, begun.update_id)
    else:
        waiting = beside(send, engine, begun.update_id, source)
    time.sleep(0.05)
    assert engine.weights.abort(begun.update_id) is True
    assert reason_of(waiting.result, 20) in ("UNKNOWN_UPDATE", "PEER_LOST")
    assert engine.rollout.info().state.status == "serving"
    assert stream.end().labels == [before.weight_version] * stream.num_tokens
    assert engine.weights.checksums() == before
    assert_serves(engine, model, push(source, engine).version)


@pytest.mark.parametrize("path", PATHS)
def test_inflight_wait_is_refused_on_a_paused_engine(path, engine, senders, model):
    version = engine.rollout.info().weight_version
    engine.rollout.pause("keep")
    try:
        with pytest.raises(PushError) as endless:
            push(ModuleSource(model), engine, via=senders[path], inflight="wait")
        assert (endless.value.code, endless.value.reason) == ("FAILED_PRECONDITION", "PAUSED_WAIT")
        assert push(ModuleSource(model), engine, via=senders[path], inflight="keep").version == version + 1
        assert engine.rollout.info().state.paused_by == "user"
    finally:
        engine.rollout.resume()
    assert_serves(engine, model, version + 1)


# ---------------------------------------------------------------- sleep


@pytest.mark.case("B110")
@pytest.mark.parametrize("path", PATHS)
def test_an_update_while_asleep_is_refused(path, engine, senders, model):
    engine.rollout.release_memory()
    try:
        with pytest.raises(PushError) as asleep:
            push(ModuleSource(model), engine, via=senders[path])
        assert (asleep.value.code, asleep.value.reason) == ("FAILED_PRECONDITION", "ASLEEP")
    finally:
        assert engine.rollout.resume_memory("weights").needs_update
        report = push(ModuleSource(model), engine, via=senders[path])
        assert reason_of(engine.greedy, PROMPT) == "ASLEEP", "the KV pool sleeps on"
        assert not engine.rollout.resume_memory("kv_cache").needs_update
        engine.rollout.resume_memory()
    assert_serves(engine, model, report.version)


@pytest.mark.case("B033")
@pytest.mark.case("B111")
def test_what_is_in_no_checkpoint_survives_three_sleeps(engine, senders, model):
    """Rotary tables come with no update: the tokens are right only if they are as before."""
    version = push(ModuleSource(model), engine, via=senders["disk"]).version
    before = engine.greedy(PROMPT, 32, ignore_eos=True)
    for cycle in range(1, 4):
        assert engine.rollout.release_memory() > 0
        assert engine.rollout.info().state.released_tags
        assert engine.rollout.resume_memory().needs_update
        assert reason_of(engine.greedy, PROMPT) == "NOT_SERVING"
        assert reason_of(push, Named(list(ModuleSource(model))[:1]), engine, partial=True) == "WRONG_STATE"
        push(ModuleSource(model), engine, via=senders["disk"])
        after = engine.greedy(PROMPT, 32, ignore_eos=True)
        assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)
        assert after.weight_versions == [version + cycle] * 32
    assert_serves(engine, model, version + 3)


def test_memory_is_not_released_under_work(engine, model):
    begun = begin(engine, ModuleSource(model))
    assert reason_of(engine.rollout.release_memory, "weights") == "BUSY"
    engine.weights.abort(begun.update_id)
    stream = InFlight(engine)
    assert reason_of(engine.rollout.release_memory) == "BUSY"
    assert stream.end().finish_reason == "length"


@pytest.mark.case("B142")
@pytest.mark.parametrize("path", ["disk", "segment", "ipc"])
def test_without_staging_bad_values_that_can_be_seen_beforehand_disturb_nobody(path, engine, senders, model):
    version = push(ModuleSource(model), engine).version
    stream = InFlight(engine)
    bad = copy.deepcopy(model)
    with torch.no_grad():
        bad.model.norm.weight[1] = float("nan")
    with pytest.raises(PushError) as refused:
        push(ModuleSource(bad), engine, via=senders[path], staging="none", inflight="abort")
    assert refused.value.reason == "NONFINITE"
    assert stream.end().finish_reason == "length"
    assert stream.labels == [version] * stream.num_tokens
    assert_serves(engine, model, version)
