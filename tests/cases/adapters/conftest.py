"""An engine that holds none of its adapters when a test begins."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from rollout_engine import messages as m
from tests.cases.adapters.common import RANK
from tests.cases.common import stored
from tests.desk import Desk, desk
from tests.lora import adapted
from tests.ways import Ways, ways_to

NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def held(tied_dir, tmp_path_factory) -> Iterator[tuple[Desk, Ways]]:
    folder = tmp_path_factory.mktemp("adapters")
    config = {"max_adapters": 2, "max_adapter_rank": RANK, "weights_roots": (folder,)}
    with desk(tied_dir, **config) as engine, ways_to(engine, folder) as ways:
        yield engine, ways


@pytest.fixture
def engine(held, tied_dir) -> Desk:
    """No adapter is held, and the base weights are those of the directory."""
    engine, ways = held
    for name in list(engine.updater.adapters.book.held):
        engine.call(m.RemoveAdapter, name=name, abort=True)
    engine.idle()
    if any(not torch.equal(engine.runner.target.slot(n), t) for n, t in stored(tied_dir).items()):
        ways.push("ipc", stored(tied_dir))
    return engine


@pytest.fixture
def ways(held) -> Ways:
    return held[1]


@pytest.fixture
def model(tied_dir):
    return adapted(tied_dir)


@pytest.fixture
def name() -> str:
    """Of an adapter that was never held: versions are remembered beyond a removal."""
    return f"math-{next(NUMBERS)}"
