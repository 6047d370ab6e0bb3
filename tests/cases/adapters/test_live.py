"""Adapters while requests run: chosen by name, replaced in the middle, cached apart, removed."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

from rollout_engine import messages as m
from rollout_engine.errors import EngineError
from tests.cases.common import stored, trained
from tests.desk import Desk, desk
from tests.holdings import held_by
from tests.lora import adapted, greedy, learn, push
from tests.ways import Ways, ways_to
from trainers_adapters import AdapterSource
from weight_updater.errors import UpdateRefused
from weight_updater.requests import Inflight

PROMPT = [5, 6, 7, 8, 9]
LONG = 300
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def held(tied_dir, tmp_path_factory) -> Iterator[tuple[Desk, Ways]]:
    folder = tmp_path_factory.mktemp("live-adapters")
    with (
        desk(tied_dir, max_adapters=2, weights_roots=(folder,), num_pages=256) as engine,
        ways_to(engine, folder) as ways,
    ):
        yield engine, ways


@pytest.fixture
def source(engine, ways, tied_dir) -> AdapterSource:
    """Held in version 1."""
    source = AdapterSource(adapted(tied_dir), f"live-{next(NUMBERS)}")
    push(engine, ways, source)
    return source


def model_of(source: AdapterSource):
    return source._module


def in_the_background(engine: Desk, ways: Ways, source: AdapterSource, **fields) -> Future[m.Reply]:
    offer = ways.offer("ipc", dict(source))
    spec = source.spec(engine.runner.target.arena.layout)
    return offer.start("", replace(offer.begin, adapter=spec, **fields))


# ---------------------------------------------------------------- chosen


def test_an_unknown_adapter_is_not_found_and_those_held_are_named(engine, source):
    with pytest.raises(EngineError) as refused:
        engine.generate(PROMPT, adapter="mth")
    assert refused.value.reason == "UNKNOWN_ADAPTER"
    assert f"held are {source.name} (version 1)" in refused.value.message


def test_an_older_version_than_asked_for_is_refused(engine, ways, source):
    with pytest.raises(EngineError) as refused:
        engine.generate(PROMPT, adapter=source.name, min_adapter_version=2)
    assert refused.value.reason == "VERSION_TOO_OLD"
    push(engine, ways, source)
    running = engine.generate(PROMPT, adapter=source.name, min_adapter_version=2)
    assert set(running.adapter_labels()) == {(source.name, 2)}
    with pytest.raises(EngineError, match="no adapter is named"):
        engine.generate(PROMPT, min_adapter_version=2)


def test_completions_of_one_prompt_share_its_pages_and_their_adapter(engine, source):
    running = engine.submit(PROMPT * 8, adapter=source.name, n=3).end()
    tokens, _ = greedy(model_of(source), PROMPT * 8)
    for index in range(3):
        assert running.tokens(index) == tokens
        assert set(running.adapter_labels(index)) == {(source.name, 1)}
    assert running.parts[1][0].num_cached_tokens == 32


# ---------------------------------------------------------------- cached apart


@pytest.mark.case("B053")
def test_pages_are_found_under_the_same_adapter_in_the_same_version_only(engine, ways, source, tied_dir):
    prompt = list(range(3, 40))
    other = AdapterSource(adapted(tied_dir), f"other-{next(NUMBERS)}")
    push(engine, ways, other)
    engine.call(m.FlushCache)
    found = []
    for name in ("", source.name, other.name, "", source.name, other.name):
        found.append(engine.generate(prompt, adapter=name).num_cached)
    assert found == [0, 0, 0, 32, 32, 32]
    push(engine, ways, source)
    found = [engine.generate(prompt, adapter=name).num_cached for name in ("", source.name, other.name)]
    assert found == [32, 0, 32], "a new version of one leaves the pages of all others"
    engine.call(m.RemoveAdapter, name=source.name)
    push(engine, ways, source)
    assert engine.generate(prompt, adapter=source.name).num_cached == 0
    assert engine.generate(prompt, adapter=source.name).num_cached == 32
    engine.idle()


# ---------------------------------------------------------------- replaced while it generates


@pytest.mark.parametrize("inflight", list(Inflight))
def test_sequences_in_flight_follow_the_policy_and_others_go_on(inflight, engine, ways, source):
    """An update of an adapter concerns the sequences that use it; the base model's are left alone."""
    before = greedy(model_of(source), PROMPT, 8)[0]
    learn(model_of(source))
    base = engine.submit(PROMPT, max_tokens=LONG).started()
    running = engine.submit(PROMPT, max_tokens=LONG, adapter=source.name).started(4)
    reply = push(engine, ways, source, inflight=inflight)
    late = engine.submit(PROMPT, max_tokens=8, adapter=source.name).end()
    assert late.tokens() == greedy(model_of(source), PROMPT)[0]
    assert set(late.adapter_labels()) == {(source.name, 2)}
    running.end()
    base.end()
    versions = [version for _, version in running.adapter_labels()]
    assert versions == sorted(versions)
    assert running.tokens()[: versions.count(1)][:8] == before[: versions.count(1)]
    counted = (reply.num_aborted, reply.num_recomputed, reply.num_kept)
    if inflight is Inflight.WAIT:
        assert (set(versions), running.finish(), counted) == ({1}, "length", (0, 0, 0))
        assert len(versions) == LONG
    elif inflight is Inflight.ABORT:
        assert (set(versions), running.finish(), counted) == ({1}, "abort", (1, 0, 0))
    else:
        assert (set(versions), running.finish(), len(versions)) == ({1, 2}, "length", LONG)
        assert counted == ((0, 0, 1) if inflight is Inflight.KEEP else (0, 1, 0))
    assert (base.finish(), len(base.tokens())) == ("length", LONG)
    assert set(base.adapter_labels()) == {("", 0)}
    if inflight is Inflight.RECOMPUTE:
        at = versions.count(1)
        again = greedy(model_of(source), PROMPT + running.tokens()[:at], 8)[0]
        assert running.tokens()[at : at + 8] == again, "what comes after is of the new version altogether"


