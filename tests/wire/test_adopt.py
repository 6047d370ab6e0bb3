"""Adoption over real processes: one arena for the trainer and the engine, and every way in which it ends."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.engines import RunningEngine, serve
from tests.lora import adapted as adapted_model
from tests.preloaded import interpreter
from tests.tiny import load_reference, make_tiny
from tests.wire.trainer import (
    PROMPT,
    InFlight,
    Named,
    assert_serves,
    beside,
    checksums_of,
    reference_tokens,
    train,
    until,
    until_closed,
)
from trainers_adapters import AdapterSource, AdoptedArena, IpcArena, ModuleSource, RollsyncError, push_weights
from weight_updater.requests import BeginUpdate, Recapture, Staging
from weight_updater.requests import Path as Way


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "llama", "llama", tied=True)


@pytest.fixture(scope="module")
def engine(model_dir) -> Iterator[RunningEngine]:
    with serve(
        model_dir, "--num-pages", "256", "--lease-seconds", "30", "--max-adapters", "1", forked=True
    ) as running:
        yield running


@pytest.fixture
def model(model_dir):
    return load_reference(model_dir)


def push(model, engine: RunningEngine, **options):
    return push_weights(ModuleSource(model), engine.weights, **options)


@contextlib.contextmanager
def adopted(engine: RunningEngine, model) -> Iterator[AdoptedArena]:
    """An arena that the engine lives on; afterwards the engine has weights of its own again."""
    with AdoptedArena(engine.weights, model) as arena:
        with arena.update():
            train(model, 1)
        yield arena
        push(model, engine)


def test_the_weights_move_into_the_trainers_memory_and_out_again(engine, model):
    before = engine.rollout.info()
    with AdoptedArena(engine.weights, model) as arena:
        assert arena.descriptor.size == before.weight_bytes == engine.weights.layout().arena_bytes
        with arena.update():
            train(model, 2)
        assert arena.report.previous_version == before.weight_version
        assert arena.report.version == before.weight_version + 1
        assert arena.report.extra_bytes == 0, "no second copy of the weights anywhere"
        inside = engine.rollout.info()
        assert inside.weights_address != before.weights_address
        assert inside.kv_capacity == before.kv_capacity
        assert_serves(engine, model, arena.report.version)
        assert engine.greedy(PROMPT).num_cached_tokens == 32
        with arena.update():
            train(model, 3)
        assert engine.rollout.info().weights_address == inside.weights_address, "it moves once"
        assert engine.greedy(PROMPT).num_cached_tokens == 0, "old pages never match, adopted or not"
        assert_serves(engine, model, arena.report.version)
        with pytest.raises(RollsyncError) as used:
            engine.weights.release(arena.descriptor.allocation_id)
        assert used.value.reason == "WRONG_STATE"

        left = push(model, engine)
        after = engine.rollout.info()
        assert after.weights_address != inside.weights_address
        assert next(iter(left.replies.values())).extra_bytes >= before.weight_bytes, "a home of its own again"
        assert engine.weights.release(arena.descriptor.allocation_id) == 1
    live = checksums_of(ModuleSource(model))
    train(model, 4)
    assert engine.weights.checksums().by_name == live, "what the trainer does now is its own affair"
    assert engine.rollout.info().kv_capacity == before.kv_capacity


@pytest.mark.parametrize("inflight", ["wait", "abort", "keep", "recompute"])
def test_nothing_is_generated_while_the_trainer_writes(inflight, engine, model):
    with adopted(engine, model) as arena:
        old = arena.report.version
        stream = InFlight(engine)
        with arena.update(inflight=inflight):
            state = engine.rollout.info().state
            assert (state.status, state.paused_by) == ("paused", "update")
            request = beside(engine.greedy, PROMPT, ignore_eos=True)
            until(lambda: engine.rollout.info().state.num_waiting > 0, "the new request waits")
            train(model, 5)
            time.sleep(0.1)
            assert engine.rollout.info().state.num_steps == state.num_steps
        new = arena.report.version
        fresh = request.result(10)
        assert fresh.token_ids == reference_tokens(model, PROMPT)
        assert fresh.weight_versions == [new] * 8
        stream.end()
        switch = stream.labels.count(old)
        assert stream.labels == [old] * switch + [new] * (len(stream.labels) - switch)
        if inflight == "wait":
            assert (switch, stream.finish_reason) == (stream.num_tokens, "length")
        elif inflight == "abort":
            assert (switch, stream.finish_reason) == (len(stream.token_ids), "abort")
        else:
            assert 0 < switch < len(stream.token_ids) == stream.num_tokens
        if inflight == "recompute":
            following = reference_tokens(model, PROMPT + stream.token_ids[:switch])
            assert stream.token_ids[switch : switch + 8] == following
        report = arena.report
        counted = {"abort": report.num_aborted, "keep": report.num_kept, "recompute": report.num_recomputed}
        assert sum(counted.values()) == counted.get(inflight, 0) == (inflight != "wait")
        assert_serves(engine, model, new)


def test_never_recapture_refuses_what_would_move(engine, model):
    version = push(model, engine).version
    home = engine.rollout.info().weights_address
    manifest = ModuleSource(model).manifest(checksums=False)
    moving = BeginUpdate(path=Way.IPC, manifest=manifest, adopt=True, recapture=Recapture.NEVER)
    with pytest.raises(RollsyncError) as into:
        engine.weights.begin(moving)
    assert into.value.reason == "WOULD_MOVE"
    assert engine.rollout.info().weights_address == home
    assert_serves(engine, model, version)
    with adopted(engine, model) as arena:
        with pytest.raises(RollsyncError) as out:
            engine.weights.begin(BeginUpdate(path=Way.TENSOR, manifest=manifest, recapture=Recapture.NEVER))
        assert out.value.reason == "WOULD_MOVE"
        begun = engine.weights.begin(moving)  # moves nothing: the slots point there already
        train(model, 6)
        engine.weights.update_from_ipc(begun.update_id, [arena.descriptor])
        version = engine.weights.commit(begun.update_id).version
        assert_serves(engine, model, version)


def test_a_module_of_separate_tensors_cannot_be_adopted(engine, model):
    version = push(model, engine).version
    source = ModuleSource(model)
    begun = engine.weights.begin(BeginUpdate(path=Way.IPC, manifest=source.manifest(), adopt=True))
    with IpcArena() as lent:  # packed in the manifest's order, and not held under the owner's lock
        from trainers_adapters.sending import Outgoing

        lent.stage(Outgoing(source, source.manifest(), time.monotonic() + 10), [engine.weights])
        with pytest.raises(RollsyncError) as refused:
            engine.weights.update_from_ipc(begun.update_id, [lent.descriptor])
    assert refused.value.reason in ("INVALID_UPDATE", "MEMORY_UNAVAILABLE")
    assert_serves(engine, model, version)


@pytest.mark.case("B066")
def test_a_lease_that_runs_out_before_the_engine_lives_there_is_refused(engine, model):
    version = push(model, engine).version
    with AdoptedArena(engine.weights, model) as arena:
        old = checksums_of(ModuleSource(model))
        with pytest.raises(RollsyncError) as late:
            _write_until_the_lease_ends(engine, model, arena)
        assert late.value.reason == "UNKNOWN_UPDATE"
        live = engine.weights.checksums()
        assert (live.by_name, live.weight_version) == (old, version)
        assert engine.greedy(PROMPT, ignore_eos=True).weight_versions == [version] * 8


@pytest.mark.parametrize("recovery", ["tensor", "adopt"])
def test_a_lease_that_runs_out_while_the_trainer_writes_is_torn(recovery, engine, model):
    with adopted(engine, model) as arena:
        torn = arena.report.version
        stream = InFlight(engine)
        with pytest.raises(RollsyncError) as late:
            _write_until_the_lease_ends(engine, model, arena)
        assert late.value.reason == "UNKNOWN_UPDATE"
        assert "lease" in late.value.message
        assert stream.end().finish_reason == "error"
        assert stream.labels == [torn] * len(stream.labels), "nothing was sampled from what was written"
        _assert_serves_nothing(engine, "lease")
        with pytest.raises(RollsyncError) as partial:
            push(model, engine, partial=True)
        assert partial.value.reason == "WRONG_STATE"
        if recovery == "adopt":
            with arena.update():
                pass
            version = arena.report.version
        else:
            version = push(model, engine).version
        assert version == torn + 1
        assert_serves(engine, model, version)


def test_a_step_that_fails_while_the_trainer_writes_is_torn(engine, model):
    with adopted(engine, model) as arena:
        with pytest.raises(FloatingPointError), arena.update():
            _train_and_fail(model)
        _assert_serves_nothing(engine, "aborted")
        push(model, engine)
        assert_serves(engine, model, arena.report.version + 1)


def test_weights_that_are_not_finite_are_torn_for_the_bytes_are_live_already(engine, model):
    with adopted(engine, model) as arena:
        parameter = next(model.parameters())
        good = parameter.detach().clone()
        with pytest.raises(RollsyncError) as refused, arena.update(), torch.no_grad():
            parameter[0, 0] = float("nan")
        assert refused.value.reason == "NONFINITE"
        _assert_serves_nothing(engine, "NaN")
        with arena.update(), torch.no_grad():
            parameter.copy_(good)
        assert_serves(engine, model, arena.report.version)


def test_an_engine_whose_arena_is_closed_stops_serving(engine, model):
    with AdoptedArena(engine.weights, model) as arena, arena.update():
        train(model, 10)
    until(lambda: engine.rollout.info().state.status == "not_serving", "the engine notices")
    version = push(model, engine).version
    assert_serves(engine, model, version)


def adopting_trainer(engine: RunningEngine, model_dir: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [interpreter(), "-m", "tests.wire.adopting_trainer", engine.address, str(model_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("while_writing", [False, True])
def test_the_trainers_death_is_seen_within_a_second(while_writing, engine, model, model_dir):
    child = adopting_trainer(engine, model_dir)
    try:
        assert child.stdout.readline() == "adopted\n"
        stream = None if while_writing else InFlight(engine)
        if while_writing:
            child.stdin.write("begin\n")
            child.stdin.flush()
            assert child.stdout.readline() == "written\n"
    finally:
        child.kill()
        child.wait()
    died = time.monotonic()
    until(lambda: engine.rollout.info().state.status == "not_serving", "the engine notices")
    assert time.monotonic() - died < 5.0, "a second, and what a busy machine adds"
    if stream is not None:
        assert stream.end().finish_reason in ("error", "length")
    _assert_serves_nothing(engine, "gone")
    state = engine.rollout.info().state
    assert (state.open_update_id, state.num_running, state.num_waiting) == ("", 0, 0)
    version = push(model, engine).version
    assert_serves(engine, model, version)
    with adopted(engine, model) as arena:  # another trainer may share its memory now
        assert_serves(engine, model, arena.report.version)


@pytest.mark.parametrize("what", ["adapter", "partial"])
def test_an_update_that_needs_the_dead_trainers_weights_ends_with_them(what, engine, model, model_dir):
    """A full update would make the engine whole; one of an adapter beside them or of a part of them would
    not, and must not say that it has committed.
    """
    push(model, engine)  # the trainer adopts with the same bytes
    source = AdapterSource(adapted_model(model_dir), "held")
    if what == "adapter":
        held = push_weights(source, engine.weights).version
        opened = {"manifest": source.manifest(), "adapter": source.spec(engine.weights.layout())}
    else:
        opened = {"manifest": Named(list(ModuleSource(model))[:3]).manifest(), "partial": True}
    child = adopting_trainer(engine, model_dir)
    try:
        assert child.stdout.readline() == "adopted\n"
        update = engine.weights.begin(BeginUpdate(path=Way.TENSOR, staging=Staging.HOST, **opened)).update_id
    finally:
        child.kill()
        child.wait()
    until(lambda: engine.rollout.info().state.status == "not_serving", "the engine notices")
    until_closed(engine)
    with pytest.raises(RollsyncError, match="the trainer that owns the adopted arena is gone") as ended:
        engine.weights.commit(update)
    assert ended.value.reason == "UNKNOWN_UPDATE"
    version = push(model, engine).version
    assert_serves(engine, model, version)
    if what == "adapter":
        completion = engine.greedy(PROMPT, adapter="held", ignore_eos=True)
        assert completion.adapter_versions == [held] * 8, "over the bytes that it was pushed over"


def test_rollback_does_not_let_generation_into_what_the_trainer_writes(engine, model):
    with adopted(engine, model) as arena, arena.update(inflight="keep"):
        with pytest.raises(RollsyncError) as refused:
            engine.weights.rollback(inflight="keep")
        assert refused.value.reason == "UPDATE_IN_PROGRESS"
        assert engine.rollout.info().state.paused_by == "update"


@pytest.mark.case("B111")
def test_an_engine_that_sleeps_on_the_trainers_memory_leaves_it_alone(engine, model):
    with adopted(engine, model) as arena:
        values = checksums_of(ModuleSource(model))
        assert engine.rollout.release_memory("weights") == 0, "none of it is the engine's to give back"
        assert checksums_of(ModuleSource(model)) == values
        with pytest.raises(RollsyncError) as asleep, arena.update():
            pass
        assert asleep.value.reason == "ASLEEP"
        assert engine.rollout.resume_memory("weights").needs_update
        assert checksums_of(ModuleSource(model)) == values
        with arena.update():
            train(model, 11)
        assert_serves(engine, model, arena.report.version)


def _write_until_the_lease_ends(engine: RunningEngine, model, arena: AdoptedArena) -> None:
    with arena.update(lease_s=0.3, inflight="keep"):
        train(model, 7)
        until_closed(engine)


def _train_and_fail(model) -> None:
    train(model, 9)
    raise FloatingPointError("the loss is not finite")


def _assert_serves_nothing(engine: RunningEngine, because: str) -> None:
    state = engine.rollout.info().state
    assert state.status == "not_serving"
    assert because in state.not_serving_reason
    with pytest.raises(RollsyncError) as refused:
        engine.greedy(PROMPT)
    assert (refused.value.code, refused.value.reason) == ("UNAVAILABLE", "NOT_SERVING")
