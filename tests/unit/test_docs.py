"""What the pages of docs/ promise to be complete is."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from rollout_engine.errors import Reason as EngineReason
from rollout_engine.server.status import ENGINE_CODES, UPDATE_CODES
from weight_updater.errors import Reason as UpdateReason

ROOT = Path(__file__).parents[2]
STATUSES = {code.name for code in grpc.StatusCode}


def reasons_told(heading: str) -> dict[str, str]:
    """The statuses by reason in the table under a heading of the operations page; each with what to do."""
    section = (ROOT / "docs" / "operations.md").read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([A-Z_]+) \| ([A-Z_]+) \| (.{20,}) \|$", section, re.M)
    assert len(rows) == len(re.findall(r"^\| [A-Z_]+ \|", section, re.M)), "a row that says nothing"
    return {reason: status for reason, status, _ in rows}


def test_every_reason_stands_in_the_operations_page_with_its_status():
    codes = {
        reason.value: code.name for table in (ENGINE_CODES, UPDATE_CODES) for reason, code in table.items()
    }
    assert codes.keys() == {reason.value for reason in (*EngineReason, *UpdateReason)}
    assert reasons_told("Reasons") == codes


def reasons_raised(file: Path) -> Iterator[tuple[str, str | None]]:
    """(reason, status) of each error that a file raises by its words; None: a status that is no literal."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call):
            words = [arg.value if isinstance(arg, ast.Constant) else None for arg in node.args[:3]]
            reason = words[1] if len(words) == 3 else None
            if isinstance(reason, str) and re.fullmatch("[A-Z][A-Z_]+[A-Z]", reason):
                yield reason, words[0] if words[0] in STATUSES else None
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if names == ["reason"] and node.value.value:
                yield node.value.value, None


def test_every_reason_of_the_trainers_side_stands_there_too():
    told = reasons_told("Reasons of the trainer's side")
    raised = {one for file in (ROOT / "trainers_adapters").rglob("*.py") for one in reasons_raised(file)}
    engine = {reason.value for reason in (*EngineReason, *UpdateReason)}
    assert told.keys() - engine == {reason for reason, _ in raised} - engine
    assert told.keys() <= {reason for reason, _ in raised}
    wrong = [(reason, code) for reason, code in raised if code and told.get(reason, code) != code]
    assert wrong == []


@pytest.mark.parametrize(
    "page", sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").glob("*.md")), ids=lambda p: p.name
)
def test_links_lead_to_files_that_are_there(page):
    links = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_readme_counts_reports_and_broken_lines_as_they_are():
    """Reports, those of which a part is left out, and what `make cases-red` breaks."""
    listed, left_out, broken = (
        tomllib.loads((ROOT / "tests" / name).read_text())
        for name in ("cases_list.toml", "cases.toml", "cases_red.toml")
    )
    parts = [case for case in left_out.values() if "part" in case]
    assert (len(left_out) - len(parts), len(parts)) == (1, 6), "README says one whole, and a part of six"
    row = next(line for line in (ROOT / "README.md").read_text().splitlines() if "`make cases`" in line)
    numbers = [int(number) for number in re.findall(r"\b\d+\b", row)]
    assert numbers == [len(listed["cases"]), len(broken["mutation"])]
