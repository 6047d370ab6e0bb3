"""LiveEngine over real engines that are killed, replaced, stopped or disturbed: no stale token, no hang."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from tests.engines import Replaceable
from tests.tiny import load_reference
from tests.wire.trainer import PROMPT, SEEDS, assert_serves, reference_tokens, train
from trainers_adapters import ModuleSource, RollsyncError, push_weights
from trainers_adapters.frameworks.live_engine import EngineLost, LiveEngine, WeightsLost
from trainers_adapters.rollout_calls import Request

GREEDY = [Request(PROMPT, {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True})]


@pytest.fixture
def model(tiny_llama_dir):
    model = load_reference(tiny_llama_dir)
    train(model, next(SEEDS))
    return model


@pytest.fixture(scope="module")
def replaceable(tiny_llama_dir):
    """One for all tests; a test that kills the engine starts another."""
    with Replaceable(tiny_llama_dir, "--num-pages", "64", forked=True) as made:
        yield made


@pytest.fixture
def live(replaceable):
    made = LiveEngine(replaceable.address, timeout_s=60.0, restart_s=50.0)
    yield made
    made.close()


def test_an_engine_is_waited_for_and_pushed_to_again_under_a_larger_version(replaceable, model):
    for _ in range(3):
        push_weights(ModuleSource(model), replaceable.engine.weights)
    live = LiveEngine(replaceable.address, restart_s=1.5)
    assert live.push(ModuleSource(model)).version == 4
    ((completion,),) = live.sample(GREEDY, timeout_s=10)
    assert completion.token_ids == reference_tokens(model, PROMPT)

    replaceable.kill()
    with pytest.raises(WeightsLost):
        live.sample(GREEDY, timeout_s=10)
    started = time.monotonic()
    with pytest.raises(EngineLost) as lost:
        live.push(ModuleSource(model))
    assert 1.0 < time.monotonic() - started < 20.0
    assert f"the engine at {replaceable.address} was lost and is not back after 1.5 s" in str(lost.value)
    assert "weight version 4 was the last pushed to it" in str(lost.value)

    live.restart_s = 50.0
    train(model, next(SEEDS))
    starting = threading.Timer(0.5, replaceable.start)
    starting.start()
    try:
        assert live.push(ModuleSource(model)).version == 5
    finally:
        starting.join()
    assert_serves(replaceable.engine, model, 5)
    ((completion,),) = live.sample(GREEDY, timeout_s=10)
    assert (completion.token_ids, set(completion.weight_versions)) == (reference_tokens(model, PROMPT), {5})
    live.close()


def test_an_engine_replaced_by_one_with_a_larger_version_is_not_believed(replaceable, live, model):
    pushed = live.push(ModuleSource(model)).version
    replaceable.kill()
    replaceable.start("--initial-version", "100")
    live.wait()
    with pytest.raises(WeightsLost, match=rf"version 100 \(commit 0\), but version {pushed} \(commit "):
        live.sample(GREEDY, timeout_s=10)
    assert live.push(ModuleSource(model)).version == 101
    assert_serves(replaceable.engine, model, 101)


def test_an_engine_that_hangs_is_an_error_within_the_deadline(replaceable, model):
    live = LiveEngine(replaceable.address, restart_s=1.0, timeout_s=5.0)
    live.push(ModuleSource(model))
    os.kill(replaceable.engine.pid, signal.SIGSTOP)
    try:
        started = time.monotonic()
        with pytest.raises(RollsyncError, match="DEADLINE"):
            live.sample(GREEDY, timeout_s=1.0)
        assert time.monotonic() - started < 4.0
        started = time.monotonic()
        with pytest.raises(EngineLost, match="did not answer in time"):
            live.push(ModuleSource(model))
        assert time.monotonic() - started < 20.0
    finally:
        os.kill(replaceable.engine.pid, signal.SIGCONT)
    live.close()


def test_tokens_of_weights_that_someone_else_pushed_are_refused(replaceable, live, model):
    mine = live.push(ModuleSource(model)).version
    train(model, next(SEEDS))
    push_weights(ModuleSource(model), replaceable.engine.weights)
    said = rf"INTERFERENCE.*version {mine + 1} .*but version {mine} .*was pushed last"
    with pytest.raises(RollsyncError, match=said):
        live.sample(GREEDY, timeout_s=10)


def test_nothing_is_sampled_before_a_push(live):
    with pytest.raises(ValueError, match="push before sampling"):
        live.sample(GREEDY, timeout_s=10)


def test_a_request_that_can_never_run_is_no_lost_engine(live, model):
    live.push(ModuleSource(model))
    with pytest.raises(RollsyncError, match="TOKEN_OUT_OF_RANGE: prompt 0 of the batch"):
        live.sample([Request([5, 4096])], timeout_s=10)


def test_unknown_options_are_named():
    with pytest.raises(TypeError, match="unknown option 'retries'; the options are token"):
        LiveEngine("127.0.0.1:1", retries=3)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="path is 'disk'; it must be auto, tensor, ipc, distributed"):
        LiveEngine("127.0.0.1:1", path="disk")


@pytest.mark.parametrize(
    ("address", "path"),
    [
        ("127.0.0.1:1", "ipc"),
        ("localhost:1", "ipc"),
        ("[::1]:1", "ipc"),
        ("10.0.0.1:1", "tensor"),
        ("gpu-7:1", "tensor"),
    ],
)
def test_auto_lends_memory_on_this_host_and_streams_elsewhere(address, path):
    live = LiveEngine(address)
    assert live._sender.path == path
    live.close()
