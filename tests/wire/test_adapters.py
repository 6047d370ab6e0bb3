"""A LoRA trainer and a real engine that holds its adapters beside the base weights, over gRPC."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollout_engine.cli.main import app
from tests.engines import RunningEngine, serve
from tests.lora import adapted, greedy, learn
from tests.programs import run_program
from tests.tiny import load_reference, make_tiny
from tests.ways import free_port
from tests.wire.trainer import PATHS, PROMPT, EarlyArena, InFlight, push, reference_tokens, train
from trainers_adapters import (
    AdapterSource,
    ModuleSource,
    PushError,
    RollsyncError,
    WeightsClient,
    push_weights,
)
from trainers_adapters.aio import AsyncRolloutClient, AsyncWeightsClient
from trainers_adapters.results import VersionSpan
from trainers_adapters.rollout_calls import Request


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "qwen2", "qwen2", tied=True)


@pytest.fixture(scope="module")
def engine(model_dir, work_dir) -> Iterator[RunningEngine]:
    flags = ("--weights-root", str(work_dir), "--num-pages", "128", "--max-adapters", "2")
    with serve(model_dir, *flags, forked=True) as running:
        yield running


@pytest.fixture
def model(model_dir):
    return adapted(model_dir)


@pytest.fixture
def free(engine) -> None:
    """Nothing is held."""
    for held in engine.rollout.info().state.adapters:
        engine.weights.remove_adapter(held.name, abort=True)


@pytest.mark.parametrize("path", PATHS)
def test_every_path_brings_an_adapter_and_each_step_of_it(path, engine, senders, model):
    source = AdapterSource(model, "walk")
    engine.rollout.flush_cache()  # products of other heights round in other places
    base = engine.greedy(PROMPT, ignore_eos=True)
    (span,) = base.spans
    for _ in range(2):
        report = push(source, engine, via=senders[path])
        asked = {"adapter": "walk", "min_adapter_version": report.version}
        completion = engine.greedy(PROMPT, ignore_eos=True, **asked)
        assert completion.token_ids == greedy(model, PROMPT)[0]
        label = (span.weight_version, span.commit_sequence, "walk", report.version)
        assert completion.spans == (VersionSpan(0, *label),)
        assert completion.adapter_versions == [report.version] * 8
        learn(model)
    reply = report.replies[engine.address]
    assert (reply.version, reply.num_tensors, reply.verified) == (span.weight_version, 28, True)
    engine.rollout.flush_cache()
    again = engine.greedy(PROMPT, ignore_eos=True)
    assert (again.token_ids, again.logprobs, again.spans) == (base.token_ids, base.logprobs, base.spans)


def test_an_adapter_whose_checksums_come_with_its_bytes(engine, model, free):
    with EarlyArena() as arena:
        report = push(AdapterSource(model, "walk"), engine, via=arena)
    (reply,) = report.replies.values()
    assert (reply.verified, reply.num_tensors) == (True, 28)
    completion = engine.greedy(PROMPT, ignore_eos=True, adapter="walk", min_adapter_version=report.version)
    assert completion.token_ids == greedy(model, PROMPT)[0]


def test_a_batch_mixes_adapters_and_the_base_model(engine, model, free):
    push(AdapterSource(model, "a"), engine)
    first = greedy(model, PROMPT)[0]
    learn(model)
    push(AdapterSource(model, "b"), engine)
    wanted = {"a": first, "b": greedy(model, PROMPT)[0]}
    with model.disable_adapter():
        wanted[""] = reference_tokens(model, PROMPT)
    names = ["a", "", "b", None, ""]
    asked = [Request(PROMPT, adapter=name) for name in names]
    sampling = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    found = engine.together(asked, adapter="a", **sampling)
    assert [one.token_ids for one in found] == [wanted["a" if name is None else name] for name in names]
    assert [one.spans[0].adapter for one in found] == ["a", "", "b", "a", ""]
    (by_a,) = engine.rollout.score([PROMPT + first], adapter="a")
    assert by_a.spans[0].adapter == "a"
    (by_base,) = engine.rollout.score([PROMPT + first])
    assert by_a.logprobs != by_base.logprobs


def test_an_update_while_it_generates_is_labelled_token_by_token(engine, model, free):
    source = AdapterSource(model, "walk")
    first = push(source, engine).version
    running = InFlight(engine, adapter="walk")
    learn(model)
    second = push(source, engine, inflight="keep").version
    running.end()
    versions = [version for part in running._parts for version in part.adapter_versions]
    assert sorted(set(versions)) == [first, second]
    assert versions == sorted(versions)
    assert len(versions) == running.num_tokens
    assert set(running.labels) == {engine.rollout.info().weight_version}


def test_errors_have_their_status_and_name_what_is_held(engine, model, free):
    with pytest.raises(RollsyncError, match="none is held yet") as unknown:
        engine.greedy(PROMPT, adapter="walk")
    assert (unknown.value.code, unknown.value.reason) == ("NOT_FOUND", "UNKNOWN_ADAPTER")
    for name in ("a", "b"):
        push(AdapterSource(model, name), engine)
    with pytest.raises(PushError, match=r"held are a .*, b ") as full:
        push(AdapterSource(model, "c"), engine)
    assert (full.value.code, full.value.reason) == ("RESOURCE_EXHAUSTED", "NO_ADAPTER_SLOT")
    running = InFlight(engine, adapter="a")
    with pytest.raises(RollsyncError, match="abort=true") as used:
        engine.weights.remove_adapter("a")
    assert (used.value.code, used.value.reason) == ("FAILED_PRECONDITION", "BUSY")
    assert engine.weights.remove_adapter("a", abort=True).num_aborted == 1
    assert running.end().finish_reason == "abort"
    assert [held.name for held in engine.rollout.info().state.adapters] == ["b"]


@pytest.mark.case("B010")
def test_other_base_weights_refuse_an_adapter_and_make_one_stale(engine, model, model_dir, free):
    source = AdapterSource(model, "walk")
    push(source, engine)
    other = load_reference(model_dir)
    train(other, 1)
    push(ModuleSource(other), engine)
    with pytest.raises(RollsyncError) as stale:
        engine.greedy(PROMPT, adapter="walk")
    assert (stale.value.code, stale.value.reason) == ("FAILED_PRECONDITION", "ADAPTER_STALE")
    (held,) = engine.rollout.info().state.adapters
    assert held.stale
    with pytest.raises(PushError) as mismatch:
        push(source, engine)
    assert (mismatch.value.code, mismatch.value.reason) == ("FAILED_PRECONDITION", "BASE_MISMATCH")
    push(ModuleSource(load_reference(model_dir)), engine)
    assert engine.greedy(PROMPT, ignore_eos=True, adapter="walk").token_ids == greedy(model, PROMPT)[0]


def test_two_engines_take_an_adapter_together_or_not_at_all(engine, model, model_dir, work_dir, free):
    """The second one has no room for adapters: its refusal ends the update on both."""
    with serve(model_dir, "--num-pages", "64", "--max-adapters", "1", forked=True) as second:
        source = AdapterSource(model, "walk")
        report = push_weights(source, [engine.weights, second.weights], version=40)
        assert {reply.adapter_version for reply in report.replies.values()} == {40}
        for one in (engine, second):
            assert one.greedy(PROMPT, ignore_eos=True, adapter="walk").token_ids == greedy(model, PROMPT)[0]
        with pytest.raises(PushError, match=second.address):
            push_weights(AdapterSource(model, "other"), [engine.weights, second.weights])
        assert [held.name for held in engine.rollout.info().state.adapters] == ["walk"]
        assert not engine.rollout.info().state.open_update_id


def test_a_push_to_an_engine_that_is_gone_says_that_nothing_was_committed(model):
    address = f"127.0.0.1:{free_port()}"
    with WeightsClient(address) as gone, pytest.raises(PushError) as lost:
        push_weights(AdapterSource(model, "walk"), gone, timeout_s=5.0)
    assert (lost.value.reason, lost.value.committed, lost.value.laggards) == ("UNREACHABLE", (), ())
    assert f"GetWeightLayout on {address}" in lost.value.message
    assert "every engine keeps its version" in lost.value.message


def test_clients_for_asyncio(engine, model, free):
    version = push(AdapterSource(model, "walk"), engine).version

    async def use() -> list[int]:
        async with (
            AsyncRolloutClient(engine.address) as rollout,
            AsyncWeightsClient(engine.address) as weights,
        ):
            sampling = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
            (completion,) = await rollout.generate(PROMPT, adapter="walk", **sampling)
            removed = await weights.remove_adapter("walk")
            assert (removed.version, removed.num_aborted) == (version, 0)
            return completion.adapter_versions

    assert asyncio.run(use()) == [version] * 4


def test_the_command_line(engine, model, work_dir, free):
    """What docs/lora.md says of it: an adapter that PEFT saved, chosen by name, shown, refused by name."""

    def run(*arguments: str):
        return CliRunner().invoke(app, [*arguments, "--address", engine.address])

    model.save_pretrained(work_dir / "saved")
    loaded = run("reload", "--adapter", "saved", str(work_dir / "saved"))
    assert loaded.exit_code == 0, loaded.output
    assert "adapter saved version 0 -> 1 from" in loaded.stdout
    assert "were not compared" in loaded.stdout
    ids = ",".join(map(str, PROMPT))
    generated = run("generate", "--ids", ids, "--adapter", "saved", "--temperature", "0", "--max-tokens", "4")
    tokens = [int(word) for word in generated.stdout.splitlines()[0].split()]
    assert tokens == greedy(model, PROMPT, 4)[0]
    assert "saved version 1" in generated.stderr
    shown = run("status").stdout
    assert "1 of 2, up to rank 16" in shown
    told = json.loads(run("status", "--json").stdout)["state"]["adapters"]
    assert [(held["name"], held["version"], held["rank"]) for held in told] == [("saved", 1, 4)]
    unknown = run("generate", "--ids", ids, "--adapter", "svaed")
    assert unknown.exit_code == 1
    assert "held are saved (version 1)" in unknown.stderr


def test_the_program_of_the_documentation(engine, model_dir, tmp_path, free):
    printed = run_program(
        "lora.md", tmp_path, number=1, MODEL=str(model_dir), ROLLSYNC_ADDRESS=engine.address
    )
    lines = printed.splitlines()
    assert len(lines) == 6
    assert lines[0].startswith("math version 1: 28 tensors changed, ")
    assert all(": 28 tensors changed" in line for line in lines[1:4])
    assert lines[5] == "removed RemovedAdapter(version=4, num_aborted=0)"
