"""`rollsync serve`: every field of ServeConfig as a flag."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import threading
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from rollout_engine.cli.output import EXIT_USAGE, JsonOption, fail

_READY_POLL_S = 0.05


class ServeCommand(TyperCommand):
    """Tells the defaults of ServeConfig in its help; nothing else has to load them."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from rollout_engine.config import ServeConfig

        for parameter in self.params:
            field = ServeConfig.model_fields.get(parameter.name or "")
            if isinstance(parameter, TyperOption) and field is not None and not field.is_required():
                parameter.show_default = _shown(field.default)
        super().format_help(ctx, formatter)


def _shown(default: Any) -> str | bool:
    """A default as the flag is written; False for one that says nothing."""
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        default = ",".join(map(str, default))
    return False if default in (None, "") else str(default)


def _flag(help_text: str, *names: str) -> Any:
    """An option that stays None unless it is given, so that environment and TOML may speak."""
    return typer.Option(*names, help=help_text, show_default=False)


def serve(
    config: Annotated[Path | None, typer.Option("--config", help="TOML file with these keys.")] = None,
    ready_file: Annotated[
        Path | None, typer.Option("--ready-file", help="Written (JSON: address, pid) once it serves.")
    ] = None,
    as_json: JsonOption = False,
    model: Annotated[Path | None, _flag("Directory with config.json, safetensors, tokenizer.json.")] = None,
    dtype: Annotated[str | None, _flag("auto, float32, bfloat16 or float16.")] = None,
    device: Annotated[str | None, _flag("auto, cpu, cuda or cuda:N.")] = None,
    load_format: Annotated[str | None, _flag("disk, or random: weights drawn from --seed.")] = None,
    weights: Annotated[str | None, _flag("ipc:FILE starts on a trainer's arena, as FILE describes.")] = None,
    num_threads: Annotated[int | None, _flag("Threads of torch; 0: its own choice.")] = None,
    seed: Annotated[int | None, _flag("Of random weights, and of requests without a seed.")] = None,
    host: Annotated[str | None, _flag("Address to listen on; not loopback needs a token or mTLS.")] = None,
    port: Annotated[int | None, _flag("0 lets the system choose.")] = None,
    token: Annotated[str | None, _flag("Bearer token; better set ROLLSYNC_TOKEN.")] = None,
    tls_cert: Annotated[Path | None, _flag("PEM certificate; turns TLS on.")] = None,
    tls_key: Annotated[Path | None, _flag("PEM key.")] = None,
    tls_client_ca: Annotated[Path | None, _flag("PEM CA that clients must come from (mTLS).")] = None,
    metrics_port: Annotated[
        int | None, _flag("Serve Prometheus metrics here; 0: the system chooses.")
    ] = None,
    metrics_host: Annotated[str | None, _flag("Address of the metrics; loopback by default.")] = None,
    metrics_log: Annotated[Path | None, _flag("Append metrics as JSON lines, for `rollsync plot`.")] = None,
    metrics_log_bytes: Annotated[int | None, _flag("At this size the file becomes FILE.1.")] = None,
    metrics_log_seconds: Annotated[float | None, _flag("Between two samples.")] = None,
    log_format: Annotated[str | None, _flag("text or json, on stderr.")] = None,
    log_level: Annotated[str | None, _flag("debug, info, warning or error.")] = None,
    max_message_bytes: Annotated[int | None, _flag("Limit of one gRPC message.")] = None,
    upload_slots: Annotated[int | None, _flag("Slots of the upload ring.")] = None,
    stream_receivers: Annotated[
        int | None,
        _flag("Processes that take chunks of weights at ports of their own; by default 1 to 4, by cores."),
    ] = None,
    max_generate_streams: Annotated[int | None, _flag("Generating calls that may be open at once.")] = None,
    max_weight_streams: Annotated[int | None, _flag("Streams of weights that may be open at once.")] = None,
    max_watch_streams: Annotated[
        int | None, _flag("Watchers of the state that may be there at once.")
    ] = None,
    max_health_streams: Annotated[
        int | None, _flag("Watchers of health, who need no token, at once.")
    ] = None,
    weights_roots: Annotated[
        list[Path] | None,
        _flag(
            "Disk updates may read below it, beside the model's; repeatable (key weights_roots).",
            "--weights-root",
        ),
    ] = None,
    page_size: Annotated[int | None, _flag("Tokens in a KV page.")] = None,
    num_pages: Annotated[int | None, _flag("KV pages; 0 sizes the pool from memory.")] = None,
    mem_fraction_static: Annotated[
        float | None, _flag("Share of memory for weights, KV and reserves; 0: 0.85 on a GPU, 0.3 on a CPU.")
    ] = None,
    context_length: Annotated[int | None, _flag("0 takes the model's.")] = None,
    max_running_requests: Annotated[
        int | None, _flag("Sequences in a batch at most; 0: 256 on a GPU, 64 on a CPU.")
    ] = None,
    max_waiting_requests: Annotated[int | None, _flag("Requests that may wait.")] = None,
    max_prefill_tokens: Annotated[
        int | None, _flag("Prompt tokens of one forward pass; 0: 8192 on a GPU, 2048 on a CPU.")
    ] = None,
    chunked_prefill: Annotated[
        bool | None, _flag("Cut long prompts.", "--chunked-prefill/--no-chunked-prefill")
    ] = None,
    mixed_batches: Annotated[
        bool | None, _flag("Prefill beside decode.", "--mixed-batches/--no-mixed-batches")
    ] = None,
    prefix_cache: Annotated[
        bool | None, _flag("Share prompts' pages.", "--prefix-cache/--no-prefix-cache")
    ] = None,
    attention_backend: Annotated[str | None, _flag("auto, torch or flashinfer.")] = None,
    cuda_graphs: Annotated[
        bool | None, _flag("Capture forward passes on a GPU.", "--cuda-graphs/--no-cuda-graphs")
    ] = None,
    capture_batch_sizes: Annotated[str | None, _flag("Of decode graphs, for example 1,2,4,8.")] = None,
    capture_prefill_tokens: Annotated[
        str | None, _flag("Of prefill graphs, for example 64,256; '' captures none.")
    ] = None,
    overlap: Annotated[
        bool | None, _flag("Prepare a pass while another runs; default on a GPU.", "--overlap/--no-overlap")
    ] = None,
    max_prompt_logits_rows: Annotated[
        int | None, _flag("Rows of logits at once for prompt log-probabilities.")
    ] = None,
    max_adapters: Annotated[int | None, _flag("LoRA adapters held beside the base weights.")] = None,
    max_adapter_rank: Annotated[int | None, _flag("Largest rank of an adapter.")] = None,
    reserve_device_staging: Annotated[
        bool | None,
        _flag("Keep a second arena on the device.", "--reserve-device-staging/--no-reserve-device-staging"),
    ] = None,
    lease_seconds: Annotated[float | None, _flag("An untouched open update ends after this.")] = None,
    min_version: Annotated[int | None, _flag("Refuse generation below this weight version.")] = None,
    initial_version: Annotated[int | None, _flag("Weight version of the weights loaded at start.")] = None,
) -> None:
    """Serve a model until SIGTERM or SIGINT. Every option from --model on is also a ROLLSYNC_* variable and a
    TOML key.
    """
    flags = dict(locals())
    for name in ("config", "ready_file", "as_json"):
        del flags[name]
    _serve(flags, config, ready_file, as_json)


