"""What every command has in common: where words go, exit codes, one JSON object, how to reach an engine."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from trainers_adapters.clients import RolloutClient, WeightsClient

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3

DEFAULT_ADDRESS = "127.0.0.1:50051"
I32, U32, U64 = (1 << 31) - 1, (1 << 32) - 1, (1 << 64) - 1
"""The largest numbers that the engine's messages have room for."""


def _can_be_sent(token: str | None) -> str | None:
    """A token as a header carries it; its text is not repeated."""
    if token and not (token.isascii() and token.isprintable() and token == token.strip()):
        raise typer.BadParameter(
            "it has characters that no header can carry: use printable ASCII, without spaces or a line break "
            "at its ends"
        )
    return token


AddressOption = Annotated[
    str, typer.Option("--address", envvar="ROLLSYNC_ADDRESS", help="host:port of the engine.")
]
TokenOption = Annotated[
    str | None,
    typer.Option(
        "--token",
        envvar="ROLLSYNC_TOKEN",
        help="Bearer token; better set ROLLSYNC_TOKEN.",
        callback=_can_be_sent,
    ),
]
CaOption = Annotated[str | None, typer.Option("--tls-ca", help="PEM file of the engine's CA; turns TLS on.")]
CertOption = Annotated[str | None, typer.Option("--tls-cert", help="mTLS: our certificate (PEM).")]
KeyOption = Annotated[str | None, typer.Option("--tls-key", help="mTLS: our key (PEM).")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")]


def rollout_client(
    address: str, token: str | None, ca: str | None, cert: str | None, key: str | None
) -> RolloutClient:
    from trainers_adapters.clients import RolloutClient

    return RolloutClient(address, token=token, tls=tls_of(ca, cert, key))


def weights_client(
    address: str, token: str | None, ca: str | None, cert: str | None, key: str | None
) -> WeightsClient:
    from trainers_adapters.clients import WeightsClient

    return WeightsClient(address, token=token, tls=tls_of(ca, cert, key))


def tls_of(ca: str | None, cert: str | None, key: str | None) -> Any:
    from trainers_adapters.connection import Tls

    if bool(cert) != bool(key):
        raise typer.BadParameter("--tls-cert and --tls-key go together")
    return Tls(ca, cert, key) if ca or cert else None


def print_json(value: Any) -> None:
    """One line of strict JSON on stdout: dataclasses as objects, non-finite numbers as null."""
    print(json.dumps(_plain(value), allow_nan=False), flush=True)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def say(message: str) -> None:
    """A line for people, on stderr, so that stdout stays what was asked for."""
    print(message, file=sys.stderr, flush=True)


def fail(message: str, *, as_json: bool, exit_code: int, **fields: str) -> NoReturn:
    say(f"rollsync: error: {message}")
    if as_json:
        print_json({"error": {"message": message, **fields}})
    raise typer.Exit(exit_code)


@contextmanager
def reported(as_json: bool) -> Iterator[None]:
    """Turn an engine's refusal into a line that says what to do, and an exit code."""
    from trainers_adapters.errors import RollsyncError

    try:
        yield
    except RollsyncError as error:
        code = EXIT_UNREACHABLE if error.unreachable else EXIT_FAILED
        reason = error.reason or error.code
        message = error.message if error.unreachable else f"{reason}: {error.message}"
        if error.unreachable:
            message += " (--address or ROLLSYNC_ADDRESS names another)"
        fail(message, as_json=as_json, exit_code=code, code=error.code, reason=reason)
    except OSError as error:
        if error.filename is None:  # no TLS file
            raise
        text = f"cannot read {error.filename}: {error.strerror}"
        fail(text, as_json=as_json, exit_code=EXIT_USAGE, reason="USAGE")
