"""The engine process: `python -m rollout_engine.engine_main --fd N`, started by the front.

Builds the engine from the configuration that comes as the first frame, sizes the KV pool, and runs the
loop. Whatever ends it is told to the front as a typed `Failed` first.
"""

from __future__ import annotations

import argparse
import gc
import secrets
import socket
import sys
import time
from collections.abc import Callable

from rollout_engine.channel import Channel
from rollout_engine.config import ServeConfig
from rollout_engine.engine import Engine
from rollout_engine.errors import ConfigError, EngineError, Reason
from rollout_engine.kv.capacity import KvCapacity
from rollout_engine.logs import configure, get_log, log_uncaught
from rollout_engine.messages import EngineInfo, ErrorInfo, Failed, KvArithmetic, Ready
from rollout_engine.replies import error_info
from rollout_engine.rows import Limits
from rollout_engine.runner.copy_rate import measure_copy_rate
from rollout_engine.runner.model_runner import ModelRunner
from rollout_engine.scheduler import Scheduler
from rollout_engine.uploads import Uploads
from weight_updater.errors import UpdateError
from weight_updater.preloaded import PreloadedWeights
from weight_updater.requests import DEFAULT_BUCKET_BYTES
from weight_updater.updater import WeightUpdater

log = get_log(__name__)

GIL_SWITCH_SECONDS = 0.0005
"""How long a receiver's thread may keep the loop from the interpreter; Python's own 5 ms is a decode step."""


def main(arguments: list[str] | None = None) -> int:
    """Run the engine until the front closes the socket. Returns the exit code."""
    parser = argparse.ArgumentParser(description="rollsync's engine process; started by `rollsync serve`")
    parser.add_argument("--fd", type=int, required=True, help="socket to the front process")
    parser.add_argument("--receivers-fd", type=int, help="socket that brings sockets to receivers of chunks")
    given = parser.parse_args(arguments)
    sys.setswitchinterval(GIL_SWITCH_SECONDS)
    configure("text", "info", "engine")  # until it is known how
    log_uncaught()
    channel = Channel(socket.socket(fileno=given.fd))
    receivers = None if given.receivers_fd is None else socket.socket(fileno=given.receivers_fd)
    try:
        config = ServeConfig.model_validate_json(next(iter(channel.frames())))
        configure(config.log_format, config.log_level, "engine")
        build(config, channel, receivers).run()
    except (ConfigError, EngineError, UpdateError) as error:
        channel.send(Failed(_start_error(error)))
        return 1
    except Exception as error:  # the front must learn why, whatever it is
        log.exception("engine_died", error)
        message = f"{type(error).__name__}: {error}"
        channel.send(Failed(ErrorInfo("engine", str(Reason.INTERNAL), message)))
        raise
    return 0


def _start_error(error: ConfigError | EngineError | UpdateError) -> ErrorInfo:
    if isinstance(error, ConfigError):
        return ErrorInfo("engine", str(Reason.MODEL_INVALID), str(error))
    return error_info(error)


def build(config: ServeConfig, channel: Channel, receivers: socket.socket | None = None) -> Engine:
    """Load the model, size the pool, compose the engine, and tell the front that it is ready.

    Args:
        receivers: brings sockets to receivers of chunks.

    Raises:
        ConfigError, EngineError, UpdateError: the model or the configuration cannot be served.
    """
    started = time.monotonic()
    runner, preloaded, arithmetic = load(config)
    num_pages = arithmetic.kv_bytes // arithmetic.bytes_per_page
    updater = WeightUpdater(
        runner.target,
        lease_s=config.lease_seconds,
        roots=[str(config.model), *map(str, config.weights_roots)],
        device_staging=config.reserve_device_staging,
        initial_version=config.initial_version,
        graphs=runner.graphs,
        preloaded=preloaded,
        adapters=runner.adapters,
    )
    uploads = Uploads(
        channel, config.upload_slots, config.max_message_bytes, config.lease_seconds, runner.target.device
    )
    info = _info(config, runner, updater, arithmetic)
    engine = Engine(
        runner=runner,
        scheduler=Scheduler(scheduler_limits(config, runner, num_pages), updater.adapters.book),
        updater=updater,
        channel=channel,
        receivers=receivers,
        uploads=uploads,
        info=info,
        min_version=config.min_version,
        max_waiting=config.max_waiting_requests,
        copy_bytes_per_second=measure_copy_rate(runner.target.device),
    )
    # What is loaded by now lives as long as the process; no collection of garbage need look at it again.
    gc.collect()
    gc.freeze()
    log.info(
        "engine_ready",
        model=str(config.model),
        device=str(runner.device),
        num_weight_bytes=runner.target.arena.nbytes,
        num_pages=num_pages,
        num_kv_bytes=arithmetic.kv_bytes,
        seconds=round(time.monotonic() - started, 3),
    )
    ring = uploads.front_ring
    channel.send(Ready(info(), ring.name, ring.slots, ring.slot_bytes))
    return engine


