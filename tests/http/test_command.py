"""`rollsync http` as a process before a real engine, and what it refuses at once."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error

import pytest
from typer.testing import CliRunner

from rollout_engine.cli.http import told
from rollout_engine.cli.main import app
from rollout_engine.cli.output import EXIT_USAGE
from tests.http.facade import fetch


def test_the_command_serves_until_it_is_told_to_stop(engine, free_port):
    port = free_port
    command = [sys.executable, "-m", "rollout_engine.cli", "http", "--address", engine.address]
    command += ["--port", str(port), "--model-name", "policy", "--model-name", "other"]
    command += ["--server-info", "base_gpu_id=4", "--server-info", "note=as it is"]
    process = subprocess.Popen(command)
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 60
        while True:
            try:
                assert fetch(url, "/health") == (200, {"status": "serving"})
                break
            except urllib.error.URLError:
                assert process.poll() is None
                assert time.monotonic() < deadline, "the facade does not listen"
                time.sleep(0.05)
        said = fetch(url, "/server_info")[1]
        assert (said["host"], said["port"], said["base_gpu_id"], said["note"]) == (
            "127.0.0.1",
            port,
            4,
            "as it is",
        )
        names = [model["id"] for model in fetch(url, "/v1/models")[1]["data"]]
        info = engine.rollout.info()
        assert names == [info.model_path, "policy", "other", *(held.name for held in info.state.adapters)]
    finally:
        process.terminate()
        assert process.wait(20) in (0, -15)


def test_what_json_does_not_know_is_told_as_text():
    pairs = {"a": "NaN", "b": "1e999", "c": "9" * 5000, "d": "[" * 100_000}
    assert told(f"{key}={value}" for key, value in pairs.items()) == pairs
    assert told(["a=4", 'b={"c": null}']) == {"a": 4, "b": {"c": None}}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--host", "0.0.0.0"], "is not loopback: set a token"),
        (["--server-info", "base_gpu_id"], "it must be KEY=VALUE"),
        (["--server-info", "=4"], "it must be KEY=VALUE"),
    ],
)
def test_what_cannot_be_served_is_said_at_once(arguments, text):
    said = CliRunner().invoke(app, ["http", *arguments])
    assert said.exit_code == EXIT_USAGE
    assert text in " ".join(said.output.split())
