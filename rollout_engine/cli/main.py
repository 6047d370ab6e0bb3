"""The `rollsync` command.

Exit codes: 0 done; 1 refused or failed; 2 wrong usage or configuration; 3 no engine answers. Commands
import what they need when they run, so that --help answers at once.
"""

from __future__ import annotations

import typer

from rollout_engine.cli.demo import demo
from rollout_engine.cli.doctor import doctor
from rollout_engine.cli.generate import generate
from rollout_engine.cli.http import http
from rollout_engine.cli.plot import plot
from rollout_engine.cli.reload import reload
from rollout_engine.cli.serve import ServeCommand, serve
from rollout_engine.cli.status import status
from rollout_engine.cli.top import top
from rollout_engine.cli.warmup import warmup

app = typer.Typer(
    name="rollsync",
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
