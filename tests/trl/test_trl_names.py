"""A TRL that calls things otherwise: attach says which name is missing, and in which versions."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from trl import GRPOTrainer, RLOOTrainer

from tests.trl.trainers import Seen, make_trainer
from trainers_adapters.frameworks.trl import attach
from trainers_adapters.frameworks.trl_names import IncompatibleTrl

pytestmark = pytest.mark.trl

NOWHERE = "127.0.0.1:1"
"""Names are looked at before an engine is asked for."""


@pytest.fixture(params=["grpo", "rloo"])
def trainer(request, chat_model_dir, tmp_path):
    return make_trainer(request.param, chat_model_dir, tmp_path, Seen())


def refusal(trainer) -> str:
    with pytest.raises(IncompatibleTrl) as refused:
        attach(trainer, NOWHERE)
    return str(refused.value)


@pytest.mark.parametrize(
    "name", ["use_vllm", "vllm_mode", "eos_token_ids", "_metrics", "max_completion_length"]
)
def test_a_missing_attribute_is_named_with_the_versions(trainer, name):
    delattr(trainer, name)
    said = refusal(trainer)
    assert f"trl {version('trl')} lacks {type(trainer).__name__}.{name}, which" in said
    assert f"rollsync {version('rollsync')} attaches to; install trl>=1.16,<1.17" in said
    assert ("make_rollout_func" in said) == isinstance(trainer, GRPOTrainer)


def test_a_missing_method_is_named(trainer, monkeypatch):
    stock = type(trainer)
    monkeypatch.delattr(stock, "_generate_single_turn")
    monkeypatch.delattr(stock, "_calculate_rewards")
    said = refusal(trainer)
    assert f"lacks {stock.__name__}._generate_single_turn, {stock.__name__}._calculate_rewards(self, " in said


def test_a_turn_that_syncs_or_asks_otherwise_is_refused(trainer, monkeypatch):
    def turn(self, prompt_ids):
        if self.use_vllm and self.state.global_step != self._last_synced_step:
            self.vllm_generation.sync_weights()
        return self.vllm_generation.generate(prompts=prompt_ids, n=4)

    monkeypatch.setattr(type(trainer), "_generate_single_turn", turn)
    where = f"{type(trainer).__name__}._generate_single_turn: "
    assert (
        f"lacks {where}_last_loaded_step, "
        f"{where}vllm_generation.generate(prompts=, images=, num_generations=, profiler=), which"
    ) in refusal(trainer)


def test_rewards_with_other_parameters_are_refused(trainer, monkeypatch):
    monkeypatch.setattr(type(trainer), "_calculate_rewards", lambda self, inputs, completions: None)
    said = refusal(trainer)
    assert "_calculate_rewards(self, inputs, prompts, completions, completion_ids_list), which" in said


def test_trl_as_it_is_has_every_name(trainer):
    from trainers_adapters.frameworks.trl_names import check_names

    check_names(trainer)
    assert isinstance(trainer, GRPOTrainer | RLOOTrainer)


def test_other_trainers_and_settings_are_refused(trainer, chat_model_dir, tmp_path):
    with pytest.raises(TypeError, match=r"takes a trl GRPOTrainer or RLOOTrainer, not builtins\.object"):
        attach(object(), NOWHERE)
    trainer.use_vllm = True
    with pytest.raises(ValueError, match="build it with use_vllm=False"):
        attach(trainer, NOWHERE)
    both = make_trainer("grpo", chat_model_dir, tmp_path, Seen(), rollout_func=lambda prompts, trainer: {})
    with pytest.raises(ValueError, match="has a rollout_func; use either that or attach"):
        attach(both, NOWHERE)


def test_no_engine_and_another_model_are_named_at_attach(trainer, tiny_llama_dir):
    from tests.engines import serve
    from trainers_adapters import RollsyncError
    from trainers_adapters.frameworks.live_engine import EngineLost

    with pytest.raises(EngineLost, match=r"engine at 127\.0\.0\.1:1 has not answered for 0 s"):
        attach(trainer, NOWHERE, restart_s=0.0)
    with (
        serve(tiny_llama_dir, "--num-pages", "64") as other,
        pytest.raises(RollsyncError, match="OTHER_MODEL: the engine serves LlamaForCausalLM with 128 tokens"),
    ):
        attach(trainer, other.address)
    assert trainer.use_vllm is False
