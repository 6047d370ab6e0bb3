"""What tests over real engines share. A module gives its own `model_dir`, and an `engine` that serves it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny import load_reference
from tests.wire.trainer import SEEDS, all_senders, train
from trainers_adapters.sending import Sender


@pytest.fixture(scope="module")
def work_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("pushes")


@pytest.fixture(scope="module")
def senders(engine, work_dir) -> Iterator[dict[str, Sender]]:
    with all_senders(work_dir) as made:
        yield made


@pytest.fixture
def model(model_dir):
    """A trainer whose weights are not those of any test before."""
    model = load_reference(model_dir)
    train(model, next(SEEDS))
    return model
