"""The front process: start the engine, open the port, serve, drain."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rollout_engine.config import ServeConfig
from rollout_engine.errors import ConfigError, EngineError
from rollout_engine.logs import configure, get_log, log_uncaught
from rollout_engine.server.auth import TlsContents, TokenInterceptor, read_tls
from rollout_engine.server.engine_client import EngineClient
from rollout_engine.server.engine_process import ENGINE_COMMAND
from rollout_engine.server.health import EngineHealth
from rollout_engine.server.observers import Observers
from rollout_engine.server.options import join_address, server_options
from rollout_engine.server.receivers import Receivers
from rollout_engine.server.rollout_service import RolloutService
from rollout_engine.server.stream_limits import StreamLimits
from rollout_engine.server.text import TextCodec, load_tokenizer
from rollout_engine.server.unreadable import ReadingInterceptor
from rollout_engine.server.weights_service import WeightsService
from rollout_engine.v1 import rollout_pb2, rollout_pb2_grpc, weights_pb2, weights_pb2_grpc
from weight_updater.errors import UpdateError
from weight_updater.heap import keep_freed_buffers

log = get_log(__name__)

DRAIN_GRACE_S = 30.0
"""How long running requests may take to finish after SIGTERM."""
FLUSH_GRACE_S = 1.0
"""How long the last responses may take to be sent once the engine is gone."""
EXIT_GRACE_S = 5.0
"""How long the engine may take to exit once its socket is closed."""

SERVICES = (
    rollout_pb2.DESCRIPTOR.services_by_name["Rollout"].full_name,
    weights_pb2.DESCRIPTOR.services_by_name["Weights"].full_name,
)


def check_port_free(config: ServeConfig) -> None:
    """Fail on a used port before a model is loaded, not after.

    Raises:
        ConfigError: the address cannot be bound.
    """
    if config.port == 0:
        return
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise _cannot_listen(config, error.strerror or str(error)) from error


def _cannot_listen(config: ServeConfig, why: str) -> ConfigError:
    return ConfigError(
        f"cannot listen on {join_address(config.host, config.port)}: {why}; choose another port, or 0"
    )


@dataclass
class RunningServer:
    """An engine that serves. `stop` must be called."""

    config: ServeConfig
    engine: EngineClient
    server: grpc.aio.Server
    receivers: Receivers
    health: EngineHealth
    port: int
    draining: asyncio.Event
    observers: Observers
    _follower: asyncio.Task[None] = field(init=False)

    def __post_init__(self) -> None:
        self._follower = asyncio.create_task(self.health.follow())

    @property
    def address(self) -> str:
        return join_address(self.config.host, self.port)

    async def stop(self, grace_s: float) -> None:
        """Take no more calls, let the engine finish what runs for up to `grace_s`, end both."""
        self._follower.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._follower
        await self.health.servicer.enter_graceful_shutdown()
        self.draining.set()
        self.engine.shutdown(grace_s)
        closing = asyncio.create_task(self.server.stop(grace_s + FLUSH_GRACE_S))
        if grace_s > 0:
            await self.engine.wait_exit(grace_s)
            await asyncio.wait({closing}, timeout=FLUSH_GRACE_S)
        await self.receivers.stop()
        await self.server.stop(None)
        await closing
        await self.engine.stop(EXIT_GRACE_S)
        await self.observers.close()


async def start(config: ServeConfig, *, engine_command: Sequence[str] = ENGINE_COMMAND) -> RunningServer:
    """Start the engine and serve it.

    Args:
        engine_command: the engine process; `--fd N` is appended.

    Raises:
        ConfigError: an address cannot be bound, or a file not read or written.
        EngineError or UpdateError: why the engine did not start.
    """
    tls = read_tls(config)
    check_port_free(config)
    codec = TextCodec(load_tokenizer(config.model))
    observers = Observers(config)
    try:
        observers.serve()
        engine = await EngineClient.start(config, engine_command, observers.tally)
        try:
            return await _open(config, engine, codec, tls, observers)
        except BaseException:
            await engine.stop(EXIT_GRACE_S)
            raise
    except BaseException:
        await observers.close()
        raise


async def _open(
    config: ServeConfig,
    engine: EngineClient,
    codec: TextCodec,
    tls: TlsContents | None,
    observers: Observers,
) -> RunningServer:
    interceptors: list[grpc.aio.ServerInterceptor] = [
        StreamLimits(config, observers.tally),
        ReadingInterceptor(SERVICES),
    ]
    if config.token is not None:
        interceptors.insert(0, TokenInterceptor(config.token.get_secret_value(), observers.tally))
    server = grpc.aio.server(interceptors=interceptors, options=server_options(config.max_message_bytes))
    draining = asyncio.Event()
    health = EngineHealth(engine, SERVICES)
    rollout = RolloutService(engine, codec, config.max_message_bytes, draining)
    receivers = Receivers(config, tls, engine.lend)
    weights = WeightsService(engine, receivers, config.max_message_bytes)
    rollout_pb2_grpc.add_RolloutServicer_to_server(rollout, server)  # type: ignore[no-untyped-call]
    weights_pb2_grpc.add_WeightsServicer_to_server(weights, server)  # type: ignore[no-untyped-call]
    health_pb2_grpc.add_HealthServicer_to_server(health.servicer, server)
    names = (*SERVICES, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name)
    reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)
    address = join_address(config.host, config.port)
    try:
        if tls is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, tls.credentials())
    except RuntimeError as error:
        raise _cannot_listen(config, "it is in use, or cannot be bound") from error
    await health.publish()
    await server.start()
    observers.watch(engine)
    return RunningServer(config, engine, server, receivers, health, port, draining, observers)


def write_ready_file(path: Path, running: RunningServer) -> None:
    """Say where the engine serves; the file appears whole."""
    content = {
        "address": running.address,
        "pid": os.getpid(),
        "instance_id": running.engine.info.instance_id,
    }
    if running.observers.metrics_address:
        content["metrics_address"] = running.observers.metrics_address
    path = path.absolute()
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "w") as file:
            json.dump(content, file)
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise


def serve(
    config: ServeConfig, ready_file: Path | None = None, *, engine_command: Sequence[str] = ENGINE_COMMAND
) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code.

    0: drained after a signal. 1: the engine could not start (one line on stderr says why), or had died.
    """
    secrets = [] if config.token is None else [config.token.get_secret_value()]
    configure(config.log_format, config.log_level, "front", secrets=secrets)
    log_uncaught()
    keep_freed_buffers()  # chunks of weights come and go
    return asyncio.run(_serve(config, ready_file, engine_command))


