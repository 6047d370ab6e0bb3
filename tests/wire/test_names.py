"""Names over a real process: wrappers, adapters, partial updates, ties, and reading what is live."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.engines import RunningEngine, serve
from tests.tiny import make_tiny
from tests.wire.trainer import (
    PATHS,
    Named,
    assert_serves,
    begin,
    checksums_of,
    chunks_of,
    push,
)
from trainers_adapters import ModuleSource, RollsyncError


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "qwen2", "qwen2", tied=True)


@pytest.fixture(scope="module")
def engine(model_dir, work_dir) -> Iterator[RunningEngine]:
    with serve(model_dir, "--weights-root", str(work_dir), "--num-pages", "64", forked=True) as running:
        yield running


def reason_of(call: Callable, *args, **kwargs) -> str:
    with pytest.raises(RollsyncError) as refused:
        call(*args, **kwargs)
    return refused.value.reason


def renamed(model, name: Callable[[str], str]) -> Named:
    return Named((name(n), t) for n, t in ModuleSource(model))


WRAPPERS = {
    "DDP": ("B006", lambda n: f"module.{n}"),
    "compile": ("B006", lambda n: f"_orig_mod.{n}"),
    "DDP of compile": ("B006", lambda n: f"module._orig_mod.{n}"),
    "compile of DDP": ("B006", lambda n: f"_orig_mod.module.{n}"),
    "FSDP": (
        "B007",
        lambda n: (
            "_fsdp_wrapped_module."
            + n.replace(".mlp.", "._fsdp_wrapped_module._checkpoint_wrapped_module.mlp.")
        ),
    ),
    "PEFT": ("B009", lambda n: "base_model.model." + n.replace("q_proj.", "q_proj.base_layer.")),
}


@pytest.mark.parametrize(
    "wrapper", [pytest.param(w, marks=pytest.mark.case(case)) for w, (case, _) in WRAPPERS.items()]
)
def test_wrapper_segments_are_no_part_of_a_name(wrapper, engine, model):
    wrapped = renamed(model, WRAPPERS[wrapper][1])
    report = push(wrapped, engine)
    (reply,) = report.replies.values()
    assert (reply.num_tensors, reply.unmatched) == (len(wrapped.named), ())
    assert_serves(engine, model, report.version)


@pytest.mark.case("B009")
def test_adapters_are_skipped_only_if_they_are_said_to_be_merged(engine, model):
    adapter = torch.ones(4, 64)
    named = renamed(model, WRAPPERS["PEFT"][1]).named
    q = "base_model.model.model.layers.0.self_attn.q_proj"
    source = Named(
        [*named, (f"{q}.lora_A.default.weight", adapter), (f"{q}.lora_B.default.weight", adapter.T)]
    )
    before = engine.weights.checksums()
    with pytest.raises(RollsyncError) as refused:
        begin(engine, source)
    assert refused.value.reason == "MANIFEST_MISMATCH"
    assert "lora_A" in refused.value.message
    assert engine.weights.checksums() == before
    begun = begin(engine, source, merged=True)
    engine.weights.update_from_tensor(begun.update_id, chunks_of(source))
    assert_serves(engine, model, engine.weights.commit(begun.update_id).version)


@pytest.mark.case("B018")
@pytest.mark.parametrize("path", PATHS)
def test_a_partial_update_writes_what_it_brings_and_names_the_rest(path, engine, senders, model):
    push(ModuleSource(model), engine)
    before = engine.weights.checksums().by_name
    name = "model.layers.0.mlp.down_proj.weight"
    one = Named([(name, torch.randn(64, 96)), ("not.there", torch.ones(2))])
    assert reason_of(push, one, engine, via=senders[path]) == "MANIFEST_MISMATCH"
    (reply,) = push(one, engine, via=senders[path], partial=True).replies.values()
    assert (reply.num_tensors, reply.num_changed, reply.unmatched) == (1, 1, ("not.there",))
    assert engine.weights.checksums().by_name == before | checksums_of(one.named[:1])
    nothing = Named(one.named[1:])
    assert reason_of(push, nothing, engine, via=senders[path], partial=True) == "MANIFEST_MISMATCH"


def test_live_bytes_can_be_read_by_name(engine, model):
    version = push(ModuleSource(model), engine).version
    names = ModuleSource(model).names
    weights = engine.weights.get_weights(names)
    for name, tensor in ModuleSource(model):
        assert torch.equal(weights[name].tensor(), tensor)
        assert weights[name].weight_version == version
    tied = engine.weights.get_weights("lm_head.weight")["lm_head.weight"]
    assert torch.equal(tied.tensor(), model.lm_head.weight)
    assert reason_of(engine.weights.get_weights, "no.such.weight") == "UNKNOWN_NAME"
    assert reason_of(engine.weights.checksums, "no.such.weight") == "UNKNOWN_NAME"
    some = engine.weights.checksums(names[2:4]).by_name
    assert some == {n: c for n, c in checksums_of(ModuleSource(model)).items() if n in names[2:4]}
