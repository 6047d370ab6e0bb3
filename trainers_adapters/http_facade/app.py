"""The application: who may call, how errors look, which routers there are."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from trainers_adapters.connection import Tls
from trainers_adapters.errors import RollsyncError
from trainers_adapters.http_facade import adapters, areal, elsewhere, sglang, vllm
from trainers_adapters.http_facade.engine import Engine

OPEN_PATHS = {"/health", "/liveness"}

HTTP_STATUS = {
    "INVALID_ARGUMENT": HTTPStatus.BAD_REQUEST,
    "UNAUTHENTICATED": HTTPStatus.UNAUTHORIZED,
    "PERMISSION_DENIED": HTTPStatus.FORBIDDEN,
    "NOT_FOUND": HTTPStatus.NOT_FOUND,
    "ALREADY_EXISTS": HTTPStatus.CONFLICT,
    "ABORTED": HTTPStatus.CONFLICT,
    "FAILED_PRECONDITION": HTTPStatus.CONFLICT,
    "DATA_LOSS": HTTPStatus.UNPROCESSABLE_ENTITY,
    "RESOURCE_EXHAUSTED": HTTPStatus.TOO_MANY_REQUESTS,
    "UNIMPLEMENTED": HTTPStatus.NOT_IMPLEMENTED,
    "UNAVAILABLE": HTTPStatus.SERVICE_UNAVAILABLE,
    "DEADLINE_EXCEEDED": HTTPStatus.GATEWAY_TIMEOUT,
}


def create_app(
    address: str,
    *,
    token: str | None = None,
    tls: Tls | None = None,
    model_names: Sequence[str] = (),
    server_info: Mapping[str, Any] | None = None,
) -> FastAPI:
    """The facade of the engine at `address`.

    Args:
        token: the engine's; callers of the facade must present it too.
        model_names: what callers call the model, beside its directory (/v1/models).
        server_info: what /server_info answers besides, for callers that compare it with their arguments.
    """
    others = {"model_names": model_names, "said": server_info or {}}

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with Engine.connect(address, token, tls, **others) as engine:
            app.state.engine = engine
            yield

    app = FastAPI(title="rollsync", lifespan=lifespan, docs_url=None, redoc_url=None)
    for module in (sglang, vllm, adapters, areal, elsewhere):
        app.include_router(module.router)
    app.add_exception_handler(RollsyncError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(ValueError, _cannot_be_sent)
    app.add_exception_handler(Exception, _failed)
    expected = None if token is None else token.encode()

    @app.middleware("http")
    async def allowed(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        if expected is not None and request.url.path not in OPEN_PATHS:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given.encode(), expected):
                return error_response(
                    HTTPStatus.UNAUTHORIZED,
                    "UNAUTHENTICATED",
                    "this engine wants a token: send `authorization: Bearer TOKEN`",
                )
        return await call_next(request)

    return app


def error_response(status: HTTPStatus, reason: str, message: str) -> JSONResponse:
    """One shape for every error: `error.type` is the engine's own word for it."""
    error = {"type": reason, "message": message, "code": int(status)}
    return JSONResponse({"success": False, "message": message, "error": error}, status_code=int(status))


async def _refused(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RollsyncError)
    status = HTTP_STATUS.get(error.code, HTTPStatus.INTERNAL_SERVER_ERROR)
    return error_response(status, error.reason or error.code, error.message)


async def _cannot_be_sent(_: Request, error: Exception) -> JSONResponse:
    """The client refused a value that no message to the engine can hold."""
    return error_response(HTTPStatus.BAD_REQUEST, "INVALID_REQUEST", str(error))


async def _failed(_: Request, error: Exception) -> JSONResponse:
    """A bug of ours; the server logs it, too."""
    text = f"{type(error).__name__} in the facade; see its log"
    return error_response(HTTPStatus.INTERNAL_SERVER_ERROR, "INTERNAL", text)


async def _invalid(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body")
    return error_response(HTTPStatus.BAD_REQUEST, "INVALID_REQUEST", f"{where or 'the body'}: {first['msg']}")
