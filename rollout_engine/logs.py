"""Structured logs of all processes: each line has a time, a level, the process, an event and its fields.

    log = get_log(__name__)
    log.info("update_committed", update_id="step-7", version=7)

    2026-11-30T10:52:01.123Z  info     front   update_committed  update_id=step-7 version=7
    {"time": "2026-11-30T10:52:01.123Z", "level": "info", "process": "front", "event": "update_committed",
     "update_id": "step-7", "version": 7, "logger": "..."}

An event is a stable word; what varies stands in the fields. Libraries log sentences: these become the event
`message`. Nothing here is imported but the standard library, so that every layer may use it.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, TextIO

Format = Literal["text", "json"]
Level = Literal["debug", "info", "warning", "error"]

REDACTED = "[redacted]"
OWN_KEYS = ("time", "level", "process", "event", "logger", "exception")
"""Keys of a line that no field may take; a field of such a name gets an underscore after it."""
AGAIN_S = 10.0
"""How often what takes long says that it goes on."""


class Log:
    """Logs events of one module."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, /, **fields: Any) -> None:
        self._log(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: Any) -> None:
        self._log(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: Any) -> None:
        self._log(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: Any) -> None:
        self._log(logging.ERROR, event, fields)

    def exception(self, event: str, error: BaseException, /, **fields: Any) -> None:
        """An error with its traceback."""
        self._log(logging.ERROR, event, fields, error)

    @contextmanager
    def repeating(self, event: str, /, **fields: Any) -> Iterator[None]:
        """An event of something that may take long: now, and while the block runs every AGAIN_S seconds
        with the seconds so far.
        """
        started, ended = time.monotonic(), threading.Event()

        def again() -> None:
            while not ended.wait(AGAIN_S):
                self.info(event, **fields, so_far_s=round(time.monotonic() - started))

        self.info(event, **fields)
        thread = threading.Thread(target=again, name=event, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _log(
        self, level: int, event: str, fields: dict[str, Any], error: BaseException | None = None
    ) -> None:
        if self._logger.isEnabledFor(level):
            # The sentence is for handlers of others, which know no fields.
            sentence = " ".join([event, *(f"{key}={value}" for key, value in fields.items())])
            extra = {"event": event, "fields": fields}
            self._logger.log(level, "%s", sentence, exc_info=error, extra=extra, stacklevel=3)


def get_log(name: str) -> Log:
    return Log(name)


class LineFormatter(logging.Formatter):
    """Makes one line of a record.

    Args:
        process: front, engine or receiver.
        secrets: texts that must not appear; wherever a value holds one, REDACTED stands in its place.
    """

    def __init__(self, process: str, secrets: Sequence[str] = ()) -> None:
        super().__init__()
        self._process = process
        self._secrets = [secret for secret in secrets if secret]

    def parts(self, record: logging.LogRecord) -> dict[str, Any]:
        """The line as keys and values, secrets gone."""
        millis = int(record.created * 1000)
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(millis // 1000))
        event = getattr(record, "event", None)
        fields = getattr(record, "fields", {}) if event else {"message": record.getMessage()}
        line: dict[str, Any] = {
            "time": f"{stamp}.{millis % 1000:03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "event": event or "message",
        }
        for key, value in fields.items():
            line[f"{key}_" if key in OWN_KEYS else key] = self._clean(value)
        line["logger"] = record.name
        if record.exc_info:
            line["exception"] = self._clean(self.formatException(record.exc_info))
        return line

    def _clean(self, value: Any) -> Any:
        """A value as JSON has it, without secrets."""
        if isinstance(value, bool | int) or value is None:
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else None
        if isinstance(value, dict):
            return {str(key): self._clean(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._clean(item) for item in value]
        text = str(value)
        for secret in self._secrets:
            text = text.replace(secret, REDACTED)
        return text


class JsonFormatter(LineFormatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(self.parts(record))


class TextFormatter(LineFormatter):
    """Columns for people; a traceback follows its line, indented."""

    def format(self, record: logging.LogRecord) -> str:
        parts = self.parts(record)
        time_, level, process, event = (parts.pop(key) for key in OWN_KEYS[:4])
        exception = parts.pop("exception", "")
        if event != "message":
            del parts["logger"]  # the event says where it comes from
        fields = " ".join(f"{key}={_shown(value)}" for key, value in parts.items())
        line = f"{time_}  {level:<7}  {process:<6}  {event}  {fields}".rstrip()
        return "\n    ".join([line, *exception.splitlines()])


def _shown(value: Any) -> str:
    """A value that reads as one word; quoted where it would not, so that no value can look like a line."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str) and value.isprintable():
        return value if value and not set(value) & set(' "=') else json.dumps(value, ensure_ascii=False)
    return json.dumps(value)


class StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to whatever is sys.stderr at that moment."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, _: TextIO) -> None:
        raise AttributeError("a StderrHandler writes to sys.stderr")


def configure(format: Format, level: Level, process: str, *, secrets: Sequence[str] = ()) -> None:
    """Send every log of this process, warnings included, to stderr in one form; again to change the form.

    Args:
        process: what lines call this process: front, engine or receiver.
        secrets: texts that must never appear.
    """
    handler = StderrHandler()
    handler.setFormatter((JsonFormatter if format == "json" else TextFormatter)(process, secrets))
    root = logging.getLogger()
    for old in [old for old in root.handlers if isinstance(old, StderrHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    logging.captureWarnings(True)


def log_uncaught() -> None:
    """Log exceptions that nobody catches, in whatever thread, instead of printing them."""
    log = get_log(__name__)

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
        else:
            log.exception("uncaught_exception", error)

    def uncaught_in_thread(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_value is not None and not isinstance(arguments.exc_value, SystemExit):
            thread = arguments.thread.name if arguments.thread else ""
            log.exception("uncaught_exception", arguments.exc_value, thread=thread)

    sys.excepthook = uncaught
    threading.excepthook = uncaught_in_thread
