"""Who may call: a bearer token for every method of every service but health, and TLS."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from rollout_engine.config import ServeConfig
from rollout_engine.errors import ConfigError, EngineError, Reason
from rollout_engine.server.status import abort, kind_of
from rollout_engine.server.tally import Tally

OPEN_PREFIX = "/grpc.health.v1.Health/"


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Refuses every call without `authorization: Bearer TOKEN`, and does not say what was wrong with it.

    Args:
        tally: counts the refusals.
    """

    def __init__(self, token: str, tally: Tally) -> None:
        self._expected = token.encode()
        self._tally = tally

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        if handler_call_details.method.startswith(OPEN_PREFIX) or self._is_allowed(
            handler_call_details.invocation_metadata
        ):
            return await continuation(handler_call_details)
        # Streams both ways, so that it answers before it reads anything.
        return grpc.stream_stream_rpc_method_handler(self._deny)

    def _is_allowed(self, metadata: Any) -> bool:
        values = [value for key, value in metadata or () if key == "authorization"]
        return len(values) == 1 and is_bearer(values[0], self._expected)

    async def _deny(self, _: Any, context: grpc.aio.ServicerContext) -> None:
        text = "this engine wants a token: send `authorization: Bearer TOKEN`"
        error = EngineError(Reason.UNAUTHENTICATED, text)
        self._tally.errored(kind_of(error), error.reason)
        await abort(context, error)


def is_bearer(authorization: str, token: bytes) -> bool:
    """Whether a header's value is `Bearer TOKEN`; takes as long for a wrong token as for a right one."""
    scheme, _, given = authorization.partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.encode(), token)


def server_credentials(config: ServeConfig) -> grpc.ServerCredentials | None:
    """TLS (or, with tls_client_ca, mTLS) credentials; None for plain text.

    Raises:
        ConfigError: a file that cannot be read.
    """
    if config.tls_cert is None or config.tls_key is None:
        return None
    contents = {}
    for name in ("tls_key", "tls_cert", "tls_client_ca"):
        path = getattr(config, name)
        try:
            contents[name] = None if path is None else path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{name}: cannot read {path}: {error.strerror}") from error
    return grpc.ssl_server_credentials(
        [(contents["tls_key"], contents["tls_cert"])],
        root_certificates=contents["tls_client_ca"],
        require_client_auth=config.tls_client_ca is not None,
    )
