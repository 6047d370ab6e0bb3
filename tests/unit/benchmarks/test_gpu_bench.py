"""The benchmark of a GPU where there is none: its table is whole, results merge, floors add up."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.benchmarks.gpu import rows
from tests.benchmarks.gpu.__main__ import main, run
from tests.benchmarks.gpu.bench import Bench, NotHereError
from tests.benchmarks.gpu.floors import decode_rate
from tests.benchmarks.gpu.goals import BY_NAME, GOALS
from tests.benchmarks.gpu.model import QWEN3_8B
from tests.benchmarks.gpu.results import RESULTS, line, merge
from tests.benchmarks.gpu.rows_ipc import largest_gap
from tests.benchmarks.gpu.supervise import END_S, GRACE_S, TOTAL_S, Outcome, Report, supervise
from tests.holdings import born

COPY_BYTES_PER_S, FLOPS = 4.24e12, 7e14


def test_every_goal_has_a_row_and_every_row_a_goal() -> None:
    assert set(rows.ROWS) == set(BY_NAME)
    assert len(BY_NAME) == len(GOALS) == len({goal.what for goal in GOALS}) == 18
    assert rows.chosen([]) == list(rows.ROWS)


def test_limits_are_those_that_the_goals_name() -> None:
    for goal in GOALS:
        numbers = [float(n.replace(",", "").rstrip(".")) for n in re.findall(r"[\d.,]*\d", goal.goal)]
        assert goal.limit in numbers, goal.name
        assert ("<=" if goal.at_most else ">=") in goal.goal, goal.name


def test_rows_run_in_their_own_order() -> None:
    assert rows.chosen(["start", "disk", "decode_1"]) == ["decode_1", "disk", "start"]


def test_a_row_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="there is no row 'disc'; choose from decode_1, "):
        rows.chosen(["disc"])
    assert main(["disk,disc"]) == 2
    assert "there is no row 'disc'" in capsys.readouterr().err


def test_a_goal_without_a_row_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(rows.ROWS, "graphs")
    with pytest.raises(ValueError, match="no row measures 'graphs'"):
        rows.chosen([])


def test_lines_are_judged_by_limit_and_second_condition() -> None:
    at_most, at_least = BY_NAME["ipc_none"], BY_NAME["decode_1"]
    assert line(at_most, 12.0, 8.0).met
    assert line(at_most, 12.0, 8.0).ratio == 1.5
    assert not line(at_most, 12.1, 8.0).met
    assert not line(at_most, 11.0, 8.0, also=False).met
    assert line(at_most, 19.0, 8.0, limit=20.0).met
    assert line(at_least, 210.0, None).met
    assert not line(at_least, 209.0, None).met
    with pytest.raises(ValueError, match="decode_1 measured nan"):
        line(at_least, float("nan"), None)


def test_results_merge_by_what_they_measure(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "h200.json"
    merge(path, [line(BY_NAME["disk"], 0.5, 0.3), line(BY_NAME["decode_1"], 200.0, 280.0)])
    merge(path, [line(BY_NAME["disk"], 0.35, 0.3, note="again")])
    stored = {item["what"]: item for item in json.loads(path.read_text())}
    assert list(stored) == [BY_NAME["disk"].what, BY_NAME["decode_1"].what]
    disk = stored[BY_NAME["disk"].what]
    assert (disk["value"], disk["floor"], disk["met"], disk["note"]) == (0.35, 0.3, True, "again")
    assert {"unit", "goal", "date", "versions"} <= disk.keys()
    assert {"torch", "flashinfer", "driver", "python"} <= disk["versions"].keys()


def test_every_goal_has_a_result() -> None:
    found = [
        item for name in ("h200.json", "h200x2.json") for item in json.loads((RESULTS / name).read_text())
    ]
    assert {item["name"] for item in found} == BY_NAME.keys()
    assert all(item["goal"] == BY_NAME[item["name"]].goal for item in found)
    assert all(isinstance(item["met"], bool) and item["value"] >= 0 and item["date"] for item in found)


def test_floors_of_decoding_follow_from_reads_and_products() -> None:
    """At 4.24 TB/s and 700 TFLOP/s, the 15.1 GB of the model allow about 280 tokens/s one by one."""

    def rate(batch: int, num_out: int) -> float:
        return decode_rate(QWEN3_8B, batch, 128, num_out, COPY_BYTES_PER_S, FLOPS)

    assert rate(1, 128) == pytest.approx(280, rel=0.02)
    assert rate(32, 256) == pytest.approx(8000, rel=0.08)
    assert rate(256, 256) == pytest.approx(25000, rel=0.08)


def test_the_gap_that_counts_is_the_one_around_the_update() -> None:
    quiet, paused = [0.0, 1.0, 2.0, 3.0, 4.0], [0.0, 1.0, 2.5, 3.0, 9.0]
    assert largest_gap([quiet, paused], (1.5, 2.2)) == 1.5
    assert largest_gap([quiet, paused], (3.5, 3.6)) == 6.0
    with pytest.raises(AssertionError, match="nothing was seen"):
        largest_gap([[1.0]], (1.5, 2.2))


def test_a_failing_row_ends_with_1_and_keeps_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(bench: Bench):
        raise RuntimeError("no such luck")

    def needs_more(bench: Bench):
        raise NotHereError("needs two GPUs")

    monkeypatch.setitem(rows.ROWS, "disk", fails)
    monkeypatch.setitem(rows.ROWS, "distributed", needs_more)
    monkeypatch.setitem(rows.ROWS, "decode_1", lambda bench: bench.line("decode_1", 200.0, 280.0))
    out, told, cpu = tmp_path / "lines.json", tmp_path / "report", torch.device("cpu")
    assert run(["decode_1", "distributed"], cpu, tiny=True, out=out) == 0
    assert run(["disk", "decode_1"], cpu, tiny=True, out=out, report=Report(told)) == 1
    assert "RuntimeError: no such luck" in capsys.readouterr().err
    assert [item["name"] for item in json.loads(out.read_text())] == ["decode_1"]
    outcome = Outcome()
    for line_of_report in told.read_text().splitlines():
        outcome.take(json.loads(line_of_report))
    assert outcome.others == {"disk": "FAILED: RuntimeError: no such luck"}
    assert (list(outcome.lines), outcome.num_failures) == (["decode_1"], 1)
    assert outcome.title.startswith("CPU, torch ")


def test_a_call_ends_within_eight_minutes():
    assert TOTAL_S + GRACE_S + END_S <= 480


def supervised(rows: list[str], seconds: float, tmp_path: Path, **options: float) -> Outcome:
    command = [sys.executable, "-m", "tests.unit.benchmarks.fake_worker", str(tmp_path / "pids")]
    return supervise(
        rows, command, lambda row: seconds, directory=str(tmp_path), first_row_s=20.0, grace_s=2.0, **options
    )


def test_a_row_that_hangs_or_kills_its_process_costs_only_itself(tmp_path: Path) -> None:
    names = ["quick", "dies", "fails", "hangs", "elsewhere", "stubborn", "quick"]
    outcome = supervised(names, 0.5, tmp_path, total_s=100.0)
    assert list(outcome.lines) == ["quick"]
    assert outcome.others.pop("dies") == "FAILED: the process that measured it ended with -9"
    assert outcome.others.pop("fails") == "FAILED: as it should"
    assert outcome.others.pop("elsewhere") == "needs two GPUs"
    assert outcome.others == dict.fromkeys(["hangs", "stubborn"], "FAILED: it took too long, and was stopped")
    assert outcome.num_failures == 4
    left = [pid for pid in (tmp_path / "pids").read_text().split() if born(int(pid))]
    assert left == [], "a process is left behind"
    assert os.listdir(tmp_path) == ["pids"]


def test_rows_that_do_not_fit_are_left_to_another_call(tmp_path: Path) -> None:
    outcome = supervised(["hangs", "quick", "fails"], 100.0, tmp_path, total_s=3.0)
    assert outcome.lines == {}
    assert outcome.others["hangs"] == "FAILED: the time of this call is over, and was stopped"
    assert outcome.others["fails"] == "FAILED: not begun: 3 s are over; run it with ROWS=fails"
    assert outcome.num_failures == 3


def test_rows_run_over_a_tiny_model_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "lines.json"
    assert main(["ipc_none,disk", "--tiny", "--device", "cpu", "--out", str(out)]) == 0
    measured = {item["name"]: item for item in json.loads(out.read_text())}
    assert measured.keys() == {"ipc_none", "disk"}
    assert all(item["value"] > 0 and item["floor"] > 0 for item in measured.values())
    assert "checksums compared" in measured["disk"]["note"]
