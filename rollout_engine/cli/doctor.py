"""`rollsync doctor`: look at this machine and say what an engine would stumble over."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollout_engine.cli.output import EXIT_FAILED, EXIT_USAGE, JsonOption, fail, print_json

if TYPE_CHECKING:
    from rich.table import Table

    from rollout_engine.doctor.facts import Finding, Options

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def doctor(
    model: Annotated[Path | None, typer.Option(help="Directory that an engine is to serve.")] = None,
    weights_roots: Annotated[
        list[Path] | None, typer.Option("--weights-root", help="Disk updates come from below it; repeatable.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address that the engine is to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="And its port.")] = 50051,
    metrics_host: Annotated[str, typer.Option(help="Address of the metrics.")] = "127.0.0.1",
    metrics_port: Annotated[int | None, typer.Option(help="And their port.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    config: Annotated[
        Path | None, typer.Option("--config", help="TOML file of `serve`; instead of the options above.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check Python, packages, GPU, CUDA IPC, shared memory, ports, limits and directories.

    Exit code 1 if something fails: an engine could not start, or not as it is asked to.
    """
    from rollout_engine.doctor.checks import examine
    from rollout_engine.doctor.facts import Options, as_plain
    from rollout_engine.doctor.gather import gather

    if config is not None:
        options = _from_config(config, as_json)
    else:
        roots = tuple(map(_absolute, weights_roots or ()))
        named = None if model is None else _absolute(model)
        options = Options(named, roots, host, port, metrics_host, metrics_port, device)
    findings = examine(gather(options))
    if as_json:
        print_json(as_plain(findings))
    else:
        from rich.console import Console

        console = Console()
        console.print(table(findings))
        console.print(summary(findings), highlight=False)
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(EXIT_FAILED)


def _absolute(path: Path) -> Path:
    from rollout_engine.config import usable_path

    try:
        return usable_path(path)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _from_config(path: Path, as_json: bool) -> Options:
    """What an engine with this file (and this environment) would be started with."""
    from rollout_engine.config import load_config
    from rollout_engine.doctor.facts import Options
    from rollout_engine.errors import ConfigError

    try:
        config = load_config({}, path)
    except ConfigError as error:
        fail(str(error), as_json=as_json, exit_code=EXIT_USAGE, reason="CONFIG")
    return Options(
        model=config.model,
        weights_roots=config.weights_roots,
        host=config.host,
        port=config.port,
        metrics_host=config.metrics_host,
        metrics_port=config.metrics_port,
        device=config.device,
        ring_bytes=config.upload_slots * config.max_message_bytes,
    )


def table(findings: list[Finding]) -> Table:
    """One row a finding; what to do stands below what was found."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    result.add_column("check", no_wrap=True)
    result.add_column("", no_wrap=True)
    result.add_column("found, and what to do", overflow="fold")
    for finding in findings:
        text = Text(finding.found)
        if finding.advice:
            text.append(f"\n-> {finding.advice}", STYLES[finding.status])
        result.add_row(Text(finding.check), Text(finding.status, STYLES[finding.status]), text)
    return result


def summary(findings: list[Finding]) -> str:
    """The last line."""
    counts = {status: sum(finding.status == status for finding in findings) for status in STYLES}
    return ", ".join(f"{count} {status}" for status, count in counts.items())
