"""Who may call: a bearer token for every method of every service but health, and TLS."""

from __future__ import annotations

import hmac
import ssl
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
import msgspec

from rollout_engine.errors import ConfigError, EngineError, Reason
from rollout_engine.server.status import abort, abort_now, kind_of

if TYPE_CHECKING:
    from pathlib import Path

    from rollout_engine.config import ServeConfig
    from rollout_engine.server.tally import Tally

OPEN_PREFIX = "/grpc.health.v1.Health/"
WANTS_TOKEN = EngineError(
    Reason.UNAUTHENTICATED, "this engine wants a token: send `authorization: Bearer TOKEN`"
)


def is_allowed(metadata: Any, token: bytes) -> bool:
    """Whether a call's metadata carry the token, once."""
    values = [value for key, value in metadata or () if key == "authorization"]
    return len(values) == 1 and is_bearer(values[0], token)


def is_bearer(authorization: str, token: bytes) -> bool:
    """Whether a header's value is `Bearer TOKEN`; takes as long for a wrong token as for a right one."""
    scheme, _, given = authorization.partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.encode(), token)


class TokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Refuses every call without `authorization: Bearer TOKEN`, and does not say what was wrong with it.

    Args:
        tally: counts the refusals.
    """

    def __init__(self, token: str, tally: Tally) -> None:
        self._token = token.encode()
        self._tally = tally

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        if handler_call_details.method.startswith(OPEN_PREFIX) or is_allowed(
            handler_call_details.invocation_metadata, self._token
        ):
            return await continuation(handler_call_details)
        # Streams both ways, so that it answers before it reads anything.
        return grpc.stream_stream_rpc_method_handler(self._deny)

    async def _deny(self, _: Any, context: grpc.aio.ServicerContext) -> None:
        self._tally.errored(kind_of(WANTS_TOKEN), WANTS_TOKEN.reason)
        await abort(context, WANTS_TOKEN)


class ThreadedTokenInterceptor(grpc.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """TokenInterceptor for a server of threads, all of whose methods need the token."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        if is_allowed(handler_call_details.invocation_metadata, self._token):
            return continuation(handler_call_details)
        return grpc.stream_stream_rpc_method_handler(lambda _, context: abort_now(context, WANTS_TOKEN))


class TlsContents(msgspec.Struct, frozen=True):
    """What is in the PEM files; client_ca: clients must present a certificate of it (mTLS)."""

    key: bytes
    cert: bytes
    client_ca: bytes | None = None

    def credentials(self) -> grpc.ServerCredentials:
        return grpc.ssl_server_credentials(
            [(self.key, self.cert)],
            root_certificates=self.client_ca,
            require_client_auth=self.client_ca is not None,
        )


def read_tls(config: ServeConfig) -> TlsContents | None:
    """The contents of the configured files; None for plain text.

    Raises:
        ConfigError: a file that cannot be read, or is not what it should be.
    """
    if config.tls_cert is None or config.tls_key is None:
        return None
    key, cert = _read("tls_key", config.tls_key), _read("tls_cert", config.tls_cert)
    client_ca = None if config.tls_client_ca is None else _read("tls_client_ca", config.tls_client_ca)
    try:
        server_context(config, any_strength=True)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"tls_cert, tls_key or tls_client_ca cannot be used ({error}); they must be PEM, the certificate "
            "that of the key, and the key without a password"
        ) from error
    return TlsContents(key, cert, client_ca)


def server_context(config: ServeConfig, *, any_strength: bool = False) -> ssl.SSLContext:
    """The configured files as a server of Python's own uses them. gRPC, which has them beside, does not say
    what is wrong with them.

    Args:
        any_strength: take keys that the system's policy finds too weak.

    Raises:
        OSError: they cannot be read or used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if any_strength:
        context.set_ciphers("DEFAULT:@SECLEVEL=0")
    assert config.tls_cert is not None
    # Without an answer of ours a key with a password would ask the terminal.
    context.load_cert_chain(config.tls_cert, config.tls_key, password=lambda: b"")
    if config.tls_client_ca is not None:
        context.load_verify_locations(config.tls_client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _read(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}: cannot read {path}: {error.strerror}") from error
