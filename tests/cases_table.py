"""What the field's bug reports are shown by: a pytest plugin that prints a table of cases and misses none.

    python -m pytest -p tests.cases_table -m case        (make cases)

tests/cases_list.toml has every case: letter and title, and under [open] what of it is not shown yet, which
fails the run. A test says which cases it shows by `@pytest.mark.case("B001")`. tests/cases.toml has what is
about something that rollsync is not meant to have: whole cases, or a named part of one whose rest has tests,
each with its reason. A case without tests that is not there, or with tests that is there whole, fails it.
"""

from __future__ import annotations

import ast
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
LONGEST_SECONDS = 5.0
"""What a test of an E case may take."""


@dataclass(frozen=True)
class Case:
    """One report.

    letter: E, M or H, as cases_list.toml explains. open: what is not shown yet. reason: why there are no
    tests of it, or of `part` of it, if that has words.
    """

    id: str
    letter: str
    title: str
    open: str = ""
    reason: str = ""
    part: str = ""


@dataclass
class Tally:
    """What became of a case's tests in this run."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    slow: list[str] = field(default_factory=list)
    elsewhere: int = 0  # tests that need a GPU, on a machine without one

    @property
    def num_tests(self) -> int:
        return self.passed + self.failed + self.skipped + self.elsewhere


def read_cases(folder: Path = TESTS) -> dict[str, Case]:
    """Every case by its id.

    Raises:
        ValueError: a reason or a note for a case that is not on the list, or without words.
    """
    listed = tomllib.loads((folder / "cases_list.toml").read_text())
    exempt = tomllib.loads((folder / "cases.toml").read_text())
    reasons = {name: entry["reason"] for name, entry in exempt.items()}
    parts = {name: entry["part"] for name, entry in exempt.items() if "part" in entry}
    notes = listed.get("open", {})
    for name, words in (*reasons.items(), *parts.items(), *notes.items()):
        if name not in listed["cases"] or not words.strip():
            raise ValueError(f"{name} is not on the list, or nothing is said of it")
    return {
        name: Case(name, letter, title, notes.get(name, ""), reasons.get(name, ""), parts.get(name, ""))
        for name, (letter, title) in listed["cases"].items()
    }


def problems(cases: Mapping[str, Case], num_tests: Mapping[str, int]) -> list[str]:
    """What is wrong with the list, whatever the tests say.

    Args:
        num_tests: case -> how many tests are marked with it; 0 or absent for none.
    """
    found = [f"{name} is marked, and not on the list" for name in num_tests if name not in cases]
    for case in cases.values():
        whole = case.reason and not case.part
        if whole and num_tests.get(case.id):
            found.append(f"{case.id} has tests, and a reason in cases.toml to have none")
        if not whole and not num_tests.get(case.id):
            found.append(f"{case.id} ({case.title}) has neither a test nor a reason in cases.toml")
    return found


def result(case: Case, tally: Tally) -> str:
    """One word or a few about a case."""
    if case.reason and not case.part:
        return f"no such feature: {case.reason}"
    if tally.failed:
        return f"FAILED {tally.failed} of {tally.num_tests}"
    if tally.skipped:
        return f"SKIPPED {tally.skipped} of {tally.num_tests}"
    if not tally.num_tests:
        return "MISSING"
    said = "passed" if tally.passed else ""
    if tally.elsewhere:
        said += (", and " if said else "") + f"{tally.elsewhere} need a GPU"
    if tally.slow:
        said += f", slow: {', '.join(tally.slow)}"
    if case.part:
        said += f"; without {case.part}: {case.reason}"
    return f"{said}; open: {case.open}" if case.open else said


def rows(cases: Mapping[str, Case], tallies: Mapping[str, Tally]) -> Iterator[str]:
    """The table."""
    width = max(len(case.title) for case in cases.values())
    yield f"{'case':6}   {'title':{width}}  tests  result"
    for case in cases.values():
        tally = tallies.get(case.id, Tally())
        yield f"{case.id:6} {case.letter} {case.title:{width}}  {tally.num_tests:5}  {result(case, tally)}"


def marked_in(files: Iterable[Path]) -> dict[str, int]:
    """Case -> number of test functions in `files` that are marked with it, without importing them."""
    found: dict[str, int] = defaultdict(int)
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or not ast.unparse(node.func).endswith("mark.case"):
                continue
            for argument in node.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    found[argument.value] += 1
    return dict(found)


class CasesTable:
    """The plugin: counts what the marked tests of this run end with."""

    def __init__(self) -> None:
        self._cases = read_cases()
        self._marks: dict[str, list[str]] = {}  # nodeid -> cases
        self._tallies: dict[str, Tally] = defaultdict(Tally)
        self._problems: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        num_tests: dict[str, int] = defaultdict(int)
        collected_gpu = False
        for item in items:
            names = sorted({mark.args[0] for mark in item.iter_markers("case")})
            self._marks[item.nodeid] = names
            collected_gpu = collected_gpu or "tests/gpu/" in item.nodeid
            for name in names:
                num_tests[name] += 1
        if not collected_gpu:
            for name, count in marked_in((TESTS / "gpu").glob("test_*.py")).items():
                self._tallies[name].elsewhere = count
                num_tests[name] += count
        self._problems = problems(self._cases, num_tests)
        self._problems += [f"{case.id} is open: {case.open}" for case in self._cases.values() if case.open]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and report.when != "call":
            return
        for name in self._marks.get(report.nodeid, ()):
            tally = self._tallies[name]
            tally.passed += report.passed
            tally.failed += report.failed
            tally.skipped += report.skipped
            letter = self._cases[name].letter if name in self._cases else ""
            if letter == "E" and report.when == "call" and report.duration > LONGEST_SECONDS:
                tally.slow.append(f"{report.nodeid.rpartition('::')[2]} {report.duration:.1f} s")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._problems and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("cases")
        for row in rows(self._cases, self._tallies):
            terminalreporter.write_line(row)
        for problem in self._problems:
            terminalreporter.write_line(f"error: {problem}", red=True)
        told = [result(case, self._tallies.get(case.id, Tally())) for case in self._cases.values()]
        counts = {
            "passed": sum(text.startswith("passed") for text in told),
            "need a GPU alone": sum("need a GPU" in text and not text.startswith("passed") for text in told),
            "without a feature": sum(text.startswith("no such feature") for text in told),
            "without a part": sum("; without " in text for text in told),
            "with something open": sum("; open: " in text for text in told),
        }
        summary = ", ".join(f"{number} {what}" for what, number in counts.items())
        terminalreporter.write_line(f"{len(told)} cases: {summary}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CasesTable(), "rollsync-cases")
