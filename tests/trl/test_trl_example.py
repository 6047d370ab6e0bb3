"""examples/trl_grpo.py in a short form: the command of docs/trl.md, over a served SmolLM2."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines import serve

pytestmark = pytest.mark.trl

REPOSITORY = Path(__file__).resolve().parents[2]
LINE = re.compile(
    r"step +(\d+)  reward (\d\.\d+)  version +(\d+)  update +\d+ ms +\d+ tokens/s  "
    r"logprob diff (\S+)  ratio (\d\.\d+)$",
    re.M,
)


@pytest.mark.timeout(900)
def test_the_documented_program_trains_smollm2(smollm2_dir, tmp_path):
    with serve(smollm2_dir, "--num-pages", "256") as engine:
        command = [sys.executable, str(REPOSITORY / "examples" / "trl_grpo.py"), str(smollm2_dir)]
        done = subprocess.run(
            [*command, "--steps", "2", "--out", str(tmp_path)],
            env=os.environ | {"ROLLSYNC_ADDRESS": engine.address, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            timeout=850,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        assert engine.weights.checksums().weight_version == 2
    lines = LINE.findall(done.stdout)
    assert [(step, version) for step, _, version, _, _ in lines] == [("1", "1"), ("2", "2")]
    for _, reward, _, diff, ratio in lines:
        assert 0 < float(reward) < 1
        assert float(diff) < 1e-4
        assert float(ratio) == pytest.approx(1, abs=1e-3)
