"""The `rollsync` command.

Exit codes: 0 done; 1 refused or failed; 2 wrong usage or configuration; 3 no engine answers. Commands
import what they need when they run, so that --help answers at once.
"""

from __future__ import annotations

import os
from typing import Any

import typer
from typer.core import TyperGroup

from rollout_engine.cli.demo import demo
from rollout_engine.cli.doctor import doctor
from rollout_engine.cli.generate import generate
from rollout_engine.cli.http import http
from rollout_engine.cli.output import EXIT_USAGE, fail
from rollout_engine.cli.plot import plot
from rollout_engine.cli.reload import reload
from rollout_engine.cli.serve import ServeCommand, serve
from rollout_engine.cli.status import status
from rollout_engine.cli.top import top
from rollout_engine.cli.warmup import warmup


class Commands(TyperGroup):
    """Refuses arguments and ROLLSYNC_* variables that are not UTF-8 before any command meets them: no
    message, no log line and no answer could name them.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for at, text in enumerate(args):
            if not _is_utf8(text):
                before = args[at - 1] if at else ""
                option = text.partition("=")[0] if text.startswith("--") else before
                what = option if option.startswith("-") and _is_utf8(option) else f"argument {at + 1}"
                _refuse(what, as_json="--json" in args)
        for name, text in os.environ.items():
            if name.startswith("ROLLSYNC_") and not _is_utf8(text):
                _refuse(name, as_json="--json" in args)
        return super().parse_args(ctx, args)


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse(what: str, *, as_json: bool) -> None:
    """The value itself may be a token, and is not repeated."""
    text = f"{what} is given a value that is not valid UTF-8; rename the file, or name it by a link"
    fail(text, as_json=as_json, exit_code=EXIT_USAGE, reason="USAGE")


app = typer.Typer(
    name="rollsync",
    cls=Commands,
    help="A rollout engine for RL trainers whose weights are swapped while it serves.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command(cls=ServeCommand)(serve)
for command in (generate, reload, status, top, plot, doctor, http, warmup, demo):
    app.command()(command)


@app.callback(invoke_without_command=True)
def root(
    version: bool = typer.Option(False, "--version", is_eager=True, help="Print the version."),
) -> None:
    if version:
        from rollout_engine import __version__

        print(__version__)
        raise typer.Exit


def main() -> None:
    """Entry point of the console script."""
    app()
