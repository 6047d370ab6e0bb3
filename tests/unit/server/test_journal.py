"""Which changes of the engine's state are worth a line, and what an update's line holds."""

from __future__ import annotations

import pytest

from rollout_engine.server.journal import StateJournal, log_update
from tests.unit.server.test_metrics import record, snapshot


def events(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [f"{entry.levelname} {entry.event}" for entry in caplog.records]


def test_changes_of_state_are_logged_once_and_pauses_of_updates_are_not(caplog):
    caplog.set_level("INFO")
    journal = StateJournal()
    for status, paused_by in (
        ("serving", ""),
        ("paused", "update"),
        ("serving", ""),
        ("paused", "user"),
        ("paused", "user"),
        ("serving", ""),
        ("not_serving", ""),
        ("paused", "update"),
        ("not_serving", ""),
        ("serving", ""),
    ):
        journal.see(snapshot(status=status, paused_by=paused_by, reason="torn"))
    assert events(caplog) == [
        "INFO generation_paused",
        "INFO serving_again",
        "WARNING not_serving",
        "INFO serving_again",
    ]
    assert caplog.records[2].fields == {"version": 3, "commit_sequence": 4, "reason": "torn"}


def test_an_update_is_one_line_as_loud_as_its_end(caplog):
    caplog.set_level("INFO")
    for end in ("committed", "rolled_back", "refused", "torn"):
        log_update(record(end=end, reason="NONFINITE", message="a.weight is NaN"))
    assert events(caplog) == [
        "INFO update_committed",
        "INFO update_rolled_back",
        "WARNING update_refused",
        "ERROR update_torn",
    ]
    committed, _, refused, _ = (entry.fields for entry in caplog.records)
    assert (committed["whole_s"], committed["pause_s"], committed["version"]) == (0.5, 0.02, 3)
    assert (refused["reason"], refused["error"], refused["path"]) == ("NONFINITE", "a.weight is NaN", "ipc")
