"""examples/trl_grpo.py, the command of docs/trl.md, over SmolLM2: the reward rises in six steps."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest

from tests.engines import serve

pytestmark = pytest.mark.trl

STEPS = 6
REPOSITORY = Path(__file__).resolve().parents[2]
LINE = re.compile(
    r"step +(\d+)  reward (\d\.\d+)  version +(\d+)  update +\d+ ms +\d+ tokens/s  "
    r"logprob diff (\S+)  ratio (\d\.\d+)$",
    re.M,
)


@pytest.mark.timeout(1800)
def test_the_documented_program_trains_smollm2(smollm2_dir, tmp_path, show):
    with serve(smollm2_dir, "--num-pages", "256") as engine:
        command = [sys.executable, str(REPOSITORY / "examples" / "trl_grpo.py"), str(smollm2_dir)]
        done = subprocess.run(
            [*command, "--steps", str(STEPS)],
            cwd=tmp_path,
            env=os.environ | {"ROLLSYNC_ADDRESS": engine.address, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            timeout=1700,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        assert engine.weights.checksums().weight_version == STEPS
    lines = LINE.findall(done.stdout)
    print(done.stdout)
    assert [(step, version) for step, _, version, _, _ in lines] == [
        (str(n), str(n)) for n in range(1, STEPS + 1)
    ]
    rewards = [float(reward) for _, reward, _, _, _ in lines]
    show(f"rewards {rewards}")
    assert mean(rewards[-3:]) > mean(rewards[:3]) + 0.1
    for _, _, _, diff, ratio in lines:
        assert float(diff) < 1e-4
        assert float(ratio) == pytest.approx(1, abs=1e-3)
