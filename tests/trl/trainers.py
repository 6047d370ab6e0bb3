"""Stock TRL trainers of the tests, over a tiny chat model, and what they see while they train."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from trainers_adapters import source_of
from weight_updater.checksum import checksum

NUM_GENERATIONS, MAX_TOKENS, STEPS = 4, 8, 4


def questions(*, chat: bool = True) -> Dataset:
    """Prompts of several lengths, as messages or as texts."""
    texts = [f"What is {a}+{b}?" + " Please." * (a % 3) for a in range(1, 5) for b in range(1, 5)]
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": text}] if chat else text} for text in texts]
    )


@dataclass
class Seen:
    """A reward function, and what it was given: one entry for each generation batch."""

    versions: list[list[int]] = field(default_factory=list)
    completion_ids: list[list[list[int]]] = field(default_factory=list)
    __name__ = "seen"

    def __call__(
        self, completion_ids: list[list[int]], weight_version: list[int], **rest: Any
    ) -> list[float]:
        """Odd token ids earn: as good as any reward to tell whether two runs learn the same."""
        self.versions.append(list(weight_version))
        self.completion_ids.append([list(ids) for ids in completion_ids])
        return [sum(i % 2 for i in ids) / len(ids) for ids in completion_ids]


def checksums_of(model: Any) -> dict[str, int]:
    """Of each tensor as it would be pushed."""
    return {name: checksum(tensor) for name, tensor in source_of(model)}


class Learned(TrainerCallback):
    """The model's checksums after each optimizer step."""

    def __init__(self) -> None:
        self.after_steps: list[dict[str, int]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
        self.after_steps.append(checksums_of(model))


def make_trainer(kind: str, model: Any, out: Path, reward: Any, *, chat: bool = True, **settings: Any) -> Any:
    """A stock trainer on the CPU in float32.

    Args:
        kind: grpo or rloo. settings: for its config, or rollout_func, peft_config, callbacks for itself.
    """
    trainer_class, config_class = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}[kind]
    own = {
        name: settings.pop(name) for name in ("rollout_func", "peft_config", "callbacks") if name in settings
    }
    config = config_class(
        **{
            "output_dir": str(out),
            "use_cpu": True,
            "bf16": False,
            "max_steps": STEPS,
            "per_device_train_batch_size": 2 * NUM_GENERATIONS,
            "num_generations": NUM_GENERATIONS,
            "max_completion_length": MAX_TOKENS,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "report_to": [],
            "save_strategy": "no",
            "disable_tqdm": True,
            **settings,
        }
    )
    return trainer_class(
        model=str(model) if isinstance(model, Path) else model,
        reward_funcs=reward,
        args=config,
        train_dataset=questions(chat=chat),
        **own,
    )


def logged(trainer: Any, name: str) -> list[float]:
    """A metric's values, one for each logged step."""
    return [entry[name] for entry in trainer.state.log_history if name in entry]
