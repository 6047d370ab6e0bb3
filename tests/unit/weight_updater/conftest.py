from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.preloaded import interpreter
from tests.unit.weight_updater.gloo_ends import GroupRegistryScope
from tests.unit.weight_updater.nccl_wire import World
from weight_updater import gloo_parent
from weight_updater.groups import GroupRegistry


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[GroupRegistry]:
    """Its groups' children are forked: they come and go, and each would import torch."""
    command = (interpreter(), *gloo_parent.CHILD_COMMAND[1:])
    monkeypatch.setattr(gloo_parent, "CHILD_COMMAND", command)
    with GroupRegistryScope() as found:
        yield found


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as found:
        together = threading.Barrier(4)  # all start now: when a later one would start is a matter of moments
        for started in [found.submit(together.wait, 20) for _ in range(4)]:
            started.result()
        yield found


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.registry.close()
    made.pool.shutdown()
