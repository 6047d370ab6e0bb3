"""A caller that goes away leaves nothing running, and an end of the facade waits for nobody without end."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
from urllib.parse import urlsplit

import pytest

from tests.http.facade import facade, fetch

PROMPT = [1, 2, 3]


@pytest.fixture
def paused(engine):
    engine.rollout.pause("keep")
    yield engine
    engine.rollout.resume()


def ask(url, path, body):
    """A connection on which a request was sent and no answer came yet."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    return connection


def until_waiting(engine, num):
    deadline = time.monotonic() + 10
    while engine.rollout.info().state.num_waiting != num:
        assert time.monotonic() < deadline, f"{engine.rollout.info().state.num_waiting} wait, not {num}"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"input_ids": PROMPT}),
        ("/generate", {"input_ids": PROMPT, "stream": True}),
        ("/inference/v1/generate", {"token_ids": PROMPT}),
        ("/v1/completions", {"prompt": PROMPT}),
    ],
)
def test_the_requests_of_a_caller_that_hung_up_are_ended(path, body, paused):
    with facade(paused.address) as url:
        connection = ask(url, path, body)
        until_waiting(paused, 1)
        connection.close()
        until_waiting(paused, 0)
        assert fetch(url, "/is_paused") == (200, {"is_paused": True})


PROGRAM = """
import rollout_engine.cli.http as command
from rollout_engine.cli.main import main
assert command.DRAIN_GRACE_S == 30
command.DRAIN_GRACE_S = 1
main()
"""


def test_the_command_ends_although_a_caller_waits_for_a_paused_engine(paused, free_port):
    arguments = ["http", "--address", paused.address, "--port", str(free_port)]
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], stderr=subprocess.PIPE)
    try:
        url, deadline = f"http://127.0.0.1:{free_port}", time.monotonic() + 60
        while True:
            try:
                connection = ask(url, "/generate", {"input_ids": PROMPT, "stream": True})
                break
            except ConnectionRefusedError:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
        until_waiting(paused, 1)
        process.terminate()
        process.wait(15)
        connection.close()
        until_waiting(paused, 0)
    finally:
        process.kill()
        assert b"Traceback" not in process.communicate()[1]
