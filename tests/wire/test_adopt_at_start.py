"""An engine that starts on its trainer's arena: nothing is loaded, and the KV pool knows of those bytes."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from rollout_engine.kv.capacity import KvCapacity
from rollout_engine.models.weights import model_layout
from tests.engines import serve
from tests.preloaded import interpreter
from tests.tiny import load_reference, make_tiny
from tests.wire.trainer import PROMPT, assert_serves, checksums_of, reference_tokens, train, until
from trainers_adapters import AdoptedArena, ModuleSource, RollsyncError, push_weights

FRACTION = 0.05
POOL = ("--mem-fraction-static", str(FRACTION), "--max-running-requests", "4096")
"""A pool that memory limits, not the largest batch."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "llama", "llama", tied=True)


@pytest.fixture
def model(model_dir):
    model = load_reference(model_dir)
    train(model, 1)  # what the engine answers with cannot have come from the directory
    return model


def test_an_engine_starts_on_the_trainers_arena(model_dir, model, tmp_path):
    descriptor = tmp_path / "arena.json"
    with AdoptedArena(None, model, layout=model_layout(model_dir, "float32")) as arena:
        arena.write_descriptor(descriptor)
        assert stat.S_IMODE(descriptor.stat().st_mode) == 0o600
        with serve(model_dir, "--weights", f"ipc:{descriptor}", *POOL) as engine:
            info = engine.rollout.info()
            assert info.weight_bytes == engine.weights.layout().arena_bytes
            assert engine.weights.layout().digest() == model_layout(model_dir, "float32").digest()
            assert engine.weights.checksums().by_name == checksums_of(ModuleSource(model))
            assert engine.greedy(PROMPT, ignore_eos=True).token_ids == reference_tokens(model, PROMPT)
            _assert_counts_preloaded(info.kv_capacity, info.weight_bytes)

            arena.connect(engine.weights)
            with arena.update():
                train(model, 2)
            assert_serves(engine, model, arena.report.version)
            assert arena.report.extra_bytes == 0
            assert engine.rollout.info().weights_address == info.weights_address, "it lived there already"

            with pytest.raises(RollsyncError) as used:
                engine.weights.release(arena.descriptor.allocation_id)
            assert used.value.reason == "WRONG_STATE"
            version = push_weights(ModuleSource(model), engine.weights).version
            assert engine.weights.release(arena.descriptor.allocation_id) == 1
            live = checksums_of(ModuleSource(model))
            train(model, 3)
            assert engine.weights.checksums().by_name == live
            assert engine.weights.checksums().weight_version == version


def _assert_counts_preloaded(kv: dict[str, int], weight_bytes: int) -> None:
    """The pool is as large as if the engine had loaded the weights itself, to the byte."""
    assert kv["preloaded_weights_bytes"] == weight_bytes

    def pool_bytes(preloaded_bytes: int) -> int:
        capacity = KvCapacity(kv["pre_model_load_bytes"], FRACTION, kv["reserved_bytes"])
        capacity.account_preloaded_weights(preloaded_bytes, owner="adopted")
        pages = capacity.num_pages(kv["available_bytes"], kv["bytes_per_page"])
        return pages * kv["bytes_per_page"]

    assert kv["kv_bytes"] == pool_bytes(weight_bytes)
    too_large = pool_bytes(0) - pool_bytes(weight_bytes)
    assert abs(too_large - weight_bytes * (1 - FRACTION)) < kv["bytes_per_page"]
    assert too_large > 0


def test_the_trainers_death_is_seen_although_it_never_called(model_dir, tmp_path):
    descriptor = tmp_path / "arena.json"
    child = subprocess.Popen(
        [interpreter(), "-m", "tests.wire.preloading_trainer", str(model_dir), str(descriptor)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout.readline() == "written\n"
        with serve(model_dir, "--weights", f"ipc:{descriptor}", "--num-pages", "64", forked=True) as engine:
            assert len(engine.greedy(PROMPT, ignore_eos=True).token_ids) == 8
            child.kill()
            child.wait()
            until(lambda: engine.rollout.info().state.status == "not_serving", "the engine notices")
            assert "gone" in engine.rollout.info().state.not_serving_reason
            model = load_reference(model_dir)
            version = push_weights(ModuleSource(model), engine.weights).version
            assert_serves(engine, model, version)
    finally:
        child.kill()
        child.wait()
        for name in _segments_of(descriptor):
            Path("/dev/shm", name).unlink(missing_ok=True)  # what a killed trainer leaves behind
    with pytest.raises(AssertionError, match=r"cannot be opened|is gone"):
        _start(model_dir, descriptor)


def _segments_of(descriptor: Path) -> list[str]:
    return [json.loads(descriptor.read_text())["posix_shm"]["name"]]


def _start(model_dir: Path, descriptor: Path) -> None:
    with serve(model_dir, "--weights", f"ipc:{descriptor}", "--num-pages", "64", forked=True):
        pass


def test_what_cannot_be_started_on(model_dir, model, tmp_path):
    descriptor = tmp_path / "arena.json"
    with pytest.raises(AssertionError, match=r"descriptor .* cannot be read"):
        _start(model_dir, descriptor)
    with AdoptedArena(None, model, layout=model_layout(model_dir, "float32")) as arena:
        arena.write_descriptor(descriptor)
        os.chmod(descriptor, 0o640)
        with pytest.raises(AssertionError, match="mode 0600"):
            _start(model_dir, descriptor)
        os.chmod(descriptor, 0o600)
        other = make_tiny(tmp_path / "other", "qwen3")
        with pytest.raises(AssertionError, match="the layout of the same"):
            _start(other, descriptor)
        with pytest.raises(ValueError, match="connect"), arena.update():
            pass
    with pytest.raises(ValueError, match="layout="):
        AdoptedArena(None, model)
