"""What a real engine tells of itself: records of updates, counts, staleness, log lines of both processes."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from tests.engines import RunningEngine, serve
from tests.tiny import make_tiny
from tests.wire.front import whole_lines
from tests.wire.trainer import PROMPT, InFlight, Named, begin, beside, chunks_of, push, until, until_closed
from trainers_adapters import ModuleSource, PushError, Request, RollsyncError
from weight_updater.requests import BeginUpdate, Manifest, Staging
from weight_updater.requests import Path as Way


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "llama", "llama")


@pytest.fixture(scope="module")
def engine(model_dir, work_dir) -> Iterator[RunningEngine]:
    flags = ["--weights-root", str(work_dir), "--num-pages", "256", "--metrics-port", "0"]
    flags += ["--metrics-log", str(work_dir / "metrics.jsonl"), "--metrics-log-seconds", "0.05"]
    with serve(model_dir, *flags, "--log-format", "json", forked=True) as running:
        yield running


def scrape(engine: RunningEngine) -> dict[str, float]:
    address = json.loads((engine.log.parent / "ready.json").read_text())["metrics_address"]
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as response:
        families = text_string_to_metric_families(response.read().decode())
    return {
        f"{sample.name}{json.dumps(sample.labels, sort_keys=True) if sample.labels else ''}": sample.value
        for family in families
        for sample in family.samples
    }


def settled(engine: RunningEngine) -> dict[str, float]:
    """A scrape once nothing runs: all that was asked for is counted."""
    # The state comes twenty times a second, or with the reply to a call: one that is older says idle, too.
    engine.weights.checksums([])
    until(lambda: engine.rollout.info().state.num_running == 0, "the engine is idle")
    return scrape(engine)


def update_count(seen: dict[str, float], path: str, staging: str, end: str, reason: str = "") -> float:
    labels = {"end": end, "path": path, "reason": reason, "staging": staging}
    return seen.get(f"rollsync_updates_total{json.dumps(labels, sort_keys=True)}", 0.0)


def refused(engine: RunningEngine, source, reason: str, **fields) -> None:
    """Begin, send and commit; somewhere on the way it ends with `reason`."""

    def update() -> None:
        begun = begin(engine, source, **fields)
        engine.weights.update_from_tensor(begun.update_id, chunks_of(source))
        engine.weights.commit(begun.update_id)

    with pytest.raises(RollsyncError) as caught:
        update()
    assert caught.value.reason == reason


class WrongChecksum(ModuleSource):
    """Promises another value of the first tensor than it sends."""

    def manifest(self, **options) -> Manifest:
        manifest = super().manifest(**options)
        first, *others = (tensor.checksum for tensor in manifest.tensors)
        return manifest.with_checksums([first ^ 1, *others])


def test_every_end_of_an_update_is_recorded_once(engine, senders, model):
    source = ModuleSource(model)
    for path in ("disk", "tensor", "ipc"):
        push(source, engine, via=senders[path])
    committed = begin(engine, source)
    engine.weights.update_from_tensor(committed.update_id, chunks_of(source))
    for _ in range(2):  # a repeat ends nothing
        engine.weights.commit(committed.update_id)
    refused(engine, source, "STALE_VERSION", version=1)
    poisoned = Named([(name, torch.full_like(t, float("nan"))) for name, t in source])
    refused(engine, poisoned, "NONFINITE")
    begin(engine, source, lease_s=0.1)
    until_closed(engine)
    aborted = begin(engine, source)
    assert engine.weights.abort(aborted.update_id)
    refused(engine, WrongChecksum(model), "CHECKSUM_MISMATCH", staging=Staging.NONE)
    behind = scrape(engine)["rollsync_weight_versions_behind"]
    version = push(source, engine, path="ipc").version
    updates = engine.rollout.info().recent_updates
    assert [(u.end, u.reason, u.path, u.staging) for u in updates] == [
        ("committed", "", "disk", "host"),
        ("committed", "", "tensor", "host"),
        ("committed", "", "ipc", "host"),
        ("committed", "", "tensor", "host"),
        ("refused", "STALE_VERSION", "tensor", "auto"),
        ("refused", "NONFINITE", "tensor", "host"),
        ("refused", "TIMEOUT", "tensor", "host"),
        ("refused", "UNKNOWN_UPDATE", "tensor", "host"),
        ("torn", "CHECKSUM_MISMATCH", "tensor", "none"),
        ("committed", "", "ipc", "host"),
    ]
    assert [u.weight_version for u in updates] == [1, 2, 3, 4, 4, 4, 4, 4, 4, 5]
    assert updates[3].update_id == committed.update_id
    assert "lease" in updates[6].message
    assert (behind, version) == (1, 5)
    seen = settled(engine)
    assert update_count(seen, "tensor", "host", "committed") == 2
    assert update_count(seen, "tensor", "none", "torn", "CHECKSUM_MISMATCH") == 1
    assert update_count(seen, "tensor", "host", "refused", "TIMEOUT") == 1
    assert (seen["rollsync_weight_version"], seen["rollsync_weight_versions_behind"]) == (5, 0)
    for update in updates:
        seconds = update.seconds
        assert seconds["whole"] >= seconds["begin"] > 0
        if update.end == "committed":
            assert seconds["whole"] > seconds["commit"] >= seconds["pause"] > 0
            assert seconds["whole"] >= seconds["transfer"] > 0
            assert seconds["pause"] >= seconds["write"] > 0


def test_one_call_updates_are_timed_too(engine, senders, model):
    source = ModuleSource(model)
    update = BeginUpdate(path=Way.TENSOR, manifest=source.manifest(), update_id="one-call")
    engine.weights.update_from_tensor(update, chunks_of(source))
    last = engine.rollout.info().recent_updates[-1]
    assert (last.update_id, last.end) == ("one-call", "committed")
    assert last.seconds["whole"] > last.seconds["commit"] > 0
    assert last.seconds["begin"] > 0


def test_staleness_of_what_ran_through_an_update(engine, model):
    push(ModuleSource(model), engine)
    before = settled(engine)
    running = InFlight(engine)
    version = push(ModuleSource(model), engine, inflight="keep").version
    running.end()
    old = running.labels.count(version - 1)
    assert 0 < old < running.num_tokens
    seen = settled(engine)

    def more(name: str) -> float:
        return seen[f"rollsync_{name}"] - before[f"rollsync_{name}"]

    assert (more("sequence_staleness_versions_sum"), more("sequence_staleness_versions_count")) == (1, 1)
    assert more("token_staleness_versions_sum") == old
    assert more("token_staleness_versions_count") == more("generated_tokens_total") == running.num_tokens


def test_tokens_cache_and_times_of_a_batch(engine):
    """Batches are not streamed: their first tokens are known to the engine alone."""
    before = settled(engine)
    prompt = [token % 100 + 3 for token in PROMPT]
    engine.rollout.generate_batch([Request(prompt, {"n": 2})] * 2, max_tokens=8, ignore_eos=True)
    engine.rollout.generate_batch([Request(prompt)], max_tokens=1, ignore_eos=True)
    engine.rollout.score([prompt])
    seen = settled(engine)

    def more(name: str) -> float:
        return seen[f"rollsync_{name}"] - before[f"rollsync_{name}"]

    assert more("generated_tokens_total") == 33
    assert more("prompt_tokens_total") == 6 * 40
    assert more("cached_prompt_tokens_total") >= 2 * 32  # two whole pages, twice at least
    assert more("prefix_cache_lookups_total") == 6
    assert more("prefix_cache_hits_total") == more("cached_prompt_tokens_total") / 32
    assert more("time_to_first_token_seconds_count") == 5  # scoring has none
    assert 0 < more("time_to_first_token_seconds_sum") < more("sequence_duration_seconds_sum")
    assert more("time_per_output_token_seconds_count") == 4
    assert more('sequences_finished_total{"finish_reason": "length"}') == 6
    assert more('forward_passes_total{"runner": "eager"}') >= 9


def test_preempted_sequences_are_counted(engine, model):
    push(ModuleSource(model), engine)
    before = settled(engine)
    running = InFlight(engine)
    push(ModuleSource(model), engine, inflight="recompute")
    running.end()
    seen = settled(engine)
    assert seen["rollsync_preemptions_total"] - before["rollsync_preemptions_total"] == 1
    assert seen["rollsync_prompt_tokens_total"] - before["rollsync_prompt_tokens_total"] == len(PROMPT)
    settled_as = 'rollsync_update_sequences_total{"settled": "recomputed"}'
    assert seen[settled_as] - before.get(settled_as, 0) == 1


def test_a_push_that_waits_says_how_long(engine, model):
    running = InFlight(engine)
    pushed = beside(push, ModuleSource(model), engine, inflight="wait")
    running.end()
    pushed.result(20)
    seconds = engine.rollout.info().recent_updates[-1].seconds
    assert seconds["commit"] >= seconds["wait"] + seconds["pause"]
    assert seconds["wait"] > seconds["pause"]


def test_every_line_of_both_processes_is_json(engine, model):
    version = push(ModuleSource(model), engine).version
    with pytest.raises(PushError):
        push(ModuleSource(model), engine, version=version)
    # The front tells the trainer first, and its log then.
    until(lambda: whole_lines(engine.log)[-1]["event"] == "update_refused", "the refusal is told")
    entries = whole_lines(engine.log)
    assert all({"time", "level", "process", "event"} <= set(entry) for entry in entries)
    first, second = entries[:2]
    assert (first["process"], first["event"], first["num_pages"]) == ("engine", "engine_ready", 256)
    assert (second["process"], second["event"]) == ("front", "serving")
    assert second["metrics_address"].startswith("127.0.0.1:")
    assert (entries[-1]["reason"], entries[-1]["level"]) == ("STALE_VERSION", "warning")


def test_the_metrics_log_follows_a_real_engine(engine, work_dir, model):
    version = push(ModuleSource(model), engine).version
    log = work_dir / "metrics.jsonl"

    until(lambda: whole_lines(log)[-1].get("weight_version") == version, "a sample of the new version")
    updates = [line for line in whole_lines(log) if line["event"] == "update"]
    assert (updates[-1]["version"], updates[-1]["end"]) == (version, "committed")
    assert {"whole", "transfer", "pause"} <= set(updates[-1]["seconds"])
