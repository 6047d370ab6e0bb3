"""Calls that stay open: how many of a kind there may be at once.

Each is counted from its opening, before a byte of its request has come, to the end of its task. Calls that
are answered at once are not counted: whatever else is full, health, status, abort and pause are heard.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from rollout_engine.errors import EngineError, Reason
from rollout_engine.logs import get_log
from rollout_engine.server.status import abort, kind_of

if TYPE_CHECKING:
    from rollout_engine.config import ServeConfig
    from rollout_engine.server.tally import Tally

log = get_log(__name__)

KINDS: dict[str, tuple[str, ...]] = {
    "generate": (
        "/rollout_engine.v1.Rollout/Generate",
        "/rollout_engine.v1.Rollout/GenerateBatch",
        "/rollout_engine.v1.Rollout/Score",
    ),
    "watch": (
        "/rollout_engine.v1.Rollout/WatchEngine",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ),
    "weight": (
        "/rollout_engine.v1.Weights/UpdateWeightsFromTensor",
        "/rollout_engine.v1.Weights/GetWeightsByName",
    ),
    "health": ("/grpc.health.v1.Health/Watch",),
}
"""Methods by the kind that they count for; `max_{kind}_streams` is its limit."""
TELL_EVERY_S = 10.0
"""Refusals of one kind are logged no oftener."""


def too_many(kind: str, most: int) -> EngineError:
    """What the caller of one more hears."""
    return EngineError(
        Reason.TOO_MANY_STREAMS,
        f"{most} {kind} streams are open, which is the most that this engine takes (max_{kind}_streams); end "
        f"some and call again, or start it with a larger --max-{kind}-streams",
    )


class LimitReports:
    """Log lines about refusals, not one for each: whoever floods the engine must not fill the disk."""

    def __init__(self, kind: str, most: int) -> None:
        self._kind, self._most = kind, most
        self._num_untold = 0
        self._told_at = -TELL_EVERY_S

    def refused(self, now: float) -> None:
        """Another one was. now: time.monotonic()."""
        self._num_untold += 1
        if now - self._told_at >= TELL_EVERY_S:
            setting = f"max_{self._kind}_streams"
            log.warning("streams_refused", setting=setting, limit=self._most, refused=self._num_untold)
            self._told_at, self._num_untold = now, 0


@dataclass
class _Open:
    """The streams of one kind."""

    kind: str
    most: int
    reports: LimitReports
    num: int = 0


class StreamLimits(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Refuses a stream above its kind's limit, with TOO_MANY_STREAMS.

    Args:
        tally: counts the refusals, and shows how many streams are open.
    """

    def __init__(self, config: ServeConfig, tally: Tally) -> None:
        self._tally = tally
        self._of_method: dict[str, _Open] = {}
        for kind, methods in KINDS.items():
            most = getattr(config, f"max_{kind}_streams")
            self._of_method |= dict.fromkeys(methods, _Open(kind, most, LimitReports(kind, most)))
            tally.streams_open(kind, 0)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        opened = self._of_method.get(handler_call_details.method)
        if opened is None:
            return await continuation(handler_call_details)
        if opened.num >= opened.most:
            # Streams both ways, so that it answers before it reads anything.
            return grpc.stream_stream_rpc_method_handler(self._refuse(opened))
        self._count(opened, 1)
        # The whole call is one task, also while it waits for a request that never comes.
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _: self._count(opened, -1))
        return await continuation(handler_call_details)

    def _count(self, opened: _Open, change: int) -> None:
        opened.num += change
        self._tally.streams_open(opened.kind, opened.num)

    def _refuse(self, opened: _Open) -> Callable[[Any, grpc.aio.ServicerContext], Awaitable[None]]:
        async def refuse(_: Any, context: grpc.aio.ServicerContext) -> None:
            error = too_many(opened.kind, opened.most)
            opened.reports.refused(time.monotonic())
            self._tally.errored(kind_of(error), error.reason)
            await abort(context, error)

        return refuse
