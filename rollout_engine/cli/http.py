"""`rollsync http`: SGLang's and vLLM's paths in front of a running engine."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from rollout_engine.cli.output import (
    DEFAULT_ADDRESS,
    EXIT_FAILED,
    EXIT_USAGE,
    AddressOption,
    CaOption,
    CertOption,
    KeyOption,
    TokenOption,
    fail,
    reported,
    tls_of,
)

DRAIN_GRACE_S = 30
"""How long open calls may take to end after SIGTERM; a paused engine answers none of them."""


def http(
    address: AddressOption = DEFAULT_ADDRESS,
    host: Annotated[str, typer.Option(help="Others than loopback need a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 lets the system choose.")] = 30000,
    model_name: Annotated[
        list[str] | None,
        typer.Option(help="What callers call the model, beside its directory; may be given again."),
    ] = None,
    server_info: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="More of /server_info, for trainers that compare it with their own arguments; VALUE is JSON "
            "or text; may be given again.",
        ),
    ] = None,
    token: TokenOption = None,
    tls_ca: CaOption = None,
    tls_cert: CertOption = None,
    tls_key: KeyOption = None,
) -> None:
    """Serve HTTP for trainers that speak SGLang's or vLLM's reinforcement-learning paths."""
    token = token or None  # an empty one would let in whoever sends none
    _check_host(host, token)
    try:
        import uvicorn

        from trainers_adapters.http_facade import create_app
    except ModuleNotFoundError as error:
        message = f"{error.name} is missing; pip install 'rollsync[http]'"
        fail(message, as_json=False, exit_code=EXIT_USAGE, reason="CONFIG")
    tls = tls_of(tls_ca, tls_cert, tls_key)
    if tls is not None:
        with reported(as_json=False):
            tls.credentials()  # a file that cannot be read is told here, not by a traceback of the server's
    app = create_app(
        address,
        token=token,
        tls=tls,
        model_names=model_name or (),
        server_info={"host": host, "port": port} | told(server_info or ()),
    )
    try:
        uvicorn.run(
            app,
            host=host,
            port=port,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=DRAIN_GRACE_S,
        )
    except SystemExit as end:  # it could not listen, and has said why; its code would be ours for no engine
        raise typer.Exit(EXIT_FAILED if end.code else 0) from end


def _check_host(host: str, token: str | None) -> None:
    """End the command where nothing can, or nothing may, listen."""
    message = ""
    if token is None and not _is_loopback(host):
        message = f"--host {host} is not loopback: set a token (ROLLSYNC_TOKEN), as the engine does"
    try:
        host.encode("idna")
    except UnicodeError as error:
        message = f"--host is {host!r}, neither a host's name nor an address: {error}"
    if message:
        fail(message, as_json=False, exit_code=EXIT_USAGE, reason="CONFIG")


def told(pairs: Iterable[str]) -> dict[str, Any]:
    """KEY=VALUE as what they say."""
    values: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not key or not equals:
            message = f"--server-info is {pair!r}; it must be KEY=VALUE, for example base_gpu_id=4"
            fail(message, as_json=False, exit_code=EXIT_USAGE, reason="CONFIG")
        try:
            values[key] = json.loads(text)
            json.dumps(values[key], allow_nan=False)  # answers are strict JSON, which knows no NaN
        except (ValueError, RecursionError):
            values[key] = text
    return values


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
