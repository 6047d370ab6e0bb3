"""Names: which of them reach a slot, and that none is passed over in silence."""

from __future__ import annotations

import pytest
import torch

from rollout_engine.config import load_config
from rollout_engine.errors import ConfigError
from tests.cases.common import EMBED, GATE, Q, Tensors, assert_serves, live, trained
from tests.ways import STAGINGS, WAYS
from weight_updater.checksum import checksum, fold_by_name
from weight_updater.errors import Reason, UpdateRefused
from weight_updater.requests import Staging

WRAPPERS = {
    "DDP": lambda n: f"module.{n}",
    "compile": lambda n: f"_orig_mod.{n}",
    "DDP of compile": lambda n: f"module._orig_mod.{n}",
    "compile of DDP": lambda n: f"_orig_mod.module.{n}",
    "compiled layers": lambda n: n.replace(".layers.0.", ".layers.0._orig_mod."),
    "FSDP": lambda n: "_fsdp_wrapped_module." + n,
    "FSDP in FSDP": lambda n: (
        "_fsdp_wrapped_module." + n.replace(".mlp.", "._fsdp_wrapped_module._checkpoint_wrapped_module.mlp.")
    ),
    "all of them": lambda n: (
        "module._orig_mod._fsdp_wrapped_module."
        + n.replace("layers.1.", "layers.1._checkpoint_wrapped_module.")
    ),
}


@pytest.mark.case("B006")
@pytest.mark.case("B007")
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("way", WAYS)
def test_wrapped_names_end_in_the_same_checksums(way, wrapper, engine, ways, tied_dir, weights):
    new = trained(weights)
    reply = ways.push(way, {WRAPPERS[wrapper](name): tensor for name, tensor in new.items()})
    assert (reply.num_tensors, reply.unmatched) == (len(new), ())
    assert (
        reply.received_checksum
        == reply.live_checksum
        == fold_by_name({n: checksum(t) for n, t in new.items()})
    )
    assert_serves(engine, tied_dir, new)


def lookalikes(tensors: Tensors) -> Tensors:
    """Names that only look wrapped: a part of a segment is no segment."""
    return {name.replace("mlp", "my_module_mlp"): tensor for name, tensor in tensors.items()}


@pytest.mark.case("B006")
@pytest.mark.case("B018")
def test_a_name_that_holds_a_wrapper_word_is_another_name(engine, ways, weights):
    before = live(engine)
    with pytest.raises(UpdateRefused, match=r"tensors that the model lacks: .*my_module_mlp"):
        ways.push("stream", lookalikes(trained(weights)))
    assert live(engine) == before


STRANGERS = {
    "another root": lambda n: f"language_model.{n}",
    "a root less": lambda n: n.removeprefix("model."),
    "another middle": lambda n: n.replace(".layers.", ".h.").replace(".norm.", ".ln."),
    "another leaf": lambda n: n.replace(".weight", ".kernel"),
    "upper case": str.upper,
    "an adapter of another model": lambda n: (
        f"base_model.model.language_model.{n.replace('proj.', 'proj.base_layer.')}"
    ),
}


@pytest.mark.case("B012")
@pytest.mark.parametrize(
    "options", [{}, {"partial": True}, {"merged": True}, {"partial": True, "merged": True}]
)
@pytest.mark.parametrize("stranger", STRANGERS)
def test_right_suffixes_on_wrong_paths_match_nothing(stranger, options, engine, ways, weights):
    before = live(engine)
    sent = {STRANGERS[stranger](name): tensor for name, tensor in trained(weights).items() if name != EMBED}
    for way in WAYS:
        with pytest.raises(UpdateRefused) as refused:
            ways.push(way, sent, **options)
        assert refused.value.reason is Reason.MANIFEST_MISMATCH
        text = refused.value.message
        assert f"none of the manifest's {len(sent)} tensors matches a slot" in text
        assert next(iter(sent)) in text, "the sender's side"
        assert EMBED in text, "and the engine's"
    assert live(engine) == before


