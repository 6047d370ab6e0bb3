"""`rollsync top`: rates, bars and tables from hand-made states, and the loop with a hand-pressed key."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from rich.console import Console
from typer.testing import CliRunner

from rollout_engine.cli.main import app
from rollout_engine.cli.top import Keyboard, View, run
from rollout_engine.cli.top_view import Frame, History, as_plain, bar, render, sparkline
from rollout_engine.v1 import rollout_pb2 as rpb
from tests.unit.adapters.fake_engine import FakeEngine, serving
from trainers_adapters.clients import RolloutClient
from trainers_adapters.results import EngineInfo, EngineState, UpdateSummary

STATE = EngineState(
    status="serving",
    not_serving_reason="",
    weight_version=12,
    commit_sequence=13,
    num_running=8,
    num_waiting=3,
    num_free_pages=50,
    num_cached_pages=30,
    num_total_pages=100,
    open_update_id="",
    open_update_state="",
    open_update_received_bytes=0,
    open_update_total_bytes=0,
    num_steps=100,
    num_generated_tokens=1000,
    paused_by="",
    released_tags=[],
    num_prompt_tokens=400,
    num_cached_tokens=100,
)
INFO = EngineInfo(
    instance_id="i1",
    rollsync_version="0.1.0",
    architecture="Qwen3ForCausalLM",
    dtype="bfloat16",
    device="cuda:0",
    vocab_size=100,
    context_length=100,
    eos_token_ids=[2],
    num_weight_tensors=9,
    weight_bytes=10,
    page_size=16,
    attention_backend="flashinfer",
    model_path="/m",
    weights_path="/m",
    weight_version=12,
    max_running_requests=64,
    weights_address=0,
    kv_capacity={},
    forward_counts={"eager": 7, "decode_graph": 1234, "idle": 0},
    state=STATE,
)


def update(end: str, **changes: Any) -> UpdateSummary:
    fields: dict[str, Any] = {
        "update_id": "u",
        "path": "ipc",
        "staging": "device",
        "end": end,
        "reason": "",
        "message": "",
        "weight_version": 12,
        "num_bytes": 500_000_000,
        "seconds": {"whole": 0.25, "transfer": 0.1, "pause": 0.0125},
        "ended_at": 1000.0,
    }
    return UpdateSummary(**(fields | changes))


def drawn(frame: Frame, width: int = 120) -> str:
    console = Console(width=width, color_system=None, file=io.StringIO(), record=True)
    console.print(render(frame))
    return console.export_text()


def row(text: str, name: str) -> str:
    (line,) = (line for line in text.splitlines() if line.startswith(name))
    return line.removeprefix(name).strip()


# ---------------------------------------------------------------- the picture


def test_rates_are_differences_over_time():
    history = History()
    history.tick(STATE, 10.0)
    assert history.last.generated == 0
    later = replace(
        STATE, num_generated_tokens=1500, num_prompt_tokens=1000, num_cached_tokens=400, num_steps=104
    )
    history.tick(later, 12.0)
    assert (history.last.generated, history.last.prompt, history.last.passes) == (250.0, 150.0, 2.0)
    history.tick(replace(STATE, num_generated_tokens=10), 13.0)  # another engine, which counts from 0
    assert history.last.generated == 0


def test_sparklines_and_bars():
    assert sparkline([0, 1, 2, 4, 8]) == "▁▂▃▅█"
    assert sparkline([0, 0]) == "▁▁"
    assert sparkline([]) == ""
    assert bar([(50, "#", ""), (25, "+", "")], 100, 8).plain == "####++··"
    assert bar([(1, "#", ""), (99, "+", "")], 100, 8).plain == "#+++++++"
    assert bar([(0, "#", "")], 100, 4).plain == "····"
    assert bar([(0, "#", "")], 0, 4).plain == "····"


def test_a_frame_shows_what_the_engine_does():
    history = History()
    history.tick(replace(STATE, num_generated_tokens=0, num_steps=0), 10.0)
    history.tick(STATE, 12.0)
    text = drawn(Frame("h:1", INFO, STATE, history, 12.0))
    assert text.startswith("rollsync h:1  Qwen3ForCausalLM  bfloat16 on cuda:0  flashinfer attention")
    assert row(text, "state") == "serving"
    assert row(text, "version") == "12  (commit sequence 13)"
    assert row(text, "tokens/s") == "500  █  1,000 in all; prompt 0, 25% cached"
    assert row(text, "queue") == "8 running, 3 waiting"
    assert (
        row(text, "pages") == "████████▒▒▒▒▒▒▒▒▒▒▒▒····················  20 used, 30 cached, 50 free of 100"
    )
    assert row(text, "passes") == "50.0/s; eager 7, decode graph 1,234"
    assert row(text, "update") == "none open"
    assert "last updates" not in text


def test_an_open_update_has_a_progress_bar():
    history = History()
    receiving = replace(
        STATE,
        status="paused",
        paused_by="update",
        open_update_id="push-7",
        open_update_state="receiving",
        open_update_received_bytes=25_000_000,
        open_update_total_bytes=100_000_000,
    )
    history.tick(STATE, 10.0)
    history.tick(receiving, 11.0)
    text = drawn(Frame("h:1", INFO, receiving, history, 13.5))
    progress = "█" * 10 + "·" * 30
    assert row(text, "update") == f"{progress}  receiving  25.0 of 100.0 MB  2.5 s  push-7"
    assert row(text, "state") == "paused by update"


def test_trouble_and_torn_weights_are_said():
    torn = replace(STATE, status="not_serving", not_serving_reason="the weights are torn")
    assert (
        row(drawn(Frame("h:1", INFO, torn, History(), 0.0)), "state") == "not serving: the weights are torn"
    )
    lost = Frame("h:1", INFO, STATE, History(), 0.0, "no engine answers")
    assert row(drawn(lost), "state") == "unknown: no engine answers"


def test_the_last_updates_come_latest_first_with_their_times():
    why = "the checksum of a.weight is 1, not 2, and this sentence goes on and on and on"
    updates = (
        update("committed"),
        update("refused", path="tensor", reason="CHECKSUM_MISMATCH", message=why, seconds={"whole": 0.5}),
    )
    text = drawn(Frame("h:1", replace(INFO, recent_updates=updates), STATE, History(), 0.0), 115)
    refused, committed = text.splitlines()[-3:-1]
    assert refused.split()[1:7] == ["tensor", "device", "refused", "12", "500.0", "500.0"]
    assert "CHECKSUM_MISMATCH" in refused
    assert "…" in refused  # cut, not wrapped
    assert committed.split()[1:] == [
        "ipc",
        "device",
        "committed",
        "12",
        "500.0",
        "250.0",
        "100.0",
        "12.5",
        "2",
    ]
    many = tuple(update("committed", weight_version=version) for version in range(20))
    text = drawn(Frame("h:1", replace(INFO, recent_updates=many), STATE, History(), 0.0))
    assert [line.split()[4] for line in text.splitlines() if " committed " in line] == [
        str(version) for version in range(19, 11, -1)
    ]


def test_scripts_get_the_same_numbers():
    history = History()
    history.tick(replace(STATE, num_generated_tokens=0), 10.0)
    history.tick(STATE, 14.0)
    plain = as_plain(Frame("h:1", replace(INFO, recent_updates=(update("torn"),)), STATE, history, 14.0))
    assert (plain["tokens_per_second"], plain["state"]["num_running"]) == (250.0, 8)
    assert plain["recent_updates"][0]["end"] == "torn"
    assert json.loads(json.dumps(plain)) == plain


# ---------------------------------------------------------------- the command and its loop


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def address(engine: FakeEngine) -> Iterator[str]:
    with serving(engine) as where:
        yield where


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["top", "--interval", "0.05", *arguments])


def test_once_is_one_picture_without_colours(address):
    result = invoke("--once", "--address", address)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"rollsync {address}")
    assert "\x1b" not in result.stdout
    assert invoke("--address", address).stdout.count("tokens/s") == 1  # no terminal: the same


def test_json_is_one_object(address):
    plain = json.loads(invoke("--json", "--address", address).stdout)
    assert (plain["address"], plain["state"]["status"]) == (address, "serving")


def test_an_engine_that_does_not_serve_is_exit_code_1(engine, address):
    engine.status = rpb.SERVING_STATUS_NOT_SERVING
    engine.refuse["WatchEngine"] = (grpc.StatusCode.UNIMPLEMENTED, "", "no stream")
    assert invoke("--json", "--address", address).exit_code == 1


def test_no_engine_is_exit_code_3():
    result = invoke("--json", "--address", "127.0.0.1:1")
    assert result.exit_code == 3
    assert json.loads(result.stdout)["error"]["reason"] == "UNREACHABLE"


class FakeKeys:
    """Presses the last of its keys last."""

    def __init__(self, *keys: str | type[BaseException]) -> None:
        self.keys = list(keys)

    def read(self, timeout_s: float) -> str:
        key = self.keys.pop(0)
        if isinstance(key, str):
            return key
        raise key


@pytest.mark.parametrize("last", ["q", "Q", KeyboardInterrupt])
def test_the_loop_goes_on_until_it_is_told_to_quit(address, last):
    console = Console(width=100, color_system=None, file=io.StringIO(), record=True)
    keys = FakeKeys("", "x", "", last)
    with RolloutClient(address) as client:
        run(View(client, client.info()), console, keys, 0.01)
    assert keys.keys == []
    assert "tokens/s" in console.export_text()


def test_a_stream_that_breaks_off_is_taken_up_again(engine, address):
    engine.version = 3
    engine.once["WatchEngine"] = (grpc.StatusCode.UNAVAILABLE, "", "gone")
    with RolloutClient(address) as client:
        view = View(client, client.info())
        deadline = time.monotonic() + 20
        while not view.frame(time.monotonic()).trouble:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        engine.version = 4
        while view.frame(time.monotonic()).state.weight_version != 4:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert engine.events.count("WatchEngine") >= 2


def test_the_keyboard_reads_single_keys_and_restores_the_terminal(monkeypatch):
    import termios

    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "r") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        before = termios.tcgetattr(theirs)
        with Keyboard() as keys:
            assert keys.read(0.01) == ""
            os.write(ours, b"q")
            assert keys.read(1.0) == "q"
            assert termios.tcgetattr(theirs) != before
        assert termios.tcgetattr(theirs) == before
    os.close(ours)
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        with Keyboard() as keys:
            assert keys.read(0.0) == ""


def test_q_ends_it_in_a_real_terminal(address):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "rollout_engine.cli", "top", "--address", address, "--interval", "0.1"]
    env = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    seen = bytearray()
    timer = threading.Timer(30, process.kill)
    timer.start()
    while b"tokens/s" not in seen and select.select([ours], [], [], 30)[0]:
        seen += os.read(ours, 65536)
    os.write(ours, b"q")
    try:
        while data := os.read(ours, 65536):
            seen += data
    except OSError:  # the other end is closed
        pass
    assert process.wait(10) == 0
    timer.cancel()
    os.close(ours)
    assert b"\x1b[?1049h" in seen  # a screen of its own,
    assert seen.rstrip().endswith(b"\x1b[?1049l")  # left again
