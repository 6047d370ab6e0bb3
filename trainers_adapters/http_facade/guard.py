"""Who may call: with a token, whoever sends it; without one, programs of this machine and no web page.

A browser lets any page send simple requests to loopback addresses, and lets a page whose host name has come
to mean 127.0.0.1 (DNS rebinding) read the answers too. Neither can hide where it comes from: the name is in
`host`, the page's site in `origin`, and current browsers say `sec-fetch-site` even where they leave `origin`
out (images, links). A token needs none of this, since no page has it.
"""

from __future__ import annotations

import hmac
import ipaddress
from http import HTTPStatus
from urllib.parse import urlsplit

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

OPEN_PATHS = {"/health", "/liveness"}
"""Need no token, where there is one."""
SAME_SITE = {"none", "same-origin"}
"""Values of sec-fetch-site: what a user typed, and what a page of ours would send."""
WANTS_TOKEN = "this engine wants a token: send `authorization: Bearer TOKEN`"
SET_TOKEN = "set a token (ROLLSYNC_TOKEN) for the facade and the engine, and send it"


class Guard:
    """ASGI middleware: answers 401 or 403 before a byte of the body is read."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if self._token is None:
            problem = foreign(headers)
            refusal = problem and error_response(
                HTTPStatus.FORBIDDEN, "FOREIGN_CALLER", f"{problem}; {SET_TOKEN}"
            )
        elif self._is_right(headers.get("authorization", "")):
            refusal = None
        elif scope["path"] in OPEN_PATHS:
            await self._status_alone(scope, receive, send)
            return
        else:
            refusal = error_response(HTTPStatus.UNAUTHORIZED, "UNAUTHENTICATED", WANTS_TOKEN)
        await (refusal or self._app)(scope, receive, send)

    def _is_right(self, authorization: str) -> bool:
        scheme, _, given = authorization.partition(" ")
        assert self._token is not None
        return scheme.lower() == "bearer" and hmac.compare_digest(given.encode(), self._token)

    async def _status_alone(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer without the reason, which may name paths and addresses."""
        status = HTTPStatus.INTERNAL_SERVER_ERROR

        async def take(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = HTTPStatus(message["status"])

        await self._app(scope, receive, take)
        told = "up" if status is HTTPStatus.OK else "down"
        await JSONResponse({"status": told}, status_code=int(status))(scope, receive, send)


def foreign(headers: Headers) -> str | None:
    """Why a request may be a web page's of another site; None if it is not."""
    host = headers.get("host", "")  # HTTP/1.0 may leave it out, browsers never do
    if not _cannot_be_rebound(host):
        return f"without a token this facade is called by an IP address or as localhost, not as {host!r}"
    origin = headers.get("origin")
    if origin is not None and _authority(origin) != host.lower():
        return f"without a token this facade answers no web page of {origin!r}"
    site = headers.get("sec-fetch-site", "none")
    if site not in SAME_SITE:
        return f"without a token this facade answers no web page (sec-fetch-site: {site!r})"
    return None


def _cannot_be_rebound(host: str) -> bool:
    """Whether a `host` header names an address itself, or the one name that is loopback everywhere."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return not host or name == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _authority(origin: str) -> str:
    """host:port of an origin; empty for `null` and for what is none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def error_response(status: HTTPStatus, reason: str, message: str) -> JSONResponse:
    """One shape for every error: `error.type` is the engine's own word for it."""
    error = {"type": reason, "message": message, "code": int(status)}
    return JSONResponse({"success": False, "message": message, "error": error}, status_code=int(status))
