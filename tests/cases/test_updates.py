"""The life of an update: half of one is never served, and whatever fails, the engine answers again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from rollout_engine import messages as m
from rollout_engine.errors import EngineError
from rollout_engine.errors import Reason as EngineReason
from tests import pairwise
from tests.cases.common import EMBED, HEAD, Tensors, assert_serves, live, stored, trained
from tests.desk import Desk, Running, chunks_of, desk, num_threads
from tests.tiny import make_tiny
from tests.ways import STAGINGS, WAYS, Ways, manifest_of
from tests.wire.trainer import PROMPT
from weight_updater import commit as commit_module
from weight_updater.errors import Reason, UpdateError, UpdateRefused
from weight_updater.requests import BeginUpdate, Inflight, InitGroup, Path, Staging

OLD, NEW, MIXED = 7, 9, 0


def constant_model(tensors: Tensors, token: int, sign: float) -> Tensors:
    """Weights under which every token is `token`, and under a mixture of two such models (of different token
    and sign) none of either is: the hidden state is `sign` everywhere, and only the head's row of `token`
    fits to it.
    """
    made = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    made[EMBED][:] = sign
    made[HEAD][token] = sign
    for name in made:
        if "norm" in name:
            made[name][:] = 1.0
    return made


@pytest.fixture(scope="module")
def constant(tmp_path_factory) -> Iterator[tuple[Desk, Ways, Callable[[int, float], Tensors]]]:
    """An engine with a head of its own, which can be made to say one token only."""
    directory = make_tiny(tmp_path_factory.mktemp("constant") / "llama", "llama", context_length=4096)
    folder = tmp_path_factory.mktemp("constant-pushes")
    shapes = stored(directory)
    with (
        desk(directory, num_pages=1024, reserve_device_staging=True, weights_roots=(folder,)) as engine,
        Ways(engine, folder) as ways,
    ):
        yield engine, ways, lambda token, sign: constant_model(shapes, token, sign)


def slowly(engine: Desk, update_id: str, tensors: Tensors, num_buckets: int, gap_s: float) -> None:
    """Send the tensors in calls of their own, with time in between for forward passes."""
    chunks = list(chunks_of(tensors))
    step = -(-len(chunks) // num_buckets)
    for start in range(0, len(chunks), step):
        engine.stream(update_id, chunks[start : start + step])
        time.sleep(gap_s)


@pytest.mark.case("B062")
@pytest.mark.parametrize("inflight", list(Inflight))
@pytest.mark.parametrize("staging", STAGINGS)
def test_no_token_comes_from_half_an_update(staging, inflight, constant):
    """Sixteen streams, an update in ten buckets, and requests that come while it is under way."""
    engine, ways, model = constant
    ways.push("segment", model(OLD, 1.0))
    old, new = engine.version, model(NEW, -1.0)
    num_tokens = 3000 if inflight is Inflight.ABORT else 150  # none may end by itself before it is aborted
    streams = [engine.submit([5, 6, 7, i], max_tokens=num_tokens) for i in range(16)]
    for stream in streams:
        stream.started(2)
    begin = BeginUpdate(Path.TENSOR, manifest=manifest_of(new), staging=staging, inflight=inflight)
    begun = engine.begin(begin)
    late: list[Running] = []
    sending = threading.Thread(target=slowly, args=(engine, begun.update_id, new, 10, 0.005))
    sending.start()
    while sending.is_alive():
        late.append(engine.submit([8, 9], max_tokens=20))
        time.sleep(0.01)
    sending.join()
    reply = engine.commit(begun.update_id)
    for stream in [*streams, *late]:
        stream.end()
        tokens, labels = stream.tokens(), stream.labels()
        assert len(tokens) == len(labels) == len(stream.logprobs())
        switch = tokens.count(OLD)
        assert tokens == [OLD] * switch + [NEW] * (len(tokens) - switch), (
            "a token of a mixture, or out of order"
        )
        assert labels == [old] * switch + [reply.version] * (len(tokens) - switch)
        if inflight is Inflight.WAIT:
            assert len(set(tokens)) == 1
        assert stream.finish() == (
            "abort" if inflight is Inflight.ABORT and len(tokens) < 20 else stream.finish()
        )
    assert sum(len(stream.tokens()) == num_tokens for stream in streams) == (
        16 if inflight is not Inflight.ABORT else 0
    )
    assert engine.generate([1, 2]).tokens() == [NEW] * 8


@pytest.mark.case("B062")
@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("way", WAYS)
def test_no_token_comes_from_half_an_update_by_any_path(way, staging, constant):
    engine, ways, model = constant
    prepare_way(ways, way)
    ways.push("segment", model(OLD, 1.0))
    old = engine.version
    streams = [engine.submit([5, 6, 7, i], max_tokens=4000) for i in range(4)]
    for stream in streams:
        stream.started(2)
    reply = ways.push(way, model(NEW, -1.0), staging=staging, inflight=Inflight.KEEP)
    for stream in streams:
        tokens = leave(engine, stream, num_more=20).tokens()
        switch = tokens.count(OLD)
        assert tokens == [OLD] * switch + [NEW] * (len(tokens) - switch)
        assert 0 < switch < len(tokens)
        assert stream.labels() == [old] * switch + [reply.version] * (len(tokens) - switch)
    assert engine.generate([1, 2]).tokens() == [NEW] * 8


def leave(engine: Desk, running: Running, num_more: int) -> Running:
    """Wait for some more tokens of each completion of a request that is under way, and end it."""
    assert not running.ended, "an update that takes long must find it under way"
    running.started(max(len(running.tokens(i)) for i in range(len(running.parts))) + num_more)
    engine.abort(running.request_id)
    return running.end()


@pytest.mark.case("B069")
@pytest.mark.parametrize("inflight", [Inflight.KEEP, Inflight.RECOMPUTE])
@pytest.mark.parametrize("way", WAYS)
def test_every_token_carries_the_version_that_sampled_it(way, inflight, constant):
    """Two updates under one request: three versions in one completion, in order, not the last one only."""
    engine, ways, model = constant
    weights = trained(model(OLD, 1.0))
    prepare_way(ways, way)
    running = engine.submit(PROMPT, max_tokens=4000, n=2, temperature=1.0).started(3)
    versions = [engine.version]
    for _ in range(2):
        seen = [len(running.tokens(i)) for i in range(2)]
        versions.append(ways.push(way, trained(weights), inflight=inflight).version)
        running.started(max(seen) + 2)
    leave(engine, running, num_more=2)
    for index in range(2):
        labels = running.labels(index)
        assert len(labels) == len(running.tokens(index))
        assert labels == sorted(labels)
        assert sorted(set(labels)) == versions
        counted = [(version, labels.count(version)) for version in versions]
        assert running.parts[index][-1].record.versions == counted, "so does the record of the request"


@pytest.mark.case("B071")
def test_every_path_tells_the_same_of_its_commit(engine, ways, weights):
    told: dict[tuple[str, Staging], Any] = {}
    for staging in STAGINGS:
        new = trained(weights)
        for way in WAYS:
            version, sequence = engine.version, engine.updater.commit_sequence
            for push in (ways.push, ways.push_in_steps):
                reply = push(way, new, staging=staging)
            assert (reply.version, reply.previous_version) == (version + 2, version + 1)
            assert reply.commit_sequence == sequence + 2
            assert reply.path == {"segment": "tensor", "stream": "tensor"}.get(way, way)
            assert reply.staging == staging
            assert reply.seconds.transfer > 0
            assert reply.seconds.pause > 0
            told[way, staging] = replace(
                reply, update_id="", path=Path.DISK, version=0, previous_version=0, commit_sequence=0,
                num_changed=0, seconds=reply.seconds.__class__(), gb_per_s=0.0, floor_seconds=0.0,
            )  # fmt: skip
            state = engine.now
            assert (state.weight_version, state.commit_sequence) == (reply.version, reply.commit_sequence)
        assert len({told[way, staging] for way in WAYS}) == 1, "checksums, counts, graphs, warnings"


# ---------------------------------------------------------------- faults


def fail_finalise(engine: Desk, monkeypatch) -> None:
    def fail() -> None:
        raise RuntimeError("no room for the tables")

    monkeypatch.setattr(engine.runner.target, "finalise", fail)


def fail_compare(engine: Desk, monkeypatch) -> None:
    wrong = lambda target, names: lambda: dict.fromkeys(names, 1)  # noqa: E731
    monkeypatch.setattr(commit_module, "start_checksums", wrong)


def fail_verify(engine: Desk, monkeypatch) -> None:
    def fail(*args: Any) -> None:
        raise UpdateRefused(Reason.CHECKSUM_MISMATCH, "not the bytes that were promised")

    monkeypatch.setattr("weight_updater.updater.check_received", fail)
    monkeypatch.setattr("weight_updater.receive.check_received", fail)


def fail_third_write(engine: Desk, monkeypatch) -> None:
    """Of a tensor by itself; small ones come together, and the first lot of them fails."""
    from weight_updater.sink import Sink

    really, calls = Sink._begin_write, []

    def fail_later(self: Sink, *args: Any) -> Any:
        calls.append(1)
        if len(calls) >= 3:
            raise OSError("the device is gone")
        return really(self, *args)

    def fail(self: Sink, indexes: Any) -> None:
        raise OSError("the device is gone")

    monkeypatch.setattr(Sink, "_begin_write", fail_later)
    monkeypatch.setattr(Sink, "_claim_whole", fail)


STAGES = {
    "a write": fail_third_write,
    "verifying": fail_verify,
    "finalising": fail_finalise,
    "comparing": fail_compare,
}


@pytest.mark.case("B063")
@pairwise.parametrize(way=WAYS, staging=STAGINGS, stage=STAGES)
def test_whatever_fails_the_engine_answers_again(
    way, staging, stage, engine, ways, tied_dir, weights, monkeypatch
):
    """It serves the old version, or says that it serves none; and the next update is taken."""
    for push in (ways.push, ways.push_in_steps):
        prepare_way(ways, way)
        before = live(engine)
        running = engine.submit(PROMPT, max_tokens=7900).started()
        with monkeypatch.context() as broken:
            STAGES[stage](engine, broken)
            with pytest.raises((UpdateError, EngineError)):
                push(way, trained(weights), staging=staging, inflight=Inflight.KEEP)
        if open_id := engine.now.open_update_id:
            engine.abort_update(open_id)
        assert engine.version == before[2]
        assert not engine.engine._gate.parked_by_update
        started = time.monotonic()
        if torn := engine.updater.torn_reason:
            assert engine.now.status == "not_serving"
            with pytest.raises(EngineError) as refused:
                engine.generate(PROMPT)
            assert refused.value.reason is EngineReason.NOT_SERVING
        else:
            assert live(engine) == before, "nothing had been written"
            assert engine.now.status == "serving"
            assert engine.generate(PROMPT).labels() == [before[2]] * 8
        assert time.monotonic() - started < 5
        assert (running.end() if torn else leave(engine, running, 20)).finish() == (
            "error" if torn else "abort"
        )
        early = stage in ("a write", "verifying") and (staging is not Staging.NONE or way == "ipc")
        assert not (early and torn)
        assert torn or early or way in ("disk", "segment")
        new = trained(weights)
        assert ways.push("segment", new, staging=staging).version == before[2] + 1
        assert_serves(engine, tied_dir, new)


def prepare_way(ways: Ways, way: str) -> None:
    """A process group takes seconds to make, which would be over before the update comes."""
    if way == "distributed":
        ways.join()


@pytest.mark.case("B063")
@pytest.mark.case("B083")
def test_a_group_that_nobody_hosts_holds_up_nothing(engine, tied_dir, weights):
    before, threads = live(engine), num_threads()
    started = time.monotonic()
    joining = engine.start(
        m.InitWeightsGroup, request=InitGroup("lonely", "127.0.0.1", 1, 1, 2, timeout_s=1.0)
    )
    answered = 0
    while not joining.done():
        assert engine.generate(PROMPT).labels() == [before[2]] * 8
        answered += 1
    with pytest.raises(UpdateRefused, match="'lonely', rank 1 of world size 2") as refused:
        joining.result()
    assert refused.value.reason in (Reason.TIMEOUT, Reason.PEER_LOST)
    assert time.monotonic() - started < 15  # a process starts first
    assert answered > 5, "requests were answered while it waited"
    assert "lonely" not in engine.updater.groups.names
    assert live(engine) == before
    assert num_threads() <= threads
