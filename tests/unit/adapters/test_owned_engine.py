"""An engine of a trainer's own ends with it, however that dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from trainers_adapters import RolloutClient, RollsyncError
from trainers_adapters.frameworks.owned_engine import OwnedEngine

STARTS_ONE = """
import sys, time
from trainers_adapters.frameworks.owned_engine import OwnedEngine
engine = OwnedEngine(["--model", sys.argv[1], "--port", "0", "--num-pages", "16"])
print(engine.process.pid, flush=True)
time.sleep(600)
"""


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_it_ends_with_a_parent_that_is_killed(tiny_llama_dir):
    parent = subprocess.Popen(
        [sys.executable, "-c", STARTS_ONE, str(tiny_llama_dir)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    engine = int(parent.stdout.readline())
    assert is_running(engine)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    give_up = time.monotonic() + 20
    while is_running(engine):
        assert time.monotonic() < give_up, f"the engine {engine} outlives its parent"
        time.sleep(0.05)


def test_a_public_one_wants_its_token(tiny_llama_dir):
    engine = OwnedEngine(["--model", str(tiny_llama_dir), "--port", "0", "--num-pages", "16"], public=True)
    try:
        with RolloutClient(engine.address, token=engine.token) as client:
            assert client.info().vocab_size == 128
        with RolloutClient(engine.address) as stranger, pytest.raises(RollsyncError, match="token"):
            stranger.info()
    finally:
        engine.close()
    assert not is_running(engine.process.pid)


def test_one_that_cannot_start_says_why(tmp_path):
    with pytest.raises(RollsyncError, match=r"ENGINE_DEAD: `rollsync serve` ended with \d+: .*config\.json"):
        OwnedEngine(["--model", str(tmp_path / "none"), "--port", "0"])
