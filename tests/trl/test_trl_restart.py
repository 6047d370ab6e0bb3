"""An engine that is killed in the middle of a TRL run: it goes on as if nothing had been, or says why."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from tests.engines import Replaceable
from tests.trl.trainers import NUM_GENERATIONS, Learned, Seen, make_trainer
from tests.wire.receiver_streams import children_of
from trainers_adapters import RollsyncError
from trainers_adapters.frameworks.live_engine import EngineLost
from trainers_adapters.frameworks.trl import attach, make_rollout_func

pytestmark = pytest.mark.trl

RESTART_S = 60.0
DEADLINE_S = 8.0
LONG = 200
"""Tokens of completions that are surely still running when the engine is killed among them."""


@pytest.fixture(scope="module")
def replaceable(chat_model_dir):
    with Replaceable(chat_model_dir, "--num-pages", "512") as made:
        yield made


def run(seam: str, address: str, model_dir, out, reward: Seen, **settings) -> Learned:
    """Train by attach, by rollout_func or with RLOO; gives the checksums after each step."""
    learned = Learned()
    settings = {"callbacks": [learned], "max_steps": 3, **settings}
    if seam in ("attach", "rloo"):
        kind = "rloo" if seam == "rloo" else "grpo"
        trainer = make_trainer(kind, model_dir, out, reward, **settings)
        with attach(trainer, address, restart_s=RESTART_S):
            trainer.train()
    else:
        with make_rollout_func(address, restart_s=RESTART_S) as rollout:
            make_trainer("grpo", model_dir, out, reward, rollout_func=rollout, **settings).train()
    return learned


class Killer(Seen):
    """Replaces the engine when the second batch's rewards are due: before the next push."""

    def __init__(self, replaceable: Replaceable) -> None:
        super().__init__()
        self._replaceable = replaceable

    def __call__(self, **given):
        if len(self.versions) == 1:
            self._replaceable.kill()
            threading.Timer(1.0, self._replaceable.start).start()
        return super().__call__(**given)


@pytest.mark.parametrize("seam", ["attach", "rollout_func", "rloo"])
def test_a_run_goes_on_when_the_engine_is_replaced_between_steps(seam, replaceable, chat_model_dir, tmp_path):
    undisturbed = Seen()
    expected = run(seam, replaceable.address, chat_model_dir, tmp_path, undisturbed)
    seen = Killer(replaceable)
    learned = run(seam, replaceable.address, chat_model_dir, tmp_path, seen)
    assert seen.completion_ids == undisturbed.completion_ids
    assert learned.after_steps == expected.after_steps
    first = seen.versions[0][0]
    assert seen.versions == [[first + step] * 2 * NUM_GENERATIONS for step in range(3)]
    live = replaceable.engine.weights.checksums()
    assert (live.weight_version, live.by_name) == (first + 2, learned.after_steps[1])


def test_a_run_goes_on_when_the_engine_is_killed_while_it_samples(replaceable, chat_model_dir, tmp_path):
    settings = {"max_completion_length": LONG, "generation_kwargs": {"min_tokens": LONG}, "max_steps": 2}
    undisturbed = Seen()
    expected = run("attach", replaceable.address, chat_model_dir, tmp_path, undisturbed, **settings)
    killed_with = []

    def kill_while_sampling() -> None:
        """Once the second step's requests are half done."""
        for state in replaceable.engine.rollout.watch():
            half = state.num_generated_tokens - tokens_before > 1.2 * 2 * NUM_GENERATIONS * LONG
            if half and state.num_running:
                killed_with.append(state.num_running)
                break
        replaceable.kill()
        replaceable.start()

    tokens_before = replaceable.engine.rollout.info().state.num_generated_tokens
    killer = threading.Thread(target=kill_while_sampling)
    killer.start()
    seen = Seen()
    learned = run("attach", replaceable.address, chat_model_dir, tmp_path, seen, **settings)
    killer.join()
    assert killed_with[0] > 0
    assert seen.completion_ids == undisturbed.completion_ids
    assert learned.after_steps == expected.after_steps
    first, second = seen.versions[0][0], seen.versions[1][0]
    assert second == first + 2  # pushed, lost, and pushed again
    live = replaceable.engine.weights.checksums()
    assert (live.weight_version, live.by_name) == (second, learned.after_steps[0])


@pytest.mark.parametrize("frozen", ["front", "engine"])
def test_a_run_ends_within_its_deadline_when_the_engine_hangs(frozen, replaceable, chat_model_dir, tmp_path):
    """As a machine that stands still: the connection stays, and nothing answers."""
    reward = Seen()
    trainer = make_trainer("grpo", chat_model_dir, tmp_path, reward, max_steps=2)
    (engine_process,) = children_of(replaceable.engine, "engine_main")
    pid = replaceable.engine.pid if frozen == "front" else engine_process
    with attach(trainer, replaceable.address, restart_s=RESTART_S) as attached:
        trainer.train()
        steps, version = len(reward.versions), reward.versions[-1][0]
        given = attached.engine.timeout_s
        attached.engine.timeout_s = DEADLINE_S
        os.kill(pid, signal.SIGSTOP)
        started = time.monotonic()
        try:
            with pytest.raises(RollsyncError) as hung:
                trainer.train()
        finally:
            os.kill(pid, signal.SIGCONT)
        assert time.monotonic() - started < DEADLINE_S + 30.0  # a run takes a moment to begin
        attached.engine.timeout_s = given
        assert hung.value.reason == "DEADLINE"
        assert replaceable.address in str(hung.value)
        assert len(reward.versions) == steps
        trainer.train()  # it answers again
        assert reward.versions[steps][0] > version


def test_a_run_ends_with_an_error_when_the_engine_stays_away(replaceable, chat_model_dir, tmp_path):
    reward = Seen()
    trainer = make_trainer("grpo", chat_model_dir, tmp_path, reward)
    with attach(trainer, replaceable.address, restart_s=1.5):
        trainer.train()
        steps, version = len(reward.versions), reward.versions[-1][0]
        replaceable.kill()
        started = time.monotonic()
        with pytest.raises(EngineLost) as lost:
            trainer.train()
        assert time.monotonic() - started < 10.0
    assert len(reward.versions) == steps  # nothing was scored, let alone learned from
    assert f"the engine at {replaceable.address} was lost and is not back after 1.5 s" in str(lost.value)
    assert f"weight version {version} was the last pushed to it" in str(lost.value)
    replaceable.start()