async def _serve(config: ServeConfig, ready_file: Path | None, engine_command: Sequence[str]) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    starting = asyncio.create_task(start(config, engine_command=engine_command))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await starting
        return _fail(config, "stopped by a signal before the engine served")
    try:
        running = starting.result()
    except (ConfigError, EngineError, UpdateError) as error:
        return _fail(config, str(error))
    _say_serving(running)
    code = 0
    try:
        if ready_file is not None:
            write_ready_file(ready_file, running)
        await stopping
    except OSError as error:
        code = _fail(config, f"cannot write {ready_file}: {error.strerror}")
    died = running.engine.death_reason is not None
    log.info("draining", grace_s=DRAIN_GRACE_S, requests=len(running.engine.requests))
    await running.stop(DRAIN_GRACE_S)
    log.info("stopped")
    return 1 if died else code


def _say_serving(running: RunningServer) -> None:
    """One line on stdout for people, and one in the log; only the latter where each line must be JSON."""
    config, info = running.config, running.engine.info
    version = running.engine.state.weight_version
    if config.log_format == "text":
        print(f"rollsync: serving {config.model} on {running.address} (weight version {version})", flush=True)
    metrics = running.observers.metrics_address
    log.info(
        "serving",
        address=running.address,
        **({"metrics_address": metrics} if metrics else {}),
        model=str(config.model),
        architecture=info.architecture,
        device=info.device,
        dtype=info.dtype,
        attention_backend=info.attention_backend,
        version=version,
        instance_id=info.instance_id,
        engine_pid=running.engine.pid,
    )


def _fail(config: ServeConfig, message: str) -> int:
    if config.log_format == "json":
        log.error("failed", error=message)
    else:
        print(f"rollsync: error: {message}", file=sys.stderr, flush=True)
    return 1
