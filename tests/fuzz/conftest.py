"""An engine for each module of this folder, and proof that it lived through all tests of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.engines import RunningEngine, serve
from tests.fuzz.calls import tidy
from tests.tiny import load_reference, make_tiny
from tests.wire.trainer import PROMPT
from trainers_adapters import ModuleSource, push_weights

MAX_GROWTH_BYTES = 300 << 20


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "llama", "llama", tied=True)


@pytest.fixture(scope="module")
def engine(model_dir, tmp_path_factory) -> Iterator[RunningEngine]:
    root = tmp_path_factory.mktemp("root")
    flags = ["--weights-root", str(root), "--num-pages", "64", "--max-waiting-requests", "16"]
    with serve(model_dir, *flags, "--reserve-device-staging") as running:
        yield running


@pytest.fixture(scope="module")
def channel(engine) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(engine.address, options=[("grpc.max_send_message_length", -1)]) as made:
        yield made


@pytest.fixture(scope="module")
def flat(engine, model_dir) -> Iterator[None]:
    """Memory before and after all of a module's tests; and what the engine then answers."""
    model = load_reference(model_dir)
    push_weights(ModuleSource(model), engine.weights, path="tensor")
    expected = engine.greedy(PROMPT).token_ids
    before = sum(map(_resident_bytes, _family(engine.pid)))
    yield
    tidy(engine)
    push_weights(ModuleSource(model), engine.weights, path="tensor")
    assert engine.greedy(PROMPT).token_ids == expected
    assert sum(map(_resident_bytes, _family(engine.pid))) - before < MAX_GROWTH_BYTES


def _family(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(found for child in children for found in _family(int(child)))]


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
