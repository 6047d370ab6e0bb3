"""Engines and models that the tests of public bug reports share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cases.common import Tensors, stored
from tests.desk import Desk, desk
from tests.tiny import make_tiny
from tests.ways import Ways


@pytest.fixture(scope="session")
def tied_dir(tmp_path_factory) -> Path:
    """A tiny Llama with a tied head, of which the file has the embedding only, float32. Read only."""
    return make_tiny(tmp_path_factory.mktemp("tied-llama"), "llama", tied=True)


@pytest.fixture(scope="package")
def engine(tied_dir, tmp_path_factory) -> Iterator[Desk]:
    """An engine with a tied head and every staging. Tests leave it serving, with whole weights."""
    with desk(tied_dir, reserve_device_staging=True, weights_roots=(tmp_path_factory.getbasetemp(),)) as made:
        yield made


@pytest.fixture(scope="package")
def ways(engine, tmp_path_factory) -> Iterator[Ways]:
    with Ways(engine, tmp_path_factory.mktemp("ways")) as made:
        yield made


@pytest.fixture
def weights(tied_dir) -> Tensors:
    """What the engine was started with."""
    return stored(tied_dir)
