"""`rollsync reload`: swap a running engine's weights from a directory, with a progress bar."""

from __future__ import annotations

import os
import secrets
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollout_engine.cli.output import (
    DEFAULT_ADDRESS,
    U64,
    AddressOption,
    CaOption,
    CertOption,
    JsonOption,
    KeyOption,
    TokenOption,
    print_json,
    reported,
    rollout_client,
    weights_client,
)

if TYPE_CHECKING:
    from trainers_adapters.clients import RolloutClient
    from weight_updater.requests import UpdateReply


def reload(
    directory: Annotated[
        str | None,
        typer.Argument(help="Safetensors directory on the engine's host; without it, the last good one."),
    ] = None,
    adapter: Annotated[
        str, typer.Option(help="Push the LoRA adapter in DIRECTORY, as PEFT saves it, under this name.")
    ] = "",
    version: Annotated[
        int, typer.Option(min=0, max=U64, help="Weight version to commit; 0 means the next one.")
    ] = 0,
    staging: Annotated[str, typer.Option(help="auto, device, host or none.")] = "auto",
    inflight: Annotated[str, typer.Option(help="wait, abort, keep or recompute.")] = "wait",
    keep_previous: Annotated[bool, typer.Option(help="Keep the old version for a rollback.")] = False,
    partial: Annotated[bool, typer.Option(help="Accept a directory that leaves tensors out.")] = False,
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds for the whole update.")] = 600.0,
    address: AddressOption = DEFAULT_ADDRESS,
    token: TokenOption = None,
    tls_ca: CaOption = None,
    tls_cert: CertOption = None,
    tls_key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Swap a running engine's weights from a safetensors directory; the engine serves on meanwhile."""
    from weight_updater.requests import AdapterSpec, BeginUpdate, Inflight, Path, Staging

    if adapter and not directory:
        raise typer.BadParameter("--adapter needs a DIRECTORY")
    where = (address, token, tls_ca, tls_cert, tls_key)
    try:
        options: dict[str, Any] = {"staging": Staging(staging), "inflight": Inflight(inflight)}
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    with reported(as_json), rollout_client(*where) as rollout, weights_client(*where) as weights:
        target = _named(directory) if directory else rollout.info().weights_path
        update = BeginUpdate(
            path=Path.DISK,
            update_id=f"reload-{secrets.token_hex(8)}",
            version=version,
            partial=partial,
            keep_previous=keep_previous,
            directory=target,
            adapter=AdapterSpec(adapter) if adapter else None,
            **options,
        )
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(weights.update_from_disk, update, target, timeout_s=timeout_s)
            try:
                if not as_json:
                    _show_progress(rollout, update.update_id, future)
                reply = future.result()
            except KeyboardInterrupt:
                weights.abort(update.update_id)  # the old weights serve on
                raise
        print_json(as_plain(reply, target)) if as_json else print(sentence(reply, target))


def _named(directory: str) -> str:
    """A directory as the engine can be told of it."""
    path = os.path.abspath(directory)
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise typer.BadParameter(
            "the current directory's path is not valid UTF-8; give an absolute one"
        ) from error
    return path


def _show_progress(rollout: RolloutClient, update_id: str, future: Future[UpdateReply]) -> None:
    """A bar of the bytes that arrived, from the engine's own snapshots, until the update ends."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    from trainers_adapters.errors import RollsyncError

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("opening", total=None)
        while not future.done():
            try:
                for state in rollout.watch(timeout_s=1.0):  # so that the end of the update is seen
                    if future.done():
                        return
                    if state.open_update_id == update_id:
                        progress.update(
                            task,
                            description=state.open_update_state,
                            completed=state.open_update_received_bytes,
                            total=state.open_update_total_bytes or None,
                        )
            except RollsyncError as error:
                if error.reason != "DEADLINE":
                    return  # the update itself will say what is wrong


def as_plain(reply: UpdateReply, directory: str) -> dict[str, Any]:
    """The reply with checksums as hexadecimal, which every JSON reader keeps whole."""
    from dataclasses import asdict

    plain = asdict(reply) | {"directory": directory}
    for name in ("received_checksum", "live_checksum"):
        plain[name] = f"{plain[name]:016x}"
    return plain


def sentence(reply: UpdateReply, directory: str) -> str:
    """What happened, for people."""
    seconds = reply.seconds
    brought = f"weight version {reply.previous_version} -> {reply.version}"
    if reply.adapter:
        brought = (
            f"adapter {reply.adapter} version {reply.previous_adapter_version} -> {reply.adapter_version}"
        )
    lines = [
        f"{brought} from {directory}",
        f"{reply.num_tensors} tensors, {reply.num_bytes / 1e6:.1f} MB, {reply.num_changed} changed, "
        f"{'verified' if reply.verified else 'not verified (no checksums in the files)'}",
        f"transfer {seconds.transfer * 1e3:.0f} ms, verify {seconds.verify * 1e3:.0f} ms, "
        f"pause {seconds.pause * 1e3:.0f} ms",
        *(f"warning: {warning}" for warning in reply.warnings),
    ]
    return "\n".join(lines)
