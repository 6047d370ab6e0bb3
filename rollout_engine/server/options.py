"""How the engine's gRPC servers are set up, the front's and the receivers'."""

from __future__ import annotations


def server_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Channel arguments of a server whose messages have at most so many bytes."""
    return [
        ("grpc.so_reuseport", 0),  # a second engine on a used port must fail, not share its calls
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        # Clients may ping through long silent calls (an update, a prefill).
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        # A client that vanished without a word is found after 20 + 10 s, and its requests are aborted.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
    ]


def join_address(host: str, port: int) -> str:
    """host:port, also of an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
