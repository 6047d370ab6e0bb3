"""Engines and children of process groups, forked from a process that has imported torch already.

    python -m tests.preloaded INTERPRETER serve ...     `rollsync serve`, whose engine is forked

Starting them as they are started in earnest takes 1.5 to 3 s of a core, nearly all of it for imports, and
tests start more than a hundred. What runs in a forked one is the same code. Tests of how a process starts,
dies or what it holds start real ones.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.faults.nursery import nursery

_open = contextlib.ExitStack()


@atexit.register
def _close(owner: int = os.getpid()) -> None:
    if os.getpid() == owner:  # and not a fork of it
        _open.close()


@functools.cache
def interpreter() -> str:
    """The path of an interpreter that forks the modules of `tests.faults.roles.ROLES` instead of starting
    them. Its parent starts when this is asked for first, and ends with this process.
    """
    folder = Path(_open.enter_context(tempfile.TemporaryDirectory(prefix="preloaded-")))
    return str(_open.enter_context(nursery(folder)).stub)


class ForkedCommand:
    """A command of which the interpreter is one that forks; that one starts with the first use."""

    def __init__(self, command: Sequence[str]) -> None:
        self._arguments = command[1:]

    def __iter__(self) -> Iterator[str]:
        yield interpreter()
        yield from self._arguments


def main() -> None:
    """`rollsync`, with the interpreter that is the first argument for its engine and receivers."""
    from rollout_engine.cli.main import main as rollsync
    from rollout_engine.server import app, receivers
    from rollout_engine.server.engine_process import ENGINE_COMMAND

    forking = sys.argv.pop(1)
    receivers.RECEIVER_COMMAND = (forking, *receivers.RECEIVER_COMMAND[1:])
    app.serve = functools.partial(app.serve, engine_command=(forking, *ENGINE_COMMAND[1:]))
    rollsync()


if __name__ == "__main__":
    main()
