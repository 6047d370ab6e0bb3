"""Does a test of a case fail when what it tests is broken? One named line for each kind of case says so.

    python -m tests.cases_red [--jobs N] [WORD ...]        (make cases-red KIND="B013 quantised")

A word is a case, or a part of the name of a kind or of a file's path; no word means all. tests/cases_red.toml
names a file, a text that stands on exactly one of its lines, what stands there instead, the tests that must
fail then, and what their failure says. Each is tried in a copy of the tree, which is thrown away; the working
tree is never written to. At the end, all tests that failed must pass on the copy as it is.

A mutation is red if each of its tests fails by itself, in the way that was said. Everything else is wrong: a
test that stays green, a line that is not found, a test that cannot run, fails by a mistake of the mutation
(an unknown name, a syntax error), says something else, or is not marked with the cases it stands for.

Importing torch and transformers takes seconds, so the tests run in children that are forked from a parent
which has them, but nothing of the tree; where importing them starts threads, every child imports them itself.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.red_runs import PRELOADED, ROOT, RUN_S, Run, belongs, copy_tree, num_threads, start

LIST = Path(__file__).resolve().with_suffix(".toml")
UNBROKEN_S = 900.0
MISTAKES = ("NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError", "SyntaxError")
"""Exceptions that say that the mutation is wrong, not what it breaks."""
RED, GREEN, NEEDS_GPU = "red", "GREEN", "needs a GPU"


@dataclass(frozen=True)
class Mutation:
    """One line broken. line: a text that one line of `file` has; replacement: of that text, on that line.

    says: a regular expression that the failure of each of `tests` must hold, its source lines included.
    """

    kind: str
    cases: tuple[str, ...]
    file: str
    line: str
    replacement: str
    tests: tuple[str, ...]
    says: str
    gpu: bool = False

    def fits(self, words: Sequence[str]) -> bool:
        """Whether one of the words names it; no words name all."""
        return not words or any(w in self.cases or w in self.kind or w in self.file for w in words)


@dataclass
class Outcome:
    """What became of a mutation. result: RED, NEEDS_GPU or what is wrong; text: the failures or why."""

    result: str
    failed: list[str] = field(default_factory=list)  # ids of tests, with their parameters
    text: str = ""
    seconds: float = 0.0


def read_mutations(path: Path = LIST) -> list[Mutation]:
    """The list.

    Raises:
        ValueError: a mutation without tests or cases, or that breaks nothing.
    """
    found = []
    for entry in tomllib.loads(path.read_text())["mutation"]:
        mutation = Mutation(**{k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()})
        if not mutation.tests or not mutation.cases or mutation.line == mutation.replacement:
            raise ValueError(
                f"{mutation.kind}: {mutation.line!r} names no tests or no cases, or breaks nothing"
            )
        re.compile(mutation.says)
        found.append(mutation)
    return found


def find_line(text: str, line: str) -> int | None:
    """The number, from 1, of the one line that has `line` once; None if no line has it, or more than one."""
    at = [number for number, one in enumerate(text.splitlines(), 1) if line in one]
    return at[0] if len(at) == 1 and text.count(line) == 1 else None


def verdict(
    mutation: Mutation, records: Sequence[dict[str, Any]], *, timed_out: bool, output: str
) -> Outcome:
    """What the records of its run say of a mutation."""
    ran = [r for r in records if r["when"] != "collect"]
    failed = [r for r in ran if r["when"] == "call" and r["outcome"] == "failed"]
    marked = {case for r in records for case in r.get("cases", ())}
    text = "\n".join(r["text"] for r in failed)
    for test in mutation.tests:
        own = [r for r in failed if belongs(r["nodeid"], test)]
        others = [r for r in records if belongs(r["nodeid"], test) and r["outcome"] == "failed"]
        if not own and others:
            return Outcome("NOT RUN", [], others[0]["text"])
        if not own and timed_out:
            return Outcome("TIMED OUT", [], output[-2000:])
        if not own and any(belongs(r["nodeid"], test) for r in ran):
            return Outcome(GREEN, [], f"{test} passes")
        if not own:
            return Outcome("NOT RUN", [], f"{test}\n{output[-2000:]}")
        if own[0]["error"] in MISTAKES:
            return Outcome("BROKEN MUTATION", [], own[0]["text"])
        if not re.search(mutation.says, own[0]["text"]):
            return Outcome("ANOTHER REASON", [own[0]["nodeid"]], own[0]["text"])
    if missing := sorted(set(mutation.cases) - marked):
        return Outcome("NOT MARKED", [], f"none of the tests is marked with {', '.join(missing)}")
    return Outcome(RED, [r["nodeid"] for r in failed], text)


class Trial:
    """Mutations, tried in a few copies of the tree, each with one run at a time."""

    def __init__(self, mutations: Sequence[Mutation], copies: Sequence[Path]) -> None:
        self._todo = list(mutations)
        self._num = len(mutations)
        self._free = list(copies)
        self._under_way: dict[Path, tuple[Mutation, Run, Callable[[], None]]] = {}
        self.outcomes: dict[Mutation, Outcome] = {}

    def run(self) -> None:
        while self._todo or self._under_way:
            while self._todo and self._free:
                self._start(self._todo.pop(0), self._free.pop())
            time.sleep(0.05)
            for copy, (mutation, run, mend) in list(self._under_way.items()):
                if run.has_ended():
                    del self._under_way[copy]
                    mend()
                    self._end(copy, mutation, run)
                else:
                    run.shorten()

    def _start(self, mutation: Mutation, copy: Path) -> None:
        file = copy / mutation.file
        good = file.read_text() if file.exists() else ""
        if find_line(good, mutation.line) is None:
            self._free.append(copy)
            self._tell(mutation, Outcome("LINE NOT FOUND", [], mutation.line))
            return
        broken = good.replace(mutation.line, mutation.replacement)
        try:
            compile(broken, mutation.file, "exec")
        except SyntaxError as error:
            self._free.append(copy)
            self._tell(mutation, Outcome("BROKEN MUTATION", [], str(error)))
            return
        made = file.stat().st_mtime

        def write(text: str, modified: float) -> None:
            file.write_text(text)
            os.utime(file, (modified, modified))  # or the bytecode of one text may count as the other's

        write(broken, made + 10)
        run = start(copy, mutation.tests, RUN_S, stop=True)
        self._under_way[copy] = mutation, run, lambda: write(good, made)

    def _end(self, copy: Path, mutation: Mutation, run: Run) -> None:
        output = (run.folder / "output").read_text(errors="replace")
        outcome = verdict(mutation, run.records(), timed_out=run.timed_out, output=output)
        outcome.seconds = time.monotonic() - run.started
        shutil.rmtree(run.folder, ignore_errors=True)
        self._free.append(copy)
        self._tell(mutation, outcome)

    def _tell(self, mutation: Mutation, outcome: Outcome) -> None:
        self.outcomes[mutation] = outcome
        print(f"[{len(self.outcomes):3}/{self._num}] {row(mutation, outcome)}", flush=True)


def check_unbroken(outcomes: dict[Mutation, Outcome], copy: Path) -> None:
    """The tests that failed must pass with nothing broken; a mutation whose tests do not is not red.

    One that fails in this long row of tests is run once more by itself: others share its engine and its time.
    """
    tests = sorted({nodeid for outcome in outcomes.values() for nodeid in outcome.failed})
    passed: set[str] = set()
    said: dict[str, str] = {}
    for together in (tests, *([test] for test in tests)):
        if not (left := [test for test in together if test not in passed]):
            continue
        run = start(copy, left, UNBROKEN_S, stop=False)
        while not run.has_ended():
            time.sleep(0.05)
        records = [r for r in run.records() if r["when"] == "call"]
        passed |= {r["nodeid"] for r in records if r["outcome"] == "passed"}
        said |= {r["nodeid"]: r["text"] for r in records}
    for outcome in outcomes.values():
        if outcome.result == RED and (bad := [nodeid for nodeid in outcome.failed if nodeid not in passed]):
            outcome.result, outcome.text = "FAILS UNBROKEN", f"{bad[0]}\n{said.get(bad[0], 'was not run')}"
    print(f"with nothing broken {len(passed)} of these {len(tests)} tests pass", flush=True)


def row(mutation: Mutation, outcome: Outcome) -> str:
    """A line of the table."""
    file = ROOT / mutation.file
    at = find_line(file.read_text(), mutation.line) if file.exists() else None
    where = f"{mutation.file}:{at or '?'}"
    return f"{' '.join(mutation.cases):15} {where:48} {outcome.seconds:5.1f} s  {outcome.result}"


def look_around() -> tuple[bool, str]:
    """Whether there is a CUDA device, and the first of PRELOADED whose import starts threads ("": none does).
    Found out in a child, since a parent that asked, or has threads, must not fork.
    """
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        starter = next((name for name in PRELOADED if starts_threads(name)), "")
        os.write(writing, f"{int(importlib.import_module('torch').cuda.is_available())}{starter}".encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        found = answer.read()
    os.waitpid(pid, 0)
    return found[0] == "1", found[1:]


def starts_threads(name: str) -> bool:
    """Import a module. Whether this process has more than one thread then."""
    importlib.import_module(name)
    return num_threads() > 1


def main(arguments: Sequence[str]) -> int:
    """Exit code 0 if every mutation was seen."""
    parser = argparse.ArgumentParser(prog="python -m tests.cases_red", description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", metavar="WORD", help="cases, or parts of kinds or paths")
    parser.add_argument("--jobs", type=int, default=max(1, min(4, (os.cpu_count() or 2) // 2)))
    parser.add_argument("--long", action="store_true", help="print how each failed, also of the red ones")
    options = parser.parse_args(arguments)
    wanted = [m for m in read_mutations() if m.fits(options.words)]
    if not wanted:
        raise SystemExit(f"cases-red: nothing is called {' or '.join(options.words)}")
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    has_gpu, starter = look_around()
    if starter:
        print(f"importing {starter} starts threads here, so every run imports what it needs", flush=True)
    else:
        for name in PRELOADED:
            importlib.import_module(name)
    left = [m for m in wanted if m.gpu] if not has_gpu else []
    tried = [m for m in wanted if m not in left]
    with tempfile.TemporaryDirectory(prefix="red-") as folder:
        copies = [copy_tree(Path(folder) / str(number)) for number in range(options.jobs)]
        trial = Trial(tried, copies)
        trial.run()
        check_unbroken(trial.outcomes, copies[0])
    outcomes = trial.outcomes | {mutation: Outcome(NEEDS_GPU) for mutation in left}
    for mutation in wanted:
        print(row(mutation, outcomes[mutation]))
        if options.long or outcomes[mutation].result not in (RED, NEEDS_GPU):
            print("    " + outcomes[mutation].text.replace("\n", "\n    "))
    num_red = sum(outcome.result == RED for outcome in trial.outcomes.values())
    print(f"{len(wanted)} mutations: {num_red} of {len(tried)} red, {len(left)} need a GPU")
    return 1 if num_red < len(tried) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
