from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.scheduler.update_loop import Loop


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.flows.close()
    made.updater.close()
    made.segment.close()
    made.segment.unlink()
