"""Adapters that an engine holds beside the base weights: pushed, chosen, labelled."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from peft.tuners.lora import LoraLayer

from rollout_engine import messages as m
from rollout_engine.errors import EngineError
from tests.cases.adapters.common import PROMPT, RANK, assert_samples, state_of
from tests.cases.common import GATE, UP, live, logits, reference_logits, stored, trained
from tests.desk import desk
from tests.lora import adapted, greedy, learn, push
from tests.ways import WAYS, ways_to
from trainers_adapters import AdapterSource, ModuleSource, PeftSource
from weight_updater.errors import UpdateRefused
from weight_updater.requests import Staging

# ---------------------------------------------------------------- pushed


@pytest.mark.parametrize("way", [way for way in WAYS if way != "distributed"])  # tests/wire has it
def test_every_path_brings_an_adapter_and_each_step_of_it(way, engine, ways, model, name):
    source = AdapterSource(model, name)
    before = live(engine)
    for version in (1, 2, 3):
        reply = push(engine, ways, source, way)
        told = (reply.adapter, reply.adapter_version, reply.previous_adapter_version)
        assert told == (name, version, version - 1)
        assert reply.num_changed == reply.num_tensors == 28
        assert reply.verified
        assert reply.received_checksum == reply.live_checksum != 0
        assert not reply.warnings
        assert_samples(engine, model, name, version)
        learn(model)
    assert live(engine) == before, "the base weights, their version, and where they lie"
    assert state_of(engine, name) == m.AdapterState(name, 3, 4, engine.version, False, 0)


def test_steps_of_an_update_one_by_one_and_in_any_chunks(engine, ways, model, name):
    source = AdapterSource(model, name)
    reply = push(engine, ways, source)
    spec = source.spec(engine.runner.target.arena.layout)
    learn(model)
    offer = ways.offer("stream", dict(source))
    begun = engine.begin(replace(offer.begin, adapter=spec, version=7))
    assert (begun.version, begun.next_version) == (engine.version, 7)
    assert engine.generate(PROMPT, adapter=name).adapter_labels()[0] == (name, 1)
    offer.send(begun.update_id)
    prepared = engine.call(m.Prepare, update_id=begun.update_id)
    assert (prepared["adapter_version"], prepared["state"]) == (1, "prepared")
    committed = engine.commit(begun.update_id)
    assert (committed.adapter_version, committed.num_changed) == (7, 28)
    assert engine.commit(begun.update_id) == committed
    assert_samples(engine, model, name, 7)
    again = push(engine, ways, source)
    assert (again.adapter_version, again.num_changed) == (8, 0)
    assert reply.version == again.version == engine.version


def test_a_scaling_alone_changes_what_is_sampled(engine, ways, model, name):
    source = AdapterSource(model, name)
    push(engine, ways, source)
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            layer.scaling["default"] *= 3
    assert push(engine, ways, source).num_changed == 28
    assert_samples(engine, model, name, 2)


def test_names_as_peft_has_them_in_memory(engine, ways, model, name):
    """base_model.model. in front, the adapter's name behind lora_A, and wrappers in between."""
    tensors = {f"_orig_mod.module.{n}": p for n, p in model.named_parameters() if "lora_" in n}
    assert any("base_model.model.model." in n and ".lora_A.default.weight" in n for n in tensors)
    spec = AdapterSource(model, name).spec(engine.runner.target.arena.layout)
    assert ways.push("ipc", tensors, adapter=spec).num_tensors == 28
    assert_samples(engine, model, name, 1)


@pytest.mark.case("B013")
def test_gate_and_up_get_their_own_matrices(engine, ways, model, name, tied_dir):
    """They lie in one matrix of the model, and an adapter of one of them leaves the other alone."""
    for number, module in enumerate(("gate_proj", "up_proj")):
        one = adapted(tied_dir, target_modules=[module])
        push(engine, ways, AdapterSource(one, f"{name}-{number}"))
        assert_samples(engine, one, f"{name}-{number}", 1)
    both = {GATE, UP}
    assert all(torch.equal(engine.runner.target.slot(n), stored(tied_dir)[n]) for n in both)


def test_a_smaller_adapter_leaves_nothing_of_a_larger_one_behind(engine, ways, tied_dir, name):
    """The second push of it goes to the slot that the first one was in."""
    large = adapted(tied_dir, r=RANK)
    push(engine, ways, AdapterSource(large, name))
    small = adapted(tied_dir, r=1, target_modules=["v_proj"])
    for version in (2, 3, 4):
        push(engine, ways, AdapterSource(small, name))
        assert_samples(engine, small, name, version)


