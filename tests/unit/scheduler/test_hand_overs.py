"""Commands that meet between two turns of the loop, while a pass is in flight."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from rollout_engine import messages
from tests.unit.scheduler.fake_model import expected_output
from tests.unit.scheduler.hand_engine import HandEngine
from tests.unit.weight_updater.test_adopt import Trainer
from tests.unit.weight_updater.tiny_target import TinyTarget, weights
from weight_updater import live
from weight_updater.requests import BeginUpdate, FromIpc, FromTensor, Inflight, Manifest, Path, Staging
from weight_updater.slot_scan import slot_checksums

PROMPT = [3, 5, 8]


@pytest.fixture
def hand() -> Iterator[HandEngine]:
    made = HandEngine()
    yield made
    made.close()


@pytest.fixture
def prompt_hand(hand: HandEngine) -> HandEngine:
    """For what must come before a sequence ends, which some turns of the loop are enough for."""
    hand.work_promptly()
    return hand


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


def test_an_update_that_begins_beside_a_rollback_finds_generation_going_on(prompt_hand: HandEngine) -> None:
    hand = prompt_hand
    hand.done(hand.push(5, keep_previous=True))
    hand.submit("a", max_tokens=50)
    hand.engine.turn()
    hand.engine.turn()
    rollback = hand.call(messages.Rollback, Inflight.KEEP)
    begin = hand.call(messages.Begin, hand.begin(6))
    hand.done(begin)
    assert hand.done(rollback)["version"] == 4
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
        assert hand.tokens("c") == expected_output(PROMPT, 3)
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


@pytest.mark.parametrize("in_one_call", [False, True])
def test_an_abort_that_comes_while_the_manifest_is_read_ends_the_begin(
    hand: HandEngine, monkeypatch: pytest.MonkeyPatch, in_one_call: bool
) -> None:
    """It found nothing to abort; the update opened behind it, and stayed until its lease ran out."""
    reading, go_on = threading.Event(), threading.Event()
    resolve = hand.updater.resolve

    def slow(request: BeginUpdate) -> Manifest:
        reading.set()
        assert go_on.wait(10)
        return resolve(request)

    monkeypatch.setattr(hand.updater, "resolve", slow)
    request = hand.begin(5, update_id="u")
    tensor = FromTensor("", hand.segment.descriptor)
    if in_one_call:
        begin = hand.call(messages.Update, tensor=tensor, begin=request)
    else:
        begin = hand.call(messages.Begin, request)
    hand.turn_until(reading.is_set)
    assert hand.done(hand.call(messages.AbortUpdate, "another")) == {"found": False, "torn": False}
    assert hand.done(hand.call(messages.AbortUpdate, "u")) == {"found": True, "torn": False}
    go_on.set()
    error = hand.reply(begin).error
    assert error is not None
    assert (error.reason, error.message) == ("UNKNOWN_UPDATE", "update u was aborted")
    assert (hand.updater.open, hand.updater.version) == (None, 4)
    assert hand.done(hand.call(messages.AbortUpdate, "u")) == {"found": False, "torn": False}
    assert hand.done(hand.push(5, update_id="u"))["version"] == 5, "an abort ends what came before it only"


def test_a_rollback_undoes_no_other_commit_than_the_one_that_it_was_asked_for(
    prompt_hand: HandEngine,
) -> None:
    hand = prompt_hand
    hand.done(hand.push(5, keep_previous=True))
    hand.submit("a", max_tokens=20)
    hand.engine.turn()
    rollback = hand.call(messages.Rollback, Inflight.WAIT)
    push = hand.push(6, keep_previous=True)
    assert hand.done(push)["version"] == 6
    reply = hand.reply(rollback)
    assert reply.error is not None
    assert (reply.error.reason, hand.updater.version) == ("WRONG_STATE", 6)
    assert hand.done(hand.call(messages.Rollback, Inflight.WAIT))["version"] == 5


def test_what_an_aborted_call_leaves_behind_ends_no_later_update_of_the_same_id(
    prompt_hand: HandEngine,
) -> None:
    hand = prompt_hand
    hand.submit("a", max_tokens=40)
    hand.engine.turn()
    first = hand.push(5, inflight=Inflight.WAIT, update_id="u")
    hand.turn_until(lambda: hand.engine._gate.num_draining == 1)
    again = hand.begin(5, update_id="u", manifest_digest=known(hand), manifest=None)
    hand.call(messages.AbortUpdate, "u")
    begin = hand.call(messages.Begin, again)
    hand.done(begin)
    reply = hand.reply(first)
    assert reply.error is not None
    assert reply.error.reason == "UNKNOWN_UPDATE"
    assert hand.tokens("a") != expected_output(PROMPT, 40), "the call waited for sequences of another"
    update = hand.updater.open
    assert update is not None
    assert hand.done(hand.call(messages.Update, tensor=FromTensor("u", hand.segment.descriptor)))
    assert hand.done(hand.call(messages.Commit, "u"))["version"] == 5


def known(hand: HandEngine) -> str:
    """The digest of the open update's manifest."""
    assert hand.updater.open is not None
    return hand.updater.open.reply.manifest_digest


