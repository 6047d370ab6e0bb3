"""What an engine on a GPU counts: passes by the runner that did them."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.gpu


def test_graph_and_eager_passes_are_told_apart(tiny_bf16_dir: Path, serve_on_gpu) -> None:
    with serve_on_gpu(tiny_bf16_dir, "--metrics-port", "0", "--log-format", "json") as engine:
        engine.greedy([5, 9, 77, 31], max_tokens=16, ignore_eos=True)
        engine.rollout.info()  # behind the last snapshot of the run
        address = json.loads((engine.log.parent / "ready.json").read_text())["metrics_address"]
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as response:
            families = {f.name: f for f in text_string_to_metric_families(response.read().decode())}
        entries = [json.loads(line) for line in engine.log.read_text().splitlines() if line.startswith("{")]
    passes = {s.labels["runner"]: s.value for s in families["rollsync_forward_passes"].samples}
    assert passes["decode_graph"] >= 14
    assert passes["eager"] + passes["prefill_graph"] >= 1
    captured = next(entry for entry in entries if entry["event"] == "graphs_captured")
    assert (captured["process"], captured["runner"]) == ("engine", "decode_graph")
    assert captured["sizes"]
