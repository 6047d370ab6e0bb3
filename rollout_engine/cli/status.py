"""`rollsync status`: what a running engine is and does, once or as it changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rollout_engine.cli.output import (
    DEFAULT_ADDRESS,
    EXIT_FAILED,
    AddressOption,
    CaOption,
    CertOption,
    JsonOption,
    KeyOption,
    TokenOption,
    print_json,
    reported,
    rollout_client,
)

if TYPE_CHECKING:
    from rich.table import Table

    from trainers_adapters.results import EngineInfo, EngineState


def status(
    watch: Annotated[bool, typer.Option("--watch", help="Follow changes until Ctrl-C.")] = False,
    address: AddressOption = DEFAULT_ADDRESS,
    token: TokenOption = None,
    tls_ca: CaOption = None,
    tls_cert: CertOption = None,
    tls_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a running engine. Exit code 1 if it does not serve, 3 if nothing answers."""
    if watch and as_json:
        raise typer.BadParameter("--watch streams and --json is one object; choose one")
    with reported(as_json), rollout_client(address, token, tls_ca, tls_cert, tls_key) as client:
        info = client.info()
        if as_json:
            print_json(info)
        elif watch:
            from rich.live import Live

            with Live(table(info, info.state), auto_refresh=False) as live:
                for state in client.watch():
                    live.update(table(info, state), refresh=True)
        else:
            from rich.console import Console

            Console().print(table(info, info.state))
        if info.state.status == "not_serving":
            raise typer.Exit(EXIT_FAILED)


def table(info: EngineInfo, state: EngineState) -> Table:
    """Two columns, for people."""
    from rich.table import Table
    from rich.text import Text

    rows = {
        "model": f"{info.architecture}  {info.dtype} on {info.device}  {info.weights_path}",
        "status": state.status + (f": {state.not_serving_reason}" if state.not_serving_reason else ""),
        "weight version": f"{state.weight_version}  (commit sequence {state.commit_sequence})",
        "requests": f"{state.num_running} running, {state.num_waiting} waiting",
        "pages": f"{state.num_free_pages} free, {state.num_cached_pages} cached, of {state.num_total_pages}",
        "weights": f"{info.num_weight_tensors} tensors, {info.weight_bytes / 1e6:.1f} MB",
        "generated": f"{state.num_generated_tokens} tokens in {state.num_steps} forward passes",
        "open update": _open_update(state),
    }
    if info.max_adapters:
        rows["adapters"] = _adapters(info, state)
    if state.paused_by:
        rows["paused by"] = state.paused_by
    if state.released_tags:
        rows["released"] = ", ".join(state.released_tags)
    result = Table(show_header=False)
    for name, value in rows.items():
        result.add_row(name, Text(value))  # a name with brackets is no markup
    return result


def _adapters(info: EngineInfo, state: EngineState) -> str:
    lines = [
        f"{held.name}  version {held.version}, rank {held.rank}, over weight version "
        f"{held.base_weight_version}{', stale' if held.stale else ''}  {held.num_sequences} sequences"
        for held in state.adapters
    ]
    return "\n".join([f"{len(lines)} of {info.max_adapters}, up to rank {info.max_adapter_rank}", *lines])


def _open_update(state: EngineState) -> str:
    if not state.open_update_id:
        return "none"
    done, total = state.open_update_received_bytes / 1e6, state.open_update_total_bytes / 1e6
    return f"{state.open_update_id}  {state.open_update_state}  {done:.1f} of {total:.1f} MB"
