"""What a command's result or error becomes in a Reply."""

from __future__ import annotations

from typing import Any

import msgspec

from rollout_engine.errors import EngineError, Reason
from rollout_engine.logs import get_log
from rollout_engine.messages import ErrorInfo
from weight_updater.errors import UpdateError, WeightsTorn

log = get_log(__name__)


def error_info(error: Exception) -> ErrorInfo:
    """A domain error as it is; anything else is a bug of ours, logged whole and told in one line."""
    if isinstance(error, EngineError):
        return ErrorInfo("engine", str(error.reason), error.message)
    if isinstance(error, UpdateError):
        kind = "torn" if isinstance(error, WeightsTorn) else "refused"
        return ErrorInfo(kind, str(error.reason), error.message)
    log.exception("command_failed", error)
    return ErrorInfo("engine", str(Reason.INTERNAL), f"{type(error).__name__} in the engine; see its log")


def to_builtins(result: Any) -> Any:
    """Dataclasses and structs as dicts; msgspec.convert makes them typed again on the other side."""
    return msgspec.to_builtins(result, builtin_types=(bytes,))
