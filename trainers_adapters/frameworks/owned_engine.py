"""An engine of a trainer's own: a child process that ends when the process that started it does.

`python -m trainers_adapters.frameworks.owned_engine ARGUMENTS` is `rollsync ARGUMENTS`, which also ends when
its standard input does: however its parent dies, the engine does not outlive it.
"""

from __future__ import annotations

import json
import os
import runpy
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainers_adapters.errors import RollsyncError

STOP_S = 20.0
"""Seconds that an engine may take to stop."""
LOOK_S = 0.05


class OwnedEngine:
    """A running `rollsync serve`; `close` ends it.

    Args:
        arguments: of `rollsync serve`. env: variables over this process's own.
        public: it is reached from other hosts; it then wants a token, which is made here.
        start_s: seconds until it must serve.

    Raises:
        RollsyncError: it ended or was not ready; with the end of what it wrote.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        public: bool = False,
        start_s: float = 300.0,
    ) -> None:
        self.token = secrets.token_hex(16) if public else ""
        self._folder = tempfile.TemporaryDirectory(prefix="rollsync-engine-")
        ready, self.log = Path(self._folder.name) / "ready.json", Path(self._folder.name) / "log"
        command = [sys.executable, "-m", __name__, "serve", "--ready-file", str(ready), *arguments]
        own = {"ROLLSYNC_TOKEN": self.token} if public else {}
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {}), **own},
            )
        try:
            self.address = self._ready(ready, start_s)
        except BaseException:
            self.close()
            raise

    def _ready(self, ready: Path, start_s: float) -> str:
        give_up = time.monotonic() + start_s
        while not ready.exists():
            ended = self.process.poll()
            if ended is not None or time.monotonic() > give_up:
                what = f"ended with {ended}" if ended is not None else f"was not ready after {start_s:g} s"
                raise RollsyncError(
                    "UNAVAILABLE", "ENGINE_DEAD", f"`rollsync serve` {what}: {self.log.read_text()[-4000:]}"
                )
            time.sleep(LOOK_S)
        return str(json.loads(ready.read_text())["address"])

    def close(self) -> None:
        """End it and wait for it; harmless twice."""
        if self.process.poll() is None:
            assert self.process.stdin is not None, "it was started with a pipe"
            self.process.stdin.close()
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._folder.cleanup()


def _end_with_parent() -> None:
    """THREAD. Standard input ends when nobody holds its other end any more."""
    while os.read(0, 4096):  # not sys.stdin, whose lock an interpreter that ends would wait for
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Run the command line of the engine in this process."""
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    runpy.run_module("rollout_engine.cli", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
