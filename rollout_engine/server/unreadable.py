"""Requests that are no message of their type: the caller hears so, as of any other bad input.

The library itself would end such a call as UNKNOWN or INTERNAL, which are words for a bug of ours.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from rollout_engine.errors import EngineError, Reason


class Unreadable:
    """Stands where a request should, until a guarded handler meets it."""

    def __init__(self, problem: str) -> None:
        self.problem = problem


class ReadingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Lets bytes that cannot be parsed come to the handler, as Unreadable.

    Args:
        services: full names; the handlers of others are left alone.
    """

    def __init__(self, services: Sequence[str]) -> None:
        self._prefixes = tuple(f"/{service}/" for service in services)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(self._prefixes):
            return handler
        return handler._replace(request_deserializer=_forgiving(handler.request_deserializer))


def _forgiving(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError as error:
            return Unreadable(str(error))

    return read


def readable(request: Any) -> Any:
    """A request, or a stream of them, of which none is Unreadable.

    Raises:
        EngineError (INVALID_REQUEST): it is; of a stream, when its turn comes.
    """
    if isinstance(request, Unreadable):
        raise cannot_be_parsed(request.problem)
    return _readable_ones(request) if hasattr(request, "__aiter__") else request


def cannot_be_parsed(problem: str) -> EngineError:
    """What the caller hears; `problem` is the library's word."""
    return EngineError(
        Reason.INVALID_REQUEST,
        f"the request cannot be parsed ({problem}); do client and engine use the same protocol?",
    )


async def _readable_ones(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield readable(request)
