"""TRL's GRPOTrainer trains SmolLM2-135M on sums of two digits, and a rollsync engine samples for it.

    rollsync serve --model MODEL --dtype float32 --num-pages 256        (in another terminal)
    python examples/trl_grpo.py MODEL

A reply that is only a number earns 0.5, and so does one that holds the right number. Needs TRL:
`pip install 'rollsync[trl]'`.
"""

from __future__ import annotations

import argparse
import os
import re
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trainers_adapters.frameworks.trl import attach

NUM_PROMPTS, NUM_SAMPLES = 4, 8


def reward(completions: list[Any], answer: list[int], **rest: Any) -> list[float]:
    """Of each reply; `rest` holds its weight_version, among other things."""
    texts = [completion[0]["content"].strip() for completion in completions]
    return [
        0.5 * bool(re.fullmatch(r"\d+", text)) + 0.5 * (str(right) in re.findall(r"\d+", text))
        for text, right in zip(texts, answer, strict=True)
    ]


class Report(TrainerCallback):
    """A line for each step."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
        if "reward" in logs:
            print(
                f"step {state.global_step:2}  reward {logs['reward']:.3f}  "
                f"version {logs['rollsync/weight_version']:2.0f}  "
                f"update {logs['rollsync/update_seconds'] * 1e3:5.0f} ms  "
                f"{logs['rollsync/tokens_per_second']:4.0f} tokens/s  "
                f"logprob diff {logs['sampling/sampling_logp_difference/max']:.1e}  "
                f"ratio {logs['sampling/importance_sampling_ratio/mean']:.4f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="the directory that the engine serves")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--address", default=os.environ.get("ROLLSYNC_ADDRESS", "127.0.0.1:50051"))
    parser.add_argument("--out", default="trl_out", help="TRL's output directory")
    args = parser.parse_args()

    sums = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    question = "What is {}+{}? Reply with the number only."
    rows = [
        {"prompt": [{"role": "user", "content": question.format(a, b)}], "answer": a + b} for a, b in sums
    ]
    config = GRPOConfig(
        output_dir=args.out,
        max_steps=args.steps,
        per_device_train_batch_size=NUM_PROMPTS * NUM_SAMPLES,
        num_generations=NUM_SAMPLES,
        max_completion_length=12,
        learning_rate=5e-5,
        lr_scheduler_type="constant",
        bf16=False,  # as the engine, so that log-probabilities can be compared
        gradient_checkpointing=False,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    for part in (model.get_input_embeddings(), *model.model.layers[:20]):  # the last ten layers learn it
        part.requires_grad_(False)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Report()],
    )
    with attach(trainer, args.address):
        trainer.train()


if __name__ == "__main__":
    main()
