"""The metrics there are, what is counted into them, and that docs and dashboard speak of no others."""

from __future__ import annotations

import itertools
import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollout_engine import messages as m
from rollout_engine.records import STAGES, SequenceRecord, UpdateRecord, WorkCounts
from rollout_engine.server import metrics as names
from rollout_engine.server.metrics import ALL, Metrics
from rollout_engine.server.metrics_http import cumulative
from rollout_engine.server.tally import MAX_RECENT, Tally
from weight_updater.requests import StageSeconds

ROOT = Path(__file__).resolve().parents[3]
DOCS = (ROOT / "docs" / "metrics.md").read_text()
DASHBOARD = json.loads((ROOT / "deploy" / "grafana.json").read_text())
BY_NAME = {metric.name: metric for metric in ALL}
PROCESS = {
    f"{prefix}process_{name}"
    for prefix in ("", "rollsync_engine_")
    for name in ("resident_memory_bytes", "virtual_memory_bytes", "cpu_seconds_total", "open_fds", "max_fds")
}


# ---------------------------------------------------------------- names, docs, dashboard


def test_names_follow_the_conventions():
    assert len(BY_NAME) == len(ALL)
    for metric in ALL:
        assert re.fullmatch(r"rollsync_[a-z]+(_[a-z]+)*", metric.name), metric.name
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert not re.search(r"_(ms|us|millis\w*|minutes|kb|mb|gb|percent)(_|$)", metric.name), metric.name
        assert metric.help.endswith((".", "labels.")), metric.name
        assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", label) for label in metric.labels)
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert list(metric.buckets) == sorted(set(metric.buckets))


def documented() -> dict[str, tuple[str, tuple[str, ...]]]:
    rows = re.findall(r"^\| `(rollsync_\w+)` \| (\w+) \|\s*(.*?)\s*\| .+ \|$", DOCS, re.MULTILINE)
    return {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}


def test_the_docs_have_every_metric_and_no_other():
    assert documented() == {metric.name: (metric.kind, metric.labels) for metric in ALL}


def test_the_docs_have_every_stage_and_no_other():
    table = DOCS[DOCS.index("## Stages of an update") : DOCS.index("## Worth an alert")]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(STAGES)
    assert set(StageSeconds.__dataclass_fields__) <= set(STAGES)


def check_expression(expression: str) -> set[str]:
    """The metrics that a PromQL expression reads; fails on one that is not there, or on a label it lacks."""
    read = set()
    for series, matchers in re.findall(r"\b((?:rollsync|process)_\w+)(?:\{([^}]*)\})?", expression):
        metric = BY_NAME.get(series)
        if metric is None:
            base, _, part = series.rpartition("_")
            metric = BY_NAME.get(base)
            if series in PROCESS:
                continue
            assert metric is not None, f"no metric {series} in {expression}"
            assert (metric.kind, part) in {("histogram", part) for part in ("bucket", "sum", "count")}, series
        else:
            assert metric.kind != "histogram", f"{series} is a histogram: {expression}"
        read.add(metric.name)
        for label in re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", matchers):
            assert label in {*metric.labels, "instance", "job", "le"}, f"{series} has no {label}"
        grouped = re.search(r"by \(([^)]*)\) \((?:rate|increase)\(" + series, expression)
        for label in re.split(r",\s*", grouped[1]) if grouped else []:
            assert label in {*metric.labels, "le"}, f"{series} has no label {label}: {expression}"
    assert expression.count("(") == expression.count(")")
    assert expression.count("{") == expression.count("}")
    return read


@pytest.mark.parametrize(
    "wrong",
    [
        "rate(rollsync_no_such_total[1m])",
        "rollsync_time_to_first_token_seconds",
        "rollsync_pages_bucket",
        'rollsync_updates_total{color="red"}',
        "sum by (le, path) (rate(rollsync_token_staleness_versions_bucket[1m]))",
        "sum(rollsync_pages",
    ],
)
def test_the_check_of_expressions_finds_what_is_wrong(wrong):
    with pytest.raises(AssertionError):
        check_expression(wrong)


