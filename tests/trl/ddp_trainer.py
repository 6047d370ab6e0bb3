"""One rank of a run on several, started by torchrun; writes what it saw to OUT/rank-N.json.

    torchrun --nproc-per-node 2 -m tests.trl.ddp_trainer ADDRESS MODEL OUT [OPTIONS]

With --kill PID, rank 0 kills that process (the engine) after the second step, and the ranks wait --restart-s
seconds for another. With --fsdp2 the model is sharded, else each rank has it whole. With --uncorrected the
loss weighs nothing by the engine's log-probabilities, whose last bits depend on what ran beside a sequence.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from tests.trl.trainers import Learned, Seen, checksums_of, logged, make_trainer
from trainers_adapters import RollsyncError, ShardedSource, WeightsClient
from trainers_adapters.frameworks.trl import attach
from weight_updater.checksum import checksum

PER_RANK, NUM_STEPS = 6, 3
"""Six samples a rank and four to a group: the second group of a batch lies on both ranks."""


def held(trainer: Any, model: Any) -> dict[str, int]:
    """Checksums of the whole weights; of shards on rank 0 alone, and every rank has to call."""
    if getattr(trainer.accelerator.state, "fsdp_plugin", None) is None:
        return checksums_of(trainer.accelerator.unwrap_model(model))
    source = ShardedSource(trainer.model_wrapped)
    return source.together(lambda: {name: checksum(tensor) for name, tensor in source}) or {}


class Rank(Seen):
    """What a rank is given, and whether the engine held its weights."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.trainer: Any = None
        self.fresh: list[bool] = []
        self._weights = WeightsClient(address)

    def __call__(self, **given: Any) -> list[float]:
        live, mine = self._weights.checksums(), held(self.trainer, self.trainer.model)
        self.fresh.append(
            (not mine or live.by_name == mine) and {live.weight_version} == set(given["weight_version"])
        )
        return super().__call__(**given)


class Ranked(Learned):
    """Kills a process, if there is one to kill, after the second step, which every rank has taken by then."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self._pid = pid
        self.killed_at = 0.0
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
        self.after_steps.append(held(self.trainer, model))
        if self._pid and state.global_step == 2:
            self.killed_at = time.monotonic()
            if state.is_world_process_zero:
                os.kill(self._pid, signal.SIGKILL)


FSDP2 = {
    "fsdp": True,
    "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    "gradient_checkpointing": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address")
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kill", type=int, default=0)
    parser.add_argument("--restart-s", type=float, default=60.0)
    parser.add_argument("--fsdp2", action="store_true")
    parser.add_argument("--uncorrected", action="store_true")
    args = parser.parse_args()
    if args.fsdp2:
        from tests.trl.fsdp_on_cpu import install

        install()
    reward, learned = Rank(args.address), Ranked(args.kill)
    reward.trainer = learned.trainer = make_trainer(
        "grpo",
        args.model,
        args.out,
        reward,
        callbacks=[learned],
        per_device_train_batch_size=PER_RANK,
        max_steps=NUM_STEPS,
        ddp_backend="gloo",
        vllm_importance_sampling_correction=not args.uncorrected,
        **(FSDP2 if args.fsdp2 else {}),
    )
    error = ""
    with attach(reward.trainer, args.address, restart_s=args.restart_s):
        try:
            reward.trainer.train()
        except RollsyncError as raised:
            error = f"{type(raised).__name__}: {raised}"
    ended = time.monotonic()
    said = {
        "ranks": reward.trainer.accelerator.num_processes,
        "versions": reward.versions,
        "completion_ids": reward.completion_ids,
        "fresh": reward.fresh,
        "learned": learned.after_steps,
        "diffs": logged(reward.trainer, "sampling/sampling_logp_difference/max"),
        "ratios": logged(reward.trainer, "sampling/importance_sampling_ratio/mean"),
        "wrapped": type(reward.trainer.model_wrapped).__name__,
        "error": error,
        "seconds": ended - learned.killed_at,
    }
    rank = reward.trainer.accelerator.process_index
    (args.out / f"rank-{rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
