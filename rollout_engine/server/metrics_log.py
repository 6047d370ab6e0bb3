"""The metrics log: JSON lines that `rollsync plot` draws, one for each second and one for each update.

    {"time": 1764500000.5, "event": "sample", "generated_tokens": 5120, "running": 8, ...}
    {"time": 1764500001.2, "event": "update", "path": "ipc", "end": "committed", "seconds": {...}, ...}

Lines are written by a worker thread. A file that has grown to its limit becomes FILE.1, in place of an older
one, so the two never take more than twice the limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from rollout_engine.errors import ConfigError
from rollout_engine.logs import get_log
from rollout_engine.messages import Snapshot
from rollout_engine.records import UpdateRecord
from rollout_engine.server import metrics as names
from rollout_engine.server.metrics import Values

log = get_log(__name__)


def sample(snapshot: Snapshot, values: Values, now: float) -> dict[str, Any]:
    """One line's worth of numbers. Counts are since the engine's start; now: Unix time."""
    staleness = values.distribution(names.SEQUENCE_STALENESS)
    return {
        "time": round(now, 3),
        "event": "sample",
        "status": snapshot.status,
        "paused_by": snapshot.paused_by,
        "generated_tokens": snapshot.num_generated_tokens,
        "prompt_tokens": snapshot.work.num_prompt_tokens,
        "cached_prompt_tokens": snapshot.work.num_cached_tokens,
        "running": snapshot.num_running,
        "waiting": snapshot.num_waiting,
        "pages": snapshot.num_total_pages,
        "free_pages": snapshot.num_free_pages,
        "cached_pages": snapshot.num_cached_pages,
        "weight_version": snapshot.weight_version,
        "commit_sequence": snapshot.commit_sequence,
        "open_update": snapshot.open_update_id,
        "finished_sequences": staleness.num_observed,
        "staleness_sum": staleness.total,
        "passes": snapshot.work.passes,
    }


def update_line(record: UpdateRecord) -> dict[str, Any]:
    """One line's worth of an update."""
    fields = {"time": round(record.ended_at, 3), "event": "update"}
    return fields | {k: v for k, v in msgspec.to_builtins(record).items() if k != "ended_at"}


class BoundedFile:
    """Appends lines to a file that moves out of its own way when it is full. One thread uses it.

    Args:
        max_bytes: of the file; the one before it, PATH.1, is no larger.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._file = path.open("ab")

    def write(self, lines: list[bytes]) -> None:
        """Append whole lines."""
        for line in lines:
            if self._file.tell() and self._file.tell() + len(line) > self._max_bytes:
                self._file.close()
                os.replace(self._path, f"{self._path}.1")
                self._file = self._path.open("ab")
            self._file.write(line)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class MetricsLog:
    """Writes samples and updates until it is closed.

    Args:
        every_s: seconds between samples.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path, max_bytes: int, every_s: float) -> None:
        try:
            self._file = BoundedFile(path, max_bytes)
        except OSError as error:
            raise ConfigError(f"metrics_log: cannot write {path}: {error.strerror}") from error
        self._path = path
        self._every_s = every_s
        self._pending: list[dict[str, Any]] = []
        self._failed = False
        self._closing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def add_update(self, record: UpdateRecord) -> None:
        """Note an update that has ended; it is written with the next sample."""
        self._pending.append(update_line(record))

    def start(self, read: Callable[[], dict[str, Any]]) -> None:
        """Write what `read` gives from now on; it is called on the running event loop."""
        self._task = asyncio.create_task(self._run(read))

    async def _run(self, read: Callable[[], dict[str, Any]]) -> None:
        while not self._closing.is_set():
            self._pending.append(read())
            await self._flush()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), self._every_s)

    async def _flush(self) -> None:
        lines, self._pending = self._pending, []
        encoded = [json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines]
        try:
            await asyncio.to_thread(self._file.write, encoded)
            self._failed = False
        except OSError as error:
            if not self._failed:  # a full disk is said once, and generation goes on
                log.warning("metrics_log_lost", file=str(self._path), error=error.strerror)
            self._failed = True

    async def close(self) -> None:
        """Write what is pending and end."""
        self._closing.set()
        if self._task is not None:
            await self._task
            await self._flush()
        with contextlib.suppress(OSError):  # what a full disk could not take
            self._file.close()