def test_the_alerts_of_the_docs_read_metrics_that_exist():
    table = DOCS[DOCS.index("## Worth an alert") : DOCS.index("## What it costs")]
    expressions = re.findall(r"^\| .+? \| `(.+)` \|$", table, re.MULTILINE)
    assert len(expressions) == 7
    for expression in expressions:
        assert check_expression(expression)


def expressions_of(dashboard: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for annotation in dashboard["annotations"]["list"]:
        yield annotation["name"], annotation["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]


def test_the_dashboard_shows_every_metric_and_no_other():
    shown: set[str] = set()
    for title, expression in expressions_of(DASHBOARD):
        read = check_expression(expression)
        assert read or "process_" in expression, title
        shown |= read
    assert shown == set(BY_NAME)


def test_the_dashboard_can_be_imported():
    panels = DASHBOARD["panels"]
    assert DASHBOARD["title"] == "rollsync"
    assert len({panel["id"] for panel in panels}) == len(panels)
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    text = json.dumps(DASHBOARD)
    assert set(re.findall(r"\$\{?(?!__)([a-z]+)", text)) == variables
    places: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = set(itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])))
        assert not cells & places, f"{panel['title']} lies over another panel"
        assert at["x"] + at["w"] <= 24
        places |= cells
        if panel["type"] != "row":
            assert panel["targets"], panel["title"]
            assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}
            assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


# ---------------------------------------------------------------- values


def test_a_histogram_puts_a_value_on_a_bound_below_it():
    metrics = Metrics()
    for value, weight in ((0, 1), (1, 2), (1.5, 1), (64, 1), (65, 3)):
        metrics.observe(names.TOKEN_STALENESS, value, weight=weight)
    found = metrics.copy().distribution(names.TOKEN_STALENESS)
    by_bound = dict(cumulative(names.TOKEN_STALENESS, found))
    assert (by_bound["0.0"], by_bound["1.0"], by_bound["2.0"]) == (1, 3, 4)
    assert (by_bound["32.0"], by_bound["64.0"], by_bound["+Inf"]) == (4, 5, 8)
    assert list(by_bound)[-1] == "+Inf"
    assert (found.num_observed, found.total) == (8, 0 + 2 + 1.5 + 64 + 3 * 65)


def test_a_copy_does_not_change():
    metrics = Metrics()
    before = metrics.copy()
    metrics.add(names.REQUESTS)
    metrics.observe(names.FIRST_TOKEN, 0.1)
    assert before.number(names.REQUESTS) == 0
    assert before.distribution(names.FIRST_TOKEN).num_observed == 0
    assert metrics.copy().number(names.REQUESTS) == 1


def output(record: SequenceRecord | None, *, live: int = 7, reason: str = "length") -> m.SequenceOutput:
    return m.SequenceOutput("r", 0, [1], [-1.0], [], reason, record=record, weight_version=live)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_finished_sequence_is_counted_once_with_its_times_and_versions():
    clock = Clock()
    tally = Tally(clock)
    submitted = tally.submitted()
    clock.now = 103.0
    # 5 tokens: 2 by version 4, 3 by version 7, which is live at the end
    tally.finished(output(SequenceRecord(101.0, [(4, 2), (7, 3)])), submitted)
    values = tally.values(None)
    assert values.number(names.REQUESTS) == 1
    assert values.number(names.SEQUENCES, "length") == 1
    totals = {
        metric: values.distribution(metric).total
        for metric in (
            names.FIRST_TOKEN,
            names.SEQUENCE_SECONDS,
            names.PER_TOKEN,
            names.SEQUENCE_TOKENS,
            names.SEQUENCE_STALENESS,
            names.TOKEN_STALENESS,
        )
    }
    assert list(totals.values()) == [1.0, 3.0, 0.5, 5.0, 3.0, 6.0]
    assert values.distribution(names.TOKEN_STALENESS).num_observed == 5
    assert values.distribution(names.SEQUENCE_STALENESS).num_observed == 1


