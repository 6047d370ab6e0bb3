"""What is derived from weights, and what a sleep leaves of them."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rollout_engine import messages as m
from rollout_engine.errors import EngineError
from rollout_engine.errors import Reason as EngineReason
from tests.cases.common import (
    EMBED,
    HEAD,
    NORM,
    assert_serves,
    live,
    logits,
    reference,
    reference_logits,
    stored,
    trained,
    wake,
)
from tests.desk import Desk, desk, num_threads
from tests.tiny import ARCHITECTURES, make_tiny
from tests.ways import STAGINGS, WAYS, Ways
from tests.wire.trainer import PROMPT
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.requests import Staging

NAP = ["weights", "kv_cache", "graphs"]


def addresses(engine: Desk) -> dict[str, int]:
    """Of everything that a captured graph may remember: weights, buffers, KV pool, tables, sampled tokens."""
    runner = engine.runner
    found = dict(runner.model.named_parameters(remove_duplicate=False)) | dict(runner.model.named_buffers())
    found |= {f"k{i}": t for i, t in enumerate(runner.token_to_kv_pool.k)}
    found |= {f"v{i}": t for i, t in enumerate(runner.token_to_kv_pool.v)}
    found |= {
        "tokens": runner.last_tokens,
        "table": runner.device_page_table,
        "slots": runner.req_to_token_pool,
    }
    return {name: tensor.data_ptr() for name, tensor in found.items()}


def buffers(engine: Desk) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in engine.runner.model.named_buffers()}


@pytest.mark.case("B035")
@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("way", WAYS)
def test_a_head_alone_shows_in_the_next_logits(way, staging, untied):
    """Whatever was worked out from the old weights on the first forward pass does not outlive them."""
    engine, ways, directory = untied
    new = trained(stored(directory))
    ways.push("segment", new)
    logits(engine, PROMPT)
    before = addresses(engine)
    for name in (HEAD, NORM, EMBED):
        new[name] = trained(new)[name]
        ways.push(way, {name: new[name]}, partial=True, staging=staging)
        expected = reference_logits(reference(directory, new), PROMPT)
        assert torch.allclose(logits(engine, PROMPT), expected, atol=1e-5), name
    assert addresses(engine) == before


@pytest.mark.case("B057")
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_no_address_moves_by_any_path(name, tied, tmp_path):
    """What a captured graph would remember; the graphs themselves are in tests/gpu."""
    directory = make_tiny(tmp_path / name, name, tied=tied)
    with desk(directory, reserve_device_staging=True) as engine, Ways(engine, tmp_path) as ways:
        before = addresses(engine)
        for way in ("stream", "segment", "ipc"):
            for staging in STAGINGS:
                ways.push(way, trained(stored(directory)), staging=staging)
                assert addresses(engine) == before, (way, staging)
        ways.push("stream", trained(stored(directory)), keep_previous=True)
        engine.call(m.Rollback, inflight="wait")
        assert addresses(engine) == before


@pytest.mark.case("B057")
@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("way", WAYS)
def test_no_address_moves(way, staging, engine, ways, weights):
    before = addresses(engine)
    ways.push(way, trained(weights), staging=staging)
    assert addresses(engine) == before


@pytest.mark.case("B058")
def test_released_memory_comes_back_where_it_was(engine, ways, tied_dir, weights):
    before = addresses(engine)
    for tags in (["kv_cache"], ["graphs"], NAP):
        ways.push("segment", trained(weights))
        engine.call(m.ReleaseMemory, tags=tags)
        assert wake(engine) == ("weights" in tags)
        new = trained(weights)
        ways.push("segment", new)
        assert addresses(engine) == before
        assert_serves(engine, tied_dir, new)


@pytest.mark.case("B033")
@pytest.mark.case("B110")
@pytest.mark.case("B111")
@pytest.mark.parametrize("way", WAYS)
def test_asleep_awake_and_asleep_again(way, engine, ways, tied_dir, weights):
    """Nothing is taken or generated asleep, nothing is served before an update, and buffers are as before."""
    tables, before = buffers(engine), addresses(engine)
    for cycle in range(3):
        version = engine.version
        assert engine.call(m.ReleaseMemory, tags=NAP)["bytes"] > 0
        for buffer in engine.runner.model.buffers():
            buffer.fill_(float("nan"))  # as if the device had taken these too
        for attempt in (
            lambda: ways.push(way, trained(weights)),
            lambda: ways.push_in_steps(way, trained(weights)),
        ):
            with pytest.raises(EngineError) as asleep:
                attempt()
            assert asleep.value.reason is EngineReason.ASLEEP
        assert engine.engine._uploads._feeds == {}, "a stream that was refused leaves nothing behind"
        with pytest.raises(EngineError) as asleep:
            engine.generate(PROMPT)
        assert asleep.value.reason is EngineReason.ASLEEP
        assert engine.call(m.ResumeMemory, tags=["weights"])["needs_update"]
        new = trained(weights)
        with pytest.raises(UpdateRefused) as partial:
            ways.push(way, {EMBED: new[EMBED]}, partial=True)
        assert partial.value.reason is Reason.WRONG_STATE
        if cycle % 2:
            assert wake(engine)
            with pytest.raises(EngineError) as empty:
                engine.generate(PROMPT)
            assert empty.value.reason is EngineReason.NOT_SERVING
        ways.push(way, new)
        wake(engine)
        assert engine.version == version + 1
        found = buffers(engine)
        assert found.keys() == tables.keys()
        assert all(torch.equal(found[name], tables[name]) for name in tables)
        assert addresses(engine) == before
        assert_serves(engine, tied_dir, new)


@pytest.mark.case("B111")
@pytest.mark.parametrize("staging", STAGINGS)
def test_ten_cycles_serve_ten_models(staging, engine, ways, tied_dir, weights):
    for _ in range(10):
        engine.call(m.ReleaseMemory, tags=NAP)
        assert wake(engine)
        new = trained(weights)
        ways.push("segment", new, staging=staging)
        assert_serves(engine, tied_dir, new)


@pytest.mark.case("B111")
def test_what_was_kept_for_a_rollback_does_not_come_back_from_a_sleep(engine, ways, weights):
    ways.push("stream", trained(weights), keep_previous=True)
    engine.call(m.ReleaseMemory, tags=["weights"])
    assert wake(engine)
    with pytest.raises(UpdateRefused) as refused:
        engine.call(m.Rollback, inflight="wait")
    assert refused.value.reason is Reason.WRONG_STATE
    ways.push("stream", weights)
    assert engine.generate(PROMPT).finish() == "length"


def resources() -> tuple[int, int, int]:
    """Descriptors, threads and mapped segments of this process."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("/dev/shm/rollsync-")
    return len(os.listdir("/proc/self/fd")), num_threads(), maps