def test_what_arrives_is_rounded_to_the_models_dtype(tied_dir, tmp_path, model):
    with desk(tied_dir, dtype="bfloat16", max_adapters=1) as engine, ways_to(engine, tmp_path) as ways:
        source = AdapterSource(model, "math")
        reply = push(engine, ways, source)
        assert reply.received_checksum != reply.live_checksum
        assert engine.updater.buffers._host is None, "no room for base weights to wait in was taken"
        bank, slot = engine.runner.adapters, engine.updater.adapters.book.held["math"].slot
        for key, tensor in source:
            part = bank.parts[key.rpartition(".lora_")[0]]
            lies = part.a[slot, :4] if ".lora_A." in key else part.b[slot, :4].t()
            assert torch.equal(lies, tensor.to(torch.bfloat16)), key


# ---------------------------------------------------------------- the base weights


@pytest.mark.case("B010")
def test_an_adapter_counts_once_whatever_was_pushed_before_it(engine, ways, model, name):
    """Merged, then the adapter alone: over merged base weights it would count twice, so it is refused. Over
    the trainer's own it counts once. Never twice, never not at all.
    """
    prompt = list(PROMPT)
    wanted = reference_logits(model, prompt)
    with model.disable_adapter():
        without = reference_logits(model, prompt)
    assert (wanted - without).abs().max() > 0.1

    ways.push("ipc", dict(PeftSource(model)))
    assert (logits(engine, prompt) - wanted).abs().max() < 1e-4
    with pytest.raises(UpdateRefused) as refused:
        push(engine, ways, AdapterSource(model, name))
    assert refused.value.reason == "BASE_MISMATCH"
    assert (logits(engine, prompt) - wanted).abs().max() < 1e-4, "once, by the merged weights"

    base = {n: p.detach() for n, p in ModuleSource(copy.deepcopy(model).unload())}
    ways.push("ipc", base)
    push(engine, ways, AdapterSource(model, name))
    tokens, logprobs = greedy(model, prompt)
    running = engine.generate(prompt, adapter=name)
    assert running.tokens() == tokens
    assert (torch.tensor(running.logprobs()) - torch.tensor(logprobs)).abs().max() < 1e-4
    assert (logits(engine, prompt) - without).abs().max() < 1e-4, "not at all, where nobody asks for it"


@pytest.mark.case("B010")
def test_a_trainer_that_has_merged_its_adapter_does_not_push_it_beside(model, name):
    source = AdapterSource(model, name)
    model.merge_adapter()
    with pytest.raises(ValueError, match="would count twice"):
        source.manifest()
    model.unmerge_adapter()
    assert len(source.manifest()) == 28


def test_both_checksums_of_a_mismatch_are_named(engine, ways, model, name):
    spec = AdapterSource(model, name).spec(engine.runner.target.arena.layout)
    folded = engine.call(m.GetChecksums, names=[])["folded"]
    assert spec.base_checksum == folded
    with pytest.raises(UpdateRefused) as refused:
        push(engine, ways, AdapterSource(model, name), adapter=replace(spec, base_checksum=folded ^ 1))
    assert f"{folded ^ 1:016x}" in refused.value.message
    assert f"{folded:016x}" in refused.value.message
    assert engine.updater.open is None


def test_an_adapter_without_a_base_checksum_is_taken_with_a_warning(engine, ways, model, name):
    reply = push(engine, ways, AdapterSource(model, name, check_base=False))
    assert "were not compared" in reply.warnings[0]
    assert_samples(engine, model, name, 1)


def test_other_base_weights_make_an_adapter_stale_until_it_is_pushed_again(
    engine, ways, model, name, tied_dir
):
    source = AdapterSource(model, name)
    push(engine, ways, source)
    before = engine.generate(PROMPT, adapter=name).tokens()
    ways.push("segment", stored(tied_dir))
    assert not state_of(engine, name).stale, "the same bytes under another label"
    assert engine.generate(PROMPT, adapter=name).tokens() == before

    ways.push("segment", trained(stored(tied_dir)), staging=Staging.HOST, keep_previous=True)
    assert state_of(engine, name).stale
    with pytest.raises(EngineError) as refused:
        engine.generate(PROMPT, adapter=name)
    assert refused.value.reason == "ADAPTER_STALE"
    assert "push it again" in refused.value.message
    with pytest.raises(UpdateRefused, match="was trained on base weights with checksum"):
        push(engine, ways, source)

    engine.call(m.Rollback)
    assert not state_of(engine, name).stale, "its base weights are live again"
    assert engine.generate(PROMPT, adapter=name).tokens() == before

    ways.push("segment", trained(stored(tied_dir)))
    push(engine, ways, AdapterSource(model, name, check_base=False))
    assert not state_of(engine, name).stale
    assert engine.generate(PROMPT, adapter=name).adapter_labels()[0] == (name, 2)
