"""How a client reaches an engine: address, token, TLS. No torch."""

from __future__ import annotations

import errno
import ssl
from dataclasses import dataclass, field
from pathlib import Path

import grpc

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),  # the engine limits what it sends (max_message_bytes)
    ("grpc.max_send_message_length", -1),  # and refuses what is too large with its own words
    ("grpc.enable_http_proxy", 0),  # an engine is a neighbour, not a web site
    ("grpc.use_local_subchannel_pool", 1),  # a new client does not inherit a dead engine's back-off
    ("grpc.initial_reconnect_backoff_ms", 100),
    # In spite of its name this is how long one attempt to connect may take, and the engine may be busy.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files: the engine's CA (None: the system's), and with mTLS our certificate and key."""

    ca: Path | str | None = None
    cert: Path | str | None = None
    key: Path | str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """The files' contents as gRPC takes them.

        Raises:
            OSError: a file that cannot be read, or is not what it should be, by its name.
        """
        ca, cert, key = (None if p is None else Path(p).read_bytes() for p in (self.ca, self.cert, self.key))
        self._check()
        return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)

    def _check(self) -> None:
        """gRPC takes anything, and says later that nobody answers."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.set_ciphers("DEFAULT:@SECLEVEL=0")  # how strong a key must be is not decided here
        if self.ca is not None:
            try:
                context.load_verify_locations(self.ca)
            except ssl.SSLError as error:
                raise OSError(
                    errno.EINVAL, f"it is no PEM certificate ({error.reason})", str(self.ca)
                ) from error
        if self.cert is not None:
            try:
                # Without an answer of ours a key with a password would ask the terminal.
                context.load_cert_chain(self.cert, self.key, password=lambda: b"")
            except ssl.SSLError as error:
                text = f"it and its key are no PEM pair without a password ({error.reason})"
                raise OSError(errno.EINVAL, text, str(self.cert)) from error


@dataclass(frozen=True, slots=True)
class Address:
    """Where an engine listens, and what it wants to see.

    address: host:port. token: sent with every call as a bearer token.
    """

    address: str
    token: str | None = field(default=None, repr=False)
    tls: Tls | None = None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()