def test_what_was_cut_off_has_a_first_token_and_staleness_but_no_duration():
    clock = Clock()
    tally = Tally(clock)
    tally.finished(output(SequenceRecord(100.5, [(7, 2)]), reason="abort"), 100.0)
    tally.finished(output(SequenceRecord(0.0, []), reason="abort"), 100.0)  # nothing sampled
    tally.finished(output(None, reason="error"), 100.0)
    values = tally.values(None)
    assert (values.number(names.SEQUENCES, "abort"), values.number(names.SEQUENCES, "error")) == (2, 1)
    assert values.distribution(names.FIRST_TOKEN).num_observed == 1
    assert values.distribution(names.TOKEN_STALENESS).num_observed == 2
    assert values.distribution(names.SEQUENCE_SECONDS).num_observed == 0
    assert values.distribution(names.PER_TOKEN).num_observed == 0


def test_a_rollback_makes_no_negative_staleness():
    tally = Tally(Clock())
    tally.finished(output(SequenceRecord(100.0, [(9, 1)]), live=8), 100.0)
    values = tally.values(None)
    assert values.distribution(names.SEQUENCE_STALENESS).total == 0
    assert values.distribution(names.TOKEN_STALENESS).total == 0


def snapshot(**changes: Any) -> m.Snapshot:
    fields: dict[str, Any] = {
        "status": "serving",
        "reason": "",
        "weight_version": 3,
        "commit_sequence": 4,
        "num_running": 5,
        "num_waiting": 6,
        "num_free_pages": 7,
        "num_cached_pages": 8,
        "num_total_pages": 20,
        "open_update_id": "",
        "open_update_state": "",
        "num_steps": 9,
        "num_generated_tokens": 10,
        "work": WorkCounts(11, 12, 13, 14, 15, {"eager": 16, "decode_graph": 17}),
    }
    return m.Snapshot(**(fields | changes))


def test_a_snapshot_is_read_when_asked():
    tally = Tally(Clock())
    values = tally.values(snapshot())
    expected = {
        names.WEIGHT_VERSION: 3,
        names.COMMIT_SEQUENCE: 4,
        names.RUNNING: 5,
        names.WAITING: 6,
        names.FREE_PAGES: 7,
        names.CACHED_PAGES: 8,
        names.PAGES: 20,
        names.GENERATED_TOKENS: 10,
        names.PROMPT_TOKENS: 11,
        names.CACHED_TOKENS: 12,
        names.PREFIX_LOOKUPS: 13,
        names.PREFIX_HITS: 14,
        names.PREEMPTIONS: 15,
        names.OPEN_UPDATE: 0,
    }
    assert {metric: values.number(metric) for metric in expected} == expected
    assert values.numbers[names.PASSES] == {("eager",): 16, ("decode_graph",): 17}
    assert values.numbers[names.STATE] == {("serving",): 1, ("paused",): 0, ("not_serving",): 0}
    updating = snapshot(open_update_id="u", received_bytes=30, total_bytes=90, status="paused")
    values = tally.values(updating)
    open_now = [names.OPEN_UPDATE, names.OPEN_RECEIVED, names.OPEN_BYTES]
    assert [values.number(metric) for metric in open_now] == [1, 30, 90]
    assert values.number(names.STATE, "paused") == 1


def test_adapters_are_shown_as_long_as_they_are_held():
    tally = Tally(Clock())
    both = [m.AdapterState("math", 3, 8, 1, False, 2), m.AdapterState("code", 1, 4, 1, True, 0)]
    values = tally.values(snapshot(adapters=both))
    assert values.numbers[names.ADAPTER_VERSION] == {("math",): 3, ("code",): 1}
    assert values.numbers[names.ADAPTER_STALE] == {("math",): 0, ("code",): 1}
    values = tally.values(snapshot(adapters=both[:1]))
    assert values.numbers[names.ADAPTER_VERSION] == {("math",): 3}


