"""Rows run in a process of their own, so that one that hangs, or kills it, costs none of the others.

That process (the worker) appends what happens to a file, one JSON object a line, with `Report`; `supervise`
reads along, stops a worker whose row takes too long, and starts another for the rows that are left.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu.results import Line
from tests.holdings import born, descendants_of
from weight_updater.shm import sweep

TOTAL_S = 440.0
"""Of one call, which ends within eight minutes, what follows included; what has not been measured by then is
left to another.
"""
GRACE_S = 25.0
"""How long a worker may take to stop its engines once it is asked to."""
FIRST_ROW_S = 150.0
"""A worker's first row has so much longer: an engine starts, and may have to compile."""
END_S = 10.0
"""How long a killed process may take to be gone."""
POLL_S = 0.2


class Report:
    """WORKER. Tells what becomes of the rows. path None: nobody wants to know."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def began(self, row: str) -> None:
        self._say(row=row, kind="began")

    def measured(self, row: str, line: Line) -> None:
        self._say(row=row, kind="measured", line=asdict(line))

    def not_here(self, row: str, why: str) -> None:
        """This machine cannot measure it; no failure."""
        self._say(row=row, kind="not here", why=why)

    def failed(self, row: str, why: str) -> None:
        self._say(row=row, kind="failed", why=why)

    def about(self, title: str) -> None:
        """Of the table."""
        self._say(row="", kind="about", why=title)

    def _say(self, **event: Any) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(event) + "\n")


@dataclass
class Outcome:
    """What is known of the rows so far, by name. others: why a row has no line."""

    title: str = ""
    lines: dict[str, Line] = field(default_factory=dict)
    others: dict[str, str] = field(default_factory=dict)
    num_failures: int = 0

    def take(self, event: dict[str, Any]) -> None:
        row = event["row"]
        match event["kind"]:
            case "measured":
                self.lines[row] = Line(**event["line"])
            case "not here":
                self.others[row] = event["why"]
            case "failed":
                self.fail(row, event["why"])
            case "about":
                self.title = event["why"]

    def fail(self, row: str, why: str) -> None:
        self.others[row] = f"FAILED: {why}"
        self.num_failures += 1


class Worker:
    """One process that measures rows."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        self._path = folder / "report"
        self._path.touch()
        self._read = 0
        self._others = {pid: born(pid) for pid in descendants_of(os.getpid())}
        self.process = subprocess.Popen([*command, "--report", str(self._path), "--folder", str(folder)])

    def events(self) -> Iterator[dict[str, Any]]:
        """What was told since the last call."""
        with self._path.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        yield from map(json.loads, whole.splitlines())

    def stop(self, grace_s: float) -> None:
        """Ask it to end; then end it and what is left of the processes that it began."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_s)
        self.process.kill()
        self.process.wait()
        deadline = time.monotonic() + END_S
        while (left := self._left()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(POLL_S)  # what they hold of a GPU is free once they are gone

    def _left(self) -> list[int]:
        """Processes that it, or one below it, began: orphans are this process's children then."""
        return [pid for pid in descendants_of(os.getpid()) if self._others.get(pid) != born(pid)]


def supervise(
    names: Sequence[str],
    command: Sequence[str],
    seconds_for: Callable[[str], float],
    *,
    directory: str,
    total_s: float = TOTAL_S,
    first_row_s: float = FIRST_ROW_S,
    grace_s: float = GRACE_S,
) -> Outcome:
    """Measure rows, in order.

    Args:
        command: starts a worker; the rows, --report FILE and --folder DIRECTORY are appended.
        seconds_for: how long a row may take.
        directory: where workers may write; what they leave there is removed.
    """
    outcome, left = Outcome(), list(names)
    deadline = time.monotonic() + total_s
    _adopt_orphans(True)
    while left:
        if time.monotonic() > deadline - 1.0:
            for name in left:
                outcome.fail(name, f"not begun: {total_s:.0f} s are over; run it with ROWS={name}")
            break
        folder = Path(tempfile.mkdtemp(prefix="bench-", dir=directory))
        worker = Worker([*command, *left], folder)
        try:
            left = _follow(worker, left, outcome, seconds_for, deadline, first_row_s)
        finally:
            worker.stop(grace_s)
            for event in worker.events():
                outcome.take(event)
            shutil.rmtree(folder, ignore_errors=True)
            sweep()  # segments of what had to be killed
    _adopt_orphans(False)
    return outcome


def _adopt_orphans(adopt: bool) -> None:
    """Whether processes below this one become its children when their parents die, so that none gets lost."""
    set_child_subreaper = 36
    ctypes.CDLL(None).prctl(set_child_subreaper, int(adopt))


def _follow(
    worker: Worker,
    names: list[str],
    outcome: Outcome,
    seconds_for: Callable[[str], float],
    deadline: float,
    first_row_s: float,
) -> list[str]:
    """Take in what a worker tells until it ends or is to be stopped; returns the rows that are left."""
    row, num_begun = names[0], 0
    limit = time.monotonic() + first_row_s  # until its first row begins
    while True:
        running = worker.process.poll() is None  # before its last words are read
        for event in worker.events():
            outcome.take(event)
            if event["kind"] == "began":
                row, num_begun = event["row"], num_begun + 1
                limit = time.monotonic() + seconds_for(row) + (first_row_s if num_begun == 1 else 0.0)
        rest = names[names.index(row) + 1 :]
        told = row in outcome.lines or row in outcome.others
        if not running:
            if not told:
                outcome.fail(row, f"the process that measured it ended with {worker.process.returncode}")
            return rest
        now = time.monotonic()
        if now > min(limit, deadline):
            over = "it took too long" if now > limit else "the time of this call is over"
            if not told:
                outcome.fail(row, f"{over}, and was stopped")
            else:
                print(f"the worker hangs after {row}", file=sys.stderr)
            return rest
        time.sleep(POLL_S)
