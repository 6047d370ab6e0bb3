"""A stock GRPOTrainer with a LoRA adapter: the engine holds the merged weights, the base keeps its bits."""

from __future__ import annotations

import pytest
from peft import LoraConfig

from tests.trl.test_trl_training import CLOSE, Watched, assert_fresh_weights_each_step
from tests.trl.trainers import MAX_TOKENS, STEPS, Learned, logged, make_trainer
from trainers_adapters.frameworks.trl import attach
from weight_updater.checksum import checksum

pytestmark = pytest.mark.trl


def base_bits(trainer) -> dict[str, int]:
    return {
        name: checksum(parameter.detach())
        for name, parameter in trainer.model.named_parameters()
        if not parameter.requires_grad
    }


@pytest.mark.case("B015")
def test_grpo_with_lora_by_attach(chat_model_dir, tmp_path, engine):
    base = engine.rollout.info().weight_version
    watched, learned = Watched(engine, lambda: trainer), Learned()
    trainer = make_trainer(
        "grpo",
        chat_model_dir,
        tmp_path,
        watched,
        callbacks=[learned],
        peft_config=LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    before = base_bits(trainer)
    assert len(before) == 20
    with attach(trainer, engine.address):
        trainer.train()
    assert_fresh_weights_each_step(watched, learned, base)
    assert base_bits(trainer) == before
    diffs = logged(trainer, "sampling/sampling_logp_difference/max")
    assert len(diffs) == STEPS
    assert max(diffs) < CLOSE
    ratios = logged(trainer, "sampling/importance_sampling_ratio/mean")
    assert ratios == pytest.approx([1.0] * STEPS, abs=CLOSE * MAX_TOKENS)