def load(config: ServeConfig) -> tuple[ModelRunner, PreloadedWeights | None, KvArithmetic]:
    """A runner that can run, with the arena that it started on, if any, and what its KV pool was sized by.

    Raises:
        ConfigError, EngineError, UpdateError: the model or the configuration cannot be served.
    """
    runner = ModelRunner(config)
    descriptor = config.arena_descriptor
    preloaded = PreloadedWeights(str(descriptor), runner.device) if descriptor else None
    pre_model_load_bytes = runner.available_memory()
    runner.initialize(preloaded)
    arena_bytes = runner.target.arena.nbytes
    staging = arena_bytes if config.reserve_device_staging else 2 * DEFAULT_BUCKET_BYTES
    reserved = staging + runner.working_bytes()
    fraction = config.mem_fraction_static or (0.85 if runner.target.device.type == "cuda" else 0.3)
    capacity = KvCapacity(pre_model_load_bytes, fraction, reserved)
    capacity.account_preloaded_weights(preloaded.nbytes if preloaded else 0, owner="adopted")
    bytes_per_page = runner.model_config.bytes_per_token * config.page_size
    available_bytes = runner.available_memory()
    num_pages = config.num_pages or _default_pages(config, runner, capacity, available_bytes, bytes_per_page)
    runner.alloc_memory_pool(num_pages)
    runner.init_attention_backends()
    runner.init_cuda_graphs()
    arithmetic = KvArithmetic(
        pre_model_load_bytes=pre_model_load_bytes,
        available_bytes=available_bytes,
        reserved_bytes=reserved,
        preloaded_weights_bytes=capacity.preloaded_weights_bytes,
        kv_bytes=num_pages * bytes_per_page,
        bytes_per_page=bytes_per_page,
    )
    return runner, preloaded, arithmetic


def _default_pages(
    config: ServeConfig, runner: ModelRunner, capacity: KvCapacity, available_bytes: int, bytes_per_page: int
) -> int:
    """Pages that fit in memory, but no more than the largest possible batch can use."""
    pages_per_sequence = -(-runner.model_config.context_length // config.page_size)
    most = runner.max_running * pages_per_sequence
    return min(capacity.num_pages(available_bytes, bytes_per_page), most)


def scheduler_limits(config: ServeConfig, runner: ModelRunner, num_pages: int) -> Limits:
    """What the scheduler may use, from the configuration and the model."""
    return Limits(
        num_pages=num_pages,
        page_size=config.page_size,
        context_length=runner.model_config.context_length,
        max_running=runner.max_running,
        max_prefill_tokens=runner.max_prefill_tokens,
        chunked_prefill=config.chunked_prefill,
        mixed_batches=config.mixed_batches,
        prefix_cache=config.prefix_cache,
        eos_token_ids=runner.model_config.eos_token_ids,
    )


def _info(
    config: ServeConfig, runner: ModelRunner, updater: WeightUpdater, arithmetic: KvArithmetic
) -> Callable[[], EngineInfo]:
    """A function that describes the engine as it is when it is called."""
    instance_id = secrets.token_hex(8)
    model = runner.model_config

    def describe() -> EngineInfo:
        return EngineInfo(
            instance_id=instance_id,
            architecture=model.architecture,
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(runner.target.device),
            vocab_size=model.vocab_size,
            context_length=model.context_length,
            eos_token_ids=list(model.eos_token_ids),
            num_weight_tensors=len(runner.target.arena.slot_names),
            weight_bytes=runner.target.arena.nbytes,
            page_size=config.page_size,
            attention_backend=runner.attention_backend_name,
            kv=arithmetic,
            forward_counts=dict(runner.forward_counts),
            model_path=str(config.model),
            weights_path=updater.weights_path or str(config.model),
            max_running_requests=runner.max_running,
            weights_address=runner.target.buffer.data_ptr(),
            max_adapters=config.max_adapters,
            max_adapter_rank=config.max_adapter_rank if config.max_adapters else 0,
            adapter_bytes=0 if runner.adapters is None else runner.adapters.nbytes,
        )

    return describe


if __name__ == "__main__":
    sys.exit(main())