def record(**changes: Any) -> UpdateRecord:
    fields: dict[str, Any] = {
        "update_id": "u",
        "path": "ipc",
        "staging": "device",
        "end": "committed",
        "version": 3,
        "commit_sequence": 1,
        "ended_at": 1000.0,
        "seconds": {"whole": 0.5, "pause": 0.02},
        "next_version": 3,
        "num_bytes": 400,
    }
    return UpdateRecord(**(fields | changes))


def test_updates_are_counted_by_their_ends():
    tally, seen = Tally(Clock()), []
    tally.on_update = seen.append
    tally.update_ended(record(num_aborted=2, num_kept=3, graphs_recaptured=9))
    tally.update_ended(record(end="refused", reason="NONFINITE", num_bytes=100, next_version=4))
    tally.update_ended(record(end="torn", reason="PEER_LOST", path="tensor", staging="none"))
    values = tally.values(None)
    assert values.numbers[names.UPDATES] == {
        ("ipc", "device", "committed", ""): 1,
        ("ipc", "device", "refused", "NONFINITE"): 1,
        ("tensor", "none", "torn", "PEER_LOST"): 1,
    }
    assert values.numbers[names.UPDATE_BYTES] == {("ipc",): 400}
    assert values.numbers[names.SETTLED] == {("aborted",): 2, ("kept",): 3}
    assert values.number(names.RECAPTURES) == 9
    stages = values.distributions[names.STAGE_SECONDS]
    assert {labels: found.total for labels, found in stages.items()} == {
        ("ipc", "device", "whole"): 0.5,
        ("ipc", "device", "pause"): 0.02,
    }
    assert [one.end for one in seen] == ["committed", "refused", "torn"]
    for _ in range(MAX_RECENT):
        tally.update_ended(record())
    assert len(tally.recent_updates) == MAX_RECENT
    assert {one.end for one in tally.recent_updates} == {"committed"}


def test_an_engine_is_behind_while_a_newer_version_is_known_to_exist():
    def behind(**changes: Any) -> float:
        return tally.values(snapshot(**changes)).number(names.VERSIONS_BEHIND)

    tally = Tally(Clock())
    assert behind(weight_version=3) == 0
    assert behind(weight_version=3, open_update_id="u", open_update_version=5) == 2
    tally.update_ended(record(end="refused", next_version=5, reason="TIMEOUT"))
    assert behind(weight_version=3) == 2  # it failed, and the trainer is at 5
    assert behind(weight_version=6) == 0
    assert behind(weight_version=4) == 2  # a rollback
    tally.update_ended(record(end="refused", next_version=0, reason="INVALID_UPDATE"))
    assert behind(weight_version=6) == 0


def test_an_engine_process_that_dies_or_leaves():
    tally = Tally(Clock())
    kv = m.KvArithmetic(0, 0, 0, 0, 0, 0)
    info = m.EngineInfo("i1", "A", "float32", "cpu", 300, 16, [2], 1, 1, 16, "torch", kv, {}, "", "", 4, 0)
    tally.engine_ready(info)
    values = tally.values(None)
    assert (values.number(names.ENGINE_UP), values.number(names.ENGINE_STARTS)) == (1, 1)
    assert math.isclose(values.number(names.ENGINE_STARTED), time.time(), abs_tol=60)
    ((labels, value),) = values.numbers[names.ENGINE_INFO].items()
    assert (labels[1:], value) == (("i1", "A", "float32", "cpu", "torch"), 1)
    tally.engine_gone(asked=True)
    assert tally.values(None).number(names.ENGINE_DEATHS) == 0
    tally.engine_gone(asked=False)
    values = tally.values(None)
    assert (values.number(names.ENGINE_UP), values.number(names.ENGINE_DEATHS)) == (0, 1)
