"""examples/verl_grpo.py, the program of docs/verl.md: verl's trainer, its FSDP workers and its agent loop."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.verl.settings import ON_CPU

pytestmark = pytest.mark.verl

REPOSITORY = Path(__file__).resolve().parents[2]
RAY = (
    "ray_kwargs.ray_init.num_cpus=16",
    "+ray_kwargs.ray_init.num_gpus=1",
    "+ray_kwargs.ray_init.include_dashboard=false",
    "+ray_kwargs.ray_init.object_store_memory=268435456",
)


@pytest.mark.timeout(1500)
def test_the_documented_program_trains_and_its_samples_are_of_its_weights(chat_model_dir, tmp_path):
    command = [sys.executable, str(REPOSITORY / "examples" / "verl_grpo.py"), str(chat_model_dir)]
    done = subprocess.run(
        [
            *(*command, *ON_CPU, *RAY),
            "trainer.total_training_steps=3",
            "data.max_prompt_length=160",  # the tiny model's tokens are bytes
            "actor_rollout_ref.actor.optim.lr=1e-2",
            f"reward.custom_reward_function.path={REPOSITORY / 'tests' / 'verl' / 'reward.py'}",
        ],
        cwd=tmp_path,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=1400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    steps = [metrics_of(line) for line in done.stdout.splitlines() if re.search(r"step:\d+ - ", line)]
    assert [step["training/global_step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step["actor/grad_norm"] > 1e-3, "nothing is learned, so stale samples would not show"
        assert step["training/rollout_probs_diff_valid"] == 1
        assert step["training/rollout_probs_diff_max"] < 1e-6
        assert abs(step["rollout_corr/log_ppl_diff_max"]) < 1e-4
        assert abs(step["rollout_corr/log_ppl_diff_min"]) < 1e-4


def metrics_of(line: str) -> dict[str, float]:
    """What verl's console logger says of one step."""
    return {name: float(value) for name, value in re.findall(r"([\w/@.]+):([-+.\deEinfa]+)(?: - |$)", line)}
