"""What processes hold: memory, threads, open files; to see that nothing is left behind."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

SEGMENTS = "/dev/shm/rollsync-"

Holdings = dict[str, int]
"""By what is held: numbers, and kB of memory (names that end in "RSS")."""


def children_of(pid: int) -> list[int]:
    """The processes that a process has started, and that live."""
    found: list[int] = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def descendants_of(pid: int) -> list[int]:
    """All processes below one, parents first. One that ends meanwhile is left out."""
    found: list[int] = []
    try:
        for child in children_of(pid):
            found += [child, *descendants_of(child)]
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found


def born(pid: int) -> str:
    """When a process began, which tells it from a later one of the same number; "" if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] == "Z" else fields[19]


def _open_files() -> list[str]:
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return found


NOT_OURS = frozenset(_open_files())
"""Open when the tests were loaded: terminals, logs, /dev/null, which a capture opens again and closes."""


def open_paths() -> list[str]:
    """Files that this process has open, by path: no sockets and pipes, which threads of libraries open and
    close when they like; nor what stands for its output, or has no name.
    """
    files = (path for path in _open_files() if path.startswith("/") and "/#" not in path)
    return sorted(path for path in files if path not in NOT_OURS)


ENGINE = "rollout_engine.engine_main"


def command_of(pid: int) -> str:
    """Its words, separated by spaces; "" of one that ends."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def held_by(pid: int) -> Holdings:
    """Of one process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    maps = [line.split(maxsplit=5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {
        "RSS": int(status["VmRSS"].split()[0]),
        "threads": int(status["Threads"]),
        "open files": len(os.listdir(f"/proc/{pid}/fd")),
        "mapped segments": sum(fields[5].startswith(SEGMENTS) for fields in maps if len(fields) == 6),
    }


def held(front: int, trainer: int) -> Holdings:
    """Of an engine's two processes and its trainer's.

    Args:
        front: the process that was started as `rollsync serve`; one of its children is the engine, others
            receive streams.
    """
    (engine,) = [child for child in children_of(front) if ENGINE in command_of(child)]
    found: Holdings = {}
    for who, pid in {"trainer": trainer, "front": front, "engine": engine}.items():
        found |= {f"{who} {what}": value for what, value in held_by(pid).items()}
    return found


def grown(before: Mapping[str, int], after: Mapping[str, int], allowed: Mapping[str, int]) -> Iterable[str]:
    """What has become more than `allowed` (by the last word of its name; 0 where it names nothing)."""
    for what, value in after.items():
        if value - before[what] > allowed.get(what.split()[-1], 0):
            yield f"{what}: {before[what]} -> {value}"
