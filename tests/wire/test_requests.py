"""Requests over a real process: pauses, order, limits, stop strings, seeds; and the end of the engine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.engines import RunningEngine, serve
from tests.tiny import VOCAB_SIZE, load_reference, make_tiny
from tests.wire.trainer import PROMPT, InFlight, assert_serves, beside, reference_tokens, until
from trainers_adapters import ModuleSource, Request, RollsyncError, push_weights
from weight_updater.requests import BeginUpdate
from weight_updater.requests import Path as Way

MAX_RUNNING = 4


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    """A tiny model with a tokenizer of one printable character for every id."""
    directory = make_tiny(tmp_path_factory.mktemp("model") / "llama", "llama")
    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet())[:VOCAB_SIZE])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def engine(model_dir) -> Iterator[RunningEngine]:
    flags = ["--num-pages", "256", "--max-running-requests", str(MAX_RUNNING)]
    with serve(model_dir, *flags, forked=True) as running:
        yield running


@pytest.fixture(scope="module")
def model(model_dir):
    return load_reference(model_dir)


def reason_of(call: Callable, *args, **kwargs) -> str:
    with pytest.raises(RollsyncError) as refused:
        call(*args, **kwargs)
    return refused.value.reason


# ---------------------------------------------------------------- pauses


@pytest.mark.parametrize("mode", ["keep", "wait", "abort", "retract"])
def test_a_pause_stops_forward_passes_and_continue_goes_on(mode, engine, model):
    stream = InFlight(engine)
    frozen = engine.rollout.pause(mode)
    state = engine.rollout.info().state
    assert (state.status, state.paused_by, state.num_running) == ("paused", "user", frozen)
    assert frozen == (mode == "keep")
    later = beside(engine.greedy, PROMPT, ignore_eos=True)
    until(lambda: engine.rollout.info().state.num_waiting > 0, "the new request waits")
    time.sleep(0.1)
    paused = engine.rollout.info().state
    assert (paused.num_steps, paused.num_running) == (state.num_steps, frozen)
    engine.rollout.resume()
    assert later.result(10).token_ids == reference_tokens(model, PROMPT)
    stream.end()
    assert stream.finish_reason == ("abort" if mode == "abort" else "length")
    assert (len(stream.token_ids) < stream.num_tokens) == (mode == "abort")
    assert stream.token_ids[:40] == reference_tokens(model, PROMPT, 40)[: len(stream.token_ids)]


def test_a_pause_that_could_never_end_is_refused(engine):
    stream = InFlight(engine)
    engine.rollout.pause("keep")
    try:
        assert reason_of(engine.rollout.pause, "wait", timeout_s=5) == "BUSY"
    finally:
        engine.rollout.resume()
    assert stream.end().finish_reason == "length"


@pytest.mark.case("B054")
def test_the_cache_is_flushed_only_while_nothing_holds_it(engine):
    stream = InFlight(engine)
    assert reason_of(engine.rollout.flush_cache) == "BUSY"
    engine.rollout.pause("retract")
    engine.rollout.flush_cache()
    state = engine.rollout.info().state
    assert (state.num_free_pages, state.num_waiting) == (state.num_total_pages, 1)
    engine.rollout.resume()
    assert stream.end().finish_reason == "length"
    assert engine.greedy(PROMPT).num_cached_tokens == 32
    assert engine.rollout.flush_cache() > 0
    state = engine.rollout.info().state
    assert state.num_free_pages == state.num_total_pages
    assert engine.greedy(PROMPT).num_cached_tokens == 0


# ---------------------------------------------------------------- order and limits


@pytest.mark.case("B074")
def test_min_version_keeps_a_laggard_out(engine, model):
    version = push_weights(ModuleSource(model), engine.weights).version
    fresh = engine.greedy(PROMPT, min_version=version, ignore_eos=True)
    assert fresh.weight_versions == [version] * 8
    assert reason_of(engine.greedy, PROMPT, min_version=version + 1) == "VERSION_TOO_OLD"
    assert reason_of(engine.rollout.score, [PROMPT], min_version=version + 1) == "VERSION_TOO_OLD"
    assert_serves(engine, model, version)


def test_a_deadline_ends_a_request_with_what_it_has(engine, model):
    started = time.monotonic()
    (late,) = engine.rollout.generate(
        PROMPT, max_tokens=470, temperature=0.0, ignore_eos=True, deadline_s=0.1
    )
    assert late.finish_reason in ("deadline", "length")
    assert time.monotonic() - started < 20
    assert late.token_ids[:20] == reference_tokens(model, PROMPT, 20)[: len(late.token_ids)]
    engine.rollout.pause("keep")
    try:
        (waited,) = engine.rollout.generate(PROMPT, max_tokens=4, deadline_s=0.2)
    finally:
        engine.rollout.resume()
    assert (waited.finish_reason, waited.token_ids) == ("deadline", [])


def test_larger_priorities_run_first(engine):
    engine.rollout.pause("keep")
    urgent = {1, 3, 5, 7}
    requests = [Request(PROMPT, priority=9 if i in urgent else 0) for i in range(2 * MAX_RUNNING)]
    ended: list[int] = []

    def collect() -> None:
        options = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
        ended.extend(item.request_index for item in engine.rollout.generate_batch_stream(requests, **options))

    batch = beside(collect)
    until(lambda: engine.rollout.info().state.num_waiting == len(requests), "all wait")
    engine.rollout.resume()
    batch.result(20)
    assert set(ended[:MAX_RUNNING]) == urgent


def test_a_request_id_is_used_once_at_a_time_and_abort_finds_it(engine):
    stream = engine.rollout.generate_stream(PROMPT, max_tokens=400, request_id="mine", ignore_eos=True)
    next(stream)
    assert reason_of(engine.rollout.generate, PROMPT, request_id="mine", max_tokens=1) == "DUPLICATE_REQUEST"
    found = engine.rollout.abort(["mine", "nobody's"])
    assert (found.aborted, found.unknown) == (["mine"], ["nobody's"])
    assert list(stream)[-1].finish_reason == "abort"
    engine.rollout.generate(PROMPT, request_id="mine", max_tokens=1)


# ---------------------------------------------------------------- text


def test_a_stop_string_ends_the_text_before_it_and_the_ids_after_it(engine):
    options = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True, "return_text": True}
    (whole,) = engine.rollout.generate("hello", **options)
    assert len(whole.text) == len(whole.token_ids) == 24
    at = next(i for i in range(4, 20) if whole.text.index(whole.text[i : i + 3]) == i)
    (cut,) = engine.rollout.generate("hello", stop=[whole.text[at : at + 3]], **options)
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[:at]
    assert cut.token_ids == whole.token_ids[: at + 3]
    assert len(cut.logprobs) == at + 3
    until(lambda: engine.rollout.info().state.num_running == 0, "the engine stops with it")


def test_stop_ids_and_min_tokens(engine, model):
    tokens = reference_tokens(model, PROMPT, 24)
    at = next(i for i in range(3, 24) if tokens.index(tokens[i]) == i)
    stopped = engine.greedy(PROMPT, 24, stop_token_ids=[tokens[at]], ignore_eos=True)
    assert (stopped.token_ids, stopped.finish_reason) == (tokens[: at + 1], "stop")
    held = engine.greedy(PROMPT, 24, stop_token_ids=[tokens[at]], ignore_eos=True, min_tokens=at + 3)
    assert len(held.token_ids) >= at + 3
    assert tokens[at] not in held.token_ids[: at + 2]


# ---------------------------------------------------------------- draws


@pytest.mark.case("B139")
def test_samples_differ_and_a_seed_repeats_them(engine):
    def draw(**options) -> list[tuple[int, ...]]:
        completions = engine.rollout.generate(PROMPT, n=8, max_tokens=32, ignore_eos=True, **options)
        assert [c.index for c in completions] == list(range(8))
        return [tuple(c.token_ids) for c in completions]

    unseeded = draw() + draw()
    assert len(set(unseeded)) == 16
    seeded = draw(seed=42)
    assert len(set(seeded)) == 8
    assert draw(seed=42) == seeded
    assert not set(draw(seed=43)) & set(seeded)


# ---------------------------------------------------------------- the end


def test_a_killed_engine_process_fails_everyone_who_waits(model_dir):
    with serve(model_dir, "--num-pages", "128") as running:
        model = load_reference(model_dir)
        stream = InFlight(running)
        begin = BeginUpdate(path=Way.TENSOR, manifest=ModuleSource(model).manifest())
        update_id = running.weights.begin(begin).update_id
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        (child,) = [int(pid) for pid in children]
        os.kill(child, signal.SIGKILL)
        assert reason_of(stream.end) == "ENGINE_DEAD"
        until(lambda: running.rollout.info().state.status == "not_serving", "the front notices")
        assert "SIGKILL" in running.rollout.info().state.not_serving_reason
        for call in (
            lambda: running.greedy(PROMPT),
            lambda: running.weights.commit(update_id),
            lambda: push_weights(ModuleSource(model), running.weights),
            running.weights.checksums,
        ):
            assert reason_of(call) == "ENGINE_DEAD"
        with grpc.insecure_channel(running.address) as channel:
            health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
