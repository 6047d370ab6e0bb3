"""What a command cannot use is one line and an exit code, never a traceback: names, files, numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollout_engine.cli.main import app
from rollout_engine.cli.output import EXIT_FAILED, EXIT_USAGE

LONG = "x" * 300
"""Longer than a name in a directory may be."""
HALF = "\udcff"
"""How Python holds the byte 0xff of an argument."""


def run(*arguments, env=None, input=None):
    """The exit code and what was said, in one line; nothing but an orderly exit is accepted."""
    said = CliRunner().invoke(app, list(arguments), env=env or {}, input=input, terminal_width=200)
    assert said.exception is None or isinstance(said.exception, SystemExit), repr(said.exception)
    return said.exit_code, " ".join(said.output.replace("│", " ").split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "--model", f"/m{HALF}"],
        ["serve", f"--model=/m{HALF}"],
        ["serve", "--config", f"/c{HALF}"],
        ["warmup", "--model", f"/m{HALF}"],
        ["doctor", "--model", f"/m{HALF}"],
        ["doctor", "--weights-root", f"/m{HALF}"],
        ["plot", "log", "--out", f"/m{HALF}/o.png"],
        ["status", "--address", f"{HALF}:1"],
        ["generate", "hi", "--stop", HALF],
        ["reload", "/x", "--adapter", HALF],
        ["http", "--model-name", HALF],
        ["demo", "--out", HALF],
    ],
)
def test_an_argument_that_is_not_utf8_is_named(arguments):
    option = arguments[-2] if arguments[-2].startswith("-") else "--model"
    assert run(*arguments) == (
        EXIT_USAGE,
        f"rollsync: error: {option} is given a value that is not valid UTF-8; rename the file, or name it by "
        "a link",
    )


def test_so_are_positional_arguments_and_variables_and_a_token_is_not_repeated():
    code, said = run("reload", f"/m{HALF}", "--json")
    assert code == EXIT_USAGE
    assert "argument 2 is given a value" in said
    assert '"reason": "USAGE"' in said
    code, said = run("status", "--token", f"secret{HALF}")
    assert code == EXIT_USAGE
    assert "secret" not in said
    code, said = run("status", env={"ROLLSYNC_TOKEN": f"secret{HALF}"})
    assert code == EXIT_USAGE
    assert "ROLLSYNC_TOKEN is given" in said
    assert "secret" not in said


def test_a_process_ends_so_too(tmp_path):
    """Bytes as the system passes them."""
    directory = os.fsencode(tmp_path) + b"/m\xff"
    os.mkdir(directory)
    command = [sys.executable, "-m", "rollout_engine.cli", "serve", "--model", directory]
    ended = subprocess.run(command, capture_output=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr.count(b"\n")) == (EXIT_USAGE, b"", 1)
    here = subprocess.run(
        [sys.executable, "-m", "rollout_engine.cli", "serve", "--model", "."],
        cwd=directory,
        capture_output=True,
        timeout=60,
    )
    assert here.returncode == EXIT_USAGE
    assert b"is not valid UTF-8" in here.stderr
    assert here.stderr.count(b"\n") == 1


@pytest.mark.parametrize("model", [f"/{LONG}", "/" + "d/" * 3000])
def test_a_name_that_is_too_long_is_no_model(model):
    code, said = run("serve", "--model", model, "--port", "0")
    assert code == EXIT_FAILED
    assert "cannot be read (File name too long); is it a model directory?" in said
    code, said = run("warmup", "--model", model)
    assert code == EXIT_USAGE
    assert "File name too long" in said


def test_homes_that_nobody_has_are_named():
    for arguments in (
        ["serve", "--model", "~nobody-at-all/m"],
        ["serve", "--model", "/m", "--weights", "ipc:~nobody-at-all/m"],
        ["serve", "--model", "/m", "--weights-root", "~nobody-at-all/m"],
        ["warmup", "--model", "~nobody-at-all/m"],
        ["doctor", "--model", "~nobody-at-all/m"],
    ):
        code, said = run(*arguments)
        assert code == EXIT_USAGE
        assert "~nobody-at-all/m cannot be made absolute" in said


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"\xff", "codec can't decode byte 0xff"),
        (b"seed = " + b"9" * 5000, "4300 digits"),
        (b"a = " + b"[" * 100_000, "recursion"),
        (b'model = "a\\u0000b"', "has a NUL character"),
        (b'model = "m"\nhost = "a\\u0000b"\ntoken = "x"', "has characters that no host's name has"),
        (b'model = "m"\nweights_roots = ["a\\u0000b"]', "has a NUL character"),
    ],
)
def test_a_configuration_file_that_cannot_be_used_is_one_line(content, text, tmp_path):
    path = tmp_path / "c.toml"
    path.write_bytes(content)
    for command in ("serve", "doctor"):
        code, said = run(command, "--config", str(path))
        assert code == EXIT_USAGE
        assert text in said
        assert said.startswith("rollsync: error:")


def test_hosts_that_cannot_be_looked_up_are_named():
    for host in ("a" * 64, "a..b"):
        for arguments in (
            ["serve", "--model", "/m", "--token", "x", "--host", host],
            ["serve", "--model", "/m", "--token", "x", "--metrics-host", host],
            ["http", "--token", "x", "--host", host],
        ):
            code, said = run(*arguments)
            assert code == EXIT_USAGE
            assert f"'{host}'" in said
            assert "neither a host's name nor an address" in said


def test_tls_files_that_cannot_be_read_are_named_by_every_client(tmp_path):
    for path, why in (
        (tmp_path, "Is a directory"),
        (tmp_path / "none", "No such file or directory"),
        (tmp_path / LONG, "File name too long"),
    ):
        for command in (["status"], ["generate", "hi"], ["reload", "/x"], ["top", "--once"], ["http"]):
            code, said = run(*command, "--tls-ca", str(path))
            assert code == EXIT_USAGE
            assert said == f"rollsync: error: cannot read {path}: {why}"


def test_tls_files_that_are_none_are_named_by_every_client(tmp_path):
    """gRPC would take them, and say that no engine answers."""
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("-----BEGIN NOTHING-----\n")
    for command in (["status"], ["generate", "hi"], ["reload", "/x"], ["top", "--once"], ["http"]):
        code, said = run(*command, "--tls-ca", str(garbage))
        assert code == EXIT_USAGE
        assert said.startswith(f"rollsync: error: cannot read {garbage}: it is no PEM certificate")
        code, said = run(*command, "--tls-cert", str(garbage), "--tls-key", str(garbage))
        assert code == EXIT_USAGE
        assert said.startswith(f"rollsync: error: cannot read {garbage}: it and its key are no PEM pair")


@pytest.mark.parametrize("token", ["hidden\n", " hidden", "ünicode"])
def test_a_token_that_no_header_carries_is_refused_and_not_repeated(token):
    for command in (["status"], ["reload", "/x"], ["http"]):
        code, said = run(*command, env={"ROLLSYNC_TOKEN": token})
        assert code == EXIT_USAGE
        assert "characters that no header can carry" in said
        assert token.strip() not in said


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["generate", "--ids", "1,-1"], "--ids has -1"),
        (["generate", "--ids", "4294967296"], "--ids has 4294967296"),
        (["generate", "hi", "-n", "4294967296"], "'-n'"),
        (["generate", "hi", "--max-tokens", "2147483648"], "--max-tokens"),
        (["generate", "hi", "--seed", "-1"], "--seed"),
        (["generate", "hi", "--seed", str(1 << 64)], "--seed"),
        (["generate", "hi", "--top-k", "-2"], "--top-k"),
        (["generate", "hi", "--min-version", "-1"], "--min-version"),
        (["generate", "hi", "--min-adapter-version", "-1"], "--min-adapter-version"),
        (["reload", "/x", "--version", "-1"], "--version"),
        (["reload", "/x", "--version", str(1 << 64)], "--version"),
    ],
)
def test_numbers_that_no_message_holds_are_named(arguments, word):
    code, said = run(*arguments, "--address", "127.0.0.1:1")
    assert code == EXIT_USAGE
    assert word in said


def test_a_prompt_of_stdin_that_is_no_text_is_refused():
    code, said = run("generate", "-", "--address", "127.0.0.1:1", input=b"ab\xff")
    assert code == EXIT_USAGE
    assert "stdin is not valid UTF-8 (invalid start byte at byte 2)" in said


def test_a_ready_file_that_cannot_be_is_told_before_a_model_loads(tmp_path):
    (tmp_path / "file").write_text("")
    for path, why in ((tmp_path, "Is a directory"), (tmp_path / "file" / "x", "Not a directory")):
        code, said = run("serve", "--model", "/m", "--json", "--ready-file", str(path))
        assert code == EXIT_USAGE
        assert f"rollsync: error: cannot write {path}: {why}" in said


def test_doctor_finds_what_cannot_be_looked_at(tmp_path):
    code, said = run("doctor", "--model", str(tmp_path / LONG), "--host", "a" * 64, "--port", "1", "--json")
    assert code == EXIT_FAILED
    assert "cannot be read (File name too long)" in said
    assert "label too long" in said


def test_a_port_that_is_taken_is_no_missing_engine(tmp_path):
    """The server's own exit code would say that no engine answers."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert run("http", "--port", str(taken.getsockname()[1]))[0] == EXIT_FAILED


def test_relative_names_are_refused_where_the_directory_has_no_name(tmp_path, monkeypatch):
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    odd.mkdir()
    monkeypatch.chdir(odd)
    for arguments in (["reload", "x", "--address", "127.0.0.1:1"], ["doctor", "--model", "x"]):
        code, said = run(*arguments)
        assert code == EXIT_USAGE
        assert "not valid UTF-8" in said


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("seed", str(1 << 63)),
        ("initial-version", str(1 << 64)),
        ("min-version", str(1 << 64)),
        ("lease-seconds", "4294968"),
        ("lease-seconds", "inf"),
        ("metrics-log-seconds", "inf"),
        ("max-message-bytes", str(1 << 31)),
        ("num-threads", "4097"),
    ],
)
def test_settings_that_no_message_or_library_holds_are_refused_before_an_engine_starts(flag, value):
    code, said = run("serve", "--model", "/m", f"--{flag}", value)
    assert code == EXIT_USAGE
    assert said.startswith(f"rollsync: error: {flag.replace('-', '_')}: Input should be less than")
