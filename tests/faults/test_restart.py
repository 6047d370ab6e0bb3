"""Crash and restart on real processes: drained, kept out below a version, one version in a fleet."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.faults.stand import Stand, until
from tests.faults.weights import PROMPT, base_of, load_model, weights_of
from tests.wire.trainer import Named, beside, checksums_of
from trainers_adapters import (
    BroadcastGroup,
    PushError,
    RollsyncError,
    TensorSegment,
    TensorStream,
    WeightsClient,
    push_weights,
)
from weight_updater.requests import BeginUpdate
from weight_updater.requests import Path as Way


@pytest.fixture(scope="module")
def base(faults_model):
    return base_of(load_model(faults_model))


@pytest.fixture
def stands(parent, faults_model, faults_dir) -> Iterator[tuple[Stand, Stand]]:
    """Two engines that serve; what a test leaves of them is stopped."""
    made = Stand(parent, faults_model, faults_dir), Stand(parent, faults_model, faults_dir)
    for stand in made:
        stand.start()
    yield made
    for stand in made:
        stand.stop()


def test_sigterm_lets_streams_end_and_ends_what_is_open(parent, faults_model, faults_dir, base):
    stand = Stand(parent, faults_model, faults_dir)
    stand.start(version=3)
    manifest = Named(base.items()).manifest()
    stand.weights.begin(BeginUpdate(path=Way.TENSOR, manifest=manifest, lease_s=60.0))
    stream = stand.rollout.generate_stream(PROMPT, max_tokens=300, temperature=0.0, ignore_eos=True)
    parts = [next(stream)]
    ending = beside(lambda: parts.extend(stream))
    stand.front.signal(signal.SIGTERM)
    until(lambda: stand.refusal() != "", "an engine that drains takes no request")
    ending.result(30)
    assert sum(len(part.token_ids) for part in parts) == 300
    assert parts[-1].finish_reason == "length"
    assert {version for part in parts for version in part.weight_versions} == {3}
    assert stand.front.wait(10) == 0, "draining is no failure, and nobody waits for the open update"
    stand.stop()


def test_an_engine_that_replaces_a_lost_one_says_which_version_it_has_and_waits_for_more(
    parent, faults_model, faults_dir, base
):
    stand = Stand(parent, faults_model, faults_dir)
    stand.start(version=9, min_version=10)
    assert stand.rollout.info().weight_version == stand.state().weight_version == 9
    assert stand.weights.checksums().by_name == checksums_of(base.items())
    assert stand.refusal() == "VERSION_TOO_OLD"
    with pytest.raises(RollsyncError) as scored:
        stand.rollout.score([PROMPT])
    assert scored.value.reason == "VERSION_TOO_OLD"
    with pytest.raises(PushError) as stale:
        push_weights(Named(base.items()), stand.weights, 9, via=TensorStream(chunk_bytes=16384))
    assert stale.value.reason == "STALE_VERSION"
    report = push_weights(Named(weights_of(base, 5).items()), stand.weights, via=TensorSegment())
    assert report.version == 10
    (completion,) = stand.rollout.generate(PROMPT, max_tokens=4, ignore_eos=True)
    assert completion.weight_versions == [10] * 4
    stand.stop()


class Dying(WeightsClient):
    """A client whose engine is killed just before one of its calls."""

    def __init__(self, stand: Stand, before: str) -> None:
        super().__init__(stand.address)
        self._stand, self._before = stand, before

    def _reach(self, call: str) -> None:
        if call == self._before:
            os.kill(self._stand.engine_pid, signal.SIGKILL)
            self._stand.until_engine_ended()

    def begin(self, *args, **options):
        self._reach("begin")
        return super().begin(*args, **options)

    def prepare(self, *args, **options):
        self._reach("prepare")
        return super().prepare(*args, **options)

    def commit(self, *args, **options):
        self._reach("commit")
        return super().commit(*args, **options)


@pytest.mark.parametrize(
    ("before", "sender"),
    [
        ("begin", TensorSegment),
        ("prepare", lambda: BroadcastGroup(bucket_bytes=65536)),
        ("commit", lambda: TensorStream(chunk_bytes=16384)),
    ],
)
def test_a_fleet_that_loses_an_engine_ends_with_one_version_or_names_who_is_behind(
    before, sender, stands, base
):
    """All or none until the first commit; afterwards forward only, and nobody is served old weights."""
    first, second = stands
    source = Named(weights_of(base, 6).items())
    old = first.weights.checksums()
    with Dying(second, before) as dying, sender() as via, pytest.raises(PushError) as failed:
        push_weights(source, [first.weights, dying], 4, via=via)
    error = failed.value
    assert second.address in error.message
    live = first.weights.checksums()
    if before == "commit":
        assert (error.committed, error.laggards) == ((first.address,), (second.address,))
        assert (error.version, live.weight_version) == (4, 4)
        assert live.by_name == checksums_of(source)
    else:
        assert (error.committed, error.laggards) == ((), ())
        assert live == old
        assert first.state().open_update_id == ""
    second.stop()
    second.start(version=0, min_version=live.weight_version + (before != "commit"))
    assert second.rollout.info().weight_version == 0
    assert second.refusal() == "VERSION_TOO_OLD"
    with sender() as via:
        report = push_weights(source, [first.weights, second.weights], 5, via=via)
    assert set(report.replies) == {first.address, second.address}
    for stand in stands:
        live = stand.weights.checksums()
        assert (live.weight_version, live.by_name) == (5, checksums_of(source))
        (completion,) = stand.rollout.generate(PROMPT, max_tokens=4, ignore_eos=True, min_version=5)
        assert completion.weight_versions == [5] * 4
