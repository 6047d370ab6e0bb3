"""One nursery for all tests here: importing is what takes long."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.nursery import Nursery, nursery
from tests.tiny import make_tiny


@pytest.fixture(scope="session")
def faults_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="session")
def faults_model(faults_dir) -> Path:
    return make_tiny(faults_dir / "model", "llama", tied=True)


@pytest.fixture(scope="session")
def parent(faults_dir, faults_model) -> Iterator[Nursery]:
    with nursery(faults_dir, faults_model) as made:
        yield made
