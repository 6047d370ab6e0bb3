"""Adapters that cannot be held beside the base weights, and where PEFT saved them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from rollout_engine import messages as m
from rollout_engine.errors import EngineError
from tests.cases.adapters.common import PROMPT, RANK, assert_samples
from tests.cases.common import live
from tests.desk import Desk
from tests.lora import adapted, greedy, learn, push
from tests.ways import ways_to
from trainers_adapters import AdapterSource
from weight_updater.errors import UpdateRefused
from weight_updater.requests import AdapterModule, AdapterSpec, BeginUpdate, FromDisk, Path, Staging

Tensors = dict[str, torch.Tensor]


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
    "scaling beyond float32": (asked(scaling=1e39), "INVALID_UPDATE", "must be finite in float32"),
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
    [
        {"use_dora": True},
        {"bias": "all"},
        {"rank_pattern": {"q_proj": 2}},
        {"modules_to_save": ["norm"]},
        {"init_lora_weights": "pissa"},
    ],
    ids=lambda config: next(iter(config)),
)
def test_a_directory_with_more_than_plain_lora_is_refused_by_what_it_has(config, engine, tied_dir, name):
    directory = f"{held_folder(engine)}/{name}"
    adapted(tied_dir, **config).save_pretrained(directory)
    begin = BeginUpdate(Path.DISK, directory=directory, adapter=AdapterSpec(name))
    with pytest.raises(UpdateRefused, match=next(iter(config))) as refused:
        engine.update(FromDisk("", directory), begin)
    assert refused.value.reason == "INVALID_UPDATE"
