"""Does a test of a case fail when what it tests is broken? One named line for each kind of case says so.

    python -m tests.cases_red [KIND ...]        (make cases-red)

tests/cases_red.toml names a file, a text that stands on exactly one of its lines, what stands there
instead, and the tests that must fail then. Each is tried in a copy of the tree, which is thrown away; the
working tree is never written to. Before that the same tests must pass on the copy as it is. A line that is
not found, a test that stays green or cannot be run at all, and a copy that is not what runs are failures.
"""

from __future__ import annotations

import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).resolve().with_suffix(".toml")
LEFT_OUT = shutil.ignore_patterns(
    ".git",
    ".venv",
    ".cache",
    ".*_cache",
    ".hypothesis",
    "__pycache__",
    "*.egg-info",
    "build",
    "dist",
    "demo_out",
)
TIMEOUT_S = 240
"""Of one run of pytest."""


@dataclass(frozen=True)
class Mutation:
    """One line broken. line: a text that one line of `file` has; replacement: of that text, on that line."""

    kind: str
    cases: tuple[str, ...]
    file: str
    line: str
    replacement: str
    tests: tuple[str, ...]
    gpu: bool = False


def read_mutations(path: Path = LIST) -> list[Mutation]:
    """The list.

    Raises:
        ValueError: a mutation without tests, or two of one kind and line.
    """
    found = []
    for entry in tomllib.loads(path.read_text())["mutation"]:
        mutation = Mutation(**{k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()})
        if not mutation.tests or not mutation.cases or mutation.line == mutation.replacement:
            raise ValueError(
                f"{mutation.kind}: {mutation.line!r} names no tests or no cases, or breaks nothing"
            )
        found.append(mutation)
    return found


def break_line(text: str, line: str, replacement: str) -> str | None:
    """`text` with the one line that has `line` broken; None if no line has it, or more than one."""
    lines = text.splitlines(keepends=True)
    at = [number for number, one in enumerate(lines) if line in one]
    if len(at) != 1 or lines[at[0]].count(line) != 1:
        return None
    lines[at[0]] = lines[at[0]].replace(line, replacement)
    return "".join(lines)


def run_tests(copy: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """pytest in a copy of the tree, on its code alone."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}  # a mutation may not outlive its run
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-p",
        "no:cacheprovider",
        "-m",
        "",
        "--timeout=120",
    ]
    return subprocess.run(
        [*command, *tests], cwd=copy, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def try_mutation(copy: Path, mutation: Mutation) -> str:
    """What became of it: "red", or what is wrong."""
    file = copy / mutation.file
    good = file.read_text()
    broken = break_line(good, mutation.line, mutation.replacement)
    if broken is None:
        return "LINE NOT FOUND"
    try:
        compile(broken, mutation.file, "exec")
    except SyntaxError as error:
        return f"BROKEN MUTATION ({error.msg})"
    file.write_text(broken)
    try:
        done = run_tests(copy, mutation.tests)
    except subprocess.TimeoutExpired:
        return "TIMED OUT"
    finally:
        file.write_text(good)
    return verdict(done.returncode, done.stdout)


def verdict(returncode: int, stdout: str) -> str:
    """Red if a test ran and failed; a fixture that breaks or a file that cannot be imported is no failure."""
    if returncode == 0:
        return "GREEN"
    if returncode != 1 or not re.search(r"\b\d+ failed\b", stdout):
        return f"NOT RUN ({stdout.strip().splitlines()[-1] if stdout.strip() else f'exit code {returncode}'})"
    return "red"


def copy_tree(into: Path) -> Path:
    """A copy of the working tree, and proof that it is what runs there."""
    copy = into / "tree"
    shutil.copytree(ROOT, copy, ignore=LEFT_OUT)
    for package in ("rollout_engine", "weight_updater", "trainers_adapters", "tests"):
        shown = subprocess.run(
            [sys.executable, "-c", f"import {package}; print({package}.__file__)"],
            cwd=copy,
            env=os.environ | {"PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        if not shown.startswith(str(copy)):
            raise SystemExit(f"cases-red: {package} of a copy is {shown.strip()}, not the copy's own")
    return copy


class Trial:
    """All mutations, by a few workers that each have a copy of their own."""

    def __init__(self, mutations: Sequence[Mutation], num_workers: int) -> None:
        self._todo: queue.SimpleQueue[Mutation] = queue.SimpleQueue()
        self._workers = [threading.Thread(target=self._work) for _ in range(num_workers)]
        self._lock = threading.Lock()
        self.results: dict[Mutation, str] = {}
        for mutation in mutations:
            self._todo.put(mutation)

    def run(self) -> None:
        for worker in self._workers:
            worker.start()
        for worker in self._workers:
            worker.join()

    def _work(self) -> None:
        with tempfile.TemporaryDirectory(prefix="cases-red-") as folder:
            copy = copy_tree(Path(folder))
            while not self._todo.empty():
                mutation = self._todo.get()
                started = time.monotonic()
                result = try_mutation(copy, mutation)
                with self._lock:
                    self.results[mutation] = result
                    print(row(mutation, result, time.monotonic() - started), flush=True)


def row(mutation: Mutation, result: str, seconds: float) -> str:
    """A line of the table."""
    cases = " ".join(mutation.cases)
    return f"{mutation.kind:24} {cases:24} {mutation.file:42} {seconds:5.1f} s  {result}"


def has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def baseline(mutations: Sequence[Mutation]) -> None:
    """The tests must pass before anything is broken.

    Raises:
        SystemExit: they do not.
    """
    tests = sorted({test for mutation in mutations for test in mutation.tests})
    with tempfile.TemporaryDirectory(prefix="cases-red-") as folder:
        done = run_tests(copy_tree(Path(folder)), tests)
    if done.returncode != 0:
        raise SystemExit(f"cases-red: the tests fail with nothing broken\n{done.stdout[-4000:]}")
    print(f"{len(tests)} tests or groups of tests pass with nothing broken", flush=True)


def main(kinds: Sequence[str]) -> int:
    """Exit code 0 if every mutation was seen."""
    mutations = read_mutations()
    if unknown := set(kinds) - {mutation.kind for mutation in mutations}:
        raise SystemExit(f"cases-red: no kind {sorted(unknown)[0]!r}")
    wanted = [m for m in mutations if not kinds or m.kind in kinds]
    left = [m for m in wanted if m.gpu and not has_gpu()]
    tried = [m for m in wanted if m not in left]
    baseline(tried)
    trial = Trial(tried, num_workers=min(4, max(1, (os.cpu_count() or 2))))
    trial.run()
    for mutation in left:
        print(row(mutation, "needs a GPU", 0.0))
    wrong = [m for m in tried if trial.results.get(m) != "red"]
    print(f"{len(tried) - len(wrong)} of {len(tried)} red, {len(left)} need a GPU")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