def resident_bytes() -> int:
    fields = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in fields if line.startswith("VmRSS:"))


@pytest.mark.case("B113")
@pytest.mark.parametrize("staging", [Staging.DEVICE, Staging.HOST])
def test_twenty_sleeps_leave_memory_as_it_was(staging, tmp_path):
    """24 MB of weights and 16 of KV: one copy that is kept in each cycle would show."""
    directory = make_tiny(tmp_path / "m", "llama", vocab_size=20_000, num_attention_heads=8)
    new = stored(directory)
    shape = {"num_pages": 2000, "reserve_device_staging": True, "weights_roots": (tmp_path,)}
    with desk(directory, **shape) as engine, Ways(engine, tmp_path) as ways:
        before = None
        lent = ways.offer("ipc", new)  # one allocation that is lent again and again, as a trainer does
        for cycle in range(20):
            engine.call(m.ReleaseMemory, tags=NAP)
            wake(engine)
            lent.send("", replace(lent.begin, staging=staging))
            if cycle == 2:
                before = resident_bytes(), resources()
        after = resident_bytes(), resources()
        assert before is not None
        assert after[0] < before[0] + (8 << 20)
        assert after[1] == before[1]
        assert engine.updater.checksums([]) == live(engine)[0]
        assert all(torch.equal(engine.runner.target.slot(name), tensor) for name, tensor in new.items())
