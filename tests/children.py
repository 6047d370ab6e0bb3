"""Child processes that are told what to do by lines of JSON: trainers beside an engine, mostly.

A child is a module whose `main` calls `obey(commands)`. The parent calls `child.ask("name", key=value)` and
gets what `commands["name"](key=value)` returned. What the child prints goes to stderr, so that it cannot
be taken for an answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests import preloaded


class ChildError(AssertionError):
    """A command failed in the child, or the child died; says what it had printed."""


class Child:
    """A running child. `process` may be killed by a test that wants to see what happens then."""

    def __init__(self, process: subprocess.Popen, log: Any) -> None:
        self.process = process
        self._log = log

    def tell(self, command: str, **arguments: Any) -> None:
        """Start a command whose answer `answer` will fetch."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps([command, arguments]) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._error(f"the child is gone; it cannot {command}") from None

    def answer(self) -> Any:
        """What the oldest command without an answer returned; waits for it."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise self._error(f"the child ended with {self.process.wait(10)}")
        result, error = json.loads(line)
        if error:
            raise self._error(error)
        return result

    def ask(self, command: str, **arguments: Any) -> Any:
        """Run a command and wait for its answer."""
        self.tell(command, **arguments)
        return self.answer()

    def _error(self, what: str) -> ChildError:
        self._log.seek(0)
        return ChildError(f"{what}\n{self._log.read()}")


@contextlib.contextmanager
def start(
    module: str, *arguments: str, env: Mapping[str, str] | None = None, forked: bool = False
) -> Iterator[Child]:
    """Run `python -m MODULE ARGUMENTS`; at the end its stdin is closed, which ends it.

    Args:
        forked: by a process that has imported torch (tests/preloaded.py), whose environment it gets.
    """
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [preloaded.interpreter() if forked else sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | dict(env or {}),
        )
        try:
            yield Child(process, log)
        finally:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


def obey(commands: Mapping[str, Callable[..., Any]]) -> None:
    """CHILD. Run commands from stdin until it is closed."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = [commands[name](**arguments), ""]
        except Exception as error:  # noqa: BLE001 - the parent raises it
            answer = [None, f"{name}: {type(error).__name__}: {error}"]
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
