"""How a client reaches an engine: address, token, TLS. No torch."""

from __future__ import annotations

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
        ca, cert, key = (None if p is None else Path(p).read_bytes() for p in (self.ca, self.cert, self.key))
        return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)


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
