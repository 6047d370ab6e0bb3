"""Lines of the log: what each holds, in both forms, and what never stands in one."""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from rollout_engine import logs
from rollout_engine.logs import REDACTED, get_log

SECRET = "SENTINEL-token-1234567890"
log = get_log("rollout_engine.test_logs")


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str], own_logging: None) -> Callable[..., list[str]]:
    """Log what a function logs in a form; gives the lines on stderr."""

    def take(form: logs.Format, function: Callable[[], object], least: logs.Level = "info") -> list[str]:
        logging.getLogger().handlers.clear()  # pytest's: a lone surrogate in a report ends a worker of xdist
        logs.configure(form, least, "front", secrets=["", SECRET])
        function()
        return capsys.readouterr().err.splitlines()

    return take


def test_a_json_line_has_time_level_process_event_and_fields(lines):
    (line,) = lines("json", lambda: log.info("update_committed", version=7, path="ipc", seconds=0.5, ok=True))
    entry = json.loads(line)
    when = datetime.fromisoformat(entry.pop("time"))
    assert abs(when.timestamp() - datetime.now().timestamp()) < 60
    assert entry == {
        "level": "info",
        "process": "front",
        "event": "update_committed",
        "version": 7,
        "path": "ipc",
        "seconds": 0.5,
        "ok": True,
        "logger": "rollout_engine.test_logs",
    }


def test_a_text_line_has_columns_and_fields(lines):
    def say() -> None:
        log.warning("update_refused", version=7, error='a "b" c', empty="", none=None, seconds=1 / 3)

    (line,) = lines("text", say)
    time, rest = line.split("  ", 1)
    assert time.endswith("Z")
    assert len(time) == len("2026-11-30T10:52:01.123Z")
    fields = 'version=7 error="a \\"b\\" c" empty="" none=null seconds=0.333333'
    assert rest == f"warning  front   update_refused  {fields}"


@pytest.mark.parametrize("form", ["text", "json"])
def test_one_event_is_one_line_whatever_its_fields_hold(lines, form):
    forged = "x\n2026-11-30T10:52:01.123Z  error    front   engine_dead\r\u2028"
    out = lines(form, lambda: log.info("served", model=forged, surrogate="\udc80"))
    assert len(out) == 1
    if form == "json":
        assert json.loads(out[0])["model"] == forged


def test_levels_below_the_least_are_left_out(lines):
    def say() -> None:
        log.debug("a")
        log.info("b")
        log.warning("c")
        log.error("d")

    assert [json.loads(line)["event"] for line in lines("json", say, "warning")] == ["c", "d"]
    assert len(lines("json", say, "debug")) == 4


def test_what_libraries_log_and_warn_has_the_same_form(lines):
    def say() -> None:
        logging.getLogger("asyncio").error("task %s failed", 7)
        warnings.warn("old thing", UserWarning, stacklevel=1)

    first, second = map(json.loads, lines("json", say))
    assert (first["event"], first["message"], first["logger"]) == ("message", "task 7 failed", "asyncio")
    assert (second["level"], second["logger"]) == ("warning", "py.warnings")
    assert "old thing" in second["message"]


def raised() -> Exception:
    try:
        raise ValueError(f"bad {SECRET}")
    except ValueError as error:
        return error


def test_an_exception_is_one_json_line_or_indented_text(lines):
    (line,) = lines("json", lambda: log.exception("rpc_failed", raised(), rpc="Generate"))
    entry = json.loads(line)
    assert (entry["event"], entry["rpc"]) == ("rpc_failed", "Generate")
    assert entry["exception"].endswith(f"ValueError: bad {REDACTED}")
    first, *rest = lines("text", lambda: log.exception("rpc_failed", raised(), rpc="Generate"))
    assert first.endswith("rpc_failed  rpc=Generate")
    assert all(line.startswith("    ") for line in rest)
    assert rest[-1].strip() == f"ValueError: bad {REDACTED}"


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_secret_is_in_no_value(lines, form):
    def say() -> None:
        log.error(
            "e", header=f"Bearer {SECRET}", nested={"a": [f"{SECRET}!"]}, bad=float("nan"), obj=raised()
        )
        logging.getLogger("grpc").warning("metadata %s", {"authorization": SECRET})
        log.exception("f", raised())

    text = "\n".join(lines(form, say))
    assert SECRET not in text
    assert text.count(REDACTED) == 5


def test_keys_of_a_line_are_not_overwritten(lines):
    (line,) = lines("json", lambda: log.info("e", level="mine", time=1, logger="l"))
    entry = json.loads(line)
    assert (entry["level"], entry["level_"], entry["time_"], entry["logger_"]) == ("info", "mine", 1, "l")


def test_exceptions_that_nobody_catches_are_logged(lines):
    def say() -> None:
        logs.log_uncaught()
        thread = threading.Thread(target=lambda: 1 / 0, name="worker")
        thread.start()
        thread.join()
        error = raised()
        sys.excepthook(type(error), error, error.__traceback__)

    first, second = map(json.loads, lines("json", say))
    assert (first["event"], first["thread"]) == ("uncaught_exception", "worker")
    assert "ZeroDivisionError" in first["exception"]
    assert "ValueError" in second["exception"]


def test_what_takes_long_says_that_it_goes_on_until_it_ends(caplog, monkeypatch):
    monkeypatch.setattr(logs, "AGAIN_S", 0.01)

    def compile_and_fail() -> None:
        with log.repeating("attention_loading", backend="flashinfer"):
            deadline = time.monotonic() + 30
            while len(caplog.records) < 3 and time.monotonic() < deadline:
                time.sleep(0.001)
            raise RuntimeError("no compiler")

    with caplog.at_level("INFO"):
        with pytest.raises(RuntimeError, match="no compiler"):
            compile_and_fail()
        assert not [one for one in threading.enumerate() if one.name == "attention_loading"]
    first, *again = [record.fields for record in caplog.records]
    assert first == {"backend": "flashinfer"}
    assert len(again) >= 2
    assert all(fields.keys() == {"backend", "so_far_s"} for fields in again)
    assert [fields["so_far_s"] for fields in again] == sorted(fields["so_far_s"] for fields in again)
    assert {record.event for record in caplog.records} == {"attention_loading"}


def test_others_handlers_get_a_sentence(caplog):
    with caplog.at_level("INFO"):
        log.info("update_committed", version=7)
    assert caplog.messages == ["update_committed version=7"]


ROOT = Path(__file__).resolve().parents[2]


def test_the_docs_have_every_event_and_no_other():
    code = "\n".join(
        path.read_text()
        for package in ("rollout_engine", "weight_updater")
        for path in (ROOT / package).rglob("*.py")
    )
    logged = set(re.findall(r'\blog\.(?:debug|info|warning|error|exception|repeating)\(\s*"(\w+)"', code))
    logged |= set(re.findall(r'extra=\{"event": "(\w+)"', code))
    logged |= set(re.findall(r'"(\w+)" if state == "paused" else "(\w+)", \*\*fields', code)[0])
    logged |= {"update_committed", "update_rolled_back"}  # f"update_{record.end}"
    docs = (ROOT / "docs" / "seeing.md").read_text()
    table = docs[docs.index("| event | level |") : docs.index("The token never appears")]
    documented = {
        name
        for cell in re.findall(r"^\| (`.+?) \|", table, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", cell)
    }
    assert documented == logged - {"metrics_request"}  # at debug level, one for each scrape
