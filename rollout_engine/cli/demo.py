"""`rollsync demo`: run the repository's examples/grpo.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from rollout_engine.cli.output import EXIT_FAILED, JsonOption, fail

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "grpo.py"


def demo(
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of prompts and samples.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for the plot and the weights.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Train SmolLM2-135M with GRPO, swapping the engine's weights after every step."""
    if not EXAMPLE.is_file():
        fail(
            f"the demo is part of the repository, and {EXAMPLE} is not there; clone the repository, "
            "then run `make demo` in it",
            as_json=as_json,
            exit_code=EXIT_FAILED,
            reason="NO_DEMO",
        )
    command = [sys.executable, str(EXAMPLE)]
    for name, value in (("--steps", steps), ("--seed", seed), ("--out", out)):
        if value is not None:
            command += [name, str(value)]
    if not as_json:
        raise typer.Exit(subprocess.run(command, check=False).returncode)
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last = line.strip() or last
    if process.returncode != 0:
        fail(
            f"the demo failed with exit code {process.returncode}; its own words are above",
            as_json=True,
            exit_code=EXIT_FAILED,
            reason="DEMO_FAILED",
        )
    print(last, flush=True)