def _serve(flags: dict[str, Any], toml: Path | None, ready_file: Path | None, as_json: bool) -> None:
    from rollout_engine.config import load_config
    from rollout_engine.errors import ConfigError

    if not flags["weights_roots"]:  # typer gives an empty list where nothing was said
        flags["weights_roots"] = None
    try:
        config = load_config(flags, toml)
    except ConfigError as error:
        fail(str(error), as_json=as_json, exit_code=EXIT_USAGE, reason="CONFIG")
    from rollout_engine.server.app import serve as run

    if not as_json:
        raise typer.Exit(run(config, ready_file))
    with tempfile.TemporaryDirectory(prefix="rollsync-") as directory:
        ready = ready_file or Path(directory) / "ready.json"
        try:
            ready.unlink(missing_ok=True)  # of an engine before
        except OSError as error:
            text = f"cannot write {ready}: {error.strerror}"
            fail(text, as_json=True, exit_code=EXIT_USAGE, reason="USAGE")
        ended = threading.Event()
        teller = threading.Thread(target=_tell_when_ready, args=(ready, ended))
        teller.start()
        try:
            with contextlib.redirect_stdout(sys.stderr):
                code = run(config, ready)
        finally:
            ended.set()
            teller.join()
    raise typer.Exit(code)


def _tell_when_ready(ready: Path, ended: threading.Event) -> None:
    """Print the ready file's object to the real stdout as soon as it is there."""
    stdout = sys.__stdout__
    while not ready.exists():
        if ended.wait(_READY_POLL_S):
            return
    assert stdout is not None
    print(json.dumps(json.loads(ready.read_text())), file=stdout, flush=True)
