from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.unit.weight_updater.gloo_ends import GroupRegistryScope
from weight_updater.groups import GroupRegistry


@pytest.fixture
def registry() -> Iterator[GroupRegistry]:
    with GroupRegistryScope() as found:
        yield found


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as found:
        yield found
