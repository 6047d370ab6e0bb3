"""What processes hold: memory, threads, open files; to see that nothing is left behind."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")

Holdings = dict[str, int]
"""By what is held: numbers, and kB of memory (names that end in "RSS")."""


def children_of(pid: int) -> list[int]:
    """The processes that a process has started, and that live."""
    found: list[int] = []
    for task in os.listdir(f"/proc/{pid}/task"):
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


def held_by(pid: int) -> Holdings:
    """Of one process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "RSS": int(status["VmRSS"].split()[0]),
        "threads": int(status["Threads"]),
        "open files": len(os.listdir(f"/proc/{pid}/fd")),
    }


def held(front: int, trainer: int) -> Holdings:
    """Of an engine's two processes and its trainer's, and the shared memory of all.

    Args:
        front: the process that was started as `rollsync serve`; its child is the engine.
    """
    (engine,) = children_of(front)
    found: Holdings = {}
    for who, pid in {"trainer": trainer, "front": front, "engine": engine}.items():
        found |= {f"{who} {what}": value for what, value in held_by(pid).items()}
    found["shared segments"] = len(segments())
    return found


def segments() -> set[str]:
    """Names of the project's segments in shared memory, whoever made them."""
    return {name for name in os.listdir(SHARED_MEMORY) if name.startswith("rollsync-")}


def grown(before: Mapping[str, int], after: Mapping[str, int], allowed: Mapping[str, int]) -> Iterable[str]:
    """What has become more than `allowed` (by the last word of its name; 0 where it names nothing)."""
    for what, value in after.items():
        if value - before[what] > allowed.get(what.split()[-1], 0):
            yield f"{what}: {before[what]} -> {value}"
