"""Commands that meet between two turns of the loop, while a pass is in flight."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rollout_engine import messages
from tests.unit.scheduler.fake_model import expected_output
from tests.unit.scheduler.hand_engine import HandEngine
from weight_updater.requests import Inflight


@pytest.fixture
def hand() -> Iterator[HandEngine]:
    made = HandEngine()
    yield made
    made.close()


@pytest.mark.parametrize("inflight", [Inflight.KEEP, Inflight.RECOMPUTE, Inflight.ABORT, Inflight.WAIT])
def test_a_rollback_comes_while_others_generate(hand: HandEngine, inflight: Inflight) -> None:
    hand.done(hand.push(5, keep_previous=True))
    hand.submit("a", max_tokens=40)
    for _ in range(3):
        hand.engine.turn()
    before = len(hand.tokens("a"))
    assert before
    call = hand.call(messages.Rollback, inflight)
    hand.submit("b", max_tokens=40)
    reply = hand.done(call)
    assert reply["version"] == 4
    assert reply["seconds"]["pause"] > 0
    expected = {Inflight.ABORT: before + 1, Inflight.WAIT: 40}.get(inflight, before + 2)
    assert len(hand.tokens("a")) <= expected, "the rollback waited for what it need not wait for"


def test_an_update_that_begins_beside_a_rollback_finds_generation_going_on(hand: HandEngine) -> None:
    hand.done(hand.push(5, keep_previous=True))
    hand.submit("a", max_tokens=50)
    hand.engine.turn()
    hand.engine.turn()
    rollback = hand.call(messages.Rollback, Inflight.KEEP)
    begin = hand.call(messages.Begin, hand.begin(6))
    hand.done(begin)
    assert hand.reply(rollback)
    num_tokens = len(hand.tokens("a"))
    for _ in range(5):
        hand.engine.turn()
    assert len(hand.tokens("a")) > num_tokens


def test_sequences_that_a_rollback_leaves_under_too_old_weights_do_not_hold_up_the_next_push() -> None:
    hand = HandEngine(min_version=5)
    try:
        hand.done(hand.push(5, keep_previous=True))
        hand.submit("a", max_tokens=40)
        hand.submit("b", max_tokens=40)
        for _ in range(3):
            hand.engine.turn()
        assert hand.done(hand.call(messages.Rollback, Inflight.KEEP))["version"] == 4
        assert hand.done(hand.push(6, inflight=Inflight.WAIT))["version"] == 6
        hand.submit("c", max_tokens=3)
        for _ in range(6):
            hand.engine.turn()
        assert hand.tokens("c") == expected_output([3, 5, 8], 3)
    finally:
        hand.close()


def test_no_update_begins_over_memory_that_was_released_meanwhile(hand: HandEngine) -> None:
    push = hand.push(5)
    release = hand.call(messages.ReleaseMemory, ["weights"])
    hand.done(release)
    reply = hand.reply(push)
    assert reply.error is not None
    assert reply.error.reason == "ASLEEP"
    assert hand.updater.version == 4
