"""Stock trainers with a LoRA adapter: the engine holds the merged weights, the base keeps its bits."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from peft import LoraConfig

from tests.trl.test_trl_training import CLOSE, Watched, assert_fresh_weights_each_step
from tests.trl.trainers import MAX_TOKENS, STEPS, Learned, logged, make_trainer
from trainers_adapters.frameworks.trl import attach, make_rollout_func
from weight_updater.checksum import checksum

pytestmark = pytest.mark.trl


def base_bits(trainer) -> dict[str, int]:
    return {
        name: checksum(parameter.detach())
        for name, parameter in trainer.model.named_parameters()
        if not parameter.requires_grad
    }


@pytest.mark.case("B015")
@pytest.mark.parametrize("seam", ["grpo", "rloo", "rollout_func"])
def test_a_lora_run_samples_from_the_merged_weights(chat_model_dir, tmp_path, engine, seam):
    base = engine.rollout.info().weight_version
    watched, learned = Watched(engine, lambda: trainer), Learned()
    settings = {
        "callbacks": [learned],
        "peft_config": LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
    }
    with ExitStack() as stack:
        if seam == "rollout_func":
            settings["rollout_func"] = stack.enter_context(make_rollout_func(engine.address))
        kind = "rloo" if seam == "rloo" else "grpo"
        trainer = make_trainer(kind, chat_model_dir, tmp_path, watched, **settings)
        before = base_bits(trainer)
        assert len(before) == 20
        if seam != "rollout_func":
            stack.enter_context(attach(trainer, engine.address))
        trainer.train()
    assert_fresh_weights_each_step(watched, learned, base)
    assert base_bits(trainer) == before
    if seam == "grpo":
        diffs = logged(trainer, "sampling/sampling_logp_difference/max")
        assert len(diffs) == STEPS
        assert max(diffs) < CLOSE
        ratios = logged(trainer, "sampling/importance_sampling_ratio/mean")
        assert ratios == pytest.approx([1.0] * STEPS, abs=CLOSE * MAX_TOKENS)
