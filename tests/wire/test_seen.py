"""What a front shows of itself: metrics over HTTP, the metrics log, log lines. Its engine is a fake one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import ssl
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rollout_engine.config import ServeConfig
from rollout_engine.errors import ConfigError
from rollout_engine.server import app
from rollout_engine.server.metrics import ALL
from rollout_engine.server.metrics_http import MetricsServer
from rollout_engine.server.observers import Observers
from rollout_engine.v1 import rollout_pb2 as pb
from rollout_engine.v1 import rollout_pb2_grpc, weights_pb2
from tests.wire.fake_engine import FAILING_TOKEN, REFUSED_TOKEN
from tests.wire.front import engine_command, prompt, serving, wait_until, whole_lines
from tests.wire.test_front_auth import make_certificate
from tests.wire.test_front_process import front_process

TOKEN = "SENTINEL-token-1234567890"


def get(front, path: str = "/metrics", *, scheme: str = "http", method: str = "GET", **options: Any):
    address = front.running.observers.metrics_address
    headers = options.pop("headers", {})
    request = urllib.request.Request(f"{scheme}://{address}{path}", headers=headers, method=method)
    return urllib.request.urlopen(request, timeout=20, **options)


def status_of(call: Callable[[], Any]) -> int:
    try:
        with call() as response:
            return response.status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def scrape(front) -> dict[str, float]:
    """name{label="value",...} -> value, as Prometheus reads it."""
    with get(front) as response:
        text = response.read().decode()
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


METRICS = {"metrics_port": 0}


def test_a_scrape_has_every_metric_and_what_happened(tmp_path):
    with serving(tmp_path, config=METRICS, version_step=2) as front:
        list(front.rollout.Generate(prompt(*range(4, 24), n=2, max_tokens=6), timeout=10))
        batch = pb.GenerateBatchRequest(requests=[prompt(1, max_tokens=3), prompt(REFUSED_TOKEN), prompt()])
        list(front.rollout.GenerateBatch(batch, timeout=10))
        list(front.rollout.Generate(prompt(FAILING_TOKEN, max_tokens=6), timeout=10))
        with pytest.raises(grpc.RpcError):
            front.rollout.Score(pb.ScoreRequest(temperature=0.0), timeout=5)
        front.weights.CommitUpdate(weights_pb2.CommitUpdateRequest(update_id="u"), timeout=5)
        front.wait_idle()
        wait_until(lambda: front.running.engine.state.num_generated_tokens == 17, 20, "the last snapshot")
        seen = scrape(front)
    kinds = {"counter": "", "gauge": "", "histogram": "_count"}
    absent = {m.name for m in ALL if not m.labels and m.name + kinds[m.kind] not in seen}
    assert absent == set()
    expected = {
        "rollsync_requests_total": 4,  # one of the batch was refused by the front
        "rollsync_prompt_tokens_total": 42,
        "rollsync_cached_prompt_tokens_total": 32,
        "rollsync_prefix_cache_lookups_total": 4,
        "rollsync_prefix_cache_hits_total": 2,
        "rollsync_generated_tokens_total": 17,
        "rollsync_sequences_finished_total{finish_reason=length}": 3,
        "rollsync_sequences_finished_total{finish_reason=error}": 1,
        "rollsync_errors_total{kind=engine,reason=EXCEEDS_KV_POOL}": 1,
        "rollsync_errors_total{kind=engine,reason=EMPTY_PROMPT}": 1,
        "rollsync_errors_total{kind=engine,reason=INVALID_REQUEST}": 1,
        "rollsync_time_to_first_token_seconds_count": 4,
        "rollsync_sequence_duration_seconds_count": 3,
        "rollsync_sequence_generated_tokens_sum": 15,
        "rollsync_token_staleness_versions_count": 17,
        "rollsync_weight_version": 6,
        "rollsync_commit_sequence": 1,
        "rollsync_updates_total{end=committed,path=tensor,reason=,staging=host}": 1,
        "rollsync_update_bytes_total{path=tensor}": 12,
        "rollsync_update_stage_seconds_sum{path=tensor,stage=pause,staging=host}": 3,
        "rollsync_update_sequences_total{settled=aborted}": 10,
        "rollsync_pages": 100,
        "rollsync_engine_state{state=serving}": 1,
        "rollsync_engine_state{state=not_serving}": 0,
        "rollsync_engine_up": 1,
        "rollsync_engine_starts_total": 1,
        "rollsync_forward_passes_total{runner=eager}": seen["rollsync_forward_passes_total{runner=eager}"],
    }
    assert {name: seen.get(name) for name in expected} == expected
    assert seen["rollsync_engine_process_resident_memory_bytes"] > 1 << 20
    assert seen["process_resident_memory_bytes"] != seen["rollsync_engine_process_resident_memory_bytes"]
    assert TOKEN not in str(seen)


def test_only_metrics_are_there_and_only_to_be_read(tmp_path):
    with serving(tmp_path, config=METRICS) as front:
        assert status_of(lambda: get(front)) == 200
        assert status_of(lambda: get(front, "/")) == 404
        assert status_of(lambda: get(front, "/metrics/../etc/passwd")) == 404
        assert status_of(lambda: get(front, method="POST")) == 405
        host, _, port = front.running.observers.metrics_address.rpartition(":")
        assert host == "127.0.0.1"
        with socket.create_connection((host, int(port))) as silent:  # holds up nobody else
            silent.sendall(b"GET /met")
            assert status_of(lambda: get(front)) == 200
        compressed = get(front, headers={"Accept-Encoding": "gzip"})
        assert compressed.headers["Content-Encoding"] == "gzip"
        for host, status in (
            ("localhost:9464", 200),
            ("[::1]:9464", 200),
            ("10.1.2.3", 200),
            ("evil.example:9464", 403),  # a page's own name, which has come to mean loopback
            ("localhost.evil.example", 403),
        ):
            assert status_of(lambda host=host: get(front, headers={"Host": host})) == status
    with pytest.raises(urllib.error.URLError):
        get(front)


def test_with_a_token_metrics_are_read_by_any_name(tmp_path):
    with serving(tmp_path, config={**METRICS, "token": TOKEN}) as front:
        headers = {"Host": "rollsync.svc.cluster.local", "Authorization": f"Bearer {TOKEN}"}
        assert status_of(lambda: get(front, headers=headers)) == 200


def test_metrics_are_off_unless_a_port_is_given(tmp_path):
    with serving(tmp_path) as front:
        assert front.running.observers.metrics_address == ""


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (f"Bearer {TOKEN}", 200),
        (f"bearer {TOKEN}", 200),
        ("", 401),
        (f"Bearer {TOKEN}x", 401),
        (f"Basic {TOKEN}", 401),
        (TOKEN, 401),
        ("Bearer \xfc", 401),
    ],
)
def test_a_token_guards_metrics_too(guarded, authorization, status):
    assert status_of(lambda: get(guarded, headers={"Authorization": authorization})) == status


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("model"), config=METRICS | {"token": TOKEN}) as front:
        yield front


def test_refused_callers_are_counted(guarded):
    with pytest.raises(grpc.RpcError):
        guarded.rollout.GetEngineInfo(pb.GetEngineInfoRequest(), timeout=5)
    with get(guarded, headers={"Authorization": f"Bearer {TOKEN}"}) as response:
        text = response.read().decode()
    assert 'rollsync_errors_total{kind="engine",reason="UNAUTHENTICATED"}' in text
    assert TOKEN not in text


def test_tls_files_of_the_engine_are_those_of_the_metrics(tmp_path):
    for name, issuer in (("ca", None), ("server", "ca"), ("client", "ca")):
        make_certificate(tmp_path, name, issuer)
    files = {"tls_cert": "server.crt", "tls_key": "server.key", "tls_client_ca": "ca.crt"}
    config = {key: tmp_path / name for key, name in files.items()}
    trusting = ssl.create_default_context(cafile=tmp_path / "ca.crt")
    with serving(tmp_path, config=METRICS | config) as front:
        with pytest.raises((urllib.error.URLError, ConnectionError, ssl.SSLError)):
            get(front, scheme="https", context=trusting).read()
        host, _, port = front.running.observers.metrics_address.rpartition(":")
        with socket.create_connection((host, int(port))):  # no handshake: holds up nobody else
            trusting.load_cert_chain(tmp_path / "client.crt", tmp_path / "client.key")
            with get(front, scheme="https", context=trusting) as response:
                assert b"rollsync_engine_up 1.0" in response.read()


def test_another_address_needs_a_token(tmp_path):
    with pytest.raises(ValueError, match=r"metrics_host '0\.0\.0\.0' is not loopback"):
        ServeConfig(model=tmp_path, metrics_port=0, metrics_host="0.0.0.0")
    ServeConfig(model=tmp_path, metrics_port=0, metrics_host="0.0.0.0", token="t")


def test_a_used_metrics_port_is_an_error_before_an_engine_starts(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = ServeConfig(model=tmp_path, port=0, metrics_port=port)
        said = rf"cannot listen on 127\.0\.0\.1 port {port} \(metrics_port\): Address already in use"
        with pytest.raises(ConfigError, match=said):
            asyncio.run(app.start(config, engine_command=["/no/such/engine"]))


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"pip install 'rollsync\[metrics\]'"):
        MetricsServer(ServeConfig(model=tmp_path, metrics_port=0))


def test_metrics_outlive_the_engine(tmp_path):
    with serving(tmp_path, config=METRICS) as front:
        os.kill(front.running.engine.pid, signal.SIGKILL)
        wait_until(lambda: scrape(front)["rollsync_engine_up"] == 0, 20, "the death to show")
        seen = scrape(front)
        assert seen["rollsync_engine_deaths_total"] == 1
        assert seen["rollsync_engine_state{state=not_serving}"] == 1
        assert "rollsync_engine_process_resident_memory_bytes" not in seen


def test_a_busy_event_loop_is_not_waited_for_longer_than_a_moment(tmp_path, monkeypatch):
    free = threading.Event()
    with serving(tmp_path, config=METRICS) as front:
        assert status_of(lambda: get(front)) == 200
        monkeypatch.setattr("rollout_engine.server.metrics_http.COPY_WAIT_S", 0.05)
        front._loop.call_soon_threadsafe(free.wait, 20)
        try:
            assert status_of(lambda: get(front)) == 503
        finally:
            free.set()


# ---------------------------------------------------------------- the metrics log


def test_the_metrics_log_has_samples_and_updates(tmp_path):
    log = tmp_path / "metrics.jsonl"
    log.write_text('{"event": "older"}\n')
    with serving(tmp_path, config={"metrics_log": log, "metrics_log_seconds": 0.05}) as front:
        list(front.rollout.Generate(prompt(1, max_tokens=4), timeout=10))
        front.weights.CommitUpdate(weights_pb2.CommitUpdateRequest(update_id="u"), timeout=5)
        front.wait_idle()

        def has_all() -> bool:
            last = whole_lines(log)[-1]
            return (last.get("commit_sequence"), last.get("generated_tokens")) == (1, 4)

        wait_until(has_all, 20, "a sample after the update")
    first, *rest = whole_lines(log)
    assert first == {"event": "older"}
    samples = [line for line in rest if line["event"] == "sample"]
    (update,) = (line for line in rest if line["event"] == "update")
    assert abs(samples[0]["time"] - time.time()) < 60
    last = samples[-1]
    expected = {"generated_tokens": 4, "finished_sequences": 1, "weight_version": 6, "pages": 100}
    assert {key: last[key] for key in expected} == expected
    assert (update["path"], update["end"], update["seconds"]["pause"]) == ("tensor", "committed", 3.0)
    assert update["time"] == 1000.5


def test_the_metrics_log_stays_below_twice_its_limit(tmp_path):
    log = tmp_path / "metrics.jsonl"
    config = {"metrics_log": log, "metrics_log_seconds": 0.05, "metrics_log_bytes": 4096}
    with serving(tmp_path, config=config) as front:
        for number in range(60):
            update = weights_pb2.CommitUpdateRequest(update_id=f"u{number}")
            front.weights.CommitUpdate(update, timeout=5)
    before = tmp_path / "metrics.jsonl.1"
    assert log.stat().st_size <= 4096
    assert before.stat().st_size <= 4096
    ids = [line["update_id"] for file in (before, log) for line in whole_lines(file) if "update_id" in line]
    assert ids[-1] == "u59"
    assert ids == [f"u{number}" for number in range(60 - len(ids), 60)]  # whole lines, none lost between
    assert len(list(tmp_path.glob("metrics.jsonl*"))) == 2


def test_a_metrics_log_that_cannot_be_written_is_named(tmp_path):
    config = ServeConfig(model=tmp_path, metrics_log=tmp_path / "no" / "log", metrics_port=0)
    with pytest.raises(ConfigError, match=r"metrics_log: cannot write .*no/log: No such file"):
        Observers(config)


def test_a_full_disk_costs_lines_and_is_said_once(tmp_path, caplog):
    config = {"metrics_log": "/dev/full", "metrics_log_seconds": 0.05}
    with serving(tmp_path, config=config) as front:
        wait_until(lambda: "metrics_log_lost" in caplog.text, 20, "the loss to be told")
        list(front.rollout.Generate(prompt(1, max_tokens=4), timeout=10))
        time.sleep(0.3)  # for more lines that are lost
    assert caplog.text.count("metrics_log_lost") == 1
    assert "No space left on device" in caplog.text


# ---------------------------------------------------------------- log lines


def test_a_front_tells_its_life_in_lines(tmp_path):
    config = {"log_format": "json", "metrics_port": 0, "token": TOKEN}
    with front_process(tmp_path, config) as front:
        ready = front.ready()
        bearer = (("authorization", f"Bearer {TOKEN}"),)
        with grpc.insecure_channel(ready["address"]) as channel:
            stub = rollout_pb2_grpc.RolloutStub(channel)
            pause = pb.PauseGenerationRequest()
            stub.PauseGeneration(pause, timeout=5, metadata=bearer)
            time.sleep(0.15)
            stub.ContinueGeneration(pb.ContinueGenerationRequest(), timeout=5, metadata=bearer)
            commit = channel.unary_unary("/rollout_engine.v1.Weights/CommitUpdate")
            request = weights_pb2.CommitUpdateRequest(update_id="step-7")
            commit(request.SerializeToString(), timeout=5, metadata=bearer)
            with contextlib.suppress(grpc.RpcError):
                stub.FlushCache(pb.FlushCacheRequest(), timeout=5)
        code, out, err = front.end(signal.SIGTERM)
    assert code == 0
    assert TOKEN not in out + err
    events = ["serving", "generation_paused", "serving_again", "update_committed", "draining", "stopped"]
    assert out == ""
    entries = [json.loads(line) for line in err.splitlines()]
    assert [entry["event"] for entry in entries] == events
    assert {entry["process"] for entry in entries} == {"front"}
    assert (entries[0]["address"], entries[0]["metrics_address"]) == (
        ready["address"],
        ready["metrics_address"],
    )
    update = entries[3]
    assert (update["update_id"], update["path"], update["version"], update["pause_s"]) == (
        "step-7",
        "tensor",
        6,
        3.0,
    )


def test_a_front_that_cannot_serve_says_so_in_its_form(tmp_path, capfd, own_logging):
    config = ServeConfig(model=tmp_path, port=0, log_format="json")
    assert app.serve(config, engine_command=engine_command({"fail_start": "no config.json"})) == 1
    captured = capfd.readouterr()
    assert captured.out == ""
    entries = [json.loads(line) for line in captured.err.splitlines()]
    assert [(entry["event"], entry["error"]) for entry in entries] == [
        ("engine_failed", "no config.json"),
        ("failed", "no config.json"),
    ]
