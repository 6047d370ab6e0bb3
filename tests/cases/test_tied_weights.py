"""Tied heads: one memory, one value, whatever a checkpoint or a trainer brings of it."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cases.common import (
    EMBED,
    HEAD,
    NORM,
    Tensors,
    assert_serves,
    live,
    logits,
    reference,
    reference_logits,
    stored,
    trained,
)
from tests.desk import desk
from tests.tiny import ARCHITECTURES, load_reference, make_tiny
from tests.ways import STAGINGS, WAYS, Ways
from tests.wire.trainer import PROMPT
from trainers_adapters import ModuleSource
from weight_updater.errors import Reason, UpdateRefused, WeightsTorn
from weight_updater.requests import Staging
from weight_updater.safetensors_io import save_weights


@pytest.mark.case("B001")
@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("way", WAYS)
def test_an_embedding_alone_feeds_the_head_too(way, staging, engine, ways, tied_dir, weights):
    assert HEAD not in weights
    addresses = engine.runner.target.addresses()
    new = trained(weights)
    assert ways.push(way, new, staging=staging).num_tensors == len(new)
    model = engine.runner.model
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert engine.runner.target.addresses() == addresses
    assert torch.equal(model.lm_head.weight, new[EMBED])
    expected = reference_logits(reference(tied_dir, new), PROMPT)
    assert torch.allclose(logits(engine, PROMPT), expected, atol=1e-5)
    assert_serves(engine, tied_dir, new)


@pytest.mark.case("B001")
@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("way", WAYS)
def test_pipeline_stages_of_a_trainer_feed_the_head_and_the_embedding(
    way, staging, engine, ways, tied_dir, weights
):
    """The first has the embedding, the last a copy of it as its head; neither is the model by itself."""
    before, new = live(engine), trained(weights)
    first = {name: new[name] for name in new if name == EMBED or ".layers.0." in name}
    last = {name: new[name] for name in new if name not in first} | {HEAD: new[EMBED].clone()}
    for stage in (first, last):
        with pytest.raises(UpdateRefused, match="the manifest lacks"):
            ways.push(way, stage, staging=staging)
    assert live(engine) == before
    ways.push(way, last, staging=staging, partial=True)
    model = engine.runner.model
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert torch.equal(model.model.embed_tokens.weight, new[EMBED]), "the head alone moves both"
    ways.push(way, first, staging=staging, partial=True)
    assert_serves(engine, tied_dir, new)


@pytest.mark.case("B001")
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("has_head", [False, True])
def test_tied_checkpoints_of_every_architecture_load(name, has_head, tmp_path):
    """Siblings of a family differ in whether their file stores the head as well."""
    directory = make_tiny(tmp_path / name, name, tied=True, seed=3)
    tensors = stored(directory)
    if has_head:
        save_file(tensors | {HEAD: tensors[EMBED].clone()}, directory / "model.safetensors")
    expected = reference_logits(load_reference(directory), PROMPT)
    with desk(directory) as engine:
        assert torch.allclose(logits(engine, PROMPT), expected, atol=1e-5)


@pytest.mark.case("B002")
@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("way", WAYS)
def test_both_names_of_equal_value_are_one_write(way, staging, engine, ways, tied_dir, weights):
    new = trained(weights)
    reply = ways.push(way, {HEAD: new[EMBED].clone(), **new}, staging=staging)
    assert (reply.num_tensors, reply.unmatched) == (len(new), ())
    assert_serves(engine, tied_dir, new)


@pytest.mark.case("B002")
@pytest.mark.parametrize("checksums_came", [True, False])
@pytest.mark.parametrize("staging", [Staging.DEVICE, Staging.HOST])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("first", [HEAD, EMBED])
def test_both_names_of_other_values_are_refused(first, way, staging, checksums_came, engine, ways, weights):
    before = live(engine)
    new = trained(weights)
    both = {HEAD: new[EMBED] + 1, **new}
    sent = both if first == HEAD else dict(reversed(both.items()))
    with pytest.raises(UpdateRefused, match=f"{HEAD} and {EMBED} are tied") as refused:
        ways.push(way, sent, staging=staging, checksums_came=checksums_came)
    assert refused.value.reason is Reason.MANIFEST_MISMATCH
    assert live(engine) == before


@pytest.mark.case("B002")
@pytest.mark.parametrize("way", WAYS)
def test_other_values_are_refused_or_torn_but_never_live_without_staging(
    way, engine, ways, tied_dir, weights
):
    """A stream and a broadcast show their bytes but once: there it is known after the write."""
    before, new = live(engine), trained(weights)
    sent = {**new, HEAD: new[EMBED] + 1}
    with pytest.raises((UpdateRefused, WeightsTorn), match="are tied"):
        ways.push(way, sent, staging=Staging.NONE, checksums_came=False)
    assert engine.version == before[2]
    assert bool(engine.updater.torn_reason) == (way in ("stream", "distributed"))
    if way not in ("stream", "distributed"):
        assert live(engine) == before
    ways.push(way, new)
    assert_serves(engine, tied_dir, new)


@pytest.mark.case("B002")
@pytest.mark.parametrize("name", ["mtp.lm_head.weight", "model.mtp.lm_head.weight", "draft.lm_head.weight"])
def test_a_head_of_something_else_is_no_tie(name, engine, ways, weights):
    before = live(engine)
    other = {**trained(weights), name: torch.ones(128, 64)}
    with pytest.raises(UpdateRefused, match=f"1 tensors that the model lacks: {name}"):
        ways.push("stream", other)
    assert live(engine) == before
    reply = ways.push("stream", other, partial=True)
    assert reply.unmatched == (name,), "told, not dropped"
    assert torch.equal(engine.runner.target.slot(HEAD), other[EMBED])


@pytest.mark.case("B004")
def test_a_model_that_was_made_without_weights_is_tied_in_memory(tied_dir, tmp_path):
    with (
        desk(tied_dir, load_format="random", weights_roots=(tmp_path,)) as engine,
        Ways(engine, tmp_path) as ways,
    ):
        model = engine.runner.model
        for seed in range(2):
            assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
            new = trained(stored(tied_dir))
            ways.push("disk", new)
            assert torch.equal(model.lm_head.weight, new[EMBED]), seed
        assert_serves(engine, tied_dir, new)


def rebind_the_head(model) -> None:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone(), requires_grad=False)


def assign_a_state(model) -> None:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def move_one(model) -> None:
    model.model.norm.weight.data = model.model.norm.weight.data.clone()


@pytest.mark.case("B004")
@pytest.mark.parametrize(
    ("break_it", "first"), [(rebind_the_head, HEAD), (assign_a_state, EMBED), (move_one, NORM)]
)
def test_a_tie_or_a_place_that_was_lost_fails_the_update(break_it, first, tied_dir, tmp_path):
    """The config says tied; what counts is where the memory lies."""
    with desk(tied_dir, reserve_device_staging=True) as engine, Ways(engine, tmp_path) as ways:
        break_it(engine.runner.model)
        before = live(engine)
        for way, staging in (("stream", Staging.HOST), ("ipc", Staging.NONE), ("segment", Staging.DEVICE)):
            with pytest.raises(UpdateRefused, match=f"do not lie where updates write, {first}"):
                ways.push(way, trained(stored(tied_dir)), staging=staging)
        assert live(engine) == before


@pytest.mark.case("B005")
@pytest.mark.parametrize("max_shard_bytes", [5 << 30, 20_000])
def test_a_tied_model_is_saved_under_one_name_and_loads(max_shard_bytes, tied_dir, tmp_path):
    model = load_reference(tied_dir)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with pytest.raises(RuntimeError, match="share memory"):
        save_file(dict(model.state_dict()), tmp_path / "raw.safetensors")
    saved = tmp_path / "saved"
    save_weights(str(saved), ModuleSource(model), max_shard_bytes=max_shard_bytes)
    found: Tensors = {}
    for file in saved.glob("*.safetensors"):
        found |= load_file(file)
    assert EMBED in found
    assert HEAD not in found
    (saved / "config.json").write_bytes((tied_dir / "config.json").read_bytes())
    with desk(saved) as engine:
        assert_serves(engine, tied_dir, found)
