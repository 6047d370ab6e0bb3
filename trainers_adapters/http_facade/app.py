"""The application: which routers there are, and how errors look."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from trainers_adapters.connection import Tls
from trainers_adapters.errors import RollsyncError
from trainers_adapters.http_facade import adapters, areal, elsewhere, sglang, vllm
from trainers_adapters.http_facade.engine import CallerLeft, Engine
from trainers_adapters.http_facade.guard import Guard, error_response

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
        token: the engine's; callers of the facade must present it too. Without one, only programs that call
            a loopback name or an address are answered, and no web page (guard.py).
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
    app.add_exception_handler(HTTPException, _no_such_call)
    app.add_exception_handler(CallerLeft, _left)
    app.add_middleware(Guard, token=token)
    return app


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


async def _no_such_call(_: Request, error: Exception) -> JSONResponse:
    """No such path, another method, or a body that no reader of JSON takes."""
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    reason = "NOT_FOUND" if status is HTTPStatus.NOT_FOUND else "INVALID_REQUEST"
    answer = error_response(status, reason, str(error.detail))
    answer.headers.update(error.headers or {})
    return answer


async def _left(_: Request, error: Exception) -> Response:
    """Nobody reads this."""
    return Response(status_code=499)
