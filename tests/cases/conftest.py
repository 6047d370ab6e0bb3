"""Engines and models that the tests of public bug reports share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cases.common import Tensors, stored, wake
from tests.desk import Desk, desk
from tests.engines import RunningEngine, serve
from tests.preloaded import ForkedCommand
from tests.tiny import make_tiny
from tests.ways import Ways
from weight_updater import gloo_parent


@pytest.fixture(scope="session")
def tied_dir(tmp_path_factory) -> Path:
    """A tiny Llama with a tied head, of which the file has the embedding only, float32. Read only."""
    return make_tiny(tmp_path_factory.mktemp("tied-llama"), "llama", tied=True, context_length=8192)


@pytest.fixture(scope="package", autouse=True)
def forked_group_children() -> Iterator[None]:
    """Groups come and go here by the dozen; what is asked of their children needs no fresh one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gloo_parent, "CHILD_COMMAND", ForkedCommand(gloo_parent.CHILD_COMMAND))
        yield


@pytest.fixture(scope="package")
def kept_engine(tied_dir, tmp_path_factory) -> Iterator[Desk]:
    root = tmp_path_factory.getbasetemp()
    with desk(tied_dir, reserve_device_staging=True, weights_roots=(root,), num_pages=512) as made:
        yield made


@pytest.fixture(scope="package")
def ways(kept_engine, tmp_path_factory) -> Iterator[Ways]:
    """Senders to `engine`."""
    with Ways(kept_engine, tmp_path_factory.mktemp("ways")) as made:
        yield made


@pytest.fixture
def engine(kept_engine, ways, weights) -> Iterator[Desk]:
    """An engine with a tied head and every staging, kept; serving, idle and whole before each test."""
    yield kept_engine
    if kept_engine.now.open_update_id:
        kept_engine.abort_update(kept_engine.now.open_update_id)
    if kept_engine.now.released_tags:
        wake(kept_engine)
    if kept_engine.updater.torn_reason:
        ways.push("segment", weights)
    kept_engine.idle()


@pytest.fixture
def weights(tied_dir) -> Tensors:
    """What the engine was started with."""
    return stored(tied_dir)


@pytest.fixture(scope="package")
def untied(tmp_path_factory) -> Iterator[tuple[Desk, Ways, Path]]:
    """An engine with a head of its own, senders to it, and its model directory."""
    directory = make_tiny(tmp_path_factory.mktemp("untied") / "qwen3", "qwen3")
    folder = tmp_path_factory.mktemp("untied-pushes")
    with (
        desk(directory, reserve_device_staging=True, weights_roots=(folder,)) as engine,
        Ways(engine, folder) as ways,
    ):
        yield engine, ways, directory


@pytest.fixture(scope="package")
def served(tied_dir, tmp_path_factory) -> Iterator[RunningEngine]:
    """A real engine behind gRPC, for what the wire alone shows."""
    with serve(
        tied_dir, "--num-pages", "128", "--weights-root", str(tmp_path_factory.getbasetemp()), forked=True
    ) as running:
        yield running
