"""One rank of a DDP run by gloo, started by torchrun; writes what it saw to OUT/rank-N.json.

    torchrun --nproc-per-node 2 -m tests.trl.ddp_trainer ADDRESS MODEL OUT [PID TO KILL]

With a process id, rank 0 kills that process (the engine) after the second step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tests.trl.trainers import Learned, Seen, checksums_of, logged, make_trainer
from trainers_adapters import RollsyncError, WeightsClient
from trainers_adapters.frameworks.trl import attach

PER_RANK, NUM_STEPS = 6, 3
"""Six samples a rank and four to a group: the second group of a batch lies on both ranks."""


class Rank(Seen):
    """What a rank is given, and whether the engine held its weights."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.trainer: Any = None
        self.fresh: list[bool] = []
        self._weights = WeightsClient(address)

    def __call__(self, **given: Any) -> list[float]:
        live = self._weights.checksums()
        self.fresh.append(
            live.by_name == checksums_of(self.trainer.accelerator.unwrap_model(self.trainer.model))
            and {live.weight_version} == set(given["weight_version"])
        )
        return super().__call__(**given)


class Killing(Learned):
    """Kills a process after the second step, which every rank has taken by then."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self._pid = pid

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **rest: Any) -> None:
        super().on_step_end(args, state, control, model)
        if state.global_step == 2 and state.is_world_process_zero:
            os.kill(self._pid, signal.SIGKILL)


def main(address: str, model: str, out: str, kill: str = "") -> None:
    reward, learned = Rank(address), Killing(int(kill)) if kill else Learned()
    reward.trainer = make_trainer(
        "grpo",
        Path(model),
        Path(out),
        reward,
        callbacks=[learned],
        per_device_train_batch_size=PER_RANK,
        max_steps=NUM_STEPS,
        ddp_backend="gloo",
    )
    error, started = "", time.monotonic()
    with attach(reward.trainer, address, restart_s=2.0):
        try:
            reward.trainer.train()
        except RollsyncError as raised:
            error = f"{type(raised).__name__}: {raised}"
    said = {
        "ranks": reward.trainer.accelerator.num_processes,
        "versions": reward.versions,
        "completion_ids": reward.completion_ids,
        "fresh": reward.fresh,
        "learned": learned.after_steps,
        "diffs": logged(reward.trainer, "sampling/sampling_logp_difference/max"),
        "error": error,
        "seconds": time.monotonic() - started,
    }
    rank = reward.trainer.accelerator.process_index
    Path(out, f"rank-{rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
