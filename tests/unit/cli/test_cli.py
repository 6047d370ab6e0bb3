"""The command against a hand-written engine: what goes to stdout and stderr, and the exit codes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from rollout_engine.cli import demo, serve
from rollout_engine.cli.main import app
from rollout_engine.cli.output import print_json
from rollout_engine.cli.status import table
from rollout_engine.config import ServeConfig
from rollout_engine.v1 import rollout_pb2 as rpb
from tests.unit.adapters.fake_engine import FakeEngine, serving
from tests.unit.cli.test_top import INFO, STATE
from trainers_adapters.results import AdapterState


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def address(engine: FakeEngine) -> Iterator[str]:
    with serving(engine) as where:
        yield where


def run(*arguments: str, env: dict[str, str] | None = None):
    return CliRunner().invoke(app, list(arguments), env=env or {})


def one_object(stdout: str) -> dict:
    """stdout as JSON, and nothing else; NaN and Infinity are no JSON."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(stdout, parse_constant=refuse)


def test_serve_has_a_flag_for_every_field_of_the_configuration() -> None:
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    names = {parameter.name for parameter in command.params}
    assert names == set(ServeConfig.model_fields) | {"config", "ready_file", "as_json"}


def test_serve_tells_its_defaults() -> None:
    result = run("serve", "--help", env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0, result.output
    lines = {words[1]: line for line in result.output.splitlines() if len(words := line.split()) > 2}
    for flag, told in {
        "--port": "(50051)",
        "--lease-seconds": "(60.0)",
        "--prefix-cache": "(on)",
        "--reserve-device-staging": "(off)",
        "--capture-batch-sizes": "(1,2,4,8,16,32,64,128,256)",
        "--max-message-bytes": "(4194304)",
    }.items():
        assert f"[default: {told}]" in lines[flag], lines[flag]
    for flag in ("--model", "--token", "--overlap", "--weights"):
        assert "default:" not in lines[flag]


def test_a_wrong_configuration_is_told_in_words_of_the_command() -> None:
    missing = run("serve")
    assert missing.exit_code == 2
    assert "model is missing: give --model, ROLLSYNC_MODEL or the key model" in missing.stderr
    open_port = run("serve", "--model", "/m", "--host", "0.0.0.0")
    assert open_port.exit_code == 2
    assert "error: host '0.0.0.0' is not loopback: set a token" in open_port.stderr
    sizes = run("serve", "--model", "/m", "--capture-batch-sizes", "1,,2")
    assert "capture_batch_sizes: '1,,2' has an empty entry" in sizes.stderr


def test_help_is_fast_and_loads_neither_torch_nor_grpc() -> None:
    code = (
        "import sys; from rollout_engine.cli.main import app; "
        "sys.exit(bool({'torch', 'grpc', 'pydantic', 'msgspec'} & set(sys.modules)))"
    )
    started = time.monotonic()
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
    assert time.monotonic() - started < 10


def test_serve_passes_flags_over_environment_over_toml(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[ServeConfig] = []
    monkeypatch.setattr("rollout_engine.server.app.serve", lambda config, ready: seen.append(config) or 0)
    toml = tmp_path / "engine.toml"
    toml.write_text('model = "/from/toml"\nport = 1\npage_size = 4\nprefix_cache = false\n')
    env = {"ROLLSYNC_PORT": "2", "ROLLSYNC_SEED": "3", "ROLLSYNC_ADDRESS": "x:1"}
    result = run("serve", "--config", str(toml), "--seed", "5", "--weights-root", "/a", env=env)
    assert result.exit_code == 0, result.output
    config = seen[0]
    assert (config.port, config.seed, config.page_size, config.prefix_cache) == (2, 5, 4, False)
    assert (config.model, config.weights_roots) == (Path("/from/toml"), (Path("/a"),))


LISTS = {
    "capture_batch_sizes": ("--capture-batch-sizes", "4,1,2", "[1, 2, 4]", (1, 2, 4)),
    "capture_prefill_tokens": ("--capture-prefill-tokens", "64, 8", "[8, 64]", (8, 64)),
    "weights_roots": ("--weights-root", "/a:/b/c", '["/a", "/b/c"]', (Path("/a"), Path("/b/c"))),
}


def test_lists_are_read_from_the_environment_as_from_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ServeConfig] = []
    monkeypatch.setattr("rollout_engine.server.app.serve", lambda config, ready: seen.append(config) or 0)
    lists = {n for n, field in ServeConfig.model_fields.items() if "tuple" in str(field.annotation)}
    assert set(LISTS) == lists
    for name, (flag, text, as_json, value) in LISTS.items():
        variable = f"ROLLSYNC_{name.upper()}"
        flags = [f"{flag}={one}" for one in (text.split(":") if flag == "--weights-root" else [text])]
        assert run("serve", "--model", "/m", *flags).exit_code == 0
        for said in (text, as_json, ""):
            result = run("serve", "--model", "/m", env={variable: said})
            assert result.exit_code == 0, result.output
        from_flag, from_text, from_json, from_nothing = (getattr(config, name) for config in seen[-4:])
        assert from_flag == from_text == from_json == value
        assert from_nothing == ()


@pytest.mark.parametrize(
    ("name", "said", "word"),
    [
        ("capture_batch_sizes", "1,two", "capture_batch_sizes.1"),
        ("capture_batch_sizes", "1,,2", "empty entry"),
        ("capture_batch_sizes", "0,1", "at least 1"),
        ("capture_prefill_tokens", "[1,", "JSON array"),
        ("weights_roots", "/a::/b", "empty entry"),
        ("weights_roots", "[1]", "weights_roots.0"),
    ],
)
def test_a_list_that_cannot_be_read_is_exit_code_2_and_says_which(name: str, said: str, word: str) -> None:
    result = run("serve", "--model", "/m", env={f"ROLLSYNC_{name.upper()}": said})
    assert result.exit_code == 2, result.output
    assert name in result.stderr
    assert word in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["serve"], "model"),
        (["serve", "--model", "/m", "--host", "0.0.0.0"], "token"),
        (["serve", "--model", "/m", "--page-size", "0"], "page_size"),
        (["generate"], "PROMPT"),
        (["generate", "a", "--ids", "1"], "PROMPT"),
        (["generate", "--ids", "one"], "--ids"),
        (["reload", "/x", "--staging", "attic"], "attic"),
        (["status", "--watch", "--json"], "--watch"),
        (["http", "--host", "0.0.0.0"], "token"),
        (["http", "--host", "0.0.0.0", "--token", ""], "token"),
        (["serve", "--model", "/m", "--token", ""], "token"),
        (["fly"], "fly"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_says_what(arguments: list[str], word: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert word in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("command", [["status"], ["generate", "hi"], ["reload", "/w"], ["reload"]])
def test_no_engine_is_exit_code_3(command: list[str]) -> None:
    result = run(*command, "--json", "--address", "127.0.0.1:1")
    assert result.exit_code == 3
    assert one_object(result.stdout)["error"]["reason"] == "UNREACHABLE"
    assert "rollsync serve" in result.stderr


def test_serve_json_prints_the_ready_object_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fake_serve(config: ServeConfig, ready_file: Path) -> int:
        print("rollsync: serving")  # belongs to stderr here
        ready_file.write_text('{"address": "127.0.0.1:7", "pid": 1}')
        time.sleep(0.3)
        return 0

    monkeypatch.setattr("rollout_engine.server.app.serve", fake_serve)
    monkeypatch.setattr(sys, "__stdout__", sys.stdout)
    with pytest.raises(typer.Exit) as stopped:
        serve._serve({"model": "/m", "weights_roots": []}, None, None, True)
    assert stopped.value.exit_code == 0
    captured = capfd.readouterr()
    assert one_object(captured.out) == {"address": "127.0.0.1:7", "pid": 1}
    assert "serving" in captured.err


def test_generate_streams_text_and_ids(engine: FakeEngine, address: str) -> None:
    result = run("generate", "hello", "--max-tokens", "4", "--seed", "7", env={"ROLLSYNC_ADDRESS": address})
    assert (result.exit_code, result.stdout) == (0, "<0><2>\n")
    assert "4 tokens, length, weight version 7, 9" in result.stderr
    assert engine.generated[0].text == "hello"
    assert engine.generated[0].return_text
    assert engine.generated[0].sampling.seed == 7
    result = run("generate", "--ids", "5,6", "--address", address)
    assert result.stdout.split() == ["0", "1", "2", "3"]
    assert list(engine.generated[1].token_ids.ids) == [5, 6]


def test_generate_json_is_one_object(address: str) -> None:
    result = run("generate", "hello", "-n", "2", "--json", "--address", address)
    completions = one_object(result.stdout)["completions"]
    assert [c["token_ids"] for c in completions] == [[0, 1, 2, 3], [10, 11, 12, 13]]


def test_a_refusal_is_exit_code_1_with_its_reason(address: str) -> None:
    result = run("generate", "", "--json", "--address", address)
    assert result.exit_code == 1
    error = one_object(result.stdout)["error"]
    assert (error["code"], error["reason"]) == ("INVALID_ARGUMENT", "EMPTY_PROMPT")
    assert "EMPTY_PROMPT: the prompt has no token" in result.stderr


def test_reload_begins_updates_and_commits_in_one_call(engine: FakeEngine, address: str) -> None:
    result = run("reload", "/weights/7", "--version", "7", "--json", "--address", address)
    assert result.exit_code == 0, result.output
    reply = one_object(result.stdout)
    assert (reply["version"], reply["state"], reply["directory"]) == (7, "committed", "/weights/7")
    assert reply["live_checksum"] == f"{0:016x}"
    assert engine.events == ["UpdateWeightsFromDisk /weights/7"]
    result = run("reload", "/weights/8", "--address", address)
    assert "weight version 0 -> 8 from /weights/8" in result.stdout


@pytest.mark.case("B043")
def test_reload_without_a_directory_takes_the_last_good_one(engine: FakeEngine, address: str) -> None:
    engine.once["UpdateWeightsFromDisk /bad"] = (
        grpc.StatusCode.INVALID_ARGUMENT,
        "FILE_CORRUPT",
        "model.safetensors is cut off",
    )
    assert run("reload", "/bad", "--json", "--address", address).exit_code == 1
    assert run("reload", "--json", "--address", address).exit_code == 0
    assert engine.events[-1] == "UpdateWeightsFromDisk /models/last-good"


def test_status_shows_and_json_is_one_object(engine: FakeEngine, address: str) -> None:
    result = run("status", "--address", address)
    assert result.exit_code == 0
    assert "LlamaForCausalLM" in result.stdout
    assert one_object(run("status", "--json", "--address", address).stdout)["state"]["status"] == "serving"
    assert "serving" in run("status", "--watch", "--address", address).stdout


def test_status_of_an_engine_that_does_not_serve_is_exit_code_1(engine: FakeEngine, address: str) -> None:
    engine.status = rpb.SERVING_STATUS_NOT_SERVING
    result = run("status", "--address", address)
    assert result.exit_code == 1
    assert "torn" in result.stdout


def test_status_shows_names_as_they_are() -> None:
    """Brackets are markup to the library that draws: they would vanish, or end the command."""
    adapter = AdapterState("[/red]", 3, 8, 12, False, 1)
    info = replace(INFO, weights_path="/ckpt/[best]/step", max_adapters=2, max_adapter_rank=8)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table(info, replace(STATE, adapters=[adapter])))
    shown = console.export_text()
    assert "/ckpt/[best]/step" in shown
    assert "[/red]  version 3" in shown


def test_demo_passes_on_the_last_line_or_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "grpo.py"
    monkeypatch.setattr(demo, "EXAMPLE", script)
    result = run("demo", "--json")
    assert result.exit_code == 1
    assert "clone the repository" in one_object(result.stdout)["error"]["message"]
    script.write_text(
        'import sys\nprint("step 1")\nprint(\'{"argv": "\' + " ".join(sys.argv[1:]) + \'"}\')\n'
    )
    result = CliRunner().invoke(app, ["demo", "--json", "--steps", "2"])
    assert result.exit_code == 0
    script.write_text("raise SystemExit(4)")
    assert run("demo", "--json").exit_code == 1


@pytest.mark.case("B127")
def test_json_has_null_for_what_is_not_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [float("nan"), float("inf"), 1.5], "b": (True, None)})
    assert one_object(capsys.readouterr().out) == {"a": [None, None, 1.5], "b": [True, None]}


def test_warmup_names_what_it_made_ready(tiny_llama_dir: Path) -> None:
    arguments = ["warmup", "--model", str(tiny_llama_dir), "--device", "cpu"]
    done = json.loads(run(*arguments, "--json").stdout)
    assert (done["device"], done["attention_backend"]) == ("cpu", "torch")
    wrong = run(*arguments, "--attention-backend", "flashinfer")
    assert wrong.exit_code == 2
    assert "FlashInfer needs a GPU" in wrong.stderr
