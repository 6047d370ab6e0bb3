"""The table of cases: nothing is missed, and nothing is said to have passed that has not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases_table import TESTS, Case, CasesTable, Tally, marked_in, problems, read_cases, result, rows


def test_every_case_has_a_test_or_a_reason():
    cases = read_cases()
    assert len(cases) == 112
    assert problems(cases, marked_in(TESTS.rglob("test_*.py"))) == []


def test_what_is_wrong_with_a_list_is_said():
    listed = (Case("B1", "E", "one"), Case("B2", "M", "two", reason="none"), Case("B3", "H", "three"))
    cases = {case.id: case for case in listed}
    assert problems(cases, {"B1": 1, "B3": 2}) == []
    assert problems(cases, {"B3": 2}) == ["B1 (one) has neither a test nor a reason in cases.toml"]
    both = problems(cases, {"B1": 1, "B2": 1, "B3": 1})
    assert both == ["B2 has tests, and a reason in cases.toml to have none"]
    assert problems(cases, {"B1": 1, "B3": 1, "B9": 1}) == ["B9 is marked, and not on the list"]
    part = {"B4": Case("B4", "E", "four", reason="none", part="half")}
    assert problems(part, {"B4": 1}) == []
    assert problems(part, {}) == ["B4 (four) has neither a test nor a reason in cases.toml"]


@pytest.mark.parametrize(
    ("tally", "said"),
    [
        (Tally(), "MISSING"),
        (Tally(passed=3), "passed"),
        (Tally(passed=3, failed=1), "FAILED 1 of 4"),
        (Tally(passed=3, skipped=2), "SKIPPED 2 of 5"),
        (Tally(elsewhere=2), "2 need a GPU"),
        (Tally(passed=1, elsewhere=2), "passed, and 2 need a GPU"),
        (Tally(passed=1, slow=["test_x 6.0 s"]), "passed, slow: test_x 6.0 s"),
    ],
)
def test_what_is_said_of_a_case(tally, said):
    assert result(Case("B1", "E", "one"), tally) == said
    assert result(Case("B1", "E", "one", reason="no such thing"), Tally()) == "no such feature: no such thing"
    if said.startswith("passed"):
        assert result(Case("B1", "E", "one", open="half of it"), tally) == f"{said}; open: half of it"
        part = Case("B1", "E", "one", reason="no such thing", part="half of it")
        assert result(part, tally) == f"{said}; without half of it: no such thing"


def test_rows_have_everything():
    cases = {"B1": Case("B1", "E", "one"), "B2": Case("B2", "M", "a longer title")}
    head, first, second = rows(cases, {"B1": Tally(passed=2)})
    assert head.split() == ["case", "title", "tests", "result"]
    assert first.split() == ["B1", "E", "one", "2", "passed"]
    assert second.endswith("    0  MISSING")


def test_marks_are_found_without_importing(tmp_path: Path):
    file = tmp_path / "test_x.py"
    file.write_text(
        'import nothing_that_exists\n@pytest.mark.case("B7")\n@pytest.mark.case("B8")\ndef test_a(): ...\n'
        'P = pytest.param(1, marks=pytest.mark.case("B8"))\n'
    )
    assert marked_in([file]) == {"B7": 1, "B8": 2}


def test_notes_of_unknown_cases_are_refused(tmp_path: Path):
    (tmp_path / "cases_list.toml").write_text('[cases]\nB1 = ["E", "one"]\n[open]\nB2 = "what"\n')
    (tmp_path / "cases.toml").write_text("")
    with pytest.raises(ValueError, match="B2 is not on the list"):
        read_cases(tmp_path)
    (tmp_path / "cases_list.toml").write_text('[cases]\nB1 = ["E", "one"]\n')
    (tmp_path / "cases.toml").write_text('[B1]\nreason = " "\n')
    with pytest.raises(ValueError, match="nothing is said of it"):
        read_cases(tmp_path)
    (tmp_path / "cases.toml").write_text('[B1]\npart = "half"\nreason = "none"\n')
    assert read_cases(tmp_path)["B1"] == Case("B1", "E", "one", reason="none", part="half")


def test_what_is_open_fails_the_run(monkeypatch):
    monkeypatch.setattr("tests.cases_table.read_cases", lambda: {"B1": Case("B1", "E", "one", open="half")})
    table = CasesTable()
    table.pytest_collection_modifyitems([Item("tests/gpu/a.py::test_a", "B1")])
    assert table._problems == ["B1 is open: half"]


class Item:
    """A collected test."""

    def __init__(self, nodeid: str, *names: str) -> None:
        self.nodeid = nodeid
        self._marks = [pytest.mark.case(name).mark for name in names]

    def iter_markers(self, name: str):
        assert name == "case"
        return iter(self._marks)


class Report:
    def __init__(self, nodeid: str, when: str, outcome: str, duration: float = 0.0) -> None:
        self.nodeid, self.when, self.duration = nodeid, when, duration
        self.passed, self.failed, self.skipped = (outcome == o for o in ("passed", "failed", "skipped"))


def test_reports_are_counted_by_case(monkeypatch):
    table = CasesTable()
    items = [Item("tests/a.py::test_a", "B001", "B002"), Item("tests/a.py::test_b", "B001")]
    table.pytest_collection_modifyitems(items)
    assert any(problem.startswith("B004 ") for problem in table._problems), "this run misses many"
    for report in (
        Report("tests/a.py::test_a", "setup", "passed"),
        Report("tests/a.py::test_a", "call", "passed", 6.0),
        Report("tests/a.py::test_a", "teardown", "passed"),
        Report("tests/a.py::test_b", "setup", "failed"),
    ):
        table.pytest_runtest_logreport(report)
    first, second = table._tallies["B001"], table._tallies["B002"]
    assert (first.passed, first.failed) == (1, 1)
    assert (second.passed, second.failed, second.slow) == (1, 0, ["test_a 6.0 s"])
