"""KV pages: none is found again under other weights, and none is lost, whatever ends a request."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from rollout_engine import messages as m
from rollout_engine.errors import EngineError
from rollout_engine.errors import Reason as EngineReason
from rollout_engine.sampling import SamplingParams
from tests.cases.common import assert_serves, reference, trained
from tests.desk import Desk, Running, chunks_of, desk
from tests.local_engine import LocalEngine
from tests.tiny import EOS, make_tiny
from tests.ways import STAGINGS, WAYS, Ways, manifest_of
from tests.wire.trainer import PROMPT, reference_tokens
from weight_updater.requests import BeginUpdate, Inflight, Path, Staging

GREEDY = {"temperature": 0.0, "ignore_eos": True}


def all_pages_free(engine: Desk) -> bool:
    """After a flush; the books are compared with what is held, too."""
    engine.idle()
    engine.call(m.FlushCache)
    engine.engine._scheduler.check()
    pool = engine.engine._scheduler.pool
    return pool.num_free == pool.num_pages


@pytest.mark.case("B053")
@pytest.mark.parametrize("inflight", list(Inflight))
@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("way", ["stream", "segment", "ipc"])
def test_the_same_prompt_under_new_weights_finds_nothing(
    way, staging, inflight, engine, ways, tied_dir, weights
):
    engine.generate(PROMPT)
    assert engine.generate(PROMPT).num_cached == 32, "two whole pages, under one version"
    new = trained(weights)
    ways.push(way, new, staging=staging, inflight=inflight)
    again = engine.generate(PROMPT, 16)
    assert again.num_cached == 0
    assert again.tokens() == reference_tokens(reference(tied_dir, new), PROMPT, 16)
    assert engine.generate(PROMPT).num_cached == 32


@pytest.mark.case("B060")
@pytest.mark.parametrize("shortest", [5, 20, 40])
def test_a_step_follows_page_tables_that_grow_and_batches_that_shrink(
    shortest, engine, tied_dir, weights, ways
):
    """Eight sequences over several borders of pages, of which five end early; graphs are in tests/gpu."""
    new = trained(weights)
    ways.push("segment", new)
    prompts = [[3 + i, *PROMPT][: 1 + 6 * i] for i in range(8)]  # 1 to 43 tokens: borders come at all times
    lengths = [shortest + i if i % 3 else 70 for i in range(8)]
    running = [engine.submit(p, max_tokens=n) for p, n in zip(prompts, lengths, strict=True)]
    model = reference(tied_dir, new)
    for prompt, length, request in zip(prompts, lengths, running, strict=True):
        tokens = request.end().tokens()
        assert len(tokens) == length
        with torch.no_grad():
            best = model(torch.tensor([prompt + tokens])).logits[0].argmax(-1)
        assert tokens == best[len(prompt) - 1 : -1].tolist(), "each is the best one after all before it"


@pytest.mark.case("B053")
@pytest.mark.parametrize("way", WAYS)
def test_turns_of_a_conversation_across_updates(way, engine, ways, tied_dir, weights):
    """Each turn appends to the prompt of the last; an update in between makes all of it new."""
    prompt = list(PROMPT)
    for turn in range(4):
        new = trained(weights)
        ways.push(way, new)
        model = reference(tied_dir, new)
        for number in range(2):
            reply = engine.generate(prompt, 16)
            assert reply.num_cached == (
                0 if not number else len(prompt) // 16 * 16 - (16 if not len(prompt) % 16 else 0)
            )
            assert reply.tokens() == reference_tokens(model, prompt, 16), (turn, number)
            prompt += [*reply.tokens(), 7]
        prompt = prompt[:200]


@pytest.mark.case("B053")
@pytest.mark.parametrize("inflight", [Inflight.KEEP, Inflight.RECOMPUTE])
def test_groups_that_an_update_meets_leave_nothing_stale(inflight, engine, ways, tied_dir, weights):
    """Pages of two versions never enter the cache, and n completions share no old ones."""
    running = engine.submit(PROMPT, n=4, max_tokens=200).started(3)
    waiting = [engine.submit([9, *PROMPT], n=2, max_tokens=20) for _ in range(3)]
    new = trained(weights)
    ways.push("segment", new, inflight=inflight)
    model = reference(tied_dir, new)
    later = engine.submit(PROMPT, n=3, max_tokens=16).end()
    expected = reference_tokens(model, PROMPT, 16)
    assert [later.tokens(i) for i in range(3)] == [expected] * 3
    whole = running.end().tokens()
    for one in waiting:
        one.end()
    spoiled = engine.generate(PROMPT + whole[:60], 16)
    assert spoiled.tokens() == reference_tokens(model, PROMPT + whole[:60], 16)
    assert all_pages_free(engine)


@pytest.mark.case("B053")
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("n", [2, 3])
def test_completions_that_start_after_an_update_share_no_page_with_one_that_started_before(
    n, prefix_cache, tied_dir, tmp_path, weights
):
    """The first of a group goes on with the pages that it has; another finds a row while it does."""
    with (
        desk(tied_dir, prefix_cache=prefix_cache, max_running_requests=2) as engine,
        Ways(engine, tmp_path) as ways,
    ):
        new = trained(weights)
        other = engine.submit([3, 4], max_tokens=250)
        group = engine.submit(PROMPT, n=n, max_tokens=350)  # its first outlives the other
        group.until(lambda: len(group.tokens(0)) > 2)
        ways.push("stream", new, inflight=Inflight.KEEP)
        assert not other.ended
        assert group.tokens(1) == [], "it waits for a row"
        group.end(), other.end()
        expected = reference_tokens(reference(tied_dir, new), PROMPT, 8)
        for index in range(1, n):
            assert group.tokens(index)[:8] == expected
        assert all_pages_free(engine)


@pytest.mark.case("B053")
def test_a_rollback_does_not_bring_old_pages_back(engine, ways, tied_dir, weights):
    old = trained(weights)
    ways.push("stream", old)
    engine.generate(PROMPT)
    ways.push("stream", trained(weights), keep_previous=True)
    engine.generate(PROMPT)
    engine.call(m.Rollback, inflight="wait")
    assert engine.generate(PROMPT).num_cached == 0, "the version is the old one, the commit is another"
    assert_serves(engine, tied_dir, old)


@pytest.mark.case("B054")
@pytest.mark.parametrize("kind", ["running", "many", "paused", "waiting", "retracted"])
def test_a_flush_of_pages_that_are_held_is_refused_and_any_other_flushes(kind, engine):
    """What waits holds none: nothing of it has been computed, or all of it was given back."""
    num_tokens = 100 if kind == "many" else 500  # which one that runs alone still generates when it is asked
    expected = engine.generate(PROMPT, num_tokens).tokens()
    if kind == "waiting":
        engine.call(m.Pause, mode="keep")
    requests = [engine.submit(PROMPT, max_tokens=num_tokens) for _ in range(80 if kind == "many" else 1)]
    if kind != "waiting":
        requests[0].started()
    if kind in ("paused", "retracted"):
        engine.call(m.Pause, mode="keep" if kind == "paused" else "retract")
    if kind in ("running", "many", "paused"):
        with pytest.raises(EngineError, match=r"drop pages that \d+ sequences hold") as refused:
            engine.call(m.FlushCache)
        assert refused.value.reason is EngineReason.BUSY
    else:
        engine.until(lambda state: state.num_waiting > 0, "it waits")
        assert engine.call(m.FlushCache)["num_pages"] > 0
    engine.call(m.Continue)
    for request in requests:
        assert request.end().finish() == "length"
    assert requests[0].tokens() == expected or kind == "many"
    assert requests[0].num_cached == (0 if kind == "waiting" else 32)
    engine.idle()
    assert engine.call(m.FlushCache)["num_pages"] > 0
    assert engine.generate(PROMPT).num_cached == 0
    assert all_pages_free(engine)


@pytest.mark.case("B056")
@pytest.mark.parametrize("inflight", [Inflight.KEEP, Inflight.RECOMPUTE, Inflight.ABORT])
def test_a_cache_that_goes_under_running_requests_loses_no_page(inflight, engine, ways, weights, monkeypatch):
    """A commit drops the trees that they hang in; they end later, and walk to roots that are gone."""
    launch = engine.runner.launch

    def slowly(*args, **kwargs):
        time.sleep(0.02)
        return launch(*args, **kwargs)

    for _ in range(3):
        new = trained(weights)
        with monkeypatch.context() as slow:  # else they may be over before the push is
            slow.setattr(engine.runner, "launch", slowly)
            requests = [engine.submit([*PROMPT, i], max_tokens=150, n=2) for i in range(4)]
            for request in requests:
                request.started()
            ways.push("segment", new, inflight=inflight)
            if inflight is not Inflight.ABORT:
                with pytest.raises(EngineError):
                    engine.call(m.FlushCache)
        late = [engine.submit([*PROMPT, i], max_tokens=10) for i in range(4)]
        for request in [*requests, *late]:
            request.end()
    assert all_pages_free(engine)


# ---------------------------------------------------------------- aborts


def abort_waiting(engine: Desk, make) -> list[Running]:
    engine.call(m.Pause, mode="keep")
    requests = [make() for _ in range(25)]
    engine.until(lambda state: state.num_waiting > 0, "they wait")
    engine.abort(*(request.request_id for request in requests))
    engine.call(m.Continue)
    return requests


def abort_prefilling(engine: Desk, make) -> list[Running]:
    requests = [make() for _ in range(25)]
    engine.abort(*(request.request_id for request in requests))
    return requests


def abort_decoding(engine: Desk, make) -> list[Running]:
    requests = [make().started() for _ in range(12)]  # more would wait for pages that the first ones hold
    engine.abort(*(request.request_id for request in requests))
    return requests


def abort_paused(engine: Desk, make) -> list[Running]:
    requests = [make() for _ in range(25)]
    requests[0].started()
    engine.call(m.Pause, mode="keep")
    engine.abort(*(request.request_id for request in requests))
    engine.call(m.GetInfo)
    engine.call(m.Continue)
    return requests


def abort_retracted(engine: Desk, make) -> list[Running]:
    requests = [make() for _ in range(25)]
    requests[0].started()
    engine.call(m.Pause, mode="retract")
    engine.abort(*(request.request_id for request in requests))
    engine.call(m.Continue)
    return requests


def abort_twice(engine: Desk, make) -> list[Running]:
    requests = [make().started() for _ in range(10)]
    names = [request.request_id for request in requests]
    engine.abort(*names, *names, "nobody's")
    engine.abort(*names)
    return requests


ABORTS = {f.__name__.removeprefix("abort_"): f for f in (
    abort_waiting, abort_prefilling, abort_decoding, abort_paused, abort_retracted, abort_twice,
)}  # fmt: skip


@pytest.mark.case("B148")
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("state", ABORTS)
def test_aborts_give_every_page_back(state, n, engine):
    prompts = itertools.count()
    for _ in range(2):
        requests = ABORTS[state](
            engine, lambda: engine.submit([*PROMPT, next(prompts) % 100 + 3], n=n, max_tokens=300)
        )
        for request in requests:
            request.end()
        assert {request.finish(i) for request in requests for i in range(n)} <= {"abort", "length"}
        assert "abort" in {request.finish() for request in requests}
    assert engine.generate(PROMPT).finish() == "length"
    assert all_pages_free(engine)
    assert engine.engine._requests._live == {}


@pytest.mark.case("B148")
@pytest.mark.parametrize("inflight", list(Inflight))
@pytest.mark.parametrize("staging", [Staging.HOST, Staging.NONE])
def test_aborts_during_an_update_give_every_page_back(staging, inflight, engine, weights):
    new = trained(weights)
    chunks = list(chunks_of(new, 8192))
    begin = BeginUpdate(Path.TENSOR, manifest=manifest_of(new), staging=staging, inflight=inflight)
    begun = engine.begin(begin)
    requests = []
    for start in range(0, len(chunks), 10):
        batch = [engine.submit([*PROMPT, i], n=2, max_tokens=200) for i in range(4)]
        engine.stream(begun.update_id, chunks[start : start + 10]) if staging is Staging.HOST else None
        engine.abort(*(request.request_id for request in batch))
        requests += batch
    if staging is Staging.NONE:
        engine.stream(begun.update_id, chunks)
    engine.commit(begun.update_id)
    for request in requests:
        request.end()
    assert all_pages_free(engine)
    assert engine.engine._requests._live == {}


# ---------------------------------------------------------------- more than the pool


@pytest.mark.case("B147")
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("overlap", [False, True])
def test_four_that_do_not_fit_together_wait_for_each_other(overlap, chunked, tied_dir):
    prompts = [[i + 3] * 40 for i in range(4)]  # 3 pages each, and 3 more for what comes
    wanted = []
    for num_pages in (256, 16):
        model = LocalEngine(tied_dir, num_pages=num_pages, overlap=overlap, chunked_prefill=chunked)
        params = SamplingParams(max_tokens=56, seed=1, top_logprobs=2, **GREEDY)
        sequences = model.generate(prompts, params)
        assert all(len(s.logprobs) == len(s.output_ids) == len(s.top_logprobs) == 56 for s in sequences)
        assert (sum(s.num_preemptions for s in sequences) > 0) == (num_pages == 16)
        wanted.append([(s.output_ids, [round(v, 3) for v in s.logprobs]) for s in sequences])
    assert wanted[0] == wanted[1]


@pytest.mark.case("B147")
def test_one_that_never_fits_is_refused_and_the_others_answer(tied_dir):
    with desk(tied_dir, num_pages=16) as engine:
        others = [engine.submit([i + 3] * 40, max_tokens=56) for i in range(4)]
        for prompt, tokens in (([5] * 320, 8), ([5] * 250, 100), ([5] * 10, 400)):
            with pytest.raises(EngineError, match="do not fit") as refused:
                engine.generate(prompt, tokens)
            assert refused.value.reason is EngineReason.EXCEEDS_KV_POOL
        for one in others:
            assert one.end().finish() == "length"
            assert len(one.tokens()) == 56
        assert len(engine.generate([5] * 250, 6).tokens()) == 6, "as much as there is room for"
        assert all_pages_free(engine)


@pytest.mark.case("B146")
def test_a_turn_that_ends_at_once_goes_on(tmp_path):
    """Every turn's first token is EOS; the next one hangs another message on it, a hundred times."""
    directory = make_tiny(tmp_path / "m", "llama", context_length=1024)
    with desk(directory, num_pages=128) as engine:
        prompt = [5, 6, 7]
        for turn in range(100):
            reply = engine.submit(prompt, max_tokens=16, ignore_eos=False, logit_bias=((EOS, 1000.0),)).end()
            assert (reply.tokens(), reply.finish(), len(reply.logprobs())) == ([EOS], "stop", 1)
            assert reply.num_cached == max(0, len(prompt) - 3) // 16 * 16, "whole pages of the turn before"
            prompt += [EOS, 10 + turn % 50, 11]
        assert engine.generate(prompt, 4).finish() == "length"
        assert all_pages_free(engine)


@pytest.mark.case("B146")
@pytest.mark.parametrize("n", [1, 4])
def test_completions_of_one_token_end_cleanly(n, engine):
    for params in ({"max_tokens": 1}, {"ignore_eos": False, "logit_bias": ((EOS, 1000.0),)}):
        for _ in range(20):
            reply = engine.submit(PROMPT, n=n, **params).end()
            assert {len(reply.tokens(i)) for i in range(n)} == {1}
    assert all_pages_free(engine)
