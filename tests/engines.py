"""Real engines for tests: `rollsync serve` as its own process, on a port of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests import preloaded
from trainers_adapters.clients import RolloutClient, WeightsClient
from trainers_adapters.results import Completion

START_SECONDS = 90.0


@dataclass
class RunningEngine:
    """A served engine and clients for it."""

    address: str
    pid: int
    process: subprocess.Popen
    rollout: RolloutClient
    weights: WeightsClient
    log: Path

    def greedy(self, prompt: list[int], max_tokens: int = 8, **sampling):
        """One greedy completion."""
        (completion,) = self.rollout.generate(prompt, max_tokens=max_tokens, temperature=0.0, **sampling)
        return completion

    def together(self, prompts: list[list[int]], *, within_s: float = 60.0, **sampling) -> list[Completion]:
        """One completion for each prompt, all in the same passes: none starts before all have come."""
        deadline = time.monotonic() + within_s
        self.rollout.pause("keep")
        with ThreadPoolExecutor(1) as pool:
            try:
                asked = pool.submit(self.rollout.generate_batch, prompts, timeout_s=within_s, **sampling)
                while self.rollout.info().state.num_waiting < len(prompts) and not asked.done():
                    assert time.monotonic() < deadline, "the prompts do not arrive"
                    time.sleep(0.005)
            finally:
                self.rollout.resume()
            return [completion for (completion,) in asked.result()]


@contextlib.contextmanager
def serve(
    model: Path,
    *flags: str,
    token: str | None = None,
    num_threads: int = 1,
    dtype: str = "float32",
    start_seconds: float = START_SECONDS,
    forked: bool = False,
) -> Iterator[RunningEngine]:
    """Start `rollsync serve` on `model`, wait until it is ready, and stop it afterwards.

    Args:
        forked: its engine and receivers are forked from a process that has imported torch, which saves
            seconds; what the front has as its children then are stand-ins that end with them.
    """
    with tempfile.TemporaryDirectory() as folder:
        ready, log = Path(folder) / "ready.json", Path(folder) / "log"
        program = ["tests.preloaded", preloaded.interpreter()] if forked else ["rollout_engine.cli"]
        command = [sys.executable, "-m", *program, "serve", "--model", str(model), "--port", "0"]
        command += [
            "--ready-file",
            str(ready),
            "--dtype",
            dtype,
            "--num-threads",
            str(num_threads),
            *flags,
        ]
        env = (
            os.environ | {"OMP_NUM_THREADS": str(num_threads)} | ({"ROLLSYNC_TOKEN": token} if token else {})
        )
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env)
        try:
            address = _wait_ready(process, ready, log, start_seconds)
            with (
                RolloutClient(address, token=token) as rollout,
                WeightsClient(address, token=token) as weights,
            ):
                yield RunningEngine(address, process.pid, process, rollout, weights, log)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise AssertionError(f"the engine did not stop on SIGTERM:\n{log.read_text()}") from None


class Replaceable:
    """An engine at an address that stays: it can be killed, and another started in its place.

    Use it in a `with` block. `engine` is the one that runs, or ran last.
    """

    engine: RunningEngine

    def __init__(self, model: Path, *flags: str, forked: bool = False) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self._model, self._flags, self._forked = model, flags, forked
        self._running = contextlib.ExitStack()

    def start(self, *flags: str) -> RunningEngine:
        """Start one; returns once it serves."""
        serving = serve(self._model, "--port", str(self.port), *self._flags, *flags, forked=self._forked)
        self.engine = self._running.enter_context(serving)
        return self.engine

    def kill(self) -> None:
        """End it as a crash of the machine would: no goodbye to anybody."""
        self.engine.process.kill()
        self._running.close()

    def __enter__(self) -> Replaceable:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._running.close()


def _wait_ready(process: subprocess.Popen, ready: Path, log: Path, seconds: float) -> str:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if ready.exists():
            return json.loads(ready.read_text())["address"]
        if process.poll() is not None:
            raise AssertionError(f"the engine exited with {process.returncode}:\n{log.read_text()}")
        time.sleep(0.05)
    raise AssertionError(f"the engine was not ready after {seconds} s:\n{log.read_text()}")
