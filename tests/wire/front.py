"""A front with a fake engine for tests: the real server in a thread of this process, on loopback, port 0."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import grpc

from rollout_engine.config import ServeConfig
from rollout_engine.server import app
from rollout_engine.v1 import rollout_pb2 as pb
from rollout_engine.v1 import rollout_pb2_grpc, weights_pb2_grpc
from tests.preloaded import interpreter

TIMEOUT_S = 20.0


def engine_command(script: dict[str, Any], *, forked: bool = False) -> list[str]:
    """The fake engine as a process of its own; forked, it gets another environment than the front gave it."""
    return [interpreter() if forked else sys.executable, "-m", "tests.wire.fake_engine", json.dumps(script)]


class Front:
    """What a test sees of a running front."""

    def __init__(self, running: app.RunningServer, loop: asyncio.AbstractEventLoop, log: Path) -> None:
        self.running = running
        self.address = running.address
        self._loop = loop
        self._log = log
        self._channels: list[grpc.Channel] = []
        self.channel = self.connect()
        self.rollout = rollout_pb2_grpc.RolloutStub(self.channel)
        self.weights = weights_pb2_grpc.WeightsStub(self.channel)

    def connect(self, options: tuple[tuple[str, Any], ...] = ()) -> grpc.Channel:
        """A channel of its own (not a shared connection), closed with the front."""
        channel = grpc.insecure_channel(self.address, (("grpc.use_local_subchannel_pool", 1), *options))
        self._channels.append(channel)
        return channel

    def close_channels(self) -> None:
        for channel in self._channels:
            channel.close()

    def commands(self, kind: str | None = None) -> list[dict[str, Any]]:
        """What the fake engine received so far."""
        return [entry for entry in whole_lines(self._log) if kind in (None, entry["type"])]

    def wait_for(self, kind: str, count: int = 1, timeout_s: float = TIMEOUT_S) -> list[dict[str, Any]]:
        """Wait until the fake engine has received `count` commands of a kind."""
        wait_until(lambda: len(self.commands(kind)) >= count, timeout_s, f"{count} {kind}")
        return self.commands(kind)

    def wait_idle(self) -> None:
        """Wait until the front knows of no live request."""
        requests = self.running.engine.requests
        wait_until(lambda: self.on_loop(lambda: len(requests)) == 0, TIMEOUT_S, "no live request")

    def on_loop(self, function: Callable[[], Any]) -> Any:
        """Run a function on the front's event loop."""
        result: Future[Any] = Future()
        self._loop.call_soon_threadsafe(lambda: result.set_result(function()))
        return result.result(TIMEOUT_S)


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Poll until a condition holds; returns the seconds it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, f"waited {timeout_s} s for {what}"
        time.sleep(0.01)
    return time.monotonic() - start


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON lines of a file that may be written to now: its last line counts once it has its end."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


@contextlib.contextmanager
def serving(
    directory: Path, *, config: dict[str, Any] | None = None, forked: bool = True, **script: Any
) -> Iterator[Front]:
    """Serve a fake engine with `script` (see fake_replies.Script) from a model directory."""
    log = directory / f"engine-{time.monotonic_ns()}.log"
    log.touch()
    settings = ServeConfig(**{"model": directory, "port": 0, **(config or {})})
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    command = engine_command({"log": str(log), **script}, forked=forked)
    try:
        starting = asyncio.run_coroutine_threadsafe(app.start(settings, engine_command=command), loop)
        running = starting.result(TIMEOUT_S)
        front = Front(running, loop, log)
        try:
            yield front
        finally:
            front.close_channels()
            asyncio.run_coroutine_threadsafe(running.stop(0.0), loop).result(TIMEOUT_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(TIMEOUT_S)
        loop.close()


def prompt(*ids: int, **fields: Any) -> pb.GenerateRequest:
    """A request for token ids; keyword arguments are fields of SamplingParams but those of the request."""
    names = {"request_id", "min_version", "return_text", "return_hidden_states", "deadline_ms"}
    own = {key: fields.pop(key) for key in names & set(fields)}
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=pb.SamplingParams(**fields), **own)


def reason_of(error: grpc.RpcError) -> tuple[grpc.StatusCode, str, str]:
    """(status code, rollsync-reason, rollsync-kind) of a failed call."""
    metadata = dict(error.trailing_metadata() or ())
    return error.code(), metadata.get("rollsync-reason", ""), metadata.get("rollsync-kind", "")
