"""The front as a process: what it prints, how it ends, and that no engine outlives it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from rollout_engine.server.app import write_ready_file
from rollout_engine.v1 import rollout_pb2 as pb
from rollout_engine.v1 import rollout_pb2_grpc
from tests.wire.front import engine_command, prompt, wait_until, whole_lines

PROGRAM = """
import json, sys
from pathlib import Path
from rollout_engine.config import ServeConfig
from rollout_engine.server.app import serve
config, command, ready_file = (json.loads(text) for text in sys.argv[1:])
sys.exit(serve(ServeConfig(**config), ready_file and Path(ready_file), engine_command=command))
"""


class FrontProcess:
    def __init__(self, directory: Path, config: dict[str, Any], script: dict[str, Any]) -> None:
        self.log = directory / "engine.log"
        self.log.touch()
        self.ready_file = directory / "ready.json"
        settings = {"model": str(directory), "port": 0, **config}
        command = engine_command({"log": str(self.log), **script})
        arguments = [json.dumps(value) for value in (settings, command, str(self.ready_file))]
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ready(self) -> dict[str, Any]:
        wait_until(self.ready_file.exists, 60, "the ready file")
        return json.loads(self.ready_file.read_text())

    def commands(self, kind: str) -> list[dict[str, Any]]:
        return [entry for entry in whole_lines(self.log) if entry["type"] == kind]

    def end(self, number: int | None = None, timeout_s: float = 60) -> tuple[int, str, str]:
        """Send a signal, wait; returns (exit code, stdout, stderr)."""
        if number is not None:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err


@contextlib.contextmanager
def front_process(
    directory: Path, config: dict[str, Any] | None = None, **script: Any
) -> Iterator[FrontProcess]:
    made = FrontProcess(directory, config or {}, script)
    try:
        yield made
    finally:
        if made.process.poll() is None:
            made.process.kill()
            made.process.communicate()


def engine_pid(ready: dict[str, Any]) -> int:
    return int(ready["instance_id"].removeprefix("fake-"))


def is_gone(pid: int) -> bool:
    """No process of that id, but for one that waits to be reaped by somebody else."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_exits_with_0(tmp_path, number):
    with front_process(tmp_path, step_s=0.01) as front:
        ready = front.ready()
        assert ready["pid"] == front.process.pid
        with grpc.insecure_channel(ready["address"]) as channel:
            stub = rollout_pb2_grpc.RolloutStub(channel)
            watch = stub.WatchEngine(pb.WatchEngineRequest(), timeout=30)
            next(watch)
            stream = stub.Generate(prompt(1, max_tokens=60), timeout=30)
            ids = list(next(stream).token_ids)
            front.process.send_signal(number)
            for message in stream:
                ids += message.token_ids
            assert len(ids) == 60  # what ran has finished
            assert message.finish_reason == pb.FINISH_REASON_LENGTH
        code, out, err = front.end()
        assert code == 0
        assert [line.split()[3] for line in err.splitlines()] == ["serving", "draining", "stopped"]
        assert out == f"rollsync: serving {tmp_path} on {ready['address']} (weight version 5)\n"
        assert front.commands("Shutdown")[0]["grace_s"] > 0
        assert is_gone(engine_pid(ready))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_engine_outlives_its_front(tmp_path, number):
    with front_process(tmp_path, step_s=0.01) as front:
        pid = engine_pid(front.ready())
        assert not is_gone(pid)
        front.end(number)
        wait_until(lambda: is_gone(pid), 20, "the engine to be gone")
        assert len(front.commands("exit")) == 1
        assert not Path("/dev/shm", front.commands("config")[0]["ring"]).exists()


@pytest.mark.case("B125")
def test_a_used_port_is_an_error_before_an_engine_starts(tmp_path):
    with front_process(tmp_path) as first:
        port = int(first.ready()["address"].rsplit(":", 1)[1])
        other = tmp_path / "second"
        other.mkdir()
        with front_process(other, {"port": port}) as second:
            code, out, err = second.end()
            assert (code, out) == (1, "")
            assert err.startswith(f"rollsync: error: cannot listen on 127.0.0.1:{port}: ")
            assert err.count("\n") == 1
            assert second.commands("config") == []
        assert first.process.poll() is None


@pytest.mark.case("B125")
def test_the_real_bind_does_not_share_a_port(tmp_path, monkeypatch):
    """Even if a port is taken while the model loads."""
    import asyncio

    from rollout_engine.config import ServeConfig
    from rollout_engine.errors import ConfigError
    from rollout_engine.server import app

    monkeypatch.setattr(app, "check_port_free", lambda config: None)
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken:
        config = ServeConfig(model=tmp_path, port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="cannot listen on"):
            asyncio.run(app.start(config, engine_command=engine_command({})))


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ({"fail_start": "no config.json in /models/x"}, "no config.json in /models/x"),
        ({"exit_at_start": 7}, "the engine process exited with code 7"),
    ],
)
def test_an_engine_that_cannot_start_is_one_line_and_exit_1(tmp_path, script, text):
    with front_process(tmp_path, **script) as front:
        code, out, err = front.end()
        assert (code, out) == (1, "")
        lines = [line for line in err.splitlines() if line.startswith("rollsync: ")]
        assert lines == [f"rollsync: error: {text}"]
        assert not front.ready_file.exists()


def test_a_broken_tokenizer_is_named_before_the_engine_starts(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with front_process(tmp_path) as front:
        code, _, err = front.end()
        assert code == 1
        assert "tokenizer.json is not a tokenizer" in err
        assert front.commands("config") == []


def test_an_engine_that_died_leaves_the_front_up_and_its_exit_code_1(tmp_path):
    with front_process(tmp_path) as front:
        ready = front.ready()
        os.kill(engine_pid(ready), signal.SIGKILL)
        with grpc.insecure_channel(ready["address"]) as channel:
            stub = rollout_pb2_grpc.RolloutStub(channel)

            def died() -> bool:
                state = stub.GetEngineInfo(pb.GetEngineInfoRequest(), timeout=5).state
                return "killed by SIGKILL" in state.not_serving_reason

            wait_until(died, 20, "the death to show")
        code, _, err = front.end(signal.SIGTERM)
        assert code == 1
        assert 'engine_dead  reason="the engine process was killed by SIGKILL"' in err


def test_a_signal_while_the_engine_loads_ends_both(tmp_path):
    program = "import os, sys, time; print(os.getpid(), flush=True); sys.stdin.read(); time.sleep(60)"
    front = FrontProcess.__new__(FrontProcess)
    settings = {"model": str(tmp_path), "port": 0}
    arguments = [json.dumps(value) for value in (settings, [sys.executable, "-c", program], None)]
    front.process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    pid = int(front.process.stdout.readline())
    start = time.monotonic()
    code, _, err = front.end(signal.SIGTERM)
    assert code == 1
    assert "stopped by a signal before the engine served" in err
    assert time.monotonic() - start < 20, "the engine sleeps for a minute"
    assert is_gone(pid)


def test_a_ready_file_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    """The place where it should stand is a directory."""
    target = tmp_path / "there"
    target.mkdir()
    engine = SimpleNamespace(info=SimpleNamespace(instance_id="i"))
    running = SimpleNamespace(address="a", engine=engine, observers=SimpleNamespace(metrics_address=""))
    with pytest.raises(OSError, match="Is a directory"):
        write_ready_file(target, running)
    assert list(tmp_path.iterdir()) == [target]
