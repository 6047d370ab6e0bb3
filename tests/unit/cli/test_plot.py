"""`rollsync plot`: what is read from a metrics log, and what stands in the picture."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from rollout_engine.cli import plot_figure as figures
from rollout_engine.cli.main import app
from rollout_engine.cli.plot import Log, read_log, since


def sample(at: float, **changes: Any) -> dict[str, Any]:
    fields = {
        "time": 1000.0 + at,
        "event": "sample",
        "status": "serving",
        "paused_by": "",
        "generated_tokens": int(100 * at),
        "prompt_tokens": int(30 * at),
        "cached_prompt_tokens": int(10 * at),
        "running": 4,
        "waiting": 1,
        "pages": 64,
        "free_pages": 40,
        "cached_pages": 14,
        "weight_version": int(at),
        "commit_sequence": int(at),
        "finished_sequences": 2 * at,
        "staleness_sum": 3 * at,
    }
    return fields | changes


def update(at: float, path: str = "ipc", end: str = "committed", **seconds: float) -> dict[str, Any]:
    stages = {"whole": 0.5, "pause": 0.02} | seconds
    return {
        "time": 1000.0 + at,
        "event": "update",
        "path": path,
        "end": end,
        "version": int(at),
        "seconds": stages,
    }


def full_log() -> Log:
    samples = [sample(at) for at in range(6)]
    samples[3] |= {"status": "not_serving"}
    samples[4] |= {"status": "paused", "paused_by": "user"}
    updates = [
        update(1),
        update(2, whole=0.1, pause=0.01),
        update(3, "disk", whole=2.0),
        update(4, end="refused"),
        update(4.5, "tensor", "torn"),
    ]
    return Log(samples, updates)


# ---------------------------------------------------------------- numbers


def test_rates_come_from_counts_and_a_new_engine_counts_from_zero():
    samples = [
        sample(0, generated_tokens=100),
        sample(2, generated_tokens=500),
        sample(3, generated_tokens=7),
    ]
    assert figures.rates(samples, lambda s: s["generated_tokens"]) == [200.0, 7.0]
    assert figures.growth(samples, lambda s: s["generated_tokens"]) == [400, 7]


def test_thinning_keeps_the_last_sample_and_the_sum():
    samples = [sample(at) for at in range(1001)]
    few = figures.thinned(samples, 100)
    assert len(few) <= 100
    assert few[-1] == samples[-1]
    growth = figures.growth(few, lambda s: s["generated_tokens"])
    assert sum(growth) == few[-1]["generated_tokens"] - few[0]["generated_tokens"]
    assert figures.thinned(samples[:5], 100) == samples[:5]


def test_times_are_said_in_units_that_suit():
    assert figures.time_unit(100) == (1.0, "seconds")
    assert figures.time_unit(600) == (60.0, "minutes")
    assert figures.time_unit(20_000) == (3600.0, "hours")
    assert figures.time_unit(300_000) == (86400.0, "days")
    assert [figures.duration(s) for s in (0.0123, 0.5, 1.0, 12.34)] == ["12.3 ms", "500 ms", "1 s", "12.3 s"]


def test_the_title_says_what_happened():
    assert (
        figures.summary(full_log()) == "rollsync: 500 tokens in 5 s; updates: 3 committed, 1 refused, 1 torn"
    )
    assert figures.summary(Log([sample(0), sample(1)])).endswith("updates: none")


# ---------------------------------------------------------------- the picture


def panel(figure: Figure, label: str) -> Any:
    (found,) = (axis for axis in figure.axes if axis.get_ylabel() == label)
    return found


def line(axis: Any, label: str) -> tuple[list[float], list[float]]:
    (found,) = (line for line in axis.get_lines() if line.get_label() == label)
    return list(map(float, found.get_xdata())), list(map(float, found.get_ydata()))


def legend(axis: Any) -> list[str]:
    return [text.get_text() for text in axis.get_legend().get_texts()]


def test_each_panel_shows_its_numbers_at_their_times():
    figure = figures.figure_of(full_log())
    assert line(panel(figure, "tokens/s"), "generated") == ([1, 2, 3, 4, 5], [100] * 5)
    assert line(panel(figure, "prompt tokens/s"), "prompt, not cached")[1] == [20] * 5
    versions = panel(figure, "weight version")
    assert line(versions, "live") == ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5])
    assert line(versions, "update refused") == ([4], [4])
    assert line(versions, "update torn") == ([4.5], [4])
    stale = panel(figure, "staleness, versions").get_lines()[0]
    assert list(stale.get_ydata()) == [1.5] * 5
    queue = panel(figure, "sequences")
    assert (line(queue, "running")[1], line(queue, "waiting")[1]) == ([4] * 6, [1] * 6)
    pages = panel(figure, "pages of 64")
    heights = [area.get_paths()[0].vertices[:, 1].max() for area in pages.collections]
    assert heights == [10, 24]  # used, and cached on top of it
    assert figure.axes[4].get_xlabel().startswith("seconds since ")


def test_updates_are_told_apart_by_path_and_pause():
    updates = panel(figures.figure_of(full_log()), "update, seconds")
    assert legend(updates) == [
        "disk, median\n  whole 2 s\n  pause 20 ms",
        "ipc, median\n  whole 500 ms\n  pause 20 ms",
        "hollow: the pause",
    ]
    points = {
        (line.get_color(), line.get_markerfacecolor()): list(map(float, line.get_ydata()))
        for line in updates.get_lines()
    }
    ipc, disk = figures.PATH_COLORS["ipc"], figures.PATH_COLORS["disk"]
    assert points == {
        (ipc, ipc): [0.5, 0.1],
        (ipc, "white"): [0.02, 0.01],
        (disk, disk): [2.0],
        (disk, "white"): [0.02],
    }


def test_times_without_service_are_shaded():
    axis = panel(figures.figure_of(full_log()), "sequences")
    spans = [(patch.get_x(), patch.get_width(), patch.get_facecolor()[0] > 0.6) for patch in axis.patches]
    assert spans == [(3.0, 1.0, True), (4.0, 1.0, False)]


def test_a_log_without_updates_says_so():
    figure = figures.figure_of(Log([sample(0), sample(1)]))
    assert [text.get_text() for text in panel(figure, "update, seconds").texts] == ["no update committed"]


# ---------------------------------------------------------------- the command


def write(path: Path, *entries: Any) -> Path:
    lines = [entry if isinstance(entry, str) else json.dumps(entry) for entry in entries]
    path.write_text("\n".join(lines) + "\n")
    return path


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["plot", *arguments])


def test_the_part_that_was_moved_away_comes_first_and_broken_lines_are_counted(tmp_path):
    path = write(tmp_path / "m.jsonl", sample(2), update(2.5), '{"time": 1003.0, "event": "sam')
    write(tmp_path / "m.jsonl.1", sample(0), sample(1), "[]", '{"event": "other", "time": 1}')
    read = read_log(path)
    assert [entry["time"] for entry in read.samples] == [1000.0, 1001.0, 1002.0]
    assert (len(read.updates), read.num_broken, read.seconds) == (1, 3, 2.0)
    assert len(since(read, 1001.0).samples) == 2


def test_it_writes_a_png_and_says_where(tmp_path):
    path = write(tmp_path / "m.jsonl", *full_log().samples, *full_log().updates)
    result = invoke(str(path), "--json", "--title", "a run")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said == {
        "out": f"{path}.png",
        "samples": 6,
        "updates": 5,
        "broken_lines": 0,
        "seconds": 5.0,
    }
    assert Path(said["out"]).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    few = invoke(str(path), "--last", "1", "--out", str(tmp_path / "x.png"))
    assert few.stdout == f"{tmp_path / 'x.png'}: 2 samples, 2 updates\n"


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["no.jsonl"], 2, "No such file"),
        (["one.jsonl"], 1, "holds 1 samples"),
        (["two.jsonl", "--out", "no/dir.png"], 2, "cannot write no/dir.png"),
    ],
)
def test_what_cannot_be_drawn_is_said(tmp_path, monkeypatch, arguments, code, word):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "one.jsonl", sample(0))
    write(tmp_path / "two.jsonl", sample(0), sample(1))
    result = invoke(*arguments)
    assert result.exit_code == code
    assert word in result.stderr


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "rollout_engine.cli.plot_figure")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    path = write(tmp_path / "m.jsonl", sample(0), sample(1))
    result = invoke(str(path))
    assert result.exit_code == 1
    assert "pip install 'rollsync[plot]'" in result.stderr


@pytest.mark.parametrize(
    "line",
    [
        '{"event": "sample"}',
        '{"event": "sample", "time": 1000}',
        json.dumps(sample(2) | {"time": "1002"}),
        json.dumps(sample(2, time=float("nan"))),
        json.dumps(sample(2, generated_tokens=None)),
        json.dumps(sample(2, status=None)),
        json.dumps(sample(2, pages=10**400)),
        json.dumps(update(2) | {"seconds": None}),
        json.dumps(update(2) | {"end": 5}),
        json.dumps(update(2, whole=float("inf"))),
        '{"event": []}',
        "[" * 100_000,
        "null",
    ],
)
def test_a_line_that_is_not_whole_is_left_out_and_counted(line, tmp_path):
    path = tmp_path / "log"
    path.write_text("\n".join([json.dumps(sample(0)), line, json.dumps(sample(4)), ""]))
    read = read_log(path)
    assert ([entry["time"] for entry in read.samples], read.updates, read.num_broken) == ([1000, 1004], [], 1)
    said = CliRunner().invoke(app, ["plot", str(path), "--title", "costs $x^{$"])
    assert (said.exit_code, said.output.endswith("2 samples, 0 updates, 1 broken lines left out\n")) == (
        0,
        True,
    )
