"""`rollsync warmup`: compile ahead of time what an engine would compile at its first start."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from rollout_engine.cli.output import EXIT_USAGE, JsonOption, fail, print_json, say


def warmup(
    model: Annotated[Path, typer.Option(help="Directory with config.json; no weights are read.")],
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    attention_backend: Annotated[str | None, typer.Option(help="auto, torch or flashinfer.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Compile the GPU kernels of a model's shapes, so that `serve` finds them in the caches.

    Takes about a minute the first time on a machine, and seconds once everything is cached; and for that time
    the GPU memory of one layer, the embedding and the head.
    """
    from rollout_engine.config import load_config
    from rollout_engine.errors import ConfigError, EngineError
    from rollout_engine.logs import configure

    configure("text", "info", "warmup")
    flags: dict[str, Any] = {
        "model": model,
        "device": device,
        "dtype": dtype,
        "attention_backend": attention_backend,
    }
    started = time.monotonic()
    try:
        config = load_config(flags)
        from rollout_engine.runner.model_runner import ModelRunner
        from rollout_engine.runner.warm_up import compile_ahead
        from weight_updater.device_scan import warm

        runner = ModelRunner(config)
        name = compile_ahead(runner)
        warm(runner.device)
    except (ConfigError, EngineError) as error:
        fail(str(error), as_json=as_json, exit_code=EXIT_USAGE, reason="CONFIG")
    seconds = round(time.monotonic() - started, 2)
    if as_json:
        print_json({"device": str(runner.device), "attention_backend": name, "seconds": seconds})
        return
    say(f"{name} attention on {runner.device} is ready ({seconds} s)")
