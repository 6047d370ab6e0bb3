"""Stock GRPOTrainer by both seams, RLOOTrainer by attach: what they train on and what the engine holds."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

from tests.tiny_chat import ENDING_IDS
from tests.trl.trainers import (
    MAX_TOKENS,
    NUM_GENERATIONS,
    STEPS,
    Learned,
    Seen,
    checksums_of,
    logged,
    make_trainer,
    questions,
)
from trainers_adapters.frameworks.trl import attach, make_rollout_func

pytestmark = pytest.mark.trl

CLOSE = 1e-4


class Watched(Seen):
    """Also looks, when rewards are due, at what the engine and what the trainer hold."""

    def __init__(self, engine, trainer_of) -> None:
        super().__init__()
        self.engine, self.trainer_of = engine, trainer_of
        self.live = []
        self.held = []

    def __call__(self, **given):
        live = self.engine.weights.checksums()
        self.live.append((live.weight_version, live.by_name))
        self.held.append(checksums_of(self.trainer_of().model))
        return super().__call__(**given)


def trainer_logprobs(trainer, prompt_ids, completion_ids) -> list[float]:
    """Of the completion's tokens, by the trainer's own model in one plain forward pass."""
    ids = torch.tensor([[*prompt_ids, *completion_ids]])
    with torch.no_grad():
        logits = trainer.model(ids).logits[0, len(prompt_ids) - 1 : -1] / trainer.temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(completion_ids)[:, None])[:, 0].tolist()


def assert_fresh_weights_each_step(watched: Watched, learned: Learned, base: int) -> None:
    """Each step sampled from exactly the weights that the optimizer had left, under a label of its own."""
    versions = range(base + 1, base + STEPS + 1)
    assert watched.versions == [[version] * 2 * NUM_GENERATIONS for version in versions]
    assert watched.live == list(zip(versions, watched.held, strict=True))
    assert watched.held[1:] == learned.after_steps[:-1]
    changed = [before != after for before, after in zip(watched.held, learned.after_steps, strict=True)]
    assert changed == [True] * STEPS


def assert_eos_is_kept(watched: Watched) -> None:
    """A completion ends at its first EOS, which it keeps, or at the limit."""
    ended = 0
    for completion in (ids for batch in watched.completion_ids for ids in batch):
        assert not any(token in ENDING_IDS for token in completion[:-1])
        assert completion[-1] in ENDING_IDS or len(completion) == MAX_TOKENS
        ended += completion[-1] in ENDING_IDS
    assert ended > STEPS


@pytest.fixture
def base(engine):
    """The version that the engine has before a test, which others of the module have moved."""
    return engine.rollout.info().weight_version


@pytest.mark.parametrize("chat", [True, False], ids=["chat", "text"])
def test_grpo_by_rollout_func(chat_model_dir, tmp_path, chat, engine, base, show):
    diffs = []
    watched, learned = Watched(engine, lambda: trainer), Learned()
    with make_rollout_func(engine.address) as rollout:

        def compared(prompts, trainer):
            said = rollout(prompts, trainer)
            for prompt, ids, logprobs in zip(
                said["prompt_ids"], said["completion_ids"], said["logprobs"], strict=True
            ):
                mine = trainer_logprobs(trainer, prompt, ids)
                diffs.append(max(abs(a - b) for a, b in zip(mine, logprobs, strict=True)))
            expected = [
                trainer.processing_class.apply_chat_template(
                    prompt, add_generation_prompt=True, return_dict=False
                )
                if chat
                else trainer.processing_class(prompt)["input_ids"]
                for prompt in prompts
            ]
            assert said["prompt_ids"] == expected
            return said

        trainer = make_trainer(
            "grpo",
            chat_model_dir,
            tmp_path,
            watched,
            chat=chat,
            rollout_func=compared,
            callbacks=[learned],
            temperature=0.8,
        )
        trainer.train()
    assert_fresh_weights_each_step(watched, learned, base)
    assert_eos_is_kept(watched)
    assert len(diffs) == STEPS * 2 * NUM_GENERATIONS
    assert max(diffs) < CLOSE
    show(f"largest log-probability difference {max(diffs):.1e}")


@pytest.mark.parametrize("path", ["ipc", "tensor", "distributed"])
def test_grpo_by_attach(chat_model_dir, tmp_path, path, engine, base, show):
    watched, learned = Watched(engine, lambda: trainer), Learned()
    trainer = make_trainer("grpo", chat_model_dir, tmp_path, watched, callbacks=[learned], temperature=0.8)
    with attach(trainer, engine.address, path=path):
        trainer.train()
    assert_fresh_weights_each_step(watched, learned, base)
    assert_eos_is_kept(watched)
    diffs = logged(trainer, "sampling/sampling_logp_difference/max")
    assert len(diffs) == STEPS
    assert max(diffs) < CLOSE
    ratios = {}
    for end in ("min", "mean", "max"):
        ratios[end] = logged(trainer, f"sampling/importance_sampling_ratio/{end}")
        assert ratios[end] == pytest.approx([1.0] * STEPS, abs=CLOSE * MAX_TOKENS)
    assert logged(trainer, "rollsync/weight_version") == list(range(base + 1, base + STEPS + 1))
    assert min(logged(trainer, "rollsync/update_seconds")) > 0
    show(
        f"largest log-probability difference {max(diffs):.1e}, importance ratios from "
        f"{min(ratios['min']):.6f} to {max(ratios['max']):.6f}"
    )


def test_rloo_by_attach(chat_model_dir, tmp_path, engine, base, show):
    watched, learned = Watched(engine, lambda: trainer), Learned()
    trainer = make_trainer("rloo", chat_model_dir, tmp_path, watched, callbacks=[learned])
    with attach(trainer, engine.address) as attached:
        told = attached.generate
        diffs = []

        def compared(prompts, images, num_generations, profiler=None):
            said = told(prompts, images, num_generations, profiler)
            for prompt, ids, logprobs, of_ids in zip(*said, strict=True):
                assert [[token] for token in ids] == of_ids
                mine = trainer_logprobs(trainer, prompt, ids)
                diffs.append(max(abs(a - b[0]) for a, b in zip(mine, logprobs, strict=True)))
            return said

        attached.generate = compared
        trainer.train()
    assert_fresh_weights_each_step(watched, learned, base)
    assert_eos_is_kept(watched)
    assert len(diffs) == STEPS * 2 * NUM_GENERATIONS
    assert max(diffs) < CLOSE
    show(f"largest log-probability difference {max(diffs):.1e}")


@pytest.mark.parametrize("seam", ["attach", "rollout_func"])
def test_a_second_run_does_not_sample_from_the_weights_of_the_first(chat_model_dir, tmp_path, engine, seam):
    """Both begin at step 0, and TRL pushes when its step has changed."""
    watched = Watched(engine, lambda: trainer)
    with ExitStack() as stack:
        if seam == "attach":
            trainer = make_trainer("grpo", chat_model_dir, tmp_path, watched, max_steps=1)
            stack.enter_context(attach(trainer, engine.address))
        else:
            rollout = stack.enter_context(make_rollout_func(engine.address))
            trainer = make_trainer(
                "grpo", chat_model_dir, tmp_path, watched, max_steps=1, rollout_func=rollout
            )
        trainer.train()
        with torch.no_grad():
            trainer.model.model.norm.weight.mul_(1.5)
        trainer.train()
    assert [held for _, held in watched.live] == watched.held
    assert watched.held[0] != watched.held[1]


def test_closing_gives_the_trainer_back(chat_model_dir, tmp_path, engine):
    def short(completion_ids, **given):
        return [float(-len(ids)) for ids in completion_ids]

    trainer = make_trainer("grpo", chat_model_dir, tmp_path, short, max_steps=1)
    before = {name: value for name, value in vars(trainer).items() if name != "callback_handler"}
    callbacks = list(trainer.callback_handler.callbacks)
    attached = attach(trainer, engine.address)
    assert trainer.use_vllm
    attached.close()
    attached.close()
    after = {name: value for name, value in vars(trainer).items() if name in before}
    assert {name for name in before if after.get(name) is not before[name]} == set()
    assert trainer.callback_handler.callbacks == callbacks
    with attach(trainer, engine.address):
        trainer.train()
    assert logged(trainer, "rollsync/weight_version") == [engine.rollout.info().weight_version]


def test_evaluation_samples_from_the_engine(chat_model_dir, tmp_path, engine, base):
    seen = Seen()
    trainer = make_trainer("grpo", chat_model_dir, tmp_path, seen, per_device_eval_batch_size=NUM_GENERATIONS)
    with attach(trainer, engine.address):
        metrics = trainer.evaluate(questions().select(range(2)))
    assert seen.versions == [[base + 1] * NUM_GENERATIONS] * 2
    assert metrics["eval_rollsync/weight_version"] == base + 1
    assert 0 < metrics["eval_reward"] < 1
