"""What the pages of docs/ promise to be complete is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rollout_engine.server.status import ENGINE_CODES, UPDATE_CODES

ROOT = Path(__file__).parents[2]


def test_every_reason_stands_in_the_operations_page_with_its_status():
    text = (ROOT / "docs" / "operations.md").read_text()
    rows = dict(re.findall(r"^\| ([A-Z_]+) \| ([A-Z_]+) \|", text, re.M))
    codes = {
        reason.value: code.name for table in (ENGINE_CODES, UPDATE_CODES) for reason, code in table.items()
    }
    assert rows == codes


@pytest.mark.parametrize(
    "page", sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").glob("*.md")), ids=lambda p: p.name
)
def test_links_lead_to_files_that_are_there(page):
    links = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []
