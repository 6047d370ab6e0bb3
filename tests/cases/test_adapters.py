"""Adapters that an engine holds beside the base weights: pushed, chosen, labelled, refused."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from peft.tuners.lora import LoraLayer

from rollout_engine import messages as m
from rollout_engine.errors import EngineError
from tests.cases.common import GATE, UP, live, logits, reference_logits, stored, trained
from tests.desk import Desk, desk
from tests.lora import adapted, greedy, learn, push
from tests.ways import WAYS, Ways, ways_to
from trainers_adapters import AdapterSource, ModuleSource, PeftSource
from weight_updater.errors import UpdateRefused
from weight_updater.requests import AdapterModule, AdapterSpec, BeginUpdate, FromDisk, Path, Staging

PROMPT = [5, 6, 7, 8, 9]
RANK = 8
NUMBERS = itertools.count()

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def held(tied_dir, tmp_path_factory) -> Iterator[tuple[Desk, Ways]]:
    folder = tmp_path_factory.mktemp("adapters")
    config = {"max_adapters": 2, "max_adapter_rank": RANK, "weights_roots": (folder,)}
    with desk(tied_dir, **config) as engine, ways_to(engine, folder) as ways:
        yield engine, ways


@pytest.fixture
def engine(held, tied_dir) -> Desk:
    """No adapter is held, and the base weights are those of the directory."""
    engine, ways = held
    for name in list(engine.updater.adapters.book.held):
        engine.call(m.RemoveAdapter, name=name, abort=True)
    engine.idle()
    if any(not torch.equal(engine.runner.target.slot(n), t) for n, t in stored(tied_dir).items()):
        ways.push("ipc", stored(tied_dir))
    return engine


@pytest.fixture
def ways(held) -> Ways:
    return held[1]


@pytest.fixture
def model(tied_dir):
    return adapted(tied_dir)


@pytest.fixture
def name() -> str:
    """Of an adapter that was never held: versions are remembered beyond a removal."""
    return f"math-{next(NUMBERS)}"


def assert_samples(engine: Desk, model, name: str, version: int) -> None:
    running = engine.generate(PROMPT, adapter=name)
    tokens, logprobs = greedy(model, PROMPT)
    assert running.tokens() == tokens
    assert (torch.tensor(running.logprobs()) - torch.tensor(logprobs)).abs().max() < 1e-4
    assert running.adapter_labels() == [(name, version)] * len(tokens)
    assert running.labels() == [engine.version] * len(tokens)


def state_of(engine: Desk, name: str) -> m.AdapterState:
    engine.call(m.GetInfo)
    (found,) = [adapter for adapter in engine.now.adapters if adapter.name == name]
    return found


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


# ---------------------------------------------------------------- refused


def without(key: str) -> Callable[[Tensors, AdapterSpec], tuple[Tensors, AdapterSpec]]:
    return lambda tensors, spec: ({n: t for n, t in tensors.items() if n != key}, spec)


def renamed(old: str, new: str) -> Callable[[Tensors, AdapterSpec], tuple[Tensors, AdapterSpec]]:
    return lambda tensors, spec: ({n.replace(old, new): t for n, t in tensors.items()}, spec)


def asked(**changes) -> Callable[[Tensors, AdapterSpec], tuple[Tensors, AdapterSpec]]:
    return lambda tensors, spec: (tensors, replace(spec, **changes))


def more(key: str, *shape: int) -> Callable[[Tensors, AdapterSpec], tuple[Tensors, AdapterSpec]]:
    return lambda tensors, spec: (tensors | {key: torch.ones(shape)}, spec)


def spoilt(value: float) -> Callable[[Tensors, AdapterSpec], tuple[Tensors, AdapterSpec]]:
    def spoil(tensors: Tensors, spec: AdapterSpec) -> tuple[Tensors, AdapterSpec]:
        changed = {n: t.clone() for n, t in tensors.items()}
        changed[Q_A].view(-1)[3] = value
        return changed, spec

    return spoil


Q_A = "model.layers.0.self_attn.q_proj.lora_A.weight"
Q_B = "model.layers.0.self_attn.q_proj.lora_B.weight"
OTHER_Q = AdapterModule("model.layers.0.self_attn.q_proj", 2, 1.0)
ABSENT = AdapterModule("model.layers.9.self_attn.q_proj", 4, 1.0)

WRONG = {
    "no A": (without(Q_A), "MANIFEST_MISMATCH", "no lora_A of model.layers.0.self_attn.q_proj"),
    "no B": (without(Q_B), "MANIFEST_MISMATCH", "no lora_B of model.layers.0.self_attn.q_proj"),
    "unknown module": (renamed("q_proj", "w_proj"), "MANIFEST_MISMATCH", "can have no adapter here"),
    "nothing matches": (renamed("model.layers", "layers"), "MANIFEST_MISMATCH", "28 of 28 tensors"),
    "embedding": (more("model.embed_tokens.lora_embedding_A", 4, 128), "MANIFEST_MISMATCH", "push it merged"),
    "head": (more("lm_head.lora_A.weight", 4, 64), "MANIFEST_MISMATCH", "lm_head.lora_A.weight"),
    "whole module": (more("model.norm.weight", 64), "MANIFEST_MISMATCH", "neither lora_A nor lora_B"),
    "dora": (
        more("model.layers.0.self_attn.q_proj.lora_magnitude_vector", 64),
        "MANIFEST_MISMATCH",
        "lora_magnitude_vector",
    ),
    "twice": (
        more(Q_A.replace(".weight", ".default.weight"), 4, 64),
        "MANIFEST_MISMATCH",
        "names model.layers.0.self_attn.q_proj.lora_A.weight twice",
    ),
    "rank": (asked(rank=3), "MANIFEST_MISMATCH", "with rank 3 it must have [3, 64]"),
    "rank of one": (asked(modules=(OTHER_Q,)), "MANIFEST_MISMATCH", "with rank 2 it must have [2, 64]"),
    "rank too large": (asked(rank=RANK + 1), "MANIFEST_MISMATCH", f"ranks up to {RANK}"),
    "no rank": (asked(rank=0), "INVALID_UPDATE", "must be at least 1"),
    "no such module": (asked(modules=(ABSENT,)), "INVALID_UPDATE", "model.layers.9.self_attn.q_proj"),
    "name": (asked(name="a\nb"), "INVALID_UPDATE", "printable characters"),
    "no name": (asked(name=""), "INVALID_UPDATE", "printable characters"),
    "scaling": (asked(scaling=float("nan")), "INVALID_UPDATE", "must be finite"),
    "NaN": (spoilt(float("nan")), "NONFINITE", Q_A),
    "infinity": (spoilt(float("inf")), "NONFINITE", Q_A),
}


@pytest.mark.case("B012")
@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_fit_is_refused_and_the_held_version_serves_on(wrong, engine, ways, model, name):
    change, reason, text = WRONG[wrong]
    source = AdapterSource(model, name)
    push(engine, ways, source)
    before = live(engine)
    tensors, spec = change(dict(source), source.spec(engine.runner.target.arena.layout))
    with pytest.raises(UpdateRefused) as refused:
        ways.push("segment", tensors, adapter=spec)
    assert refused.value.reason == reason
    assert text in refused.value.message
    assert live(engine) == before
    assert_samples(engine, model, name, 1)
    learn(model)
    assert push(engine, ways, source).adapter_version == 2
    assert_samples(engine, model, name, 2)


@pytest.mark.parametrize(
    "fields",
    [
        {"partial": True},
        {"merged": True},
        {"keep_previous": True},
        {"allow_nonfinite": True},
        {"staging": Staging.NONE},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_an_adapter_cannot_be_asked_for_is_refused(fields, engine, ways, model, name):
    with pytest.raises(UpdateRefused, match=r"leave .* out") as refused:
        push(engine, ways, AdapterSource(model, name), "segment", **fields)
    assert refused.value.reason == "INVALID_UPDATE"


def test_a_byte_that_flips_on_the_way_refuses_the_adapter(engine, ways, model, name):
    source = AdapterSource(model, name)
    push(engine, ways, source)
    offer = ways.offer("stream", dict(source))
    spec = source.spec(engine.runner.target.arena.layout)
    begun = engine.begin(replace(offer.begin, adapter=spec))
    chunks = [(i, o, bytearray(d)) for i, o, d in offer.chunks()]
    chunks[5][2][7] ^= 1
    engine.stream(begun.update_id, chunks)
    with pytest.raises(UpdateRefused) as refused:
        engine.commit(begun.update_id)
    assert refused.value.reason == "CHECKSUM_MISMATCH"
    assert_samples(engine, model, name, 1)


def test_a_fault_in_the_commit_leaves_the_version_before_it_live(engine, ways, model, name, monkeypatch):
    """The new one is proven where it lies before a row may point to it."""
    source = AdapterSource(model, name)
    push(engine, ways, source)
    bank = engine.runner.adapters
    install = bank.install

    def spoil(slot, fitted):
        install(slot, fitted)
        next(iter(bank.parts.values())).a[slot, 0, 0] += 1

    monkeypatch.setattr(bank, "install", spoil)
    before = greedy(model, PROMPT)
    learn(model)
    with pytest.raises(UpdateRefused, match="what was live before is") as refused:
        push(engine, ways, source)
    assert refused.value.reason == "CHECKSUM_MISMATCH"
    assert engine.generate(PROMPT, adapter=name).tokens() == before[0]
    monkeypatch.undo()
    assert push(engine, ways, source).adapter_version == 2
    assert_samples(engine, model, name, 2)


def test_versions_only_grow_also_beyond_a_removal(engine, ways, model, name):
    source = AdapterSource(model, name)
    push(engine, ways, source, version=5)
    for version in (4, 5):
        with pytest.raises(UpdateRefused, match="is not larger than 5"):
            push(engine, ways, source, version=version)
    assert engine.call(m.RemoveAdapter, name=name) == {"version": 5, "num_aborted": 0}
    with pytest.raises(UpdateRefused, match="is not larger than 5"):
        push(engine, ways, source, version=5)
    assert push(engine, ways, source).adapter_version == 6
    other = push(engine, ways, AdapterSource(model, f"{name}-b"))
    assert other.adapter_version == 1, "each has versions of its own"


def test_no_room_names_those_that_are_held(engine, ways, model, name):
    for number in range(2):
        push(engine, ways, AdapterSource(model, f"{name}-{number}"))
    with pytest.raises(UpdateRefused) as refused:
        push(engine, ways, AdapterSource(model, name))
    assert refused.value.reason == "NO_ADAPTER_SLOT"
    assert f"held are {name}-0 (version 1), {name}-1 (version 1)" in refused.value.message
    assert push(engine, ways, AdapterSource(model, f"{name}-1")).adapter_version == 2, "one that is held has"
    engine.call(m.RemoveAdapter, name=f"{name}-0")
    assert push(engine, ways, AdapterSource(model, name)).adapter_version == 1
    assert_samples(engine, model, name, 1)
    assert_samples(engine, model, f"{name}-1", 2)


def test_an_engine_without_room_for_adapters_says_how_to_get_some(kept_engine, tmp_path, model):
    with ways_to(kept_engine, tmp_path) as ways, pytest.raises(UpdateRefused, match="--max-adapters"):
        push(kept_engine, ways, AdapterSource(model, "math", check_base=False))
    with pytest.raises(EngineError, match="--max-adapters"):
        kept_engine.generate(PROMPT, adapter="math")


# ---------------------------------------------------------------- PEFT's own directory


def test_a_directory_that_peft_saved(engine, tied_dir, name):
    model = adapted(tied_dir, use_rslora=True)
    directory = f"{held_folder(engine)}/{name}"
    model.save_pretrained(directory)
    begin = BeginUpdate(Path.DISK, directory=directory, adapter=AdapterSpec(name))
    reply = engine.update(FromDisk("", directory), begin)
    assert (reply.adapter_version, reply.num_tensors, reply.verified) == (1, 28, False)
    assert_samples(engine, model, name, 1)


def held_folder(engine: Desk) -> str:
    """A directory that the engine may read."""
    return str(engine.updater._manifests._roots[1])


@pytest.mark.parametrize(
    "config",
    [{"use_dora": True}, {"bias": "all"}, {"rank_pattern": {"q_proj": 2}}, {"modules_to_save": ["norm"]}],
    ids=lambda config: next(iter(config)),
)
def test_a_directory_with_more_than_plain_lora_is_refused_by_what_it_has(config, engine, tied_dir, name):
    directory = f"{held_folder(engine)}/{name}"
    adapted(tied_dir, **config).save_pretrained(directory)
    begin = BeginUpdate(Path.DISK, directory=directory, adapter=AdapterSpec(name))
    with pytest.raises(UpdateRefused, match=next(iter(config))) as refused:
        engine.update(FromDisk("", directory), begin)
    assert refused.value.reason == "INVALID_UPDATE"
