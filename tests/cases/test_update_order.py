"""Updates beside and after each other: two at once, one that failed, and which version is whose."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from rollout_engine import messages as m
from rollout_engine.errors import EngineError
from rollout_engine.errors import Reason as EngineReason
from tests.cases.common import NORM, Q, assert_serves, live, trained
from tests.desk import WAIT_S, Desk, chunks_of, desk
from tests.ways import WAYS, Ways, manifest_of
from tests.wire.trainer import PROMPT
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.requests import BeginUpdate, FromTensor, Path, Staging


@pytest.mark.case("B065")
@pytest.mark.parametrize("staging", [Staging.HOST, Staging.NONE])
@pytest.mark.parametrize(
    "ways_of_two", [("disk", "disk"), ("disk", "stream"), ("segment", "ipc"), ("stream", "stream")]
)
def test_two_updates_at_once(ways_of_two, staging, engine, ways, tied_dir, weights):
    """Each is answered; the weights are those of one of them, whole, and the version counts the commits."""
    models = [trained(weights) for _ in range(2)]
    offers = [ways.offer(way, model) for way, model in zip(ways_of_two, models, strict=True)]
    for _ in range(5):
        version = engine.version
        with ThreadPoolExecutor(2) as pool:
            started = time.monotonic()
            calls = [pool.submit(o.send, "", replace(o.begin, staging=staging)) for o in offers]
            outcomes = [call.exception(10) or call.result() for call in calls]
            assert time.monotonic() - started < 10
        committed = [o for o in outcomes if not isinstance(o, Exception)]
        refused = [o for o in outcomes if isinstance(o, Exception)]
        assert committed
        assert all(isinstance(o, UpdateRefused) and o.reason is Reason.UPDATE_IN_PROGRESS for o in refused)
        assert sorted(o.version for o in committed) == [version + i + 1 for i in range(len(committed))]
        assert engine.version == version + len(committed)
        last = outcomes.index(max(committed, key=lambda o: o.version))
        assert_serves(engine, tied_dir, models[last])


@pytest.mark.case("B066")
@pytest.mark.parametrize("staging", [Staging.DEVICE, Staging.HOST])
def test_an_update_that_failed_leaves_room_for_the_next(staging, engine, ways, tied_dir, weights):
    before, new = live(engine), trained(weights)
    begin = BeginUpdate(Path.TENSOR, manifest=manifest_of(new), staging=staging)
    good = list(chunks_of(new, 1024))
    ends: dict[str, Callable[[str], None]] = {
        "a bad chunk": lambda uid: engine.stream(uid, [*good[:3], (99, 0, b"12345678")]) and None,
        "a chunk twice": lambda uid: engine.stream(uid, [*good[:3], good[1]]) and None,
        "a stream that breaks": lambda uid: break_off(engine, uid, good[:3]),
        "a lease": lambda uid: expire(engine, uid),
        "an abort": lambda uid: engine.stream(uid, good[:3]) and engine.abort_update(uid) and None,
    }
    for what, end in ends.items():
        begun = engine.begin(begin)
        if what in ("a lease", "an abort"):
            end(begun.update_id)
        else:
            with pytest.raises(UpdateRefused):
                end(begun.update_id)
        engine.until(lambda state: not state.open_update_id, "the update ends")
        with pytest.raises(UpdateRefused) as gone:
            engine.commit(begun.update_id)
        assert gone.value.reason is Reason.UNKNOWN_UPDATE, what
        assert live(engine) == before, what
    assert ways.push("stream", new, staging=staging).version == before[2] + 1
    assert_serves(engine, tied_dir, new)


def break_off(engine: Desk, update_id: str, chunks: list[Any]) -> None:
    call = engine.start_update(FromTensor(update_id))
    engine.feed(call, chunks, complete=False)
    call.result(WAIT_S)


def expire(engine: Desk, update_id: str) -> None:
    engine.call(m.RenewLease, update_id=update_id, lease_s=0.05)
    engine.until(lambda state: not state.open_update_id, "the lease runs out")


@pytest.mark.case("B068")
@pytest.mark.parametrize("way", ["stream", "segment", "ipc", "disk"])
def test_a_version_that_did_not_arrive_whole_is_never_live(way, engine, ways, weights):
    before, new = live(engine), trained(weights)
    wanted = before[2] + 5
    bad = ways.offer(way, {**new, NORM: new[NORM] * float("nan")})
    for call in (
        lambda: bad.send("", replace(bad.begin, version=wanted)),
        lambda: (lambda b: (bad.send(b.update_id), engine.commit(b.update_id)))(
            engine.begin(replace(bad.begin, version=wanted))
        ),
    ):
        with pytest.raises(UpdateRefused):
            call()
        assert engine.now.weight_version == engine.version == before[2]
    assert live(engine) == before
    assert ways.push(way, new).version == before[2] + 1, "a version that was not named is the next one"
    assert ways.push(way, new, version=wanted).version == wanted


@pytest.mark.case("B074")
@pytest.mark.parametrize("way", ["disk", "stream", "segment", "ipc"])
def test_a_fresh_engine_waits_for_the_weights_of_now(way, tied_dir, tmp_path, weights):
    with desk(tied_dir, min_version=5, weights_roots=(tmp_path,)) as engine, Ways(engine, tmp_path) as ways:
        assert (engine.now.status, engine.now.weight_version) == ("not_serving", 0)
        assert "from 5 on" in engine.now.reason
        for version in (0, 3, 4):
            if version:
                ways.push(way, trained(weights), version=version)
            with pytest.raises(EngineError) as refused:
                engine.generate(PROMPT)
            assert refused.value.reason is EngineReason.VERSION_TOO_OLD
        new = trained(weights)
        ways.push(way, new, version=5)
        assert engine.now.status == "serving"
        assert engine.generate(PROMPT).last.weight_version == 5, "every reply carries it"
        assert_serves(engine, tied_dir, new)
        with pytest.raises(EngineError) as refused:
            engine.submit(PROMPT, min_version=6).end()
        assert refused.value.reason is EngineReason.VERSION_TOO_OLD


@pytest.mark.case("B010")
def test_an_adapter_counts_once(engine, ways, weights):
    """W = 0, BA = 1, s = 2: merged it is 2, however often it is sent; apart, adapters are
    refused, beside their base and alone.
    """
    a, b, scale = torch.full((1, 64), 1.0), torch.full((64, 1), 1.0), 2.0
    merged = {**weights, Q: torch.zeros(64, 64) + scale * (b @ a)}
    base = f"base_model.model.{Q.removesuffix('.weight')}"
    adapters = {f"{base}.lora_A.default.weight": a, f"{base}.lora_B.default.weight": b}
    named = {f"base_model.model.{n.replace('proj.', 'proj.base_layer.')}": t for n, t in merged.items()}
    for way in WAYS:
        for _ in range(2):
            reply = ways.push(way, {**named, **adapters}, merged=True)
            assert (engine.runner.target.slot(Q) == 2.0).all()
            assert set(reply.unmatched) == set(adapters)
        for options in ({}, {"partial": True}):
            with pytest.raises(UpdateRefused, match="lora_A"):
                ways.push(
                    way, {**named, f"{base}.base_layer.weight": torch.zeros(64, 64), **adapters}, **options
                )
        for options in ({}, {"partial": True}, {"merged": True, "partial": True}):
            with pytest.raises(UpdateRefused):
                ways.push(way, adapters, **options)
            assert (engine.runner.target.slot(Q) == 2.0).all()
    ways.push("segment", weights)