def test_a_rollback_waits_for_a_worker_that_reads_what_is_live(
    hand: HandEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An aborted update's worker hashed the slots while they were exchanged, and its sums were believed."""
    hand.done(hand.push(5, keep_previous=True, skip_checksums=True))
    reading, go_on = threading.Event(), threading.Event()

    def slowly(target: TinyTarget, names: list[str]) -> dict[str, int]:
        found = slot_checksums(target, names)
        reading.set()
        assert go_on.wait(10)
        return found

    monkeypatch.setattr(live, "slot_checksums", slowly)
    hand.push(6, update_id="u", staging=Staging.HOST)  # beside what was kept
    hand.turn_until(reading.is_set)
    hand.call(messages.AbortUpdate, "u")
    rollback = hand.call(messages.Rollback, Inflight.KEEP)
    for _ in range(3):
        hand.engine.turn()
    go_on.set()
    assert hand.done(rollback)["version"] == 4
    monkeypatch.setattr(live, "slot_checksums", slot_checksums)
    hand.engine._flows._pool.shutdown(wait=True)
    hand.updater._live.know()
    assert hand.updater._live.known == slot_checksums(hand.target, hand.target.arena.slot_names)


def test_a_pause_that_still_waits_is_undone_by_continue(hand: HandEngine) -> None:
    """Whoever gave up waiting for it, and continued, had an engine that paused some seconds later."""
    hand.submit("a", max_tokens=30)
    hand.engine.turn()
    pause = hand.call(messages.Pause, "wait")
    hand.engine.turn()
    hand.done(hand.call(messages.Continue))
    reply = hand.reply(pause)
    assert reply.error is not None
    assert reply.error.reason == "BUSY"
    hand.turn_until(lambda: len(hand.tokens("a")) == 30)
    hand.submit("b", max_tokens=3)
    hand.turn_until(lambda: len(hand.tokens("b")) == 3)


def test_graphs_wait_for_what_they_are_captured_over(hand: HandEngine) -> None:
    hand.done(hand.call(messages.ReleaseMemory, []))
    hand.done(hand.call(messages.ResumeMemory, ["kv_cache", "graphs"]))
    assert hand.runner.resumed == ["kv_cache"], "a pass would read weights that are not there"
    hand.done(hand.call(messages.ResumeMemory, ["weights"]))
    assert hand.runner.resumed == ["kv_cache", "weights", "graphs"]
    hand.done(hand.push(5))
    hand.done(hand.call(messages.ReleaseMemory, ["graphs", "kv_cache"]))
    hand.done(hand.call(messages.ResumeMemory, ["graphs"]))
    hand.done(hand.call(messages.ResumeMemory, ["kv_cache"]))
    assert hand.runner.resumed[3:] == ["kv_cache", "graphs"]
    hand.submit("a", max_tokens=3)
    hand.turn_until(lambda: len(hand.tokens("a")) == 3)


def test_no_memory_is_released_under_a_worker_of_an_update_that_was_aborted(
    hand: HandEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU what is released is unmapped, and whoever reads it then ends the process."""
    reading, go_on = threading.Event(), threading.Event()

    def slowly(target: TinyTarget, names: list[str]) -> dict[str, int]:
        reading.set()
        assert go_on.wait(10)
        return slot_checksums(target, names)

    monkeypatch.setattr(live, "slot_checksums", slowly)
    hand.done(hand.call(messages.Begin, hand.begin(5, update_id="u")))
    hand.done(hand.call(messages.Update, tensor=FromTensor("u", hand.segment.descriptor)))
    hand.call(messages.Prepare, "u", 5.0)
    hand.turn_until(reading.is_set)
    assert hand.done(hand.call(messages.AbortUpdate, "u"))["found"]
    release = hand.call(messages.ReleaseMemory, ["weights"])
    for _ in range(5):
        hand.engine.turn()
    assert release not in hand.news.replies
    go_on.set()
    hand.done(release)


@pytest.fixture
def trainer(hand: HandEngine) -> Iterator[Trainer]:
    made = Trainer(hand.target.arena.nbytes)
    yield made
    made.close()


def adopt(hand: HandEngine, trainer: Trainer, version: int, **fields: object) -> int:
    """Lend the trainer's arena in one call; its id."""
    trainer.train(hand.target, weights(version))
    begin = hand.begin(version, path=Path.IPC, staging=Staging.NONE, adopt=True, **fields)
    return hand.call(messages.Update, ipc=FromIpc("", (trainer.descriptor,)), begin=begin)


def test_an_adopting_update_that_ends_before_its_trainer_may_write_is_refused(
    prompt_hand: HandEngine, trainer: Trainer
) -> None:
    hand = prompt_hand
    hand.done(adopt(hand, trainer, 5))
    hand.submit("a", max_tokens=40)
    hand.engine.turn()
    request = hand.begin(6, path=Path.IPC, staging=Staging.NONE, adopt=True, inflight=Inflight.WAIT)
    begin = hand.call(messages.Begin, request)
    hand.turn_until(lambda: hand.engine._gate.num_draining == 1)
    assert hand.updater.open is not None
    abort = hand.call(messages.AbortUpdate, hand.updater.open.update_id)
    assert hand.done(abort) == {"found": True, "torn": False}
    assert hand.reply(begin).error is not None
    hand.turn_until(lambda: len(hand.tokens("a")) == 40)
    assert hand.tokens("a") == expected_output(PROMPT, 40), "generation goes on under the old weights"


def test_no_trainer_writes_before_the_pass_in_flight_has_ended(hand: HandEngine, trainer: Trainer) -> None:
    """Nor one whose call to begin is a repeated one."""
    hand.done(adopt(hand, trainer, 5))
    hand.submit("a", max_tokens=40)
    hand.turn_until(lambda: hand.tokens("a"))
    request = hand.begin(6, path=Path.IPC, staging=Staging.NONE, adopt=True, update_id="u")
    calls = [hand.call(messages.Begin, request) for _ in range(2)]
    for call in calls:
        hand.done(call)
        assert not hand.was_in_flight[call]
    assert hand.done(hand.call(messages.AbortUpdate, "u"))["torn"], "now it may have written"


def test_a_commit_that_finds_no_memory_to_prepare_in_refuses_and_lets_generation_go_on(
    hand: HandEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(live, "CopyBorrowed", no_memory)
    hand.submit("a", max_tokens=40)
    hand.engine.turn()
    begin = hand.begin(5, path=Path.IPC, staging=Staging.NONE)
    push = hand.call(messages.Update, ipc=FromIpc("", (hand.segment.descriptor,)), begin=begin)
    reply = hand.reply(push)
    assert reply.error is not None
    assert (reply.error.reason, hand.updater.open, hand.updater.torn_reason) == ("NO_MEMORY", None, "")
    hand.turn_until(lambda: len(hand.tokens("a")) == 40)


def test_a_fault_of_one_call_is_its_answer(hand: HandEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(*_: object) -> dict[str, int]:
        raise RuntimeError("an error of the driver")

    hand.submit("a", max_tokens=10)
    monkeypatch.setattr(hand.updater, "checksums", fault)
    reply = hand.reply(hand.call(messages.GetChecksums, []))
    assert reply.error is not None
    assert (reply.error.reason, "RuntimeError" in reply.error.message) == ("INTERNAL", True)
    hand.turn_until(lambda: len(hand.tokens("a")) == 10)
