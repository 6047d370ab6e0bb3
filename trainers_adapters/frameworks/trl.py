"""TRL: stock GRPOTrainer and RLOOTrainer sample from a rollsync engine. Needs `pip install rollsync[trl]`.

    trainer = GRPOTrainer(..., rollout_func=make_rollout_func("127.0.0.1:50051"))    # TRL's public seam
    trainer.train()

    trainer = GRPOTrainer(...)                       # or RLOOTrainer; use_vllm stays False
    with attach(trainer, "127.0.0.1:50051"):         # everything that TRL does with a vLLM server
        trainer.train()

Both push the trainer's weights whenever its global step changed, before anything is sampled, and hand each
sample's `weight_version` to the reward functions. On several ranks rank 0 pushes and samples for all. For
AsyncGRPOTrainer see trl_async.py. What goes wrong, and what then: docs/trl.md.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from transformers import TrainerCallback
from typing_extensions import Unpack

from trainers_adapters.frameworks.live_engine import EngineOptions, LiveEngine
from trainers_adapters.frameworks.ranks import Ranks
from trainers_adapters.frameworks.rollouts import Rollouts, Sample
from trainers_adapters.frameworks.trl_names import check_names
from trainers_adapters.frameworks.trl_settings import (
    Weights,
    check_engine,
    check_trainer,
    prompt_token_ids,
    sampling_of,
)

__all__ = ["Attached", "RolloutFunc", "attach", "make_rollout_func"]


def make_rollout_func(address: str, **options: Unpack[EngineOptions]) -> RolloutFunc:
    """A `rollout_func` for GRPOTrainer that samples from the engine at `address`.

    TRL does no importance-sampling correction on this seam and calls no tools; attach has both.

    Args:
        address: host:port of the engine.
        options: see EngineOptions.
    """
    return RolloutFunc(address, **options)


def attach(trainer: Any, address: str, **options: Unpack[EngineOptions]) -> Attached:
    """Let a GRPOTrainer or RLOOTrainer, built with use_vllm=False, sample from the engine at `address`.

    On every rank, before train(). Leaving the result's `with` block, or closing it, gives the trainer back as
    it was.

    Raises:
        IncompatibleTrl: the installed TRL lacks a private name that this needs; it is named.
        ValueError: a setting of the trainer that the engine cannot honour.
        RollsyncError: no engine answers, or it serves another model.
    """
    check_names(trainer)
    return Attached(trainer, address, **options)


class _EngineSide:
    """What both seams share: the engine, the trainer's ranks, and when weights have to be pushed."""

    def __init__(self, address: str, **options: Unpack[EngineOptions]) -> None:
        self.engine = LiveEngine(address, **options)
        self._rollouts: Rollouts | None = None
        self._joined: Any = None  # the trainer whose callback this is
        self._callback: TrainerCallback | None = None
        self._place: tuple[str, int] = ("", 0)  # mode and global step of the last generation
        self._count = 0  # of generations there
        atexit.register(self.close)

    @property
    def weight_version(self) -> int:
        """Of the weights that the last samples are of."""
        return self._rollouts.version if self._rollouts is not None else 0

    def close(self) -> None:
        """Give back what pushes allocated, and the connection. Harmless twice."""
        atexit.unregister(self.close)
        self._part()
        self.engine.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _join(self, trainer: Any, forget: Callable[[], None]) -> Rollouts:
        """Meet the trainer: once, on all of its ranks."""
        if self._rollouts is None or self._joined is not trainer:
            check_trainer(trainer, self.engine.timeout_s)
            accelerator = trainer.accelerator
            ranks = Ranks(accelerator.num_processes, accelerator.process_index, accelerator.device)
            ranks.from_main(lambda: check_engine(self.engine.wait(), trainer))
            self._rollouts = Rollouts(self.engine, ranks, Weights(trainer))
            self._part()
            self._joined, self._callback = trainer, _AtTrainBegin(forget)
            trainer.add_callback(self._callback)
            forget()
        return self._rollouts

    def _part(self) -> None:
        """Take the callback from the trainer that has it."""
        if self._joined is not None:
            self._joined.remove_callback(self._callback)
        self._joined = None

    def _generate(self, trainer: Any, prompts: Sequence[list[int]]) -> list[Sample]:
        assert self._rollouts is not None
        place = ("train" if trainer.model.training else "eval", trainer.state.global_step)
        self._count = self._count + 1 if place == self._place else 0
        self._place = place
        sampling = sampling_of(trainer)
        base = sampling.pop("seed", trainer.args.seed)
        return self._rollouts.generate(prompts, sampling, f"{base}/{place[0]}/{place[1]}/{self._count}")


class _AtTrainBegin(TrainerCallback):
    """A run that begins may begin with other weights than those last pushed at the same step."""

    def __init__(self, forget: Callable[[], None]) -> None:
        self._forget = forget

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._forget()


