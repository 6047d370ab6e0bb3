"""verl's GRPO trains a model on sums of two digits, and a rollsync engine on the same GPU samples for it.

    python examples/verl_grpo.py MODEL [KEY=VALUE ...]

KEY=VALUE are settings of verl, over those below. A reply that is only a number earns 0.5, and so does one
that holds the right number. Needs verl: `pip install 'rollsync[verl]'`.
"""

import argparse
import re
import runpy
import sys
from pathlib import Path

from datasets import Dataset

SETTINGS = {
    "algorithm.adv_estimator": "grpo",
    "data.train_batch_size": 4,  # prompts of a step
    "data.max_prompt_length": 64,
    "data.max_response_length": 12,
    "actor_rollout_ref.rollout.name": "rollsync",
    "actor_rollout_ref.rollout.n": 8,  # samples of a prompt
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,  # an engine runs on one GPU
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.4,
    "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes": 256,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 32,
    "actor_rollout_ref.actor.strategy": "fsdp2",
    "actor_rollout_ref.actor.optim.lr": 5e-5,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 32,
    "trainer.n_gpus_per_node": 1,
    "trainer.total_training_steps": 20,
    "trainer.val_before_train": False,
    "trainer.resume_mode": "disable",
    "trainer.logger": "[console]",
}


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **rest):
    """The reward of one reply; verl loads this function from this file."""
    text = solution_str.strip()
    only_a_number = bool(re.fullmatch(r"\d+", text))
    return 0.5 * only_a_number + 0.5 * (ground_truth in re.findall(r"\d+", text))


def write_questions(path):
    """verl reads its prompts from a Parquet file."""
    question = "What is {}+{}? Reply with the number only."
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": question.format(a, b)}],
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        }
        for a in range(1, 10)
        for b in range(1, 10)
    ]
    Dataset.from_list(rows).to_parquet(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a directory with config.json, safetensors and tokenizer")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of verl")
    args = parser.parse_args()

    questions = Path("verl_out") / "questions.parquet"
    questions.parent.mkdir(exist_ok=True)
    write_questions(questions)
    settings = SETTINGS | {
        "actor_rollout_ref.model.path": args.model,
        "data.train_files": questions.absolute(),
        "data.val_files": questions.absolute(),
        "reward.custom_reward_function.path": Path(__file__).absolute(),
        "reward.custom_reward_function.name": "compute_score",
    }
    sys.argv = ["main_ppo", *(f"{key}={value}" for key, value in settings.items()), *args.settings]
    runpy.run_module("verl.trainer.main_ppo", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
