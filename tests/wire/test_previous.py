"""keep_previous and RollbackUpdate over a real process: what comes back, what never does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engines import RunningEngine, serve
from tests.tiny import load_reference, make_tiny
from tests.wire.trainer import (
    PROMPT,
    InFlight,
    Named,
    assert_serves,
    beside,
    checksums_of,
    chunks_of,
    reference_tokens,
    train,
    until,
)
from trainers_adapters import ModuleSource, PushError, RollsyncError, push_weights
from weight_updater.requests import BeginUpdate, Staging
from weight_updater.requests import Path as Way

INFLIGHT = ["wait", "abort", "keep", "recompute"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "qwen2", "qwen2", tied=True)


@pytest.fixture(scope="module")
def engine(model_dir) -> Iterator[RunningEngine]:
    with serve(model_dir, "--num-pages", "256", "--reserve-device-staging", forked=True) as running:
        yield running


@pytest.fixture
def old(model_dir):
    return load_reference(model_dir)


@pytest.fixture
def new(model_dir):
    model = load_reference(model_dir)
    train(model, 1)
    return model


def push(model, engine: RunningEngine, **options):
    return push_weights(ModuleSource(model), engine.weights, **options)


def refused_rollback(engine: RunningEngine, inflight: str = "wait") -> str:
    with pytest.raises(RollsyncError) as refused:
        engine.weights.rollback(inflight=inflight)
    return refused.value.reason


@pytest.mark.parametrize("staging", ["device", "host"])
@pytest.mark.parametrize("inflight", INFLIGHT)
def test_sequences_in_flight_follow_the_policy_there_and_back(inflight, staging, engine, old, new):
    first = push(old, engine).version
    before = engine.rollout.info()
    stream = InFlight(engine)
    kept = push(new, engine, keep_previous=True, inflight=inflight, staging=staging)
    if inflight in ("wait", "abort"):  # that sequence is over; the way back gets one of its own
        assert set(stream.end().labels) == {first}
        assert stream.finish_reason == ("length" if inflight == "wait" else "abort")
        stream = InFlight(engine)
    back = engine.weights.rollback(inflight=inflight)
    stream.end()
    after = engine.rollout.info()
    sequence = before.state.commit_sequence
    assert (back.state, back.version, back.previous_version) == ("rolled_back", first, kept.version)
    assert after.state.commit_sequence == back.commit_sequence == sequence + 2
    assert after.weight_version == first < kept.version
    assert after.weights_address == before.weights_address
    counts = {"abort": back.num_aborted, "keep": back.num_kept, "recompute": back.num_recomputed}
    assert sum(counts.values()) == counts.get(inflight, 0) == (inflight != "wait")
    if inflight in ("wait", "abort"):
        assert set(stream.labels) == {kept.version}
    else:
        away = stream.labels.index(kept.version)
        home = stream.labels.index(first, away)
        labels = [first] * away + [kept.version] * (home - away) + [first] * (stream.num_tokens - home)
        assert stream.labels == labels
        assert stream.commit_sequences == [sequence, sequence + 1, sequence + 2]
        if inflight == "recompute":
            following = reference_tokens(old, PROMPT + stream.token_ids[:home])
            assert stream.token_ids[home : home + 8] == following
    # Pages from before never match again; those of a sequence that was computed anew are of this commit.
    fresh = engine.greedy(PROMPT, ignore_eos=True)
    assert fresh.num_cached_tokens == (32 if inflight == "recompute" else 0)
    assert_serves(engine, old, first)
    assert engine.greedy(PROMPT).num_cached_tokens == 32, "pages of this commit do"


def test_versions_go_on_above_all_that_ever_committed(engine, old, new):
    first = push(old, engine).version
    kept = push(new, engine, version=first + 10, keep_previous=True).version
    engine.weights.rollback()
    for stale in (first, first + 1, kept):
        with pytest.raises(PushError) as refused:
            push(new, engine, version=stale)
        assert refused.value.reason == "STALE_VERSION"
    assert push(new, engine).version == kept + 1
    assert_serves(engine, new, kept + 1)


@pytest.mark.parametrize("inflight", INFLIGHT)
def test_without_a_kept_version_a_rollback_disturbs_nothing(inflight, engine, old, new):
    first = push(old, engine).version
    push(new, engine, keep_previous=True)
    engine.weights.rollback()
    stream = InFlight(engine)
    assert refused_rollback(engine, inflight) == "NO_PREVIOUS"
    assert stream.end().labels == [first] * stream.num_tokens
    assert stream.finish_reason == "length"
    assert stream.token_ids[:64] == reference_tokens(old, PROMPT, 64)
    assert_serves(engine, old, first)


def test_a_partial_update_is_taken_back_alone(engine, old, new):
    push(old, engine)
    name = "model.layers.1.mlp.up_proj.weight"
    one = Named((n, t) for n, t in ModuleSource(new) if n == name)
    before = checksums_of(ModuleSource(old))
    version = push_weights(one, engine.weights, partial=True, keep_previous=True).version
    assert engine.weights.checksums().by_name == before | checksums_of(one)
    assert engine.weights.rollback().version == version - 1
    assert_serves(engine, old, version - 1)


def test_the_kept_version_outlives_an_update_that_waits_elsewhere(engine, old, new):
    first = push(old, engine).version
    push(new, engine, keep_previous=True, staging="device")
    source = ModuleSource(new)
    begin = BeginUpdate(path=Way.TENSOR, manifest=source.manifest(), staging=Staging.HOST)
    begun = engine.weights.begin(begin)
    engine.weights.update_from_tensor(begun.update_id, chunks_of(source))
    assert refused_rollback(engine) == "UPDATE_IN_PROGRESS"
    engine.weights.abort(begun.update_id)
    engine.weights.rollback()
    assert_serves(engine, old, first)


def test_the_kept_version_is_gone_once_its_buffer_is_used_again(engine, old, new):
    push(old, engine)
    version = push(new, engine, keep_previous=True, staging="device").version
    source = ModuleSource(old)
    begin = BeginUpdate(path=Way.TENSOR, manifest=source.manifest(), staging=Staging.DEVICE)
    begun = engine.weights.begin(begin)
    engine.weights.update_from_tensor(begun.update_id, chunks_of(source))
    engine.weights.abort(begun.update_id)
    assert refused_rollback(engine) == "NO_PREVIOUS"
    assert_serves(engine, new, version)


def test_rollback_on_a_paused_engine(engine, old, new):
    first = push(old, engine).version
    second = push(new, engine, keep_previous=True).version
    stream = InFlight(engine)
    assert engine.rollout.pause("keep") == 1
    assert refused_rollback(engine, "wait") == "PAUSED_WAIT"
    assert engine.weights.rollback(inflight="recompute").num_recomputed == 1
    assert engine.rollout.info().state.paused_by == "user", "only ContinueGeneration undoes a pause"
    engine.rollout.resume()
    stream.end()
    switch = stream.labels.count(second)
    assert stream.labels == [second] * switch + [first] * (stream.num_tokens - switch)
    assert_serves(engine, old, first)


def test_a_rollback_that_waits_lets_nobody_new_in(engine, old, new):
    first = push(old, engine).version
    second = push(new, engine, keep_previous=True).version
    stream = InFlight(engine)
    rollback = beside(engine.weights.rollback, inflight="wait")
    late = beside(engine.greedy, [7, 7, 7], ignore_eos=True)
    assert rollback.result(20).seconds.wait > 0
    assert stream.end().labels == [second] * stream.num_tokens
    assert set(late.result(20).weight_versions) in ({first}, {second})
    assert_serves(engine, old, first)


def test_a_request_that_waits_is_never_sampled_by_weights_older_than_it_asked_for(engine, old, new):
    first = push(old, engine).version
    second = push(new, engine, keep_previous=True).version
    engine.rollout.pause("keep")
    picky = beside(engine.greedy, PROMPT, n=1, min_version=second)
    group = beside(engine.rollout.generate, PROMPT, n=3, max_tokens=4, min_version=second)
    content = beside(engine.greedy, PROMPT, min_version=first)
    until(lambda: engine.rollout.info().state.num_waiting == 5, "all of them wait")
    engine.weights.rollback(inflight="keep")
    for refused in (picky, group):
        with pytest.raises(RollsyncError, match=f"{second} or newer was asked for; {first} is live") as error:
            refused.result(20)
        assert error.value.reason == "VERSION_TOO_OLD"
    engine.rollout.resume()
    assert set(content.result(20).weight_versions) == {first}
    assert_serves(engine, old, first)


@pytest.mark.parametrize("inflight", ["keep", "recompute"])
def test_a_sequence_in_flight_ends_where_the_way_back_leads_below_its_version(inflight, engine, old, new):
    first = push(old, engine).version
    second = push(new, engine, keep_previous=True).version
    stream = InFlight(engine, min_version=second)
    other = InFlight(engine)
    engine.weights.rollback(inflight=inflight)
    stream.end()
    assert stream.finish_reason == "error"
    assert stream.error == f"VERSION_TOO_OLD: weight version {second} or newer was asked for; {first} is live"
    assert set(stream.labels) == {second}
    assert stream.token_ids == reference_tokens(new, PROMPT, len(stream.token_ids))
    assert set(other.end().labels) == {second, first}
    assert_serves(engine, old, first)


def test_torn_weights_have_no_way_back(engine, old, new):
    push(old, engine)
    push(new, engine, keep_previous=True)
    source = ModuleSource(old)
    begin = BeginUpdate(path=Way.TENSOR, manifest=source.manifest(), staging=Staging.NONE)
    begun = engine.weights.begin(begin)
    half = list(chunks_of(source))[:3]
    engine.weights.update_from_tensor(begun.update_id, half)
    engine.weights.abort(begun.update_id)
    until(lambda: engine.rollout.info().state.status == "not_serving", "torn")
    assert refused_rollback(engine) == "WRONG_STATE"
    version = push(old, engine, keep_previous=True).version
    assert refused_rollback(engine) == "NO_PREVIOUS", "half a model is not worth going back to"
    assert_serves(engine, old, version)


def test_keep_previous_needs_a_buffer_to_exchange_with(engine, old, new):
    version = push(old, engine).version
    with pytest.raises(PushError) as refused:
        push(new, engine, keep_previous=True, staging="none")
    assert refused.value.reason == "INVALID_UPDATE"
    assert_serves(engine, old, version)


def test_the_way_back_holds_bytes_not_values(engine, old, new):
    """-0.0 and denormals come back as they were."""
    with torch.no_grad():
        next(old.parameters())[0, :3] = torch.tensor([-0.0, 1e-42, 3.4e38])
    push(old, engine)
    before = engine.weights.checksums()
    push(new, engine, keep_previous=True)
    engine.weights.rollback()
    after = engine.weights.checksums()
    assert (after.by_name, after.folded) == (before.by_name, before.folded)
