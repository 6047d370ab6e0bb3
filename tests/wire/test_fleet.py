"""push_weights to two real engines: all or none, and who lags is named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines import RunningEngine, serve
from tests.tiny import make_tiny
from tests.wire.trainer import PATHS, PROMPT, SEEDS, InFlight, all_senders, assert_serves, chunks_of, train
from trainers_adapters import (
    AdoptedArena,
    ModuleSource,
    PushError,
    RollsyncError,
    TensorStream,
    WeightsClient,
    bucket_push,
    push_weights,
)
from trainers_adapters import push as push_module
from trainers_adapters.bucket_push import BucketPush
from trainers_adapters.sending import Sender
from weight_updater.requests import BeginUpdate
from weight_updater.requests import Path as Way


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def fleet(model_dir, work_dir) -> Iterator[tuple[RunningEngine, RunningEngine]]:
    flags = ["--weights-root", str(work_dir), "--num-pages", "128"]
    with serve(model_dir, *flags, forked=True) as first, serve(model_dir, *flags, forked=True) as second:
        yield first, second


@pytest.fixture(scope="module")
def senders(fleet, work_dir) -> Iterator[dict[str, Sender]]:
    with all_senders(work_dir) as made:
        yield made


def next_version(fleet) -> int:
    return max(engine.rollout.info().weight_version for engine in fleet) + 1


def push(model, fleet, **options):
    """A push under a version that is new to every engine, whatever the test before left behind."""
    options.setdefault("version", next_version(fleet))
    clients = options.pop("clients", [engine.weights for engine in fleet])
    return push_weights(ModuleSource(model), clients, **options)


def state_of(engine: RunningEngine) -> tuple:
    live = engine.weights.checksums()
    return live.by_name, live.weight_version, live.commit_sequence


def assert_unchanged(fleet, before) -> None:
    for engine, state in zip(fleet, before, strict=True):
        assert state_of(engine) == state
        assert engine.rollout.info().state.open_update_id == ""
        assert engine.greedy(PROMPT, ignore_eos=True).weight_versions == [state[1]] * 8


@pytest.mark.case("B073")
@pytest.mark.parametrize("path", PATHS)
def test_a_push_commits_the_same_everywhere(path, fleet, senders, model):
    report = push(model, fleet, via=senders[path])
    assert set(report.replies) == {engine.address for engine in fleet}
    assert {reply.version for reply in report.replies.values()} == {report.version}
    assert len({reply.live_checksum for reply in report.replies.values()}) == 1
    for engine in fleet:
        assert_serves(engine, model, report.version)


def test_an_engine_that_is_paused_refuses_for_all(fleet, model):
    push(model, fleet)
    before = [state_of(engine) for engine in fleet]
    _, second = fleet
    second.rollout.pause("keep")
    try:
        with pytest.raises(PushError) as refused:
            push(model, fleet, inflight="wait")
    finally:
        second.rollout.resume()
    error = refused.value
    assert (error.reason, error.committed, error.laggards) == ("PAUSED_WAIT", (), ())
    assert second.address in error.message
    assert_unchanged(fleet, before)


def test_engines_that_would_commit_different_versions_are_told_apart(fleet, model):
    push(model, fleet)
    _, second = fleet
    alone = push_weights(ModuleSource(model), second.weights).version
    before = [state_of(engine) for engine in fleet]
    with pytest.raises(PushError) as disagree:
        push(model, fleet, version=0)
    assert disagree.value.reason == "ENGINES_DISAGREE"
    with pytest.raises(PushError) as stale:
        push(model, fleet, version=alone)
    assert stale.value.reason == "STALE_VERSION"
    assert second.address in stale.value.message
    assert_unchanged(fleet, before)
    assert push(model, fleet, version=alone + 1).version == alone + 1
    assert {engine.rollout.info().weight_version for engine in fleet} == {alone + 1}


@pytest.mark.parametrize("path", ["tensor", "ipc"])
def test_unstaged_updates_are_for_one_engine(path, fleet, senders, model):
    push(model, fleet)
    before = [state_of(engine) for engine in fleet]
    with pytest.raises(PushError) as refused:
        push(model, fleet, via=senders[path], staging="none")
    assert refused.value.reason == "NO_STAGING"
    assert_unchanged(fleet, before)


def test_adoption_is_for_one_engine(fleet, model):
    first, _ = fleet
    before = [state_of(engine) for engine in fleet]
    manifest = ModuleSource(model).manifest()
    shared = BeginUpdate(path=Way.IPC, manifest=manifest, adopt=True, num_engines=2)
    with pytest.raises(RollsyncError) as refused:
        first.weights.begin(shared)
    assert refused.value.reason == "NO_STAGING"
    with AdoptedArena(first.weights, model):
        pass
    assert_unchanged(fleet, before)


class Spoiling(TensorStream):
    """A stream whose last chunk arrives at one engine with a bit flipped."""

    def __init__(self, victim: str) -> None:
        super().__init__()
        self._victim = victim

    def send(self, client, begun, outgoing):
        chunks = list(chunks_of(outgoing.source))
        if client.address == self._victim:
            index, offset, data = chunks[-1]
            chunks[-1] = index, offset, bytes([data[0] ^ 1]) + bytes(data[1:])
        return client.update_from_tensor(begun.update_id, chunks)


@pytest.mark.case("B073")
@pytest.mark.parametrize("victim", [0, 1])
def test_one_failed_vote_aborts_all(victim, fleet, model):
    before = [state_of(engine) for engine in fleet]
    stream = InFlight(fleet[1 - victim])
    with pytest.raises(PushError) as refused:
        push(model, fleet, via=Spoiling(fleet[victim].address), inflight="abort")
    assert refused.value.reason == "CHECKSUM_MISMATCH"
    assert "PrepareUpdate" in refused.value.message
    assert fleet[victim].address in refused.value.message
    assert stream.end().finish_reason == "length", "no sequence pays for a push that failed"
    assert_unchanged(fleet, before)


class Losing(WeightsClient):
    """A client whose engine loses the update just before its commit: somebody aborts it."""

    def commit(self, update_id, **options):
        self.abort(update_id)
        return super().commit(update_id, **options)


def test_a_first_engine_that_does_not_commit_takes_the_push_back(fleet, model):
    first, second = fleet
    before = [state_of(engine) for engine in fleet]
    with Losing(first.address) as losing, pytest.raises(PushError) as refused:
        push(model, fleet, clients=[losing, second.weights])
    error = refused.value
    assert (error.reason, error.committed, error.laggards) == ("UNKNOWN_UPDATE", (), ())
    assert_unchanged(fleet, before)


@pytest.mark.case("B073")
@pytest.mark.case("B074")
@pytest.mark.parametrize("path", ["tensor", "distributed"])
def test_after_the_first_commit_a_laggard_is_named_and_kept_out(path, fleet, senders, model):
    first, second = fleet
    push(model, fleet)
    train(model, next(SEEDS))
    lagging = state_of(second)
    with Losing(second.address) as losing, pytest.raises(PushError) as incomplete:
        push(model, fleet, clients=[first.weights, losing], via=senders[path])
    error = incomplete.value
    assert (error.committed, error.laggards) == ((first.address,), (second.address,))
    assert second.address in error.message
    assert f"min_version={error.version}" in error.message
    assert_serves(first, model, error.version)
    assert state_of(second) == lagging
    assert first.greedy(PROMPT, min_version=error.version).weight_version == error.version
    with pytest.raises(RollsyncError) as kept_out:
        second.greedy(PROMPT, min_version=error.version)
    assert kept_out.value.reason == "VERSION_TOO_OLD"
    report = push(model, fleet, via=senders[path])
    assert {engine.rollout.info().weight_version for engine in fleet} == {report.version}
    for engine in fleet:
        assert_serves(engine, model, report.version)


def in_one_call(model, clients) -> None:
    push_weights(ModuleSource(model), clients)


def in_buckets(model, clients) -> None:
    buckets = BucketPush(clients, path="tensor")
    try:
        buckets.begin()
        for name, tensor in model.named_parameters():
            if buckets.add(name, tensor):
                buckets.send()
        buckets.prepare()
        buckets.commit()
    finally:
        buckets.close()


class Deaf(WeightsClient):
    """A client whose engine cannot be reached when it is to commit, and can be afterwards."""

    def commit(self, update_id, **options):
        raise RollsyncError("UNAVAILABLE", "UNREACHABLE", "no engine answers")


@pytest.mark.case("B074")
@pytest.mark.parametrize("how", [in_one_call, in_buckets])
def test_a_laggard_that_answers_again_takes_the_next_push(how, fleet, model, monkeypatch):
    monkeypatch.setattr(push_module, "COMMIT_RETRY_S", 0.3)
    monkeypatch.setattr(bucket_push, "COMMIT_RETRY_S", 0.3)
    first, second = fleet
    push(model, fleet)
    train(model, next(SEEDS))
    with Deaf(second.address) as deaf, pytest.raises(PushError) as incomplete:
        how(model, [first.weights, deaf])
    assert incomplete.value.laggards == (second.address,)
    report = push(model, fleet)
    assert {engine.rollout.info().weight_version for engine in fleet} == {report.version}


@pytest.mark.case("B139")
def test_replicas_draw_different_samples_unless_they_are_seeded(fleet, model):
    push(model, fleet)

    def draw(**options) -> list[tuple[int, ...]]:
        return [
            tuple(completion.token_ids)
            for engine in fleet
            for completion in engine.rollout.generate(PROMPT, n=8, max_tokens=32, ignore_eos=True, **options)
        ]

    assert len(set(draw())) == 16
    seeded = draw(seed=42)
    assert seeded[:8] == seeded[8:], "the same seed gives the same samples on every replica"
    assert len(set(seeded)) == 8


@pytest.mark.case("B125")
def test_instances_can_be_told_apart(fleet):
    first, second = (engine.rollout.info() for engine in fleet)
    assert first.instance_id != second.instance_id