def test_a_waiting_update_lets_nobody_start_over_the_old_version_but_others(engine, ways, source):
    learn(model_of(source))
    running = engine.submit(PROMPT, max_tokens=2 * LONG, adapter=source.name).started()
    update = in_the_background(engine, ways, source)
    engine.until(lambda state: bool(state.open_update_id), "the update is open")
    engine.call(m.GetInfo)
    late = engine.submit(PROMPT, max_tokens=4, adapter=source.name)
    base = engine.submit(PROMPT, max_tokens=4).end()
    assert not running.ended, "the test is about what happens before the commit"
    assert set(base.adapter_labels()) == {("", 0)}
    assert late.parts[0] == []
    assert update.result(20).result["adapter_version"] == 2
    assert len(running.end().tokens()) == 2 * LONG
    assert set(late.end().adapter_labels()) == {(source.name, 2)}


def test_a_paused_engine_refuses_to_wait_for_sequences_of_the_adapter(engine, ways, source):
    running = engine.submit(PROMPT, max_tokens=LONG, adapter=source.name).started()
    engine.call(m.Pause)
    with pytest.raises(UpdateRefused) as refused:
        push(engine, ways, source)
    assert refused.value.reason == "PAUSED_WAIT"
    assert push(engine, ways, source, inflight=Inflight.KEEP).num_kept == 1
    engine.call(m.Continue)
    assert {version for _, version in running.end().adapter_labels()} == {1, 2}


def test_other_base_weights_end_what_runs_through_an_adapter_of_the_old(engine, ways, source, tied_dir):
    """Its tokens would be of no policy that anybody trains. What has no token yet is refused."""
    engine.call(m.FlushCache)
    running = engine.submit(PROMPT, max_tokens=LONG, adapter=source.name).started()
    base = engine.submit(PROMPT, max_tokens=LONG).started()
    engine.call(m.Pause)
    waiting = engine.submit(PROMPT, adapter=source.name)
    reply = ways.push("segment", trained(stored(tied_dir)), inflight=Inflight.KEEP)
    engine.call(m.Continue)
    assert reply.num_kept == 2
    assert running.end().finish() == "error"
    assert "ADAPTER_STALE" in running.last.error
    assert {version for _, version in running.adapter_labels()} == {1}
    with pytest.raises(EngineError, match="push it again") as refused:
        waiting.end()
    assert refused.value.reason == "ADAPTER_STALE"
    assert set(base.end().labels()) == {reply.previous_version, reply.version}
    engine.idle()


# ---------------------------------------------------------------- removed


def test_an_adapter_in_use_is_not_removed_silently(engine, ways, source):
    running = engine.submit(PROMPT, max_tokens=LONG, adapter=source.name).started()
    with pytest.raises(EngineError) as refused:
        engine.call(m.RemoveAdapter, name=source.name)
    assert refused.value.reason == "BUSY"
    assert "1 sequences use" in refused.value.message
    assert engine.call(m.RemoveAdapter, name=source.name, abort=True) == {"version": 1, "num_aborted": 1}
    assert running.end().finish() == "abort"
    with pytest.raises(EngineError) as unknown:
        engine.generate(PROMPT, adapter=source.name)
    assert unknown.value.reason == "UNKNOWN_ADAPTER"
    with pytest.raises(EngineError, match="no adapter"):
        engine.call(m.RemoveAdapter, name=source.name)
    engine.idle()


def test_an_adapter_is_not_removed_under_an_open_update_of_it(engine, ways, source):
    offer = ways.offer("segment", dict(source))
    spec = source.spec(engine.runner.target.arena.layout)
    begun = engine.begin(replace(offer.begin, adapter=spec))
    with pytest.raises(EngineError, match="is open") as refused:
        engine.call(m.RemoveAdapter, name=source.name)
    assert refused.value.reason == "BUSY"
    assert engine.abort_update(begun.update_id)
    engine.call(m.RemoveAdapter, name=source.name)


# ---------------------------------------------------------------- no growth


def test_fifty_pushes_leave_no_growth_and_move_nothing(engine, ways, source):
    """Memory is taken once: every address that a graph could remember stays."""

    def lies() -> list[int]:
        parts = engine.runner.adapters.parts.values()
        return [tensor.data_ptr() for part in parts for tensor in (part.a, part.b, part.scaling)]

    def rounds(count: int) -> None:
        for number in range(count):
            learn(model_of(source))
            push(engine, ways, source, ("stream", "segment", "disk")[number % 3])
            engine.generate(PROMPT, 1, adapter=source.name)

    rounds(30)  # until what this test itself keeps comes and goes
    addresses, before, tensor_bytes = lies(), held_by("self"), bytes_of_tensors()
    rounds(50)
    after = held_by("self")
    assert lies() == addresses
    assert bytes_of_tensors() - tensor_bytes < 3 * sum(t.nbytes for _, t in source)
    assert engine.generate(PROMPT, adapter=source.name).tokens() == greedy(model_of(source), PROMPT)[0]
    assert after["threads"] == before["threads"]
    assert after["mapped segments"] <= before["mapped segments"] + 2


def bytes_of_tensors() -> int:
    """Of all memory that a tensor of this process lies in."""
    gc.collect()
    found = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}.values())
