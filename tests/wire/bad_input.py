"""What tests of bad input look at: how the call was refused, and that the engine goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.engines import RunningEngine
from tests.wire.trainer import assert_serves
from trainers_adapters import RollsyncError

INVALID = "INVALID_ARGUMENT"


def refusal(call: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, str]:
    """(status code, reason) of a call that must be refused."""
    with pytest.raises(RollsyncError) as refused:
        call(*args, **kwargs)
    assert refused.value.message
    return refused.value.code, refused.value.reason


def assert_serves_on(engine: RunningEngine, model: Any) -> None:
    """No update is open, and `model` answers."""
    state = engine.rollout.info().state
    assert (state.status, state.open_update_id) == ("serving", "")
    assert_serves(engine, model, state.weight_version)
