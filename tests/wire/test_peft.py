"""A LoRA trainer and a real engine: it serves the merged weights, and samples what the trainer computes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.engines import RunningEngine, serve
from tests.late import peft
from tests.programs import run_program
from tests.tiny import load_reference, make_tiny
from tests.wire.trainer import PATHS, PROMPT, checksums_of, push, reference_tokens
from trainers_adapters import ModuleSource, PeftSource, RollsyncError

if TYPE_CHECKING:
    from peft import PeftModel


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model") / "qwen2", "qwen2", tied=True)


@pytest.fixture(scope="module")
def engine(model_dir, work_dir) -> Iterator[RunningEngine]:
    with serve(model_dir, "--weights-root", str(work_dir), "--num-pages", "64", forked=True) as running:
        yield running


def adapted(model_dir: Path, **config) -> PeftModel:
    torch.manual_seed(0)
    model = peft.get_peft_model(
        load_reference(model_dir), peft.LoraConfig(task_type="CAUSAL_LM", **config)
    ).eval()
    learn(model)
    return model


def learn(model: PeftModel) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.2)


def assert_serves_merged(engine: RunningEngine, model: PeftModel, version: int) -> None:
    live = engine.weights.checksums()
    merged = checksums_of(ModuleSource(copy.deepcopy(model).merge_and_unload()))
    assert (live.by_name, live.weight_version) == (merged, version)
    assert engine.greedy(PROMPT, ignore_eos=True).token_ids == reference_tokens(model, PROMPT)


@pytest.mark.case("B009")
@pytest.mark.parametrize("path", PATHS)
def test_every_path_brings_the_merged_weights_of_each_step(path, engine, senders, model_dir):
    model = adapted(model_dir, r=4, target_modules="all-linear", modules_to_save=["norm"], bias="all")
    source = PeftSource(model)
    assert_serves_merged(engine, model, push(source, engine, via=senders[path]).version)
    learn(model)
    report = push(source, engine, via=senders[path])
    assert_serves_merged(engine, model, report.version)
    again = push(source, engine, via=senders[path])
    assert (again.num_changed, again.version) == (0, report.version + 1)


@pytest.mark.case("B005")
def test_an_adapter_that_parts_a_tied_head_is_refused_by_an_engine_that_ties_it(engine, model_dir):
    model = adapted(model_dir, r=4, target_modules=["embed_tokens"])
    before = engine.weights.checksums()
    with pytest.raises(RollsyncError, match="are tied in this model but bring different values"):
        push(PeftSource(model), engine)
    assert engine.weights.checksums() == before


def test_the_program_of_the_documentation(engine, model_dir, tmp_path):
    printed = run_program("lora.md", tmp_path, MODEL=str(model_dir), ROLLSYNC_ADDRESS=engine.address)
    lines = printed.splitlines()
    assert len(lines) == 4
    assert all("14 tensors changed" in line for line in lines[1:]), "seven layers in each of two blocks"
