"""What a call to an engine can end with, as one exception with a machine-readable reason. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

REASON_KEY = "rollsync-reason"
"""Trailing metadata key that carries the engine's reason."""


class RollsyncError(Exception):
    """A call that failed.

    Args:
        code: name of the gRPC status, for example "FAILED_PRECONDITION".
        reason: the engine's word for it, for example "STALE_VERSION"; "UNREACHABLE" when no engine
            answered and "DEADLINE" when the caller's own time ran out.
        message: what happened, to which input, and what to do.
    """

    def __init__(self, code: str, reason: str, message: str) -> None:
        super().__init__(f"{reason or code}: {message}")
        self.code = code
        self.reason = reason
        self.message = message

    def __reduce__(self) -> Any:
        """Trainers that span processes carry errors between them."""
        return type(self), (self.code, self.reason, self.message), self.__dict__

    @property
    def unreachable(self) -> bool:
        """No engine answered, so whether it acted is unknown."""
        return self.reason == "UNREACHABLE"


class PushError(RollsyncError):
    """A push that did not commit everywhere.

    Args:
        committed: addresses of the engines that serve `version` now; empty: none does, all keep the old.
        laggards: addresses of the engines that may not, although others do.
    """

    def __init__(
        self,
        code: str,
        reason: str,
        message: str,
        *,
        version: int = 0,
        committed: tuple[str, ...] = (),
        laggards: tuple[str, ...] = (),
    ) -> None:
        super().__init__(code, reason, message)
        self.version = version
        self.committed = committed
        self.laggards = laggards


def from_rpc_error(error: grpc.RpcError, address: str) -> RollsyncError:
    """Read status, details and reason of a failed call to `address` (sync and asyncio alike)."""
    code = error.code().name
    message = error.details() or code
    metadata = dict(error.trailing_metadata() or ())
    reason = str(metadata.get(REASON_KEY, ""))
    if not reason and code == "UNAVAILABLE":
        reason = "UNREACHABLE"
        message = f"no engine answers at {address} ({message}); is `rollsync serve` running there?"
    elif not reason and code == "DEADLINE_EXCEEDED":
        reason = "DEADLINE"
        message = f"{address} did not answer in time ({message}); raise timeout_s or see `rollsync status`"
    return RollsyncError(code, reason, message)


@contextmanager
def translated(address: str) -> Iterator[None]:
    """Turn the gRPC error of a block of calls to `address` into a RollsyncError."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error, address) from error