class RolloutFunc(_EngineSide):
    """What make_rollout_func makes; GRPOTrainer calls it on every rank."""

    def __init__(self, address: str, **options: Unpack[EngineOptions]) -> None:
        super().__init__(address, **options)
        self._synced_step = -1

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Completions of one generation batch.

        Args:
            prompts: texts or message lists, repeated for each generation that TRL wants.
            trainer: the GRPOTrainer that calls.

        Returns:
            Lists of one entry for each prompt: prompt_ids, completion_ids (EOS included), logprobs
            ("processed", of each completion token) and weight_version, which reward functions receive.
        """
        if trainer.tools:
            raise ValueError("with tools, TRL samples later turns without rollout_func; use attach instead")
        rollouts = self._join(trainer, self._forget)
        if trainer.state.global_step != self._synced_step:
            rollouts.sync()
            self._synced_step = trainer.state.global_step
        template = {"chat_template": trainer.chat_template, **trainer.chat_template_kwargs}
        prompt_ids = prompt_token_ids(trainer.processing_class, prompts, **template)
        samples = self._generate(trainer, prompt_ids)
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [sample.token_ids for sample in samples],
            "logprobs": [sample.logprobs for sample in samples],
            "weight_version": [self.weight_version] * len(samples),
        }

    def _forget(self) -> None:
        self._synced_step = -1


class Attached(_EngineSide):
    """Stands where TRL keeps its vLLM backend: `trainer.vllm_generation`.

    TRL calls sync_weights when its global step changed, and generate for tokens; everything else (tools,
    importance-sampling correction, `sampling/*` metrics) is TRL's own code. Metrics of ours are logged as
    `rollsync/*`.
    """

    def __init__(self, trainer: Any, address: str, **options: Unpack[EngineOptions]) -> None:
        if trainer.use_vllm:
            raise ValueError("the trainer was built with use_vllm=True; build it with use_vllm=False")
        if getattr(trainer, "rollout_func", None) is not None:
            raise ValueError("the trainer has a rollout_func; use either that or attach")
        super().__init__(address, **options)
        self._trainer = trainer
        self._before: dict[str, Any] = {}
        try:
            self._join(trainer, self._forget)
        except BaseException:
            self.close()
            raise
        self._before |= {"use_vllm": False, "vllm_mode": trainer.vllm_mode}
        self._score = trainer._calculate_rewards
        trainer._calculate_rewards = self._rewards
        trainer.vllm_generation = self
        trainer.vllm_mode = "server"  # colocate would look for an LLM object inside the backend
        trainer.use_vllm = True

    def close(self) -> None:
        if self._before:
            for name, value in self._before.items():
                setattr(self._trainer, name, value)
            del self._trainer._calculate_rewards, self._trainer.vllm_generation
            self._before = {}
        super().close()

    def sync_weights(self) -> None:
        """Make the trainer's weights live on the engine. On every rank."""
        rollouts = self._join(self._trainer, self._forget)
        rollouts.sync()
        if (report := self.engine.report) is not None:
            self._log("update_seconds", report.seconds)
            self._log("pause_seconds", report.pause_seconds)

    def generate(
        self,
        prompts: list[list[int]],
        images: list[Any] | None,
        num_generations: int,
        profiler: contextlib.AbstractContextManager[Any] | None = None,
    ) -> tuple[list[list[int]], list[list[int]], list[list[list[float]]], list[list[list[int]]]]:
        """One completion for each prompt of this rank.

        Args:
            prompts: token ids, repeated num_generations times.
            images: None; the engine serves text.

        Returns:
            prompt ids, completion ids, their log-probabilities and the ids that these are of; the last two
            with one entry for each token.
        """
        if images is not None and any(images):
            raise ValueError("the prompts hold images; a rollsync engine samples from text only")
        rollouts = self._join(self._trainer, self._forget)
        with profiler or contextlib.nullcontext():
            samples = self._generate(self._trainer, prompts)
        self._log("weight_version", self.weight_version)
        self._log("tokens_per_second", rollouts.num_tokens / rollouts.seconds)
        self._log("resyncs", self.engine.resyncs)
        return (
            prompts,
            [sample.token_ids for sample in samples],
            [[[logprob] for logprob in sample.logprobs] for sample in samples],
            [[[token] for token in sample.token_ids] for sample in samples],
        )

    def _rewards(self, inputs: list[dict[str, Any]], prompts: Any, completions: Any, ids: Any) -> Any:
        """TRL's own scoring, with weight_version as one more column."""
        labelled = [{**one, "weight_version": self.weight_version} for one in inputs]
        return self._score(labelled, prompts, completions, ids)

    def _log(self, name: str, value: float) -> None:
        mode = "train" if self._trainer.model.training else "eval"
        self._trainer._metrics[mode][f"rollsync/{name}"].append(value)

    def _forget(self) -> None:
        self._trainer._last_loaded_step = -1