@pytest.mark.case("B009")
@pytest.mark.case("B012")
@pytest.mark.parametrize("merged", [False, True])
def test_adapters_alone_are_never_a_success(merged, engine, ways, weights):
    """No adapter is applied here, so an update of adapters only would change nothing."""
    before = live(engine)
    base = f"base_model.model.{Q.removesuffix('.weight')}"
    sent = {
        f"{base}.lora_A.default.weight": torch.ones(2, 64),
        f"{base}.lora_B.default.weight": torch.ones(64, 2),
    }
    for way in WAYS:
        for partial in (False, True):
            with pytest.raises(UpdateRefused, match="lora_A"):
                ways.push(way, sent, merged=merged, partial=partial)
    assert live(engine) == before


@pytest.mark.case("B018")
@pytest.mark.parametrize("way", WAYS)
def test_nine_unknown_of_ten(way, engine, ways, weights):
    before = live(engine)
    unknown = {f"model.layers.{i}.attn.w": torch.ones(2) for i in range(9)}
    sent = {GATE: trained(weights)[GATE], **unknown}
    with pytest.raises(UpdateRefused) as refused:
        ways.push(way, sent)
    assert all(name in refused.value.message for name in unknown)
    assert live(engine) == before
    reply = ways.push(way, sent, partial=True)
    assert (reply.num_tensors, set(reply.unmatched)) == (1, set(unknown))
    assert torch.equal(engine.runner.target.slot(GATE), sent[GATE])
    with pytest.raises(UpdateRefused, match="none of the manifest's 9 tensors"):
        ways.push(way, unknown, partial=True)
    assert engine.version == before[2] + 1


@pytest.mark.case("B018")
@pytest.mark.parametrize("way", WAYS)
def test_names_left_out_are_listed(way, engine, ways, weights):
    before = live(engine)
    sent = dict(list(trained(weights).items())[:-3])
    with pytest.raises(UpdateRefused) as refused:
        ways.push(way, sent)
    assert "lacks 3 of the model's" in refused.value.message
    assert all(name in refused.value.message for name in list(weights)[-3:])
    assert live(engine) == before


FREQUENCIES = (
    "model.rotary_emb.inv_freq",
    "model.layers.1.self_attn.rotary_emb.inv_freq",
    "module._orig_mod.model.layers.0.self_attn.rotary_emb.inv_freq",
)


@pytest.mark.case("B034")
@pytest.mark.parametrize("staging", STAGINGS)
@pytest.mark.parametrize("way", WAYS)
def test_rounded_frequencies_of_a_trainer_are_not_taken(way, staging, engine, ways, tied_dir, weights):
    tables = {n: b.clone() for n, b in engine.runner.model.named_buffers()}
    assert tables, "the engine keeps rotary tables"
    exact = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    new = trained(weights)
    rounded = {name: exact.bfloat16() for name in FREQUENCIES}
    reply = ways.push(way, {**rounded, **new}, staging=staging)
    assert set(reply.unmatched) == set(FREQUENCIES)
    assert all(torch.equal(b, tables[n]) for n, b in engine.runner.model.named_buffers())
    assert_serves(engine, tied_dir, new)


@pytest.mark.case("B114")
@pytest.mark.parametrize("key", ["draft_model", "speculative_model", "num_speculative_tokens"])
def test_an_engine_with_a_draft_cannot_be_asked_for(key, tied_dir, tmp_path):
    with pytest.raises(ConfigError, match=key):
        load_config({"model": tied_dir, key: "1"})
    (tmp_path / "serve.toml").write_text(f'{key} = "1"\n')
    with pytest.raises(ConfigError, match=key):
        load_config({"model": tied_dir}, tmp_path / "serve.toml")


@pytest.mark.case("B114")
@pytest.mark.parametrize("prefix", ["draft.", "mtp.", "model.draft_model.", "eagle.model."])
def test_weights_of_a_draft_are_refused_where_there_is_none(prefix, engine, ways, tied_dir, weights):
    """A trainer that sends them believes that they are used; in silence its draft would grow old."""
    before, new = live(engine), trained(weights)
    draft = {
        f"{prefix}layers.0.mlp.up_proj.weight": torch.ones(96, 64),
        f"{prefix}norm.weight": torch.ones(64),
    }
    for way in WAYS:
        with pytest.raises(UpdateRefused, match="2 tensors that the model lacks") as refused:
            ways.push(way, {**new, **draft})
        assert all(name in refused.value.message for name in draft)
    assert live(engine) == before
    reply = ways.push("stream", {**new, **draft}, partial=True, staging=Staging.HOST)
    assert set(reply.unmatched) == set(draft), "the reply says what was left out"
    assert_serves(engine, tied_dir, new)
